"""Estimates from a cost model outside a run: for policies, a token budget, a balanced split.

Knows cost models; no policy. Links and CPU time are in none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import add
from typing import TypedDict

from evenflow.core.batch import Work
from evenflow.costs.base import StageCost, decode_work, prefill_work
from evenflow.costs.collectives import Fabric
from evenflow.costs.roofline import RooflineCost
from evenflow.errors import UsageError, require_positive
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GpuSpec, LinkSpec
from evenflow.specs.modelspec import ModelSpec


class Estimates(TypedDict):
    """Estimates by the names of policy parameters."""

    token_budget_for: Callable[[float], int]
    prefill_s: Callable[[int], float]
    decode_s: Callable[[int, int], float]


def estimates(cost: StageCost) -> Estimates:
    """Return estimates by the names under which a policy's constructor takes them.

    `token_budget_for(slo_s)` is the function of that name. `prefill_s(tokens)` and `decode_s(rows,
    context_tokens)` are seconds on the slowest stage. They are of a prefill micro-batch, as if it
    were one prompt, and of a decode step. Its `rows` rows attend to `context_tokens` in all.
    """
    return {
        "token_budget_for": lambda slo_s: token_budget_for(cost, slo_s),
        "prefill_s": lambda tokens: max(cost.times(prefill_work(tokens))),
        "decode_s": lambda rows, context_tokens: max(cost.times(decode_work(rows, context_tokens))),
    }


REFERENCE = decode_work(32, 32 * 4096)
"""Sarathi-Serve's reference iteration (Table 3): 32 decodes with 4096 tokens of context each."""


def joined(decodes: Work, prompt: Work) -> Work:
    """Return the work of decodes and a prompt in one micro-batch."""
    return Work(*map(add, decodes, prompt))


BUDGETS = range(16384, 0, -128)
"""Token budgets to choose from: whole tiles, the largest first."""


def token_budget_for(cost: StageCost, slo_s: float) -> int:
    """Return the largest of `BUDGETS` with which reference iterations take at most `slo_s`.

    `slo_s` is the limit on the time between tokens. A prompt chunk fills the budget beside the
    decodes (Sarathi-Serve, section 4.3). An iteration takes depth x the slowest stage: with as many
    micro-batches in flight as stages, a request gets a token that often. UsageError when not even
    one tile meets the limit.
    """
    require_positive("token budget", slo_s=slo_s)
    for budget_tokens in BUDGETS:
        prompt = prefill_work(budget_tokens - REFERENCE.decode_tokens, 4096)
        iteration_s = cost.depth * max(cost.times(joined(REFERENCE, prompt)))
        if iteration_s <= slo_s:
            return budget_tokens
    raise UsageError(
        f"token_budget: auto: an iteration of {budget_tokens} tokens already takes "
        f"{iteration_s:.3f} s, the limit is {slo_s:g} s; raise the limit"
    )


TYPICAL = decode_work(64, 64 * 1024)
"""The micro-batch that a split is balanced for: decodes, since most steps are such."""


def balanced_layers(
    model: ModelSpec,
    gpu: GpuSpec,
    stages: int,
    *,
    tensor_parallel: int = 1,
    fabric: LinkSpec | Fabric | None = None,
) -> tuple[int, ...]:
    """Return the layers of each stage that minimise the slowest stage's roofline for `TYPICAL`.

    The embedding counts on stage 0, the LM head on the last stage. A layer goes to the stage that
    is done first with it, the first of equal ones. Where layers are alike that is the best split.
    Where they are of several kinds, all splits are compared. Memory is not looked at: the stage
    with the fewest layers has the most room for KV. So a balanced split may hold fewer pages than
    an even one, as the fullest stage decides. UsageError when there are more stages than layers.
    """
    split_layers(model.num_layers, stages)
    if len(model.kinds()) > 1:
        alone = Deployment(model, gpu, (1,) * model.num_layers, tensor_parallel)
        return balanced_by(RooflineCost(alone, fabric), stages)

    def times(layers: tuple[int, ...]) -> list[float]:
        part = replace(model, num_layers=sum(layers))
        return RooflineCost(Deployment(part, gpu, layers, tensor_parallel), fabric).times(TYPICAL)

    layers = [1] * stages
    done_s = times(tuple(layers))
    layer_s = times((2, *layers[1:]))[0] - done_s[0]
    for _ in range(model.num_layers - stages):
        stage = min(range(stages), key=done_s.__getitem__)
        layers[stage] += 1
        done_s[stage] += layer_s
    return tuple(layers)


def balanced_by(by_layer: StageCost, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage that minimise the slowest stage's seconds for `TYPICAL`.

    `by_layer` are the costs of stages of one layer each.
    """
    seconds = by_layer.times(TYPICAL)
    done_s = [0.0, *accumulate(seconds)]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return done_s[-1] - done_s[start], (len(seconds) - start,)
        options = []
        for stop in range(start + 1, len(seconds) - left + 2):
            slowest_s, rest = best(stop, left - 1)
            own_s = done_s[stop] - done_s[start]
            options.append((max(own_s, slowest_s), (stop - start, *rest)))
        return min(options)

    return best(0, stages)[1]
