"""The budgets of gLLM's Token Throttling, and the pages it keeps, as functions of what it sees.

Knows the equations; not which variant uses which, nor when they are asked for.
"""

from __future__ import annotations

from evenflow.scheduling import View


def prefill_budget(
    waiting_tokens: int,
    idle_rate: float,
    *,
    iterations: int,
    max_prefill: int,
    min_prefill: int,
    kv_thresh: float,
    use_wt: bool,
    use_ut: bool,
) -> int:
    """Return the prefill tokens of the next micro-batch (gLLM, equations 1 to 3).

    `waiting_tokens` await prefill; `idle_rate` is the free share of the KV pages. WT spreads what
    waits over `iterations` micro-batches; UT shrinks the budget as the KV cache fills, and suspends
    prefill below `kv_thresh`. As in the public code, results are whole tokens and `min_prefill` is
    a floor of WT only, so UT can push the budget below it where equation 3 would not.
    """
    if idle_rate < kv_thresh:
        return 0
    tokens = max_prefill
    if use_ut:
        tokens = round(max_prefill * (idle_rate - kv_thresh) / (1 - kv_thresh))
    if use_wt:
        tokens = min(tokens, max(waiting_tokens // iterations, min_prefill))
    return tokens


def printed_budget(
    waiting_tokens: int,
    idle_rate: float,
    *,
    iterations: int,
    max_prefill: int,
    min_prefill: int,
    kv_thresh: float,
    use_wt: bool,
    use_ut: bool,
) -> int:
    """Return what `prefill_budget` does, but with gLLM's equations 1 to 3 as they are printed.

    `min_prefill` is a floor of the whole; only where both throttles act is prefill suspended below
    `kv_thresh`.
    """
    spread = waiting_tokens / iterations
    if not use_ut:  # equation 1
        return min(max(int(spread), min_prefill), max_prefill) if use_wt else max_prefill
    if not use_wt:  # equation 2
        return max(int(max_prefill * idle_rate), min_prefill)
    if idle_rate < kv_thresh:
        return 0
    ramp = max_prefill * (idle_rate - kv_thresh) / (1 - kv_thresh)
    return max(int(min(spread, ramp)), min_prefill)


def decode_budget(running_decodes: int, depth: int, turn: int) -> int:
    """Return the decodes of the next micro-batch (gLLM, equation 4): an even share of all running.

    `running_decodes` counts those in flight too. The remainder of the division is spread by `turn`,
    which counts decisions. Fewer than `depth` go one by one, if any is ready.
    """
    if running_decodes < depth:
        return 1
    return (running_decodes + turn % depth) // depth


class AdaptiveReserve:
    """Pages to keep for running decodes: a share of what they are expected to write still."""

    def __init__(self) -> None:
        self.ratio = self._next_ratio = 0.7
        self._preemptions = 0

    def ask(self, view: View) -> None:
        """Move the ratio on: the policy is asked once more, after these preemptions."""
        preempted = view.preemptions - self._preemptions
        self._preemptions = view.preemptions
        self.ratio = min(self._next_ratio + 0.05 * preempted, 1.0)
        self._next_ratio = max(self.ratio - 0.002, 0.1)

    def pages(self, view: View) -> int:
        """Return the pages to keep now."""
        expected_tokens = self.ratio * view.expected_output_tokens
        return min(int(expected_tokens / view.page_tokens), view.total_pages)
