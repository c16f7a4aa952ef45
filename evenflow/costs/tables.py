"""Seconds per stage from tables of operators, wherever the tables come from.

Knows how parts add up to stages, and counts how much rests on no measurement; knows no file, no
GPU and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenflow.costs.base import BatchShape
from evenflow.costs.curves import Estimate

Attention = Callable[[int, int], tuple[float, bool]]
"""(tokens, context) -> seconds in one layer, and whether measured points surround it."""


class Tables(NamedTuple):
    """What a stage is made of, on one rank.

    `layer`: a layer without attention, all-reduces included, from the tokens. `prefill`: attention
    of a chunk from its tokens and the context before it; `decode`: of all decoding rows from their
    number and total context. `embedding` from the tokens, `head` (with sampling) from the rows.
    """

    layer: Callable[[int], Estimate]
    prefill: Attention
    decode: Attention
    embedding: Callable[[int], Estimate]
    head: Callable[[int], Estimate]


class TableCost:
    """Add up operators; what follows from a number of tokens alone is looked up once and kept.

    `transfer_bytes_per_token` crosses from stage to stage.
    """

    __slots__ = (
        "_by_rows",
        "_by_tokens",
        "_layers",
        "_predicted_s",
        "_tables",
        "_total_layers",
        "_transfer_bytes_per_token",
        "_unmeasured_s",
    )

    def __init__(
        self, tables: Tables, layers_per_stage: Sequence[int], transfer_bytes_per_token: float
    ) -> None:
        self._tables = tables
        self._layers = tuple(float(count) for count in layers_per_stage)
        self._total_layers = sum(self._layers)
        self._transfer_bytes_per_token = transfer_bytes_per_token
        self._by_tokens: dict[int, tuple[float, float, float, float]] = {}
        self._by_rows: dict[int, Estimate] = {0: Estimate(0.0, 0.0)}
        self._predicted_s = 0.0
        self._unmeasured_s = 0.0

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return len(self._layers)

    @property
    def extrapolated_share(self) -> float:
        """Share of all the seconds predicted so far that no measurement surrounds."""
        return self._unmeasured_s / self._predicted_s if self._predicted_s else 0.0

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        known = self._by_tokens.get(tokens)
        if known is None:
            known = self._by_tokens[tokens] = (
                *self._tables.layer(tokens),
                *self._tables.embedding(tokens),
            )
        layer_s, unmeasured_s, embedding_s, embedding_unmeasured_s = known
        if batch.decode_tokens:
            seconds, measured = self._tables.decode(batch.decode_tokens, batch.decode_context)
            layer_s += seconds
            if not measured:
                unmeasured_s += seconds
        for chunk in batch.chunks:
            seconds, measured = self._tables.prefill(chunk.stop - chunk.start, chunk.start)
            layer_s += seconds
            if not measured:
                unmeasured_s += seconds
        head = self._by_rows.get(batch.sampled_rows)
        if head is None:
            head = self._by_rows[batch.sampled_rows] = self._tables.head(batch.sampled_rows)
        head_s, head_unmeasured_s = head
        total = self._total_layers
        self._predicted_s += total * layer_s + embedding_s + head_s
        self._unmeasured_s += total * unmeasured_s + embedding_unmeasured_s + head_unmeasured_s
        times = [count * layer_s for count in self._layers]
        times[0] += embedding_s
        times[-1] += head_s
        return times

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes of the hidden states that cross from one stage to the next."""
        return self._transfer_bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)
