"""gLLM: Token Throttling, which evens out prefill and decode tokens over the micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from evenflow.compiled import mypyc_attr
from evenflow.errors import MOST
from evenflow.keys import Count
from evenflow.schedulers.admission import UNLIMITED
from evenflow.schedulers.limits import Fraction, Policy
from evenflow.schedulers.sarathi import Sarathi
from evenflow.schedulers.token_throttling_code import PackageRules
from evenflow.schedulers.token_throttling_rules import (
    AdaptiveReserve,
    Throttle,
    decode_budget,
    spread,
    unblock,
)
from evenflow.scheduling import Plan, Prefill, SearchSpace, Victim, View, decodes_only

VICTIMS: dict[str, Victim] = {"latest": "last_returned", "most_pages": "most_pages"}
Variant = Literal["reading", "paper", "code"]
NOT_IN: dict[str, dict[str, object]] = {
    "reading": {},
    "paper": {"reserve": "threshold"},
    "code": {
        "use_wt": True,
        "use_ut": True,
        "coupled": False,
        "victim": "latest",
        "reserve": "threshold",
        "max_batch_rows": None,
    },
}
"""Parameters that a variant does not have, and what it does instead."""


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TokenThrottling(Policy):
    """A throttled share of the waiting prefill tokens, and an even share of the running decodes.

    Source: gLLM (SC'25), section 3.2, equations 1 to 4, with the public code's integer rules: the
    budget is also capped by the pages above the reserve; the most recently returned decodes go
    first, so micro-batches stay as they are; decodes are chosen after prefills. On one stage there
    is nothing to balance, and the budget is `max_prefill`.

    Ablations: `use_wt`, `use_ut`; `coupled` (w/ CK) is Sarathi-Serve's policy with a budget of
    `max_prefill`. `victim` of a preemption: the `latest` returned decode, or the one with
    `most_pages`. `reserve`: `threshold` keeps `kv_thresh` of the pages; `adaptive` keeps what the
    running decodes are expected to need times a ratio, which starts at 0.7, falls by 0.002 a call
    to 0.1, and rises by 0.05 with each preemption.

    `variant`: `reading` is the above; `paper` is equations 1 to 4 as printed, where `min_prefill`
    is a floor of the whole and pages do not cap the budget; `code` is the package gllm-rt
    0.0.6.post1, decision for decision (`evenflow.schedulers.token_throttling_code`).
    """

    search_space: ClassVar[SearchSpace] = {
        "iterations": {"low": 1, "high": 32, "log": True, "integer": True},
        "max_prefill": {"low": 256, "high": 8192, "log": True, "integer": True},
        "min_prefill": {"low": 8, "high": 512, "log": True, "integer": True},
        "kv_thresh": {"low": 0.0, "high": 0.3},
        "victim": ["latest", "most_pages"],
        "reserve": ["threshold", "adaptive"],
    }

    iterations: Count = 8
    max_prefill: Count = 2048
    min_prefill: Annotated[int, Field(ge=0)] = 32
    kv_thresh: Fraction = 0.05
    use_wt: bool = True
    use_ut: bool = True
    coupled: bool = False
    victim: Literal["latest", "most_pages"] = "latest"
    reserve: Literal["threshold", "adaptive"] = "threshold"
    max_batch_rows: Count | None = None
    variant: Variant = "reading"

    def __post_init__(self) -> None:
        self.pipelined_chunks = True
        for name, fixed in NOT_IN[self.variant].items():
            if getattr(self, name) != fixed:
                raise ValueError(f"variant {self.variant} has no parameter {name}")
        limits = self.iterations, self.max_prefill, self.min_prefill
        throttle = Throttle(*limits, self.use_wt, self.use_ut)
        self._budget = throttle.printed if self.variant == "paper" else throttle.read
        self._victims = VICTIMS[self.victim]
        self.adaptive = AdaptiveReserve() if self.reserve == "adaptive" else None
        self._most_rows = self.max_batch_rows or UNLIMITED
        self._turn = 0
        self.leaves_out = self.variant == "code"
        self._whole: Sarathi | PackageRules | None = None
        if self.leaves_out:
            self._whole = PackageRules(throttle, self.kv_thresh)
        elif self.coupled:
            budget, rows = self.max_prefill, self.max_batch_rows
            self._whole = Sarathi(
                token_budget=budget, max_num_seqs=MOST, watermark=0.0, max_batch_rows=rows
            )
            self._whole.order, self._whole.victims = "first_returned", self._victims

    def schedule(self, view: View) -> Plan:
        if self._whole is not None:
            return self._whole.schedule(view)
        if self.adaptive is not None:
            self.adaptive.ask(view.preemptions)
        prefills = self._throttle(view) if view.waiting_tokens else []
        decodes = view.ready_decodes
        if decodes:
            decodes = min(decodes, self._share(view), self._most_rows - len(prefills))
        elif not prefills and not view.in_flight:
            return unblock(view, self._spread(view, self.max_prefill))
        if not prefills:
            return decodes_only(decodes, "last_returned", self._victims, True)
        return Plan(prefills, decodes, "last_returned", self._victims)

    def _share(self, view: View) -> int:
        """Return the even share of the running decodes: equation 4."""
        running, depth = view.running_decodes, view.depth
        share = decode_budget(running, depth, self._turn)
        if running >= depth:
            self._turn += 1
        return share

    def _throttle(self, view: View) -> list[Prefill]:
        """Plan prefills within equation 3 and, but in the paper, the pages above the reserve."""
        if self.variant == "paper":
            idle_rate = view.free_pages / view.total_pages
            printed = self._budget(view.waiting_tokens, idle_rate, self.kv_thresh)
            return self._spread(view, printed)
        reserve, thresh = self._reserve(view)
        pages = view.free_pages
        if pages <= reserve:
            return []
        budget = view.page_tokens * (pages - reserve)
        if view.depth == 1:
            return self._spread(view, min(self.max_prefill, budget))
        idle_rate = pages / view.total_pages
        equation_3 = self._budget(view.waiting_tokens, idle_rate, thresh)
        return self._spread(view, min(equation_3, budget))

    def _reserve(self, view: View) -> tuple[int, float]:
        """Return the pages kept for decodes, and the idle rate at which prefill stops."""
        if self.adaptive is None:
            return int(self.kv_thresh * view.total_pages), self.kv_thresh
        expected = self.adaptive.pages(view.expected_output_tokens, view.page_tokens)
        pages = min(expected, view.total_pages)
        return pages, min(0.99, pages / view.total_pages)

    def _spread(self, view: View, budget: int) -> list[Prefill]:
        """Plan `budget` prefill tokens, first come first served, as pages last."""
        return spread(view, islice(view.prompts, self._most_rows), budget)[0]
