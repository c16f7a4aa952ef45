"""Time estimates as plain callables, for policies that weigh one micro-batch against another.

Knows a cost model; no policy. Links and CPU time are not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from evenflow.costs.base import StageCost, decode_work, prefill_work
from evenflow.costs.budget import token_budget_for


class Estimates(TypedDict):
    """What `estimates` returns; the keys are names of policy parameters."""

    token_budget_for: Callable[[float], int]
    prefill_s: Callable[[int], float]
    decode_s: Callable[[int, int], float]


def estimates(cost: StageCost) -> Estimates:
    """Return estimates by the names under which a policy's constructor takes them.

    `token_budget_for(slo_s)` is the function of that name. `prefill_s(tokens)` and `decode_s(rows,
    context_tokens)` are seconds on the slowest stage: of a prefill micro-batch, as if it were one
    prompt, and of a decode step of `rows` rows that attend to `context_tokens` in all.
    """
    return {
        "token_budget_for": lambda slo_s: token_budget_for(cost, slo_s),
        "prefill_s": lambda tokens: max(cost.times(prefill_work(tokens))),
        "decode_s": lambda rows, context_tokens: max(cost.times(decode_work(rows, context_tokens))),
    }
