"""The cost of a mixture of experts: which experts a micro-batch wakes, and what they take.

Knows the shapes of a model and the rates of a GPU; no pipeline. The router is taken to choose
every expert equally often, except for a stated imbalance between ranks.
"""

from __future__ import annotations

from evenflow.costs.formulas import Rates
from evenflow.specs.model import ModelSpec, parameters


def active_experts(tokens: int, num_experts: int, experts_per_token: int) -> float:
    """Return the expected number of distinct experts that `tokens` tokens are sent to.

    A token is sent to k of E experts, each as likely as any other, so an expert stays idle with
    probability (1 - k/E) a token: E x (1 - (1 - k/E)^tokens). Known error: real routers have
    favourites and wake fewer.
    """
    idle = (1 - experts_per_token / num_experts) ** tokens
    return num_experts * (1 - idle)


def experts_s(
    tokens: int,
    model: ModelSpec,
    ranks: int,
    rates: Rates,
    *,
    expert_parallel: bool,
    imbalance: float,
) -> float:
    """Return the seconds of a layer's experts for `tokens` tokens, on the busiest rank.

    Operations: 2 x parameters of an expert x tokens x experts a token, divided over the ranks.
    Bytes: the weights of the active experts, once each, and the inputs and outputs of every token
    at each of its experts; then the activation in between (3 x columns, 2 without a gate) and the
    weighted sum of the experts' outputs. With `expert_parallel` a rank holds whole experts, so it
    has 1/ranks of the (token, expert) pairs on average, and `imbalance` times that on the busiest
    rank; without it every rank has a slice of all of them. Known error: grouped kernels pad
    the rows of each expert to blocks of 16 to 128, so small batches come out too fast.
    """
    slices = 1 if expert_parallel else ranks
    shapes = model.expert_shapes(slices)
    share = imbalance / ranks if expert_parallel else 1.0
    pairs = tokens * model.experts_per_token * share
    active = active_experts(tokens, model.num_experts, model.experts_per_token)
    if expert_parallel:
        active /= ranks
    operations = 2 * parameters(shapes) * pairs
    moved = active * parameters(shapes) + pairs * sum(map(sum, shapes))
    product_s = max(operations / rates.flops_per_s, moved * model.dtype_bytes / rates.bytes_per_s)
    columns = shapes[-1][0]
    between = pairs * ((3 if model.gated_mlp else 2) * columns + model.hidden_size)
    return product_s + between * model.dtype_bytes / rates.bytes_per_s


def all_to_all_bytes(tokens: int, model: ModelSpec, ranks: int, imbalance: float) -> float:
    """Return the bytes that the busiest rank receives when tokens are sent to their experts.

    Each rank has 1/ranks of the tokens; a copy of a token goes to each of its experts, of which
    (ranks - 1)/ranks are elsewhere. The way back is as much. Known error: several experts of a
    token on one rank need one copy where the library is clever.
    """
    pairs = tokens * model.experts_per_token / ranks * imbalance
    return pairs * (ranks - 1) / ranks * model.hidden_size * model.dtype_bytes
