"""Sarathi-Serve: chunked prefills and stall-free batching under a token budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from evenflow.compiled import mypyc_attr
from evenflow.core.scheduling import Order, Plan, Victim, View
from evenflow.keys import Count, Positive
from evenflow.schedulers.admission import UNLIMITED, Room, decodes_only, lacks_a_page, plan_of
from evenflow.schedulers.limits import Fraction, Policy, Range, SearchSpace


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Sarathi(Policy):
    """Every ready decode, then prompt chunks up to `token_budget` tokens in all.

    Source: Sarathi-Serve (OSDI'24), algorithm 3; also SGLang's chunked prefill. Decodes
    are not limited by the budget. Pages for the whole prompt are allocated at admission; one chunk
    of a prompt is in flight at a time. Each decode in turn asks for a free page, even where it
    needs none (the published code's `can_append_slot`). Without, the latest-arrived ready request
    is preempted, a partly computed prompt too, and nothing is admitted beside other rows. (A prompt
    so preempted the published code goes on with at once, without its first tokens: not here.)

    The modes are those of table 4; `token_budget: auto` is that of section 4.3.
    """

    search_space: ClassVar[SearchSpace] = {
        "token_budget": Range(128, 8192, log=True),
        "max_num_seqs": Range(16, 1024, log=True),
        "watermark": Range(0.0, 0.1),
    }

    token_budget: Count | Literal["auto"] = 512
    """Most tokens of a micro-batch that has chunks; auto: most that keep `tbt_slo_s`."""
    max_num_seqs: Count = 256
    """Most requests that are admitted at a time."""
    watermark: Fraction = 0.01
    """The share of the pages that an admission leaves free."""
    mode: Literal["hybrid", "chunked_only", "hybrid_only"] = "hybrid"
    """Chunks beside decodes; chunks and decodes in turns; or whole prompts beside decodes."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""
    tbt_slo_s: Positive | None = None
    """Seconds between tokens that `token_budget: auto` keeps by the cost model."""
    token_budget_for: Callable[[float], int] | None = None

    def __post_init__(self) -> None:
        if self.token_budget != "auto":
            self.budget = self.token_budget
        elif self.tbt_slo_s is None or self.token_budget_for is None:
            raise ValueError("token_budget auto needs tbt_slo_s and a cost model")
        else:
            self.budget = self.token_budget_for(self.tbt_slo_s)
        self.order: Order = "arrival"
        self.victims: Victim = "latest_arrived"
        self._most_rows = self.max_batch_rows or UNLIMITED
        self._prefilled_last = False
        self._makes_room = False

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        return self.mode != "chunked_only" and decodes <= self._most_rows

    def schedule(self, view: View) -> Plan:
        decodes = min(view.ready_decodes, self._most_rows)
        for_decodes, self._makes_room = self._makes_room, False
        if self.mode == "chunked_only":
            return self._take_turns(view, decodes, for_decodes)
        needed = view.decode_pages(decodes, self.order) if decodes else 0
        if lacks_a_page(view, decodes, needed, self.order):
            return self._make_room(view)
        return self._mix(view, decodes, needed, for_decodes)

    def _make_room(self, view: View) -> Plan:
        """Preempt one, and be asked again; freed pages are for decodes, not for prompts."""
        self._makes_room = True
        return Plan(preempt=[view.victim(self.victims)])

    def _mix(self, view: View, decodes: int, needed: int, for_decodes: bool) -> Plan:
        if not view.waiting_tokens:
            return decodes_only(decodes, self.order)
        room = Room(
            tokens=self.budget - decodes,
            rows=self._most_rows - decodes,
            seats=self.max_num_seqs - view.running,
            pages=view.free_pages - needed,
            watermark_pages=int(self.watermark * view.total_pages),
        )
        room.go_on(view.partials)
        closed = for_decodes or self.mode == "chunked_only"
        if not (closed and (decodes or room.prefills)):
            room.admit(view, chunked=self.mode != "hybrid_only")
        return plan_of(room.prefills, decodes, self.order, "latest_arrived", room.kv_limited)

    def _take_turns(self, view: View, decodes: int, for_decodes: bool) -> Plan:
        plan = Plan()
        if not (decodes and (self._prefilled_last or for_decodes)):
            plan = self._mix(view, 0, 0, for_decodes)
        if decodes and not plan.prefills:
            if lacks_a_page(view, decodes, view.decode_pages(decodes, self.order)):
                return self._make_room(view)
            plan = plan._replace(decodes=decodes)
        if plan.prefills or plan.decodes:
            self._prefilled_last = bool(plan.prefills)
        return plan
