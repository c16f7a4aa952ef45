"""The budgets of gLLM's Token Throttling, what fits, and the pages it keeps, from what it sees.

Knows the equations; not which variant uses which, nor when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenflow.scheduling import Plan, Prefill, Prompt, View


@dataclass(frozen=True, slots=True)
class Throttle:
    """What gLLM's equations 1 to 3 are given beside what waits and what is free.

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
        `min_prefill` is a floor of WT only, so UT can push the budget below it where equation 3
        would not.
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
    """Plan `budget` prefill tokens in the order of `prompts`, as pages last; return those left too.

    `cuts`: a chunk that reaches the end of a request's own prompt ends its prefill.
    """
    prefills: list[Prefill] = []
    pages, page_tokens = view.free_pages, view.page_tokens
    for prompt in prompts:
        computed, held = prompt.computed, prompt.pages
        tokens = min(prompt.remaining, budget, (held + pages) * page_tokens - computed)
        if tokens <= 0:
            break
        stop = computed + tokens
        ends = cuts and stop >= prompt.tokens - prompt.generated
        prefills.append(Prefill(prompt.request_id, tokens, 0, ends))
        budget -= tokens
        pages -= max(-(-stop // page_tokens) - held, 0)
    return prefills, pages


def unblock(view: View, prefills: list[Prefill]) -> Plan:
    """Keep serving when the gate is shut and nothing runs: it protects nobody then.

    If there is no room for `prefills` as half-computed prompts hold it, the latest gives way.
    """
    partials = view.partials
    if prefills or len(partials) < 2:
        return Plan(prefills)
    return Plan(preempt=[partials[-1].request_id])


class AdaptiveReserve:
    """Pages to keep for running decodes: a share of what they are expected to write still."""

    def __init__(self) -> None:
        self.ratio = self._next_ratio = 0.7
        self._preemptions = 0

    def ask(self, preemptions: int) -> None:
        """Move the ratio on: the policy is asked once more, after so many preemptions."""
        preempted = preemptions - self._preemptions
        self._preemptions = preemptions
        self.ratio = min(self._next_ratio + 0.05 * preempted, 1.0)
        self._next_ratio = max(self.ratio - 0.002, 0.1)

    def pages(self, expected_output_tokens: float, page_tokens: int) -> int:
        """Return the pages to keep now."""
        return int(self.ratio * expected_output_tokens / page_tokens)
