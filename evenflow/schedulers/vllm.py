"""Policies of vLLM: V0, prefills first and never in one micro-batch with decodes.

V1, one pass over running, then over waiting requests, under one token budget; and proposals to
balance that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from evenflow.compiled import mypyc_attr
from evenflow.core.kv import PagePool
from evenflow.core.scheduling import Action, Plan, Victim, View
from evenflow.engines.rules import EngineRules
from evenflow.engines.upkeep import Take
from evenflow.engines.view import EnginePrompt, EngineView
from evenflow.keys import Count
from evenflow.schedulers.admission import (
    UNLIMITED,
    Room,
    decodes_only,
    lacks_a_page,
    plan_of,
    prefill_of,
)
from evenflow.schedulers.limits import Fraction, Policy, Range, SearchSpace


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class VLLM(Policy):
    """vLLM V0 (before 0.8; today's is `vllm_v1`): whole prompts while any fits, else all decodes.

    Source: vLLM v0 scheduler (SOSP'23, section 4.5; the "separate batching" of TD-Pipe). Pages are
    allocated as needed. Each decode in turn asks for a free one, even where it needs none
    (`can_append_slots` of 0.6.6). Without, the latest-arrived ready request is preempted and
    recomputed. There is no balancing: the first call after several returns takes all ready decodes.
    """

    search_space: ClassVar[SearchSpace] = {
        "max_num_batched_tokens": Range(1024, 16384, log=True),
        "max_num_seqs": Range(16, 1024, log=True),
        "watermark": Range(0.0, 0.1),
    }

    max_num_batched_tokens: Count | None = None
    """Most tokens of a micro-batch; null: `max_model_len`."""
    max_num_seqs: Count = 256
    """Most requests that are admitted at a time."""
    watermark: Fraction = 0.01
    """The share of the pages that an admission leaves free."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""
    max_model_len: Count | None = None
    """Most tokens of a request; null: the run's."""

    def __post_init__(self) -> None:
        budget = self.max_num_batched_tokens or self.max_model_len
        if budget is None:
            raise ValueError("max_num_batched_tokens or max_model_len has to be given")
        self._budget = budget
        self._most_rows = self.max_batch_rows or UNLIMITED
        self._makes_room = False

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        if prompt_tokens > self._budget:
            limit = f"max_num_batched_tokens {self._budget}"
            return f"a prompt of {prompt_tokens} tokens exceeds {limit}"
        return None

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        return decodes <= self._most_rows

    def schedule(self, view: View) -> Plan:
        kv_limited, ready = False, view.ready_decodes
        for_decodes, self._makes_room = self._makes_room and ready > 0, False
        if view.num_waiting and not for_decodes:
            room = Room(
                tokens=self._budget,
                rows=self._most_rows,
                seats=self.max_num_seqs - view.running,
                pages=view.free_pages,
                watermark_pages=int(self.watermark * view.total_pages),
            )
            room.admit(view, chunked=False)
            if room.prefills:
                return Plan(room.prefills)
            kv_limited = room.kv_limited
        decodes = min(ready, self._most_rows)
        self._makes_room = lacks_a_page(view, decodes, view.decode_pages(decodes, "arrival"))
        if self._makes_room:
            return Plan(preempt=[view.victim("latest_arrived")])
        return decodes_only(decodes, "arrival", "latest_arrived", kv_limited)


AHEAD: dict[bool | str, Literal["question", "round"] | None] = {
    False: None,
    "v1": "question",
    "v2": "round",
}
"""When a decode may go again, by the model runner of `async_scheduling`."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class VLLMV1(Policy):
    """Every ready decode, the chunk of the prompt that is under way, then prompts that wait.

    Source: vLLM 0.32.0 and 0.33.0 (its V1 scheduler), whose recorded decisions are this policy's
    (engines.md). Chunks of a prompt follow one another without waiting for the last to return.
    Pages come with each chunk. A prompt is admitted if all of it would fit now, with `watermark` of
    the pages free once anything runs. When a page is missing, the last admitted is preempted, in
    flight or not, and this step admits nothing. Requests of one `priority` go by arrival.
    """

    search_space: ClassVar[SearchSpace] = {
        "max_num_batched_tokens": Range(256, 16384, log=True),
        "max_num_seqs": Range(16, 256, log=True),
        "watermark": Range(0.0, 0.1),
    }

    max_num_batched_tokens: Count = 2048
    """Most tokens of a micro-batch. Where `vllm_v1` leaves it out, its server's: on GPUs from 70
    GiB 8,192, from 160 16,384, on A100 and GB10 as here.
    """
    max_num_seqs: Count = 256
    """Most requests that are admitted at a time. Where `vllm_v1` leaves it out, its server's: on
    GPUs from 70 GiB 1,024, on A100 and GB10 as here. It is no more than tokens.
    """
    watermark: Fraction = 0.0
    """The share of the pages that an admission leaves free."""
    async_scheduling: Literal[False, "v1", "v2"] | None = None
    """Which model runner schedules a decode again before its last token is there; v1 does so on one
    stage only. false: none, as vLLM before 0.14 and with --no-async-scheduling; null: v2 where
    decodes can run ahead here, else false.
    """
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """The request that is first, and preempted last: by arrival, or by the lowest `priority`."""
    prefill_schedule_interval: Count = 1
    """Micro-batches from one that prefills to the next that may. It holds while anything decodes
    and the last that could left no prompt waiting. With `data_parallel` one in that many, in all
    groups at once.
    """
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens of a chunk where more than one request is there; 0: no limit."""
    enable_chunked_prefill: bool = True
    """Whether prompts are cut where a micro-batch has no more tokens; else they wait."""
    scheduler_reserve_full_isl: bool = True
    """Whether pages for all of a prompt have to be free to admit it, or for its first chunk."""
    version: Literal["0.32", "0.33"] = "0.33"
    """Whose rules: in 0.32 no more decodes go in a micro-batch if the least urgent lacks a page."""
    depth: int = 1
    data_parallel: int = 1
    in_step: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            limits = f"{self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}"
            raise ValueError(f"max_num_batched_tokens {limits}: a decode of each has to fit")
        if self.async_scheduling is None:
            self.async_scheduling = False if self.in_step else "v2"
        if self.async_scheduling == "v1" and self.depth > 1:
            raise ValueError(f"async_scheduling v1 is for one stage, not {self.depth}; v2 is right")
        has_cadence = self.version != "0.32" or self.data_parallel > 1
        if self.prefill_schedule_interval > 1 and not has_cadence:
            interval = f"{self.prefill_schedule_interval} does nothing in version 0.32"
            raise ValueError(f"prefill_schedule_interval {interval} on one engine; 1 is right")
        by_priority = self.scheduling_policy == "priority"
        self._mixes = by_priority or self.long_prefill_token_threshold > 0
        self._is_plain = self.prefill_schedule_interval == 1 and not self._mixes
        self._limit = UNLIMITED
        self._prefilled = -self.prefill_schedule_interval  # the last micro-batch that did
        self._behind = self._holds = False
        self._skipped: set[int] = set()  # passed over while an output of them was in flight
        self.rules = EngineRules(
            pipelined_chunks=True,
            delivers=True,
            cache="append_only",
            by_priority=by_priority,
            by_admission=True,
            ahead=AHEAD[self.async_scheduling],
        )

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Return why a request would never be served whole, once it is preempted, too; or None."""
        tokens, most = prompt_tokens + output_tokens, self.max_num_batched_tokens
        if self.enable_chunked_prefill or tokens <= most:
            return None
        return f"{tokens} tokens exceed max_num_batched_tokens {most}, and chunked prefill is off"

    def limits(self, view: View) -> tuple[int, int]:
        """Return how many decodes, and how many tokens, a micro-batch may have now."""
        return self.max_num_batched_tokens, self.max_num_batched_tokens

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        return self._is_plain and decodes <= self.max_num_batched_tokens

    def schedule(self, view: EngineView) -> Plan | Iterator[Plan | Action]:
        if self._is_plain and not (view.num_waiting or view.partials):
            most, tokens = self.limits(view)
            room = min(most, tokens)
            decodes = min(view.ready_decodes, room)
            if view.decode_pages(decodes, "arrival") <= view.free_pages:
                return decodes_only(decodes, "arrival", "latest_admitted")
        return self._in_parts(view)

    def _in_parts(self, view: EngineView) -> Iterator[Plan | Action]:
        preemptions = view.preemptions
        cadence = self.prefill_schedule_interval
        since = view.sent + 1 - self._prefilled
        early = (view.asked - 1) % cadence > 0 if self.data_parallel > 1 else since < cadence
        self._holds = early and not self._behind and view.running > len(view.partials)
        most, tokens = self.limits(view)
        if self.long_prefill_token_threshold:
            alone = len(view.lined_up) + view.running == 1
            self._limit = UNLIMITED if alone else self.long_prefill_token_threshold
        tokens = yield from self._go_on(view, min(most, tokens), tokens)
        if view.preemptions == preemptions:
            yield from self._admit(view, tokens)
            if cadence > 1 and not self._holds:
                self._behind = any(number not in self._skipped for number, _ in view.lined_up)

    def _go_on(
        self, view: EngineView, most: int, tokens: int
    ) -> Generator[Plan | Action, None, int]:
        """Schedule running requests in their order; return how many tokens are left.

        While one lacks pages, the last or the least urgent is preempted. If that is the one that
        lacks them, the rest waits, by priority only in version 0.32.
        """
        victims: Victim = "lowest_priority" if self.rules.by_priority else "latest_admitted"
        stops = self.version == "0.32" or not self.rules.by_priority
        chunks: dict[int, int] = {}  # tokens of each
        decodes = found = 0  # `found`: those whose full pages a cache knows
        for prompt in [*view.partials, None]:
            number = None if prompt is None else prompt.request_id
            chunk = 0
            while number is None or any(number == one.request_id for one in view.partials):
                budget = tokens - sum(chunks.values())
                before = view.ready_decodes  # one prompt, which may be the only one, is the last
                if prompt is not None and self._mixes:
                    before = view.decodes_before(prompt)
                room = min(budget, most)
                decodes = min(before, room)
                lacking, due = number, view.decode_pages(decodes, "arrival")
                if due > view.free_pages:
                    pages = partial(view.decode_pages, order="arrival")
                    decodes = bisect_right(range(1, decodes + 1), view.free_pages, key=pages)
                    lacking, _ = view.ready(decodes + 1, "arrival")[decodes]
                elif prompt is None or decodes == budget or self._holds:
                    break
                else:
                    chunk = chunk or min(prompt.remaining, budget - decodes, self._limit)
                    need = view.pages_for(prompt.computed + chunk) - prompt.pages
                    if due + need <= view.free_pages:
                        self._prefilled = view.sent + 1
                        chunks[prompt.request_id] = chunk
                        if view.prefix_cache and decodes > found:
                            found = decodes
                            yield _ready(view, decodes)
                        yield Take({prompt.request_id: chunk})
                        break
                yield _ready(view, decodes)
                found = 0
                victim = view.victim(victims)
                yield Plan(preempt=[victim])
                chunks.pop(victim, None)
                if victim == lacking and stops:
                    yield _going_on(chunks, decodes)
                    return 0
        yield _going_on(chunks, decodes)
        return tokens - decodes - sum(chunks.values())

    def _admit(self, view: EngineView, tokens: int) -> Iterator[Plan]:
        while tokens and view.running < self.max_num_seqs:
            prompt = next(view.waiting, None)
            if self.prefill_schedule_interval > 1:
                self._pass_over(view, prompt)
            if prompt is None:
                return
            prefills = prompt.remaining > 1  # one token is a decode to vLLM
            if prefills and self._holds:
                return
            chunk = min(prompt.remaining, self._limit)
            if chunk > tokens and not self.enable_chunked_prefill:
                return
            chunk = min(chunk, tokens)
            blocks = view.total_pages + 1  # vLLM counts its null block, which holds nothing
            spare = int(self.watermark * blocks) if view.running else 0
            whole = self.scheduler_reserve_full_isl
            wanted = prompt.tokens if whole else prompt.computed + chunk
            if view.pages_for(wanted) - prompt.pages > view.free_pages - spare:
                yield Plan(kv_limited=True)
                return
            if prefills:
                self._prefilled = view.sent + 1
            self._skipped.discard(prompt.request_id)
            yield plan_of([prefill_of(prompt.request_id, chunk)])
            tokens -= chunk

    def _pass_over(self, view: EngineView, prompt: EnginePrompt | None) -> None:
        """Note requests in front of a prompt, the next to be admitted, that wait for an output."""
        for number, held_back in view.lined_up:
            if prompt is not None and number == prompt.request_id:
                return
            if held_back:
                self._skipped.add(number)


def _ready(view: EngineView, decodes: int) -> Take:
    """Return an order that the first decodes get their pages, and content in full ones."""
    return Take(dict.fromkeys((one for one, _ in view.ready(decodes, "arrival")), 1))


def _going_on(chunks: dict[int, int], decodes: int) -> Plan:
    return plan_of([prefill_of(number, tokens) for number, tokens in chunks.items()], decodes)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class VLLMBalanced(VLLMV1):
    """`vllm_v1` that takes a share of the decodes, or of the tokens, and leaves the rest.

    Source: vLLM pull requests 57433, 19873 and vllm-rbln 900, none of them in vLLM 0.32.0. Read
    from their descriptions, never compared with their code. `share` of a micro-batch on n stages.
    `seats`: at most max_num_seqs / n decodes (57433). `decodes`: at most a n-th of the running ones
    (900), with prompts free in both. `tokens`: a n-th of all decodes and prompt tokens that there
    are, up to the budget (19873). Its two phases are one where the next question counts anew.
    """

    share: Literal["seats", "decodes", "tokens"] = "seats"
    """What of a micro-batch is divided among the stages: requests to admit, decodes, or all tokens.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share == "tokens" and not self.enable_chunked_prefill:
            raise ValueError("share tokens cuts prompts; enable_chunked_prefill false goes without")

    def limits(self, view: View) -> tuple[int, int]:
        decodes, tokens = super().limits(view)
        if self.share == "seats":
            return -(-self.max_num_seqs // self.depth), tokens
        if self.share == "decodes":
            return -(-view.running_decodes // self.depth), tokens
        there = view.running_decodes + view.waiting_tokens
        return decodes, min(tokens, -(-there // self.depth))
