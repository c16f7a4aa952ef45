"""TensorRT-LLM: one pass by arrival over decodes and prompts that the pages suffice for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from evenflow.compiled import mypyc_attr
from evenflow.core.batcher import Batcher
from evenflow.core.kv import PagePool
from evenflow.core.scheduling import Action, Plan, Prefill
from evenflow.engines.rules import EngineRules
from evenflow.engines.view import Active, EnginePrompt, EngineView
from evenflow.errors import DryPoolError
from evenflow.keys import Count
from evenflow.schedulers.limits import Fraction, Policy, Range, SearchSpace


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TRTLLM(Policy):
    """Decodes and prompts in order of arrival, as long as rows, tokens and pages last.

    Source: TensorRT-LLM 1.2 (its PyTorch executor), whose recorded decisions are this policy's: see
    docs/engines.md. `max_batch_size` requests a stage are active. GUARANTEED_NO_EVICT starts a
    prompt if the pages suffice for all that it and running requests may still generate. Nobody is
    preempted. MAX_UTILIZATION looks at the next token only, in a pipeline at two. A request that
    lacks a page takes those of the last to arrive. In a pipeline that request only skips the step
    and keeps its pages. The engine dies once it needs a page and none is free. Whole prompts go,
    unless `enable_chunked_prefill`. In a pipeline each micro-batch takes all that is not in flight
    and fits; nothing balances them.
    """

    search_space: ClassVar[SearchSpace] = {
        "max_batch_size": Range(16, 2048, log=True),
        "max_num_tokens": Range(1024, 16384, log=True),
        "capacity_scheduler_policy": ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"),
    }

    max_batch_size: Count = 2048
    """Most rows of a micro-batch: decodes, and prompts."""
    max_num_tokens: Count = 8192
    """Most tokens of a micro-batch."""
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = (
        "GUARANTEED_NO_EVICT"
    )
    """Whether a prompt needs pages for all output that is allowed, or only for what is next."""
    enable_chunked_prefill: bool = False
    """Whether prompts are cut."""
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] = (
        "FIRST_COME_FIRST_SERVED"
    )
    """How prompts share the tokens left: one after the other, or in turns of a unit."""
    chunk_unit: Count | None = None
    """Tokens of which a cut chunk is a multiple; null: a page."""
    batch_wait_timeout_iters: Annotated[int, Field(ge=0)] = 0
    """Steps that prompts wait at most for others to join them, while there are decodes."""
    batch_wait_max_tokens_ratio: Fraction = 0.0
    """The share of `max_num_tokens` from which a micro-batch with its prompts waits no more."""
    disable_overlap_scheduler: bool = False
    """Whether on one stage a micro-batch is chosen after the one before is back."""
    version: Literal["1.0", "1.2"] = "1.2"
    """The release. In a pipeline of 1.0 the next chunk waits for the last, and rank 0 does not wait
    for its own GPU.
    """
    depth: int = 1
    page_tokens: int = 1

    def __post_init__(self) -> None:
        self._reserves = self.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
        self._unit = self.chunk_unit or self.page_tokens
        self._enough_tokens = self.batch_wait_max_tokens_ratio * self.max_num_tokens
        self._steps_waited = 0
        if self.enable_chunked_prefill and self._unit > self.max_num_tokens:
            limits = f"max_num_tokens {self.max_num_tokens} is less than a unit of chunks"
            raise ValueError(f"{limits}, {self._unit} tokens")
        first = self.depth > 1 and self.version == "1.0"
        self.rules = EngineRules(
            pipelined_chunks=not first,
            waits_first=self.depth > 1 and not first,
            ahead=None if self.depth > 1 or self.disable_overlap_scheduler else "question",
            delivers=not self._reserves and self.depth == 1,
            ends_late=True,
            by_arrival=True,
            cache="none",
        )

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Return why a request of these lengths would never be served, or None."""
        pages = pool.pages_for(prompt_tokens + output_tokens)
        if pages > pool.total_pages:
            return f"{pages} KV pages for all that it may generate exceed {pool.total_pages}"
        if self.enable_chunked_prefill or prompt_tokens <= self.max_num_tokens:
            return None
        limit = f"max_num_tokens {self.max_num_tokens}, and chunked prefill is off"
        return f"a prompt of {prompt_tokens} tokens exceeds {limit}"

    def schedule(self, view: EngineView) -> Plan | Iterator[Action]:
        most = self.max_batch_size * self.depth
        fitting = NoEvict(view, most) if self._reserves else MaxUtilization(view, most)
        decodes, prompts = self._pass(view, fitting)
        if decodes and prompts and self._waits(decodes + sum(tokens for _, tokens in prompts)):
            prompts = []
        prefills = [Prefill(one.request_id, tokens, one.tokens) for one, tokens in prompts]
        plan = Plan(prefills, decodes, kv_limited=fitting.limited)
        if fitting.paused and self.depth == 1:
            return plan._replace(preempt=fitting.paused)
        if fitting.paused:
            pages = sum(view.pages_for(one.tokens) - one.pages for one, _ in prompts)
            pages += view.decode_pages(decodes, "arrival")
            if pages > view.free_pages:
                return iter([Death(pages)])
        return plan

    def _waits(self, tokens: int) -> bool:
        """Say whether the prompts of a micro-batch of `tokens` wait for others, and count that."""
        waits = tokens < self._enough_tokens and self._steps_waited < self.batch_wait_timeout_iters
        self._steps_waited = self._steps_waited + 1 if waits else 0
        return waits

    def _pass(
        self, view: EngineView, fitting: NoEvict | MaxUtilization
    ) -> tuple[int, list[tuple[EnginePrompt, int]]]:
        """Return the decodes of a micro-batch, and its prompts with the tokens of each.

        One pass by arrival, which ends at the first that does not fit.
        """
        rows, tokens, decodes = self.max_batch_size, self.max_num_tokens, 0
        prompts: list[EnginePrompt] = []
        for prompt in fitting.prompts:
            older = min(view.decodes_before(prompt), fitting.decodes)
            taken = min(older - decodes, rows, tokens)
            decodes, rows, tokens = decodes + taken, rows - taken, tokens - taken
            whole = 0 if self.enable_chunked_prefill else prompt.remaining
            if decodes < older or not rows or whole > tokens:
                break
            prompts.append(prompt)
            rows, tokens = rows - 1, tokens - whole
            if not rows:
                break
        else:
            taken = min(fitting.decodes - decodes, rows, tokens)
            decodes, tokens = decodes + taken, tokens - taken
        return decodes, self._chunks(prompts, tokens)

    def _chunks(self, prompts: list[EnginePrompt], tokens: int) -> list[tuple[EnginePrompt, int]]:
        """Return prompts and their tokens; if any is cut, prompts that end here go last."""
        sizes = [prompt.remaining for prompt in prompts]
        if not self.enable_chunked_prefill or sum(sizes) <= tokens:
            return [*zip(prompts, sizes, strict=True)]
        deal = _equal if self.context_chunking_policy == "EQUAL_PROGRESS" else _first_come
        dealt = zip(prompts, deal(sizes, tokens, self._unit), strict=True)
        return sorted(
            ((prompt, size) for prompt, size in dealt if size),
            key=lambda chunk: chunk[1] == chunk[0].remaining,
        )


