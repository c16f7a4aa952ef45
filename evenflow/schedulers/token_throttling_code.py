"""gLLM's published package, gllm-rt 0.0.6.post1, decision for decision: `variant: code`.

The rules are that package's, in our own words; the parameters and the paper's equations are
`evenflow.schedulers.token_throttling`'s.
"""

from __future__ import annotations

from collections import abc
from heapq import merge

from evenflow.schedulers.token_throttling_rules import Throttle, decode_budget, spread, unblock
from evenflow.scheduling import Plan, Prefill, Prompt, View

MAX_DECODES = 2048  # the package's default


class PackageRules:
    """Where the package differs from the equations and from our reading of them:

    - WT applies only while more than one prompt waits; the floor is WT's alone, and pages above the
      reserve cap what comes out. On one stage only `max_prefill` and the pages limit prefill.
    - The decode share counts every row in flight, chunks of prompts too.
    - Before decodes are taken, as many pages are free as there will be decodes, needed or not:
      ready decodes are preempted until they are, the last row of what last returned first. It is
      also the order in which rows decode.
    - Preempted requests go before all other prompts, the last preempted first. A chunk that reaches
      the end of such a request's own prompt ends its prefill, even if output is left to recompute.

    Where the package would wait for ever (prompts hold all pages above the reserve, and nothing
    decodes) or run out of pages in a prefill, serving goes on: the reserve is given up, and then
    the latest of the partly computed prompts.
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

    def _prompts(self, view: View) -> abc.Iterator[Prompt]:
        """Return all prompts: preempted ones first, the last preempted of them at the front."""
        return merge(sorted(view.partials, key=self._place), view.waiting, key=self._place)

    def _place(self, prompt: Prompt) -> int:
        return -self._preempted.get(prompt.request_id, 0)

    def _let_go(self, prefills: abc.Iterable[Prefill]) -> None:
        """Forget that those were preempted whose prefill ends."""
        for prefill in prefills:
            if prefill.ends:
                self._preempted.pop(prefill.request_id, None)

    def _make_room(self, view: View, decodes: int, free_pages: int) -> list[int]:
        """Return whom to preempt until a page is free for each of so many decodes."""
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
