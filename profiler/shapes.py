"""Micro-batches to time: the grid of a profile, and random ones outside of it.

Knows counts of tokens; no model, no device, no seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from evenflow.core.batch import Span, Work
from evenflow.errors import Count, require_declared

LEVELS = 5
"""Grids from 0 (coarsest) to LEVELS - 1; each has about 1.5 times the points of the one before."""


class Shape(NamedTuple):
    """A micro-batch that samples every row: chunks (tokens, context before), decodes (context)."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens computed, of all rows."""
        return sum(tokens for tokens, _ in self.chunks) + len(self.decodes)

    @property
    def rows(self) -> int:
        return len(self.chunks) + len(self.decodes)

    def lengths(self) -> list[int]:
        """Return the tokens that each row has in the KV pages afterwards, chunks first."""
        return [tokens + context for tokens, context in self.chunks] + [
            context + 1 for context in self.decodes
        ]

    def work(self) -> Work:
        """Return the shape in the terms of a cost model."""
        spans = tuple(Span(context, context + tokens) for tokens, context in self.chunks)
        prefill = sum(tokens for tokens, _ in self.chunks)
        return Work(
            chunks=spans,
            prefill_tokens=prefill,
            decode_tokens=len(self.decodes),
            decode_context=sum(self.decodes),
            sampled_rows=self.rows,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound the micro-batches: tokens of a chunk, decoding rows, context of a row and of all."""

    max_tokens: Count
    max_rows: Count
    max_context: Count
    max_total_context: Count

    def __post_init__(self) -> None:
        require_declared("profile", self)

    def allow(self, shape: Shape) -> bool:
        lengths = shape.lengths()
        return max(lengths) <= self.max_context and sum(lengths) <= self.max_total_context


def grid(limits: Limits, level: int, tiles: Sequence[int] = ()) -> list[Shape]:
    """Return the micro-batches of a profile, without repeats.

    First chunks of many sizes, with a point on each side of the edges of all `tiles`. Then chunks
    against context, and decodes against rows and context. Decodes without context, of many sizes,
    are for matrices and the LM head of few rows.
    """
    shapes = [Shape(((tokens, 0),)) for tokens in _token_axis(limits, level, tiles)]
    sparse = 0.5 + 0.25 * level
    for tokens in _from(16, limits.max_tokens, sparse):
        longest = min(limits.max_context, limits.max_total_context) - tokens
        shapes += [Shape(((tokens, context),)) for context in (0, *_from(32, longest, sparse))]
    for rows in ladder(1, limits.max_rows, sparse):
        longest = min(limits.max_context, limits.max_total_context // rows) - 1
        shapes += [Shape((), (context,) * rows) for context in _from(8, longest, sparse)]
    shapes += [Shape((), (1,) * rows) for rows in _row_axis(limits, level)]
    return [shape for shape in dict.fromkeys(shapes) if limits.allow(shape)]


def ladder(start: int, stop: int, per_doubling: float) -> list[int]:
    """Return whole numbers from `start` to `stop`, both in, evenly spaced on a log scale."""
    if stop <= start:
        return [stop]
    steps = max(round(np.log2(stop / start) * per_doubling), 1)
    return sorted({round(value) for value in np.geomspace(start, stop, steps + 1)})


def _from(start: int, stop: int, per_doubling: float) -> list[int]:
    """Return a ladder from `start`, or from a quarter of `stop` if lower; may be empty."""
    return ladder(max(min(start, stop // 4), 1), stop, per_doubling) if stop > 0 else []


def _token_axis(limits: Limits, level: int, tiles: Sequence[int]) -> Iterable[int]:
    """Return numbers of tokens: a ladder, and tile edges, of smaller tiles only odd multiples.

    So a step there separates one tile from the next.
    """
    axis = set(ladder(2, limits.max_tokens, 1 + level / 2))
    for tile in tiles:
        edges = ladder(1, max(limits.max_tokens // tile, 1), 1 + level)
        odd = edges if tile == max(tiles) else [edge | 1 for edge in edges]
        axis |= {tile * edge + past for edge in odd for past in (0, 1)}
    return sorted(tokens for tokens in axis if 2 <= tokens <= limits.max_tokens)


def _row_axis(limits: Limits, level: int) -> Iterable[int]:
    """Return numbers of rows; all the small ones, as CPU kernels change from one to the next."""
    axis = {1, 2, 3, 4, 5, 6, 7, 8, *ladder(1, limits.max_rows, 1 + level / 2)}
    return sorted(rows for rows in axis if rows <= limits.max_rows)


def random_shapes(limits: Limits, count: int, rng: np.random.Generator) -> list[Shape]:
    """Return `count` random micro-batches: decodes, chunks, and both; sizes are log-uniform.

    As in traffic, rows differ in context: each by a factor of e about a mean of the micro-batch.
    """
    return [_random_shape(limits, rng) for _ in range(count)]


def _random_shape(limits: Limits, rng: np.random.Generator) -> Shape:
    kind = rng.integers(4)  # chunks, decodes, and twice both
    chunks = tuple(_random_chunks(limits, rng)) if kind != 1 else ()
    rows = _between(rng, 1, limits.max_rows) if kind != 0 else 0
    room = limits.max_total_context - sum(tokens + context for tokens, context in chunks)
    mean = _between(rng, 16, max(min(limits.max_context, room // max(rows, 1)) // 3, 17))
    scales = np.exp(rng.uniform(-1, 1, rows))
    decodes = tuple(int(max(mean * scale, 1)) for scale in scales)
    shape = Shape(chunks, decodes)
    return shape if limits.allow(shape) else _random_shape(limits, rng)


def _random_chunks(limits: Limits, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    left = _between(rng, 16, limits.max_tokens)
    while left >= 16:
        tokens = int(rng.integers(8, left + 1))
        top = limits.max_context - tokens
        yield tokens, _between(rng, 16, top) if rng.random() < 0.5 and top > 16 else 0
        left -= tokens


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a whole number, log-uniform in [low, high]; `high` when that is below `low`."""
    if high <= low:
        return high
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
