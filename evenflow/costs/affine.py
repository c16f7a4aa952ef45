"""Base + per token, the same on every stage: for teaching and for tests with closed forms.

Knows no model and no GPU; attention costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenflow.costs.base import BatchShape
from evenflow.errors import Count, NonNegative, require_declared


@dataclass(frozen=True, slots=True)
class AffineCost:
    """Cost `base_s + per_token_s * tokens` seconds on each of `depth` stages.

    `bytes_per_token` crosses from stage to stage. UsageError on negative values or NaN.
    """

    base_s: NonNegative
    per_token_s: NonNegative
    depth: Count
    bytes_per_token: NonNegative = 0.0

    def __post_init__(self) -> None:
        require_declared("costs: affine", self)

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        return [self.base_s + self.per_token_s * tokens] * self.depth

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self.bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)
