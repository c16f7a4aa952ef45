"""The time of swapping: KV pages that are copied between a GPU and its host.

Knows pages and a link; not which requests are swapped, nor what else a micro-batch costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.costs.base import BatchShape, StageCost, Work


@dataclass(frozen=True, slots=True)
class SwapCost:
    """`costs`, and before them the copies that a micro-batch waits for.

    On each stage: swapped_rows * `latency_s` + swapped_pages * page_bytes / `bandwidth_bytes_per_s`
    seconds, where `page_bytes` [depth] is a page's share of the layers on one GPU. Each GPU has a
    host link of its own; copies in and out share it, one after the other. Known error: an engine
    that copies ahead of time would hide a part.
    """

    costs: StageCost
    page_bytes: Sequence[int]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return self.costs.depth

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        times = self.costs.times(batch)
        if not isinstance(batch, Work) or not batch.swapped_rows:
            return times
        latency_s = batch.swapped_rows * self.latency_s
        per_byte_s = batch.swapped_pages / self.bandwidth_bytes_per_s
        copies_s = [latency_s + per_byte_s * size_bytes for size_bytes in self.page_bytes]
        return [seconds + copy_s for seconds, copy_s in zip(times, copies_s, strict=True)]

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self.costs.transfer_bytes(batch)
