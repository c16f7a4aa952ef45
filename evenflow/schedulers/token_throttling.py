"""gLLM: Token Throttling, which evens out prefill and decode tokens over the micro-batches.

The rules come first: the budgets of the equations, what fits, and the pages that are kept. The
published package follows, gllm-rt 0.0.6.post1, decision for decision (`variant: code`), in our own
words. The policy says which variant uses which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from evenflow.compiled import mypyc_attr
from evenflow.core.rules import Rules
from evenflow.core.scheduling import Plan, Prefill, Prompt, Victim, View
from evenflow.errors import MOST
from evenflow.keys import Count
from evenflow.schedulers.admission import UNLIMITED, decodes_only, plan_of, prefill_of
from evenflow.schedulers.limits import Fraction, Policy, Range, SearchSpace
from evenflow.schedulers.sarathi import Sarathi


@dataclass(frozen=True, slots=True)
class Throttle:
    """Parameters of gLLM's equations 1 to 3, beside the waiting tokens and the free pages.

    WT (`use_wt`) spreads what waits over `iterations` micro-batches, UT (`use_ut`) shrinks the
    budget as the KV cache fills. Tokens.
    """

    iterations: int
    max_prefill: int
    min_prefill: int
    use_wt: bool
    use_ut: bool

    def read(self, waiting_tokens: int, idle_rate: float, kv_thresh: float) -> int:
        """Return the prefill tokens of the next micro-batch.

        `waiting_tokens` await prefill; `idle_rate` is the free share of the KV pages; prefill is
        suspended below `kv_thresh`. As in the public code, results are whole tokens and
        `min_prefill` is a floor of WT only. UT can push the budget below it where equation 3 would
        not.
        """
        if idle_rate < kv_thresh:
            return 0
        tokens = self.max_prefill
        if self.use_ut:
            tokens = round(tokens * (idle_rate - kv_thresh) / (1 - kv_thresh))
        if self.use_wt:
            tokens = min(tokens, self.spread(waiting_tokens))
        return tokens

    def spread(self, waiting_tokens: int) -> int:
        """Return WT's share of what waits, in whole tokens."""
        return max(waiting_tokens // self.iterations, self.min_prefill)

    def printed(self, waiting_tokens: int, idle_rate: float, kv_thresh: float) -> int:
        """Return what `read` does, but with the equations as they are printed.

        `min_prefill` is a floor of the whole; only where both throttles act is prefill suspended
        below `kv_thresh`.
        """
        most, least = self.max_prefill, self.min_prefill
        spread = waiting_tokens / self.iterations
        if not self.use_ut:  # equation 1
            return min(max(int(spread), least), most) if self.use_wt else most
        if not self.use_wt:  # equation 2
            return max(int(most * idle_rate), least)
        if idle_rate < kv_thresh:
            return 0
        ramp = most * (idle_rate - kv_thresh) / (1 - kv_thresh)
        return max(int(min(spread, ramp)), least)


def decode_budget(running_decodes: int, depth: int, turn: int) -> int:
    """Return the decodes of the next micro-batch (gLLM, equation 4): an even share of all running.

    `running_decodes` counts those in flight too. The remainder of the division is spread by `turn`,
    which counts decisions. Fewer than `depth` go one by one, if any is ready.
    """
    return (running_decodes + turn % depth) // depth or 1


def spread(
    view: View, prompts: Iterable[Prompt], budget: int, *, cuts: bool = False
) -> tuple[list[Prefill], int]:
    """Plan `budget` prefill tokens in the order of `prompts`, as pages last; return the pages left
    too.

    `cuts`: a chunk that reaches the end of a request's own prompt ends its prefill.
    """
    prefills: list[Prefill] = []
    pages, page_tokens = view.free_pages, view.page_tokens
    for prompt in prompts:
        computed, held = prompt.computed, prompt.pages
        tokens = min(prompt.remaining, budget)  # of two it takes no call
        tokens = min(tokens, (held + pages) * page_tokens - computed)
        if tokens <= 0:
            break
        stop = computed + tokens
        ends = cuts and stop >= prompt.tokens - prompt.generated
        prefills.append(prefill_of(prompt.request_id, tokens, ends=ends))
        budget -= tokens
        pages -= max(-(-stop // page_tokens) - held, 0)
    return prefills, pages


def unblock(view: View, prefills: list[Prefill]) -> Plan:
    """Keep serving when the gate is shut and nothing runs: it protects no request then.

    If there is no room for `prefills` as half-computed prompts hold it, the latest gives way.
    """
    partials = view.partials
    if prefills or len(partials) < 2:
        return Plan(prefills)
    return Plan(preempt=[partials[-1].request_id])


class AdaptiveReserve:
    """Pages to keep for running decodes: a share of the output still expected of them."""

    def __init__(self) -> None:
        self.ratio = self._next_ratio = 0.7
        self._preemptions = 0

    def ask(self, preemptions: int) -> None:
        """Update the ratio for one more question, after `preemptions` preemptions in all."""
        preempted = preemptions - self._preemptions
        self._preemptions = preemptions
        self.ratio = min(self._next_ratio + 0.05 * preempted, 1.0)
        self._next_ratio = max(self.ratio - 0.002, 0.1)

    def pages(self, expected_output_tokens: float, page_tokens: int) -> int:
        """Return the pages to keep now."""
        return int(self.ratio * expected_output_tokens / page_tokens)


MAX_DECODES = 2048  # the package's default


class PackageRules:
    """Rules of the package that differ from the equations and from our reading of them:

    - WT applies only while more than one prompt waits. The floor is WT's alone. Pages above the
      reserve cap the result. On one stage only `max_prefill` and the pages limit prefill.
    - The decode share counts every row in flight, chunks of prompts too.
    - Before decodes are taken, as many pages are free as there will be decodes, needed or not.
      Ready decodes are preempted until they are, the last row of the last returned micro-batch
      first. It is also the order in which rows decode.
    - Preempted requests go before all other prompts, the last preempted first. A chunk to the end
      of a preempted request's prompt ends its prefill, even if output is left to recompute.

    The package would wait for ever where prompts hold all pages above the reserve and nothing
    decodes. Or it would run out of pages in a prefill. Here serving goes on: the reserve is given
    up, and then the latest of the partly computed prompts.
    """

    def __init__(self, throttle: Throttle, kv_thresh: float) -> None:
        self.throttle = throttle
        self.kv_thresh = kv_thresh
        self._turn = 0
        self._preempted: dict[int, int] = {}  # request ids; larger numbers, later preemptions
        self._preemptions = 0

    def schedule(self, view: View) -> Plan:
        share = self._share(view)
        budget = self._prefill_budget(view)
        prompts = self._prompts(view) if budget else ()
        prefills, free_pages = spread(view, prompts, budget, cuts=True)
        self._let_go(prefills)
        decodes = min(share, view.ready_decodes)
        victims = self._make_room(view, decodes, free_pages)
        decodes = min(decodes, view.ready_decodes - len(victims))
        if not prefills and not view.ready_decodes and not view.in_flight:
            return self._unblock(view)
        return Plan(prefills, decodes, order="last_row", preempt=victims, kv_limited=not prefills)

    def _share(self, view: View) -> int:
        """Return an even share of the ready decodes and of all rows in flight."""
        rows, depth = view.ready_decodes + view.rows_in_flight, view.depth
        share = decode_budget(rows, depth, self._turn)
        self._turn += rows >= depth
        return min(share, MAX_DECODES)

    def _prefill_budget(self, view: View) -> int:
        """Return the tokens of equation 3, and no more than the pages above the reserve hold."""
        reserve = int(self.kv_thresh * view.total_pages)
        budget = view.page_tokens * max(view.free_pages - reserve, 0)
        if view.depth == 1:
            return min(self.throttle.max_prefill, budget)
        idle_rate = view.free_pages / view.total_pages
        ramp = max((idle_rate - self.kv_thresh) / (1 - self.kv_thresh), 0)
        budget = min(round(ramp * self.throttle.max_prefill), budget)
        if view.num_waiting + len(view.partials) > 1:
            budget = min(budget, self.throttle.spread(view.waiting_tokens))
        return budget

    def _prompts(self, view: View) -> Iterator[Prompt]:
        """Return all prompts: preempted ones first, the last preempted of them at the front."""
        return merge(sorted(view.partials, key=self._place), view.waiting, key=self._place)

    def _place(self, prompt: Prompt) -> int:
        return -self._preempted.get(prompt.request_id, 0)

    def _let_go(self, prefills: Iterable[Prefill]) -> None:
        """Forget the preemption of requests with a prefill that ends."""
        for prefill in prefills:
            if prefill.ends:
                self._preempted.pop(prefill.request_id, None)

    def _make_room(self, view: View, decodes: int, free_pages: int) -> list[int]:
        """Return the requests to preempt until a page is free for each of `decodes` decodes."""
        victims: list[int] = []
        if free_pages >= decodes:
            return victims
        for request_id, pages in view.ready(view.ready_decodes, "last_row"):
            victims.append(request_id)
            self._preemptions += 1
            self._preempted[request_id] = self._preemptions
            free_pages += pages
            if free_pages >= decodes:
                break
        return victims

    def _unblock(self, view: View) -> Plan:
        plan = unblock(view, spread(view, view.prompts, self.throttle.max_prefill, cuts=True)[0])
        self._let_go(plan.prefills)
        for request_id in plan.preempt:  # or it would take its pages back
            self._preempted.pop(request_id, None)
        return plan


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

    Source: gLLM (SC'25), section 3.2, equations 1 to 4, with the public code's integer rules. The
    pages above the reserve cap the budget, too. The most recently returned decodes go first, so
    micro-batches stay as they are. Decodes are chosen after prefills. On one stage there is nothing
    to balance, and the budget is `max_prefill`.

    Ablations: `use_wt`, `use_ut`; `coupled` (w/ CK) is Sarathi-Serve's policy with a budget of
    `max_prefill`. `reserve: adaptive` keeps what the running decodes are expected to need times a
    ratio. The ratio starts at 0.7, falls by 0.002 a call to 0.1 and rises by 0.05 with a
    preemption.

    `variant`: `reading` is the above. `paper` is equations 1 to 4 as printed. There `min_prefill`
    is a floor of the whole, and pages do not cap the budget. `code` is the package gllm-rt
    0.0.6.post1, decision for decision (`PackageRules`).
    """

    search_space: ClassVar[SearchSpace] = {
        "iterations": Range(1, 32, log=True),
        "max_prefill": Range(256, 8192, log=True),
        "min_prefill": Range(8, 512, log=True),
        "kv_thresh": Range(0.0, 0.5),
        "victim": ("latest", "most_pages"),
        "reserve": ("threshold", "adaptive"),
    }

    iterations: Count = 8
    """#T: micro-batches over which the waiting prompt tokens are spread."""
    max_prefill: Count = 2048
    """MaxP: most prompt tokens of a micro-batch; gLLM 0.0.6 has 8,192."""
    min_prefill: Annotated[int, Field(ge=0)] = 32
    """MinP: fewest prompt tokens of a micro-batch, if that many wait."""
    kv_thresh: Fraction = 0.05
    """KVthresh: the share of free pages below which no prompt is computed."""
    use_wt: bool = True
    """Whether waiting tokens throttle prefill (WT), over `iterations` micro-batches."""
    use_ut: bool = True
    """Whether the use of the pages throttles prefill (UT)."""
    coupled: bool = False
    """Whether prompts and decodes share one budget of `max_prefill` (CK)."""
    victim: Literal["latest", "most_pages"] = "latest"
    """The decode that is preempted: the last one returned, or the one with most pages."""
    reserve: Literal["threshold", "adaptive"] = "threshold"
    """Pages kept for decodes: `kv_thresh` of all, or what they are expected to need."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""
    variant: Variant = "reading"
    """`paper`: as printed; `code`: as the authors' package; `reading`: the paper with the package's
    integer rules.
    """

    def __post_init__(self) -> None:
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
        self.rules = Rules(pipelined_chunks=True)
        self._whole: Sarathi | PackageRules | None = None
        if self.variant == "code":
            from evenflow.engines.rules import EngineRules

            self.rules = EngineRules(pipelined_chunks=True, cuts=True)
            self._whole = PackageRules(throttle, self.kv_thresh)
        elif self.coupled:
            budget, rows = self.max_prefill, self.max_batch_rows
            self._whole = Sarathi(
                token_budget=budget, max_num_seqs=MOST, watermark=0.0, max_batch_rows=rows
            )
            self._whole.order, self._whole.victims = "first_returned", self._victims

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        share = min(decode_budget(running, depth, self._turn), self._most_rows)
        whole = self._whole is None and self.adaptive is None and decodes <= share
        self._turn += whole and running >= depth
        return whole

    def schedule(self, view: View) -> Plan:
        if self._whole is not None:
            return self._whole.schedule(view)
        if self.adaptive is not None:
            self.adaptive.ask(view.preemptions)
        prefills = self._throttle(view) if view.waiting_tokens else []
        decodes = view.ready_decodes
        if decodes:
            decodes = min(decodes, self._share(view))
            decodes = min(decodes, self._most_rows - len(prefills))
        elif not prefills and not view.in_flight:
            return unblock(view, self._spread(view, self.max_prefill))
        if not prefills:
            return decodes_only(decodes, "last_returned", self._victims, True)
        return plan_of(prefills, decodes, "last_returned", self._victims)

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
