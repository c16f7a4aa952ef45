"""Roofline estimates, operator by operator, for what a measured file lacks (`fill: roofline`).

Knows a deployment with its GPU's efficiencies; every second it gives counts as unmeasured.
"""

from __future__ import annotations

from evenflow.costs.roofline import (
    AttentionRates,
    Rates,
    RooflineCost,
    embedding_s,
    head_s,
    linear_s,
)
from evenflow.costs.tables import Estimate

LINEARS = ("linear_qkv", "linear_o", "linear_up", "linear_down")
"""The products of a layer, in the order of `ModelSpec.linear_shapes`."""

ELEMENTWISE = ("norm", "norm", "rope", "activation", "kv_write")
"""The operators of a layer that move memory only; a layer has two norms."""


class RooflineFill:
    """Estimate single operators by the formulas of `roofline`, with its GPU, ranks and tiles.

    The GPU's overhead per layer is left out: it belongs to whole layers.
    """

    __slots__ = ("_attention", "_rates", "roofline")

    def __init__(self, roofline: RooflineCost) -> None:
        deployment = roofline.deployment
        self.roofline = roofline
        self._rates = Rates.of(deployment.gpu)
        self._attention = AttentionRates.of(
            deployment.model, deployment.tensor_parallel, self._rates
        )

    def operator(self, name: str, tokens: int) -> Estimate:
        """Return the seconds of a layer's linear or elementwise operator, of the embedding or head.

        `sample` costs nothing of its own: the formula of the head has it.
        """
        deployment, rates = self.roofline.deployment, self._rates
        model, ranks, tile = deployment.model, deployment.tensor_parallel, self.roofline.tile_tokens
        if name in LINEARS:
            shape = model.linear_shapes(ranks)[LINEARS.index(name)]
            return _all(linear_s(tokens, shape, model.dtype_bytes, tile, rates))
        if name == "embedding":
            return _all(embedding_s(tokens, model, rates))
        if name == "head":
            return _all(head_s(tokens, model, ranks, tile, rates))
        if name == "sample":
            return _all(0.0)
        moved = tokens * self._values_per_token(name) * model.dtype_bytes
        return _all(moved / rates.bytes_per_s)

    def _values_per_token(self, name: str) -> float:
        """Return the values that an operator moves, as `roofline.elementwise_s` counts them."""
        deployment = self.roofline.deployment
        model, ranks = deployment.model, deployment.tensor_parallel
        kv_heads = model.local_kv_heads(ranks)
        return {
            "norm": 4 * model.hidden_size,
            "rope": 2 * (model.num_heads / ranks + kv_heads) * model.head_dim,
            "activation": (3 if model.gated_mlp else 2) * model.intermediate_size / ranks,
            "kv_write": 4 * kv_heads * model.head_dim,
        }[name]

    def all_reduce(self, tokens: int) -> Estimate:
        """Return the seconds that one layer spends in all-reduces."""
        return _all(self.roofline.all_reduce_s(tokens))

    def prefill(self, tokens: int, context: int) -> tuple[float, bool]:
        """Return the seconds of a chunk's attention in one layer."""
        return self._attention.prefill_s(context, context + tokens), False

    def decode(self, rows: int, context_tokens: int) -> tuple[float, bool]:
        """Return the seconds of a decode step's attention in one layer."""
        return self._attention.decode_s(rows, context_tokens), False


def _all(seconds: float) -> Estimate:
    return Estimate(seconds, seconds)
