"""Inputs and outputs of a cost model; and the simplest one, base + per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch, Span, Work
from evenflow.errors import Count, NonNegative, require_declared

BatchShape = MicroBatch | Work
"""What has the numbers that cost time.

NOTE: of a union the compiler reads fields without their names, of a protocol by them.
"""


class StageCost(Protocol):
    """Seconds that each of `depth` stages computes a micro-batch, the links left out."""

    @property
    def depth(self) -> int: ...

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage; parts that stages share are computed once."""
        ...

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        ...


def work_of(batch: BatchShape) -> Work:
    """Return the numbers of a micro-batch."""
    chunks = tuple(Span(chunk.start, chunk.stop) for chunk in batch.chunks)
    numbers = batch.prefill_tokens, batch.decode_tokens, batch.decode_context, batch.sampled_rows
    return Work(chunks, *numbers)


def prefill_work(tokens: int, start: int = 0, *, last: bool = True) -> Work:
    """Return the work of one prompt chunk of `tokens` tokens after `start` tokens of context.

    `last`: the prompt ends with the chunk, so one row is sampled.
    """
    return Work((Span(start, start + tokens),), tokens, 0, 0, int(last))


def decode_work(rows: int, context_tokens: int) -> Work:
    """Return the work of one decode step of `rows` rows that attend to `context_tokens` in all."""
    return Work((), 0, rows, context_tokens, rows)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True, slots=True)
class AffineCost:
    """Cost `base_s + per_token_s * tokens` seconds on each of `depth` stages: the simplest formula.

    For teaching and for tests with closed forms; attention costs nothing.

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
        seconds = self.base_s + self.per_token_s * (batch.prefill_tokens + batch.decode_tokens)
        return [seconds] if self.depth == 1 else [seconds] * self.depth

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self.bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)
