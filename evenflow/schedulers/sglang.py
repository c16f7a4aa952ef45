"""SGLang: prompts first, admitted by what their outputs may need; each slot has its decodes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, sqrt
from operator import itemgetter
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from evenflow.compiled import mypyc_attr
from evenflow.core.kv import PagePool
from evenflow.core.scheduling import Action, Order, Plan, Prefill
from evenflow.engines.receiving import Agreed, Receive, ReceivingView
from evenflow.engines.rules import EngineRules
from evenflow.engines.upkeep import Upkeep
from evenflow.engines.view import DecodeRow, EnginePrompt, EngineView
from evenflow.keys import Count, NonNegative
from evenflow.schedulers.admission import UNLIMITED
from evenflow.schedulers.limits import Policy, Range, SearchSpace
from evenflow.sums import plain_sum

CLIP = 4096  # more output than this is not reserved
LEAST_RUNNING, MOST_RUNNING = 2048, 4096  # requests, where no number is given
LOOKED_UP = 128  # prompts that are looked up in a pass, at most
PROFILED = 128  # lengths of prompts that are timed for dynamic chunks
REFRESH = 32  # passes
RETRACT_STEPS = 20  # tokens a decode is expected to generate before pages run short again
SHARED = 32  # tokens that prompts begin with, of which only one is to compute them
ORDER: Order = "first_returned"
SPECULATING = 48  # requests, where no number is given
UNSPECULATIVE = (
    "mixed_chunk: with speculative, SGLang's decodes yield one token beside prompts, which is not "
    "modelled; false is right"
)


@dataclass(slots=True)
class Slot:
    """Number of requests that ran after a slot's last answer, a cut prompt included.

    `full`: a prompt did not fit, and no request has left since (a cut one leaves too).
    """

    running: int = 0
    full: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SGLang(Policy):
    """Prompts only, as long as one fits; else all decodes of the slot whose turn it is.

    Source: SGLang 0.5.23 (its scheduler), whose recorded decisions are this policy's: see
    docs/engines.md. A prompt is admitted if the output that its client allows fits beside what the
    running decodes may still need. That is what they are allowed times a ratio. The ratio starts at
    0.7 `schedule_conservativeness`, falls with each decode step and is estimated anew when pages
    run short. Then the request with the least output is retracted to the end of the queue. In a
    pipeline each micro-batch that may be in flight has separate decodes.
    """

    search_space: ClassVar[SearchSpace] = {
        "chunked_prefill_size": Range(512, 16384, log=True),
        "max_running_requests": Range(16, 4096, log=True),
        "schedule_conservativeness": Range(0.1, 1.4),
    }

    chunked_prefill_size: Count | None = 8192
    """Most prompt tokens of a micro-batch, of all groups with `data_parallel`; longer prompts are
    cut; null: none are. Left out, on GPUs below 20 GiB 2,048, below 60 4,096, from 160 16,384.
    """
    max_prefill_tokens: Count = 16384
    """Most prompt tokens that are admitted in a micro-batch."""
    prefill_max_requests: Count | None = None
    """Most requests whose prompts go in a micro-batch; null: no limit."""
    max_running_requests: Count | None = None
    """Most requests that are admitted at a time, to all groups with `data_parallel`, and at most
    half the pool's tokens. null: 48 with speculation, else 512 for each `max_model_len` in a
    group's pool, from 2,048 to 4,096.
    """
    pp_max_micro_batch_size: Count | None = None
    """Most requests of a slot; null: an even part of `max_running_requests`."""
    schedule_conservativeness: NonNegative = 1.0
    """How much of the output that clients allow is kept free for the running decodes. It is 0.7
    times this ratio at first, less with each step; 0.3 of it with `data_parallel`.
    """
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    """The order of prompts: by arrival, or the longest prefix in the cache first."""
    mixed_chunk: bool = False
    """Whether decodes go beside chunks of prompts."""
    dynamic_chunking: bool = False
    """Whether chunks get shorter as a prompt's context grows."""
    prefill_decode_interval: Annotated[int, Field(ge=0)] = 0
    """Micro-batches that admit nobody after one of prompts."""
    scheduler_recv_interval: Count = 1
    """Steps of decodes after which requests that came are seen."""
    overlap: bool | None = None
    """Whether a batch is chosen before the last one's outputs are there; null: on one stage."""
    disaggregation_mode: Literal["prefill", "decode"] | None = None
    """prefill: prompts only, for a decode server; a request ends once all stages agree on it.
    decode: decodes only, on several stages; arrivals are prompts that were computed elsewhere.
    """
    num_reserved_decode_tokens: Annotated[int, Field(ge=0)] = 512
    """Tokens of output that a decode server keeps free for each request it gives pages to."""
    version: Literal["0.5.17", "0.5.23"] = "0.5.23"
    """SGLang's release: in 0.5.17 the stages of a prefill server agree on what comes, too."""
    max_model_len: Count | None = None
    """Most tokens of a request; null: the run's."""
    depth: int = 1
    data_parallel: int = 1
    page_tokens: int = 1
    prefill_s: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        depth, groups = self.depth, self.data_parallel
        chunk = self.chunked_prefill_size and max(self.chunked_prefill_size // groups, 1)
        self._chunk = chunk
        slotted = not (depth == 1 if self.overlap is None else self.overlap)
        if depth > 1 and not slotted:
            raise ValueError(f"overlap is for one stage, not {depth}; false is right")
        mode = self.disaggregation_mode
        if mode == "prefill" and not slotted:
            raise ValueError("disaggregation_mode: prefill on one stage needs overlap: false")
        if mode == "decode" and (depth == 1 or self.version != "0.5.23"):
            raise ValueError("disaggregation_mode: decode needs several stages and version 0.5.23")
        if mode and self.scheduler_recv_interval > 1:
            raise ValueError("scheduler_recv_interval: 1 is right with disaggregation_mode")
        if chunk and chunk % self.page_tokens:
            what = f"chunked_prefill_size {chunk}{' of a group' * (groups > 1)} is no multiple of"
            raise ValueError(f"{what} kv.page_tokens, {self.page_tokens}")
        if chunk is None and (self.mixed_chunk or self.dynamic_chunking):
            raise ValueError("mixed_chunk and dynamic_chunking need a chunked_prefill_size")
        if self.dynamic_chunking and (self.prefill_s is None or self.max_model_len is None):
            raise ValueError("dynamic_chunking needs max_model_len and a cost model")
        self.rules = EngineRules(
            pipelined_chunks=True,
            preempted_last=True,
            cache="none" if mode == "decode" else "radix",
            slotted=slotted,
            ahead=None if slotted else "question",
            newest_first=self.mixed_chunk,
            reserves=True,
            unspeculative=UNSPECULATIVE if self.mixed_chunk else "",
            prefills=mode == "prefill",
            receives=(self.max_running_requests or MOST_RUNNING) if mode == "decode" else 0,
            admits_late=self.version == "0.5.17",
            looks_every=self.scheduler_recv_interval,
            cuts=self.page_tokens > 1 and (self.mixed_chunk or self.dynamic_chunking),
        )
        conservativeness = self.schedule_conservativeness * (0.3 if groups > 1 else 1.0)
        self.new_token_ratio = self._most_ratio = min(0.7 * conservativeness, 1.0)
        self._fitted: tuple[float, float] | None = None
        self._slots: dict[int, Slot] = {}
        self._idles = self._passes = 0
        self._decodes_until = 0  # no prompts in answer to the questions up to this one

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Return why a request of these lengths would never be admitted, or None."""
        if self.rules.receives:
            return self._refuse_kv(prompt_tokens, output_tokens, pool)
        tokens = (pool.pages_for(prompt_tokens) + 1) * pool.page_tokens + output_tokens
        if tokens < pool.total_pages * pool.page_tokens:
            return None
        return f"{tokens} tokens, a page of them spare, do not leave one of the pool"

    def _refuse_kv(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        reserved = pool.pages_for(prompt_tokens) * pool.page_tokens
        reserved += self.num_reserved_decode_tokens
        tokens = max(reserved, prompt_tokens + min(output_tokens, CLIP))
        if tokens <= pool.total_pages * pool.page_tokens:
            return None
        return f"{tokens} tokens, with what is reserved, exceed the pool's"

    def schedule(self, view: EngineView) -> Iterator[Plan | Action]:
        slot = self._slots.setdefault(view.slot if self.rules.slotted else 0, Slot())
        running = view.ready_decodes if self.rules.slotted else view.running - len(view.partials)
        slot.full &= running >= slot.running
        if view.idles != self._idles:
            self._idles, self.new_token_ratio = view.idles, self._most_ratio
        if self.rules.receives:
            yield from self._decode(view, running)
            return
        prompts = yield from self._take_prompts(view, slot, running)
        slot.running = running + len(prompts)
        slot.full &= running > 0
        if not prompts:
            yield from self._decode(view, running)
            return
        yield from self._prefill(view, prompts)
        ready = view.ready_decodes if self.mixed_chunk else 0
        if ready and view.decode_pages(ready, ORDER) <= view.free_pages:
            slot.full = False
            yield from _go_on(view, ready)

    def _take_prompts(
        self, view: EngineView, slot: Slot, running: int
    ) -> Generator[Upkeep, None, list[tuple[EnginePrompt, int]]]:
        """Take the next chunk of the prompt under way, then waiting prompts, in order."""
        if view.asked <= self._decodes_until:
            return []
        partial = next(iter(view.partials), None)
        waiting = view.num_waiting
        most = self.most_running(view)
        rows = self.pp_max_micro_batch_size or max(most // self.depth, 1)
        places = min(rows - running, most - view.running + (partial is not None))
        slot.full |= places <= 0 < waiting
        if partial is None and (slot.full or not waiting):
            return []
        if view.prefix_cache and waiting:
            yield from self._look_up(view)
        chunk = self._chunk or UNLIMITED
        if partial is not None and self.dynamic_chunking:
            chunk = self.chunk_after(partial.computed)
        riding = running if self.mixed_chunk else 0
        limits = chunk - riding, self.max_prefill_tokens - riding
        room = PrefillAdder(view, *limits, riding, self.new_token_ratio, view.rows)
        if partial is not None:
            tokens = room.next_chunk_of(partial)
            pages = view.pages_for(partial.computed + tokens) - partial.pages
            if tokens <= 0 or pages > view.free_pages:  # of which SGLang dies
                return []
            room.take(partial, tokens)
        if not slot.full:
            slot.full = yield from self._admit(room, places, waiting)
        return room.taken

    def most_running(self, view: EngineView) -> int:
        """Return how many requests are admitted at a time."""
        pool_tokens = view.total_pages * view.page_tokens
        most = self.max_running_requests
        if most is None and view.due_tokens is not None:
            most = SPECULATING
        if most is not None:
            most = max(most // self.data_parallel, 1)
        else:
            longest = self.max_model_len or pool_tokens
            most = max(min(int(pool_tokens / longest * 512), MOST_RUNNING), LEAST_RUNNING)
        return min(most, pool_tokens // 2)

    def _admit(
        self, room: PrefillAdder, places: int, num_waiting: int
    ) -> Generator[Upkeep, None, bool]:
        """Take waiting prompts until one does not fit; return whether the slot is full then."""
        waiting = room.view.waiting
        for _ in range(num_waiting):
            if room.is_spent:
                return False
            if len(room.taken) >= places:
                return True
            prompt = next(waiting)
            if len(room.taken) == self.prefill_max_requests:
                return False
            if not room.fits(prompt):
                return bool(room.taken or room.decodes)
            if self._chunk is None and not room.is_whole(prompt):
                return False
            if room.chunk_of(prompt) <= 0:
                return False
            if prompt.computed:
                yield Upkeep(hold=[prompt.request_id])
            room.take(prompt, room.chunk_of(prompt))
            if room.total <= 0:
                return True
        return False

    def _look_up(self, view: EngineView) -> Iterator[Upkeep]:
        """Look up waiting prompts in the cache: to order them, or to keep their prefixes from
        eviction.
        """
        if self.schedule_policy == "lpm" and view.num_waiting <= LOOKED_UP:
            yield Upkeep(waiting=_longest_prefix_first(view))
            return
        if self._passes % REFRESH == 0:
            for prompt in reversed([*islice(view.queue, LOOKED_UP)]):
                view.cached_tokens(prompt)
        self._passes += 1

    def _prefill(
        self, view: EngineView, prompts: Sequence[tuple[EnginePrompt, int]]
    ) -> Iterator[Plan | Action]:
        """Plan prompts; of the cut ones only the last goes on, the others decode."""
        cut = [prompt for prompt, tokens in prompts if tokens < prompt.remaining]
        spare_pages = len(prompts) if view.page_tokens > 1 else 0
        pages = view.pages_for(sum(tokens for _, tokens in prompts))
        if not self.rules.prefills:
            self._decodes_until = view.asked + self.prefill_decode_interval
        yield Upkeep(empty_pages=pages + spare_pages)
        yield Plan(
            [
                Prefill(prompt.request_id, tokens, ends=prompt in cut[:-1])
                for prompt, tokens in prompts
            ]
        )

    def take_in(self, view: ReceivingView, agreed: Agreed) -> Iterator[Action]:
        """Resume retracted requests, then give pages to new ones, in order, while they have room.

        Beside each decode of the slot, and each that is to come, `num_reserved_decode_tokens` stay
        free. If all others of the slot were retracted, what its longest may still need does.
        """
        rows, reserved = view.last_rows, self.num_reserved_decode_tokens
        held = sum(one.tokens for one in rows)
        alone = (min(one.output_limit, CLIP) + one.prompt_tokens - held for one in rows)
        need = max(alone, default=0)
        for prompt in view.retracted:
            if prompt.request_id in agreed.retracted:
                tokens = view.paged(prompt.tokens - 1) + reserved
                if not self._has_row(view) or tokens > self._room(view, 0):
                    break
                yield Receive(prompt.request_id)
        for prompt in [] if view.retracted else view.new:
            if prompt.request_id in agreed.new:
                tokens = prompt.tokens + min(prompt.output_limit, CLIP) - held
                tokens = max(view.paged(prompt.tokens) + reserved, tokens)
                full = view.arriving >= 2 * self.most_running(view)
                if full or not self._has_row(view) or tokens > self._room(view, need):
                    break
                yield Receive(prompt.request_id)

    def _has_row(self, view: ReceivingView) -> bool:
        """Say whether a row is left: there are three times the decodes, if these are few."""
        most = self.most_running(view)
        return view.running < (3 * most if most <= 32 else most)

    def _room(self, view: ReceivingView, need: int) -> int:
        """Return the tokens that are free beside what is reserved, or beside `need`."""
        active = len(view.last_rows) + view.arriving + view.arrived
        reserved = self.num_reserved_decode_tokens * active
        return view.free_pages * view.page_tokens - max(reserved, need)

    def _decode(self, view: EngineView, running: int) -> Iterator[Plan | Action]:
        """Plan the decodes of a slot, except those with their last allowed token in flight."""
        ready = view.ready_decodes
        short = view.decode_pages(ready, ORDER) > view.free_pages
        if short and ready < running:
            yield Upkeep(empty_pages=view.total_pages)
            ready = 0
        elif short:
            yield from self._retract(view)
            ready = view.ready_decodes
        elif ready:
            most, least = self._most_ratio, self._most_ratio * 0.14
            self.new_token_ratio = max(self.new_token_ratio - (most - least) / 600, least)
        if ready:
            yield from _go_on(view, ready)
        else:
            yield Plan(kv_limited=short or view.num_waiting > 0)

    def _retract(self, view: EngineView) -> Iterator[Plan | Action]:
        """Retract requests with the least output until the others fit; estimate the ratio anew."""
        decodes = view.rows
        while view.decode_pages(view.ready_decodes, ORDER) > view.free_pages:
            yield Upkeep(empty_pages=view.total_pages)
            last = min(reversed(decodes), key=lambda one: (one.generated, -one.prompt_tokens))
            decodes.remove(last)
            yield Plan(preempt=[last.request_id]) if decodes else Upkeep(give_up=last.request_id)
            yield Upkeep(empty_pages=view.pages_for(len(decodes) * RETRACT_STEPS))
        decodes.sort(key=lambda one: (-one.generated, one.prompt_tokens))
        yield Upkeep(rows=[one.request_id for one in decodes])
        generated = sum(one.generated for one in decodes) + RETRACT_STEPS * len(decodes)
        allowed = sum(one.output_limit for one in decodes)
        self.new_token_ratio = min(generated / (allowed + 1), 1.0)

    def chunk_after(self, computed: int) -> int:
        """Return the size of the next chunk of a prompt after `computed` tokens of it.

        f(l) = a l^2 + b l + c is fitted to the time of prompts. A chunk x after l tokens takes as
        long as the first: f(l + x) - f(l) = f(chunk) - f(0). It is smoothed. Without a square, all
        are alike.
        """
        chunk = self._chunk
        assert self.max_model_len is not None  # the constructor asks for both
        assert chunk is not None
        if self._fitted is None:
            self._fitted = self._fit(chunk)
        a, b = self._fitted
        if a * chunk <= 1e-9 * b:
            return chunk
        target = a * chunk * chunk + b * chunk
        unit = max(self.page_tokens, 64)
        slope = 2 * a * computed + b
        even = (sqrt(slope * slope + 4 * a * target) - slope) / (2 * a)
        tokens = max(int(chunk + 0.75 * (even - chunk)), chunk // 4) // unit * unit
        most = min(self.max_model_len - computed - 100, self.max_prefill_tokens)
        tokens = min(max(tokens, unit), most) // unit * unit
        return tokens if tokens >= unit else chunk

    def _fit(self, chunk: int) -> tuple[float, float]:
        """Return the square and linear coefficient of the time of prompts up to 1.25 chunks."""
        assert self.prefill_s is not None
        assert self.max_model_len is not None
        longest = min(int(1.25 * chunk), self.max_model_len)
        lengths = range(longest, 0, -max(longest // PROFILED, 1))[1:PROFILED]
        times = np.array([self.prefill_s(length) for length in lengths])
        square, linear, _ = np.linalg.lstsq(np.vander(lengths, 3), times, rcond=None)[0]
        return float(square), max(float(linear), 0.0)


@dataclass(slots=True)
class PrefillAdder:
    """Budgets left in a pass over the prompts, in tokens, and the prompts taken (PrefillAdder).

    Of prompts it takes `chunk` and `inputs` at most, both charged whole pages. Of `free` tokens,
    `planned` are those of this pass. `reserved` also has what running decodes, and the outputs of
    this pass, may need: admission reserves, it does not allocate. Where outputs have an exact
    length and no prefix cache (`walks`), it is looked ahead to the ends instead.
    """

    view: EngineView
    chunk: int
    inputs: int
    planned: int
    ratio: float
    decodes: Sequence[DecodeRow]
    reserved: float = field(init=False)
    taken: list[tuple[EnginePrompt, int]] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rest = [
            min(one.output_limit - one.generated, CLIP) * self.share(one) for one in self.decodes
        ]
        self.reserved = self.planned + plain_sum(rest)

    def walks(self, prompt: EnginePrompt) -> bool:
        return prompt.exact and not self.view.prefix_cache

    def share(self, request: DecodeRow | EnginePrompt) -> float:
        """Return the share of its allowed output that a request is expected to need."""
        return 1.0 if request.exact else self.ratio

    @property
    def free(self) -> int:
        return self.view.free_pages * self.view.page_tokens

    @property
    def total(self) -> float:
        return self.free - self.reserved

    @property
    def is_spent(self) -> bool:
        """Whether a limit of the batch, not a lack of pages, ends the pass."""
        return self.total > 0 and (self.chunk <= 0 or self.inputs <= 0)

    def paged(self, tokens: int) -> int:
        """Return the tokens of as many whole pages as `tokens` fill."""
        return self.view.pages_for(tokens) * self.view.page_tokens

    def is_whole(self, prompt: EnginePrompt) -> bool:
        """Say whether a prompt that is not cut may go: the first, or one within the limit."""
        within = self.paged(prompt.remaining) < self.inputs
        return within or not self.taken or self.walks(prompt)

    def next_chunk_of(self, prompt: EnginePrompt) -> int:
        """Return the next chunk of the prompt under way, which goes on in however little room."""
        tokens = min(self.chunk, int(self.total))
        return min(tokens if tokens > 0 else self.chunk, prompt.remaining)

    def chunk_of(self, prompt: EnginePrompt) -> int:
        """Return how much of a prompt that fits is taken: all of it, or whole pages."""
        tokens = prompt.remaining
        if self.walks(prompt):
            return min(tokens, self.chunk)
        cut = self.chunk // self.view.page_tokens * self.view.page_tokens
        return tokens if self.paged(tokens) <= self.chunk else cut

    def take(self, prompt: EnginePrompt, tokens: int) -> None:
        """Take the next `tokens` of a prompt; with the last of them, all the output it may need."""
        self.taken.append((prompt, tokens))
        output = 0 if tokens < prompt.remaining else min(prompt.output_limit, CLIP)
        tokens = self.paged(tokens)
        self.chunk -= tokens
        self.inputs -= tokens
        self.planned += tokens + self.view.page_tokens
        self.reserved += tokens + self.view.page_tokens + output

    def fits(self, prompt: EnginePrompt) -> bool:
        """Say whether a prompt and its output fit beside all that is reserved.

        What is kept of it, but comes into pages that are free now, counts too.
        """
        kept = max(prompt.computed - prompt.pages * self.view.page_tokens, 0)
        if self.walks(prompt):
            tokens = self.paged(prompt.remaining + kept) + self.view.page_tokens
            return tokens <= self.total and self._lasts(prompt, self.free - self.planned - tokens)
        output = min(max(prompt.output_limit - prompt.generated, 0), CLIP)
        return prompt.remaining + output + self.view.page_tokens < self.total - kept

    def _lasts(self, prompt: EnginePrompt, free: int) -> bool:
        """Say whether some of `free` is left before each future end of a request."""
        if not self.ends:
            taken = [one for one, _ in self.taken]
            those: list[DecodeRow | EnginePrompt] = [prompt, *self.decodes, *taken]
            self.ends = sorted(map(self._end, those), key=itemgetter(0))
        else:  # before the last at the latest, as there
            end = self._end(prompt)
            later = (at for at, other in enumerate(self.ends) if end[0] <= other[0])
            self.ends.insert(next(later, len(self.ends) - 1), end)
        ends = [pair for pair in self.ends if pair[0] > 0]
        for running, (steps, held_tokens) in zip(range(len(ends), 0, -1), ends, strict=True):
            if free - steps * running <= running:
                return False
            free += held_tokens
        return True

    def _end(self, request: DecodeRow | EnginePrompt) -> tuple[float, int]:
        """Return after how many steps a request ends, and the tokens that it holds now."""
        return request.output_limit * self.share(request) - request.generated, request.tokens


def _go_on(view: EngineView, decodes: int) -> Iterator[Plan | Action]:
    """Plan decodes; before they take room, pages of a cache are emptied for it and for each."""
    due = view.due_tokens
    yield Upkeep(empty_pages=0 if due == 0 else decodes + view.pages_for(due or 0))
    yield Plan(decodes=decodes, order=ORDER)


def _longest_prefix_first(view: EngineView) -> list[int]:
    """Return the waiting requests by cached tokens, the most first.

    Of requests that begin with the same tokens, little of them cached, all but the first go last.
    """
    begun: set[tuple[int, ...]] = set()
    missing: dict[int, float] = {}
    for prompt in view.queue:
        cached = view.cached_tokens(prompt)
        begins = prompt.begins_with(SHARED) if cached <= SHARED else None
        shared = begins is not None and begins in begun
        missing[prompt.request_id] = inf if shared else -min(cached, prompt.tokens - 1)
        if begins is not None:
            begun.add(begins)
    return sorted(missing, key=missing.__getitem__)