def _first_come(wanted: list[int], tokens: int, unit: int) -> list[int]:
    """Share out tokens, one prompt after the other; a cut one gets whole units."""
    sizes = []
    for rest in wanted:
        size = min(rest, tokens)
        sizes.append(size if size == rest else size // unit * unit)
        tokens -= sizes[-1]
    return sizes


def _equal(wanted: list[int], tokens: int, unit: int) -> list[int]:
    """Share out tokens, a unit a prompt in turns."""
    sizes, left = [0] * len(wanted), -1
    while tokens != left:
        left = tokens
        for index, rest in enumerate(wanted):
            more = min(unit, rest - sizes[index])
            if more <= tokens:
                sizes[index] += more
                tokens -= more
    return sizes


class NoEvict:
    """All ready `decodes`, and prompts, by arrival, that fit with all their output.

    `limited` once a prompt did not fit; nobody is `paused`.
    """

    paused: tuple[int, ...] = ()

    def __init__(self, view: EngineView, most: int) -> None:
        self.decodes = view.ready_decodes
        self.limited = False
        self.prompts = self._admit(view, most - view.running)

    def _admit(self, view: EngineView, places: int) -> Iterator[EnginePrompt]:
        unfinished, free = view.unfinished, {prompt.request_id for prompt in view.partials}
        places = min(places, view.num_waiting)
        pages = view.unpromised_pages if unfinished or places > 0 else 0
        waiting = islice(view.queue, max(places, 0))
        for prompt in merge(unfinished, waiting, key=attrgetter("order")):
            need = view.pages_for(prompt.most_tokens) - prompt.pages
            if need > pages:
                self.limited = True
                return
            pages -= need
            if not prompt.pages or prompt.request_id in free:
                yield prompt


class MaxUtilization:
    """Ready `decodes` and `prompts` that fit with their next tokens: one, two in a pipeline.

    A request that does not fit takes the pages of the last that holds any, which is `paused`.
    """

    def __init__(self, view: EngineView, most: int) -> None:
        active, free = view.active(most), view.free_pages
        fit, stop = 0, len(active)
        self.paused: list[int] = []
        while fit < stop:
            need = _next_pages(view, active[fit])
            if need <= free:
                free, fit = free - need, fit + 1
                continue
            held = (at for at in reversed(range(fit, stop)) if active[at].request.pages)
            if (last := next(held, None)) is None:
                break
            self.paused.append(active[last].request.request_id)
            free, stop = free + active[last].request.pages, last
        self.limited = fit < len(active)
        ready = [one for one in active[:fit] if one.ready]
        self.decodes = sum(one.decode for one in ready)
        self.prompts = [one.request for one in ready if not one.decode]


def _next_pages(view: EngineView, one: Active) -> int:
    """Return the new pages that a request needs for its prompt or its next tokens."""
    if one.decode:
        steps = 1 if view.depth == 1 else 2
        tokens = min(one.kv_tokens + steps, one.request.most_tokens)
        return view.pages_for(tokens) - view.pages_for(one.kv_tokens)
    return 0 if one.request.pages else view.pages_for(one.request.tokens)


@dataclass(frozen=True)
class Death(Action):
    """The end of an engine whose pool has run dry."""

    pages: int

    def apply(self, batcher: Batcher) -> None:
        """Raise DryPoolError."""
        free, at_s = batcher.pool.free_pages, batcher.queues.now_s
        raise DryPoolError(
            f"scheduler trtllm: at {at_s:.6g} s a micro-batch needs {self.pages} KV pages and "
            f"{free} are free: MAX_UTILIZATION in a pipeline frees nothing of whom it pauses, and "
            "TensorRT-LLM dies here; capacity_scheduler_policy: GUARANTEED_NO_EVICT, or more "
            "kv.pages, is right"
        )
