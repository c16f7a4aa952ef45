"""Decode steps replayed from captured CUDA graphs: padded to a captured size, launched at once.

Wraps any cost model. Does not know: the memory that graphs hold, and captured prefills.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from evenflow.costs.base import BatchShape, StageCost, Work
from evenflow.errors import UsageError
from evenflow.specs.checks import require_counts


class GraphCost:
    """Cost a decode-only micro-batch as the next captured size, everything else as `eager` does.

    `sizes` are the captured numbers of tokens, ascending. A decode-only micro-batch up to the
    largest is computed with as many tokens as the next size says, and by `captured`, the same
    hardware without the launches that a graph saves (default: `eager`, nothing saved). Padding rows
    attend to nothing and are not sampled. A larger micro-batch, or one with a prompt, is not
    replayed (vLLM's and SGLang's rule). UsageError unless the sizes ascend.
    """

    __slots__ = ("_captured", "_eager", "_sizes")

    def __init__(
        self, eager: StageCost, sizes: Sequence[int], captured: StageCost | None = None
    ) -> None:
        for size in sizes:
            require_counts("costs: cuda_graph_sizes", size=size)
        if not sizes or any(one >= other for one, other in pairwise(sizes)):
            raise UsageError(
                f"costs: cuda_graph_sizes: {list(sizes)} must be numbers of tokens that ascend"
            )
        self._eager = eager
        self._captured = captured or eager
        self._sizes = tuple(sizes)

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return self._eager.depth

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        if batch.prefill_tokens or batch.decode_tokens > self._sizes[-1]:
            return self._eager.times(batch)
        padded = self._sizes[bisect_left(self._sizes, batch.decode_tokens)]
        work = Work((), 0, padded, batch.decode_context, batch.sampled_rows)
        return self._captured.times(work)

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next; padding is not sent."""
        return self._eager.transfer_bytes(batch)
