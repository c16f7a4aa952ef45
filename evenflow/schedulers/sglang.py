"""SGLang: prompts first, admitted by what their outputs may need; each slot has its decodes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from evenflow.keys import Count, NonNegative
from evenflow.kv import PagePool
from evenflow.schedulers.limits import checked
from evenflow.schedulers.sglang_rules import (
    Room,
    dynamic_chunk,
    longest_prefix_first,
    needed_tokens,
)
from evenflow.scheduling import Order, Plan, Prompt, SearchSpace, Upkeep, View

LOOKED_UP = 128  # prompts that are looked up in a pass, at most
REFRESH = 32  # passes
RETRACT_STEPS = 20  # tokens a decode is expected to generate before pages run short again
ORDER: Order = "first_returned"


@dataclass(slots=True)
class Slot:
    """The running decodes of one slot as its last answer left them.

    `full`: a prompt did not fit, and nobody has left since. `cut`: its last prompt goes on.
    """

    running: int = 0
    full: bool = False
    cut: bool = False


class SGLang:
    """Prompts only, as long as one fits; else all decodes of the slot whose turn it is.

    Source: SGLang 0.5.23 (its scheduler), whose recorded decisions are this policy's: see
    docs/engines.md. A prompt is admitted if the output that its client allows fits beside what the
    running decodes may still need: what they are allowed times a ratio, which starts at 0.7
    `schedule_conservativeness`, falls with each decode step and is estimated anew when pages run
    short. Then whoever has generated least is retracted to the end of the queue. `overlap`: the
    next batch is chosen before the last one's outputs are there (default: on one stage). In a
    pipeline each micro-batch that may be in flight has decodes of its own.
    """

    pipelined_chunks = preempted_last = radix_cache = True

    search_space: ClassVar[SearchSpace] = {
        "chunked_prefill_size": [512, 1024, 2048, 4096, 8192, 16384],
        "max_running_requests": {"low": 16, "high": 4096, "log": True, "integer": True},
        "schedule_conservativeness": {"low": 0.1, "high": 1.4},
    }

    @checked
    def __init__(
        self,
        *,
        chunked_prefill_size: Count = 8192,
        max_prefill_tokens: Count = 16384,
        max_running_requests: Count = 2048,
        pp_max_micro_batch_size: Count | None = None,
        schedule_conservativeness: NonNegative = 1.0,
        schedule_policy: Literal["fcfs", "lpm"] = "fcfs",
        mixed_chunk: bool = False,
        dynamic_chunking: bool = False,
        prefill_decode_interval: Annotated[int, Field(ge=0)] = 0,
        overlap: bool | None = None,
        max_model_len: Count | None = None,
        depth: int = 1,
        page_tokens: int = 1,
        prefill_s: Callable[[int], float] | None = None,
    ) -> None:
        self.overlap = depth == 1 if overlap is None else overlap
        if self.overlap and depth > 1:
            raise ValueError(f"overlap is for one stage, not {depth}; false is right")
        if chunked_prefill_size % page_tokens:
            what = f"chunked_prefill_size {chunked_prefill_size} is no multiple of"
            raise ValueError(f"{what} kv.page_tokens, {page_tokens}")
        self.limits = chunked_prefill_size, max_prefill_tokens
        self.chunk_after: Callable[[int, int], int] | None = None
        if dynamic_chunking:
            if prefill_s is None or max_model_len is None:
                raise ValueError("dynamic_chunking needs max_model_len and a cost model")
            self.chunk_after = partial(dynamic_chunk, prefill_s, max_model_len, self.limits)
        self.max_running_requests = max_running_requests
        self.max_rows = pp_max_micro_batch_size or max(max_running_requests // depth, 1)
        self.schedule_policy = schedule_policy
        self.newest_first = self.mixed_chunk = mixed_chunk
        self.leaves_out = page_tokens > 1 and (mixed_chunk or dynamic_chunking)
        self.prefill_decode_interval = prefill_decode_interval
        self.decodes_ahead = "question" if self.overlap else None
        self.slotted = not self.overlap
        self._most_ratio = min(0.7 * schedule_conservativeness, 1.0)
        self._least_ratio = self._most_ratio * 0.14
        self._decay = (self._most_ratio - self._least_ratio) / 600
        self.new_token_ratio = self._most_ratio
        self._slots: dict[int, Slot] = {}
        self._idles = self._passes = 0
        self._decodes_until = 0  # no prompts in answer to the questions up to this one

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Say why such a request would never be admitted, or return None."""
        tokens = (pool.pages_for(prompt_tokens) + 1) * pool.page_tokens + output_tokens
        if tokens < pool.total_pages * pool.page_tokens:
            return None
        return f"{tokens} tokens, a page of them spare, do not leave one of the pool"

    def schedule(self, view: View) -> Iterator[Plan | Upkeep]:
        slot = self._slots.setdefault(view.slot, Slot())
        running = view.running - len(view.partials) if self.overlap else view.ready_decodes
        slot.full &= running >= slot.running and running > 0 and not slot.cut
        if view.idles != self._idles:
            self._idles, self.new_token_ratio = view.idles, self._most_ratio
        room = None
        if view.asked > self._decodes_until:
            room = yield from self._take_prompts(view, slot, running)
        slot.cut = room is not None and room.cut is not None
        if room is None or not room.prefills:
            yield from self._decode(view, slot, running)
            return
        yield Upkeep(empty_pages=room.needed_pages)
        yield Plan(room.prefills)
        self._decodes_until = view.asked + self.prefill_decode_interval
        ready = view.ready_decodes if self.mixed_chunk else running
        slot.full &= 0 < ready == running
        if ready and self.mixed_chunk and view.decode_pages(ready, ORDER) <= view.free_pages:
            slot.full = False
            yield Upkeep(empty_pages=ready)
            yield Plan(decodes=ready, order=ORDER)
        slot.running = ready + len(room.prefills) - slot.cut

    def _take_prompts(
        self, view: View, slot: Slot, running: int
    ) -> Generator[Upkeep, None, Room | None]:
        """Take the next chunk of the prompt under way, then prompts that wait, in order."""
        partial = next(iter(view.partials), None)
        if partial is None and (slot.full or not view.num_waiting):
            return None
        places = self.max_running_requests - view.running + (partial is not None)
        places = min(self.max_rows - running, places)
        if partial is None and places <= 0:
            slot.full = True
            return None
        if view.prefix_cache and view.num_waiting:
            yield from self._look_up(view)
        room = self._room(view, partial, running if self.mixed_chunk else 0)
        if partial is not None:
            tokens = room.next_chunk_of(partial)
            pages = view.pages_for(partial.computed + tokens) - partial.pages
            if tokens <= 0 or pages > view.free_pages:  # of which SGLang dies
                return None
            room.take(partial, tokens)
        yield from self._admit(view, slot, room, places)
        return room

    def _room(self, view: View, partial: Prompt | None, riding: int) -> Room:
        chunk, inputs = self.limits
        if partial is not None and self.chunk_after is not None:
            chunk = self.chunk_after(partial.computed, view.page_tokens)
        free, decodes = view.free_pages * view.page_tokens, view.decodes
        reserved = riding + needed_tokens(decodes, self.new_token_ratio)
        chunk, walks = chunk - riding, not view.prefix_cache
        return Room(
            *(view.page_tokens, chunk, inputs, free, riding, reserved, walks),
            decodes=decodes,
            ratio=self.new_token_ratio,
        )

    def _admit(self, view: View, slot: Slot, room: Room, places: int) -> Iterator[Upkeep]:
        """Take prompts that wait until one does not fit; with a place left, the slot is full."""
        waiting = view.waiting
        for _ in range(view.num_waiting):
            if room.has_pages and room.is_spent:
                return
            slot.full |= len(room.prefills) >= places
            if slot.full:
                return
            prompt = next(waiting)
            if not room.fits(prompt):
                slot.full = bool(room.prefills or room.decodes)
                return
            if room.chunk_of(prompt) <= 0:
                return
            if prompt.computed:
                yield Upkeep(hold=[prompt.request_id])
                room.free = view.free_pages * view.page_tokens
            room.take(prompt, room.chunk_of(prompt))
            if not room.has_pages:
                slot.full = True
                return

    def _look_up(self, view: View) -> Iterator[Upkeep]:
        """Look up those that wait: to order them, or lest what they begin with is evicted."""
        if self.schedule_policy == "lpm" and view.num_waiting <= LOOKED_UP:
            yield Upkeep(waiting=longest_prefix_first(view))
            return
        if self._passes % REFRESH == 0:
            for prompt in reversed([*islice(view.queue, LOOKED_UP)]):
                view.cached_tokens(prompt)
        self._passes += 1

    def _decode(self, view: View, slot: Slot, running: int) -> Iterator[Plan | Upkeep]:
        """Plan the decodes of a slot, without those whose last allowed token is in flight."""
        slot.running = ready = view.ready_decodes
        short = view.decode_pages(ready, ORDER) > view.free_pages
        if short and ready < running:
            yield Upkeep(empty_pages=view.total_pages)
        elif short:
            yield from self._retract(view)
            slot.running = view.ready_decodes
        elif ready:
            self.new_token_ratio = max(self.new_token_ratio - self._decay, self._least_ratio)
        slot.full &= slot.running == running
        if slot.running and (not short or ready == running):
            yield Upkeep(empty_pages=slot.running)
            yield Plan(decodes=slot.running, order=ORDER)
        else:
            yield Plan(kv_limited=short or view.num_waiting > 0)

    def _retract(self, view: View) -> Iterator[Plan | Upkeep]:
        """Retract who has generated least until the others fit; estimate the ratio anew."""
        decodes = view.decodes
        while view.decode_pages(view.ready_decodes, ORDER) > view.free_pages:
            yield Upkeep(empty_pages=view.total_pages)
            last = min(reversed(decodes), key=lambda one: (one.generated, -one.prompt_tokens))
            decodes.remove(last)
            yield Plan(preempt=[last.request_id]) if decodes else Upkeep(give_up=last.request_id)
            yield Upkeep(empty_pages=view.pages_for(len(decodes) * RETRACT_STEPS))
        generated = sum(one.generated for one in decodes) + RETRACT_STEPS * len(decodes)
        allowed = sum(one.output_limit for one in decodes)
        self.new_token_ratio = min(generated / (allowed + 1), 1.0)
