"""The token budget that keeps a time between tokens (Sarathi-Serve's choice, by prediction).

Knows a cost model; no scheduler. Links and CPU time are not in it.
"""

from __future__ import annotations

from evenflow.costs.base import Span, StageCost, Work
from evenflow.errors import UsageError
from evenflow.specs.checks import require_counts, require_positive


def token_budget_for(
    cost: StageCost,
    slo_s: float,
    *,
    decodes: int = 32,
    context_tokens: int = 4096,
    tile_tokens: int = 128,
    max_budget_tokens: int = 16384,
) -> int:
    """Return the largest token budget, in whole tiles, whose iteration takes at most `slo_s`.

    `slo_s` is the limit on the time between tokens. The iteration holds `decodes` rows with
    `context_tokens` each and fills the budget with a prompt chunk after as much context:
    Sarathi-Serve's reference batch (Table 3 and section 4.3). Its time is depth x the slowest
    stage: with as many micro-batches in flight as stages, a request gets a token that often.
    UsageError when not even one tile meets the limit.
    """
    require_positive("token budget", slo_s=slo_s)
    require_counts("token budget", tile_tokens=tile_tokens, max_budget_tokens=max_budget_tokens)

    def iteration_s(budget_tokens: int) -> float:
        rows = min(decodes, budget_tokens)
        chunk = Span(context_tokens, context_tokens + budget_tokens - rows)
        chunks = (chunk,) if chunk.stop > chunk.start else ()
        work = Work(chunks, budget_tokens - rows, rows, rows * context_tokens, rows + len(chunks))
        return cost.depth * max(cost.times(work))

    budget_tokens = max(max_budget_tokens // tile_tokens, 1) * tile_tokens
    while iteration_s(budget_tokens) > slo_s:
        if budget_tokens <= tile_tokens:
            raise UsageError(
                f"token_budget: auto: an iteration of {tile_tokens} tokens already takes "
                f"{iteration_s(tile_tokens):.3f} s, the limit is {slo_s:g} s; raise the limit"
            )
        budget_tokens -= tile_tokens
    return budget_tokens
