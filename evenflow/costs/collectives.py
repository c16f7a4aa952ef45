"""Seconds of the exchanges between the GPUs of one stage: all-reduce and all-to-all.

Knows links and numbers of ranks; no model. Three sources have one interface. They are a ring over
one link, rings in two levels for a stage that spans nodes, and measured points.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from evenflow.errors import Count, UsageError, require_declared, require_positive
from evenflow.specs.gpu import LinkSpec


class Fabric(Protocol):
    """Seconds that `ranks` GPUs take to exchange `size_bytes`; nothing for one rank."""

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds until every rank has the sum of all ranks' `size_bytes`."""
        ...

    def all_to_all_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds in which every rank sends `size_bytes` in all to the others."""
        ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ring:
    """A ring over one kind of link; the slowest link of the ring where there are several kinds.

    All-reduce: 2 (n - 1) steps of 1/n of the data. That is 2 (n - 1)/n x bytes / bandwidth, plus 2
    (n - 1) latencies. All-to-all: n - 1 messages, one after the other. All n ranks send at once,
    and where they share a wire each has 1/n of it. Over direct links engines launch kernels for
    messages up to some MB (vLLM's custom all-reduce), where these are faster. In one shot every
    rank reads all of the others' data. In two shots each reads and then shares its part. That is a
    latency a shot; docs/costs-errors.md compares it with measured times. Known error: trees beat
    the ring on small messages.
    """

    link: LinkSpec

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce, or of a faster one over direct links."""
        ring_s = 2 * (ranks - 1) * self.link.transfer_s(size_bytes / ranks, ranks)
        if not self.link.direct or self.link.shared_by > 1 or ranks == 1:
            return ring_s
        latency_s, byte_s = self.link.latency_s, 1e-9 / self.link.bandwidth_gb_s
        one_shot_s = latency_s + (ranks - 1) * size_bytes * byte_s
        two_shots_s = 2 * latency_s + 2 * (ranks - 1) / ranks * size_bytes * byte_s
        return min(ring_s, one_shot_s, two_shots_s)

    def all_to_all_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of n - 1 messages of 1/(n - 1) of the data."""
        if ranks == 1:
            return 0.0
        return (ranks - 1) * self.link.transfer_s(size_bytes / (ranks - 1), ranks)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TwoLevel:
    """Rings within the nodes, and between them over one link a node, `ranks_per_node` GPUs each.

    All-reduce: reduce-scatter within each node, all-reduce of every shard between the nodes,
    all-gather within each node. The shards of a node share its link, so the nodes act like ranks of
    a separate ring. All-to-all: what stays in the node and what leaves it, the latter over the
    shared link, one after the other. Known error: real libraries overlap the levels.
    """

    within: LinkSpec
    across: LinkSpec
    ranks_per_node: Count

    def __post_init__(self) -> None:
        require_declared("all_reduce", self)

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of the three phases."""
        local = min(ranks, self.ranks_per_node)
        between = Ring(self.across).all_reduce_s(size_bytes, ranks // local)
        return Ring(self.within).all_reduce_s(size_bytes, local) + between

    def all_to_all_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of both parts; every destination gets as much as any other."""
        local = min(ranks, self.ranks_per_node)
        if ranks == 1:
            return 0.0
        stays = size_bytes * (local - 1) / (ranks - 1)
        leaves = local * (size_bytes - stays)
        nodes = ranks // local
        return Ring(self.within).all_to_all_s(stays, local) + Ring(self.across).all_to_all_s(
            leaves, nodes
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AllReduceTimes:
    """All-reduce times measured at some message sizes, on the number of ranks in question.

    `points` are (bytes, seconds) by size. Between two points the time is a straight line. Below the
    first it is the first's. Above the last it grows with the bytes at the last one's rate. The
    all-to-all was not measured: it takes `otherwise`, a UsageError without.
    """

    points: Sequence[tuple[float, float]]
    otherwise: Fabric | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise UsageError("all_reduce: points holds no [bytes, microseconds]; give at least one")
        for size_bytes, seconds in self.points:
            require_positive("all_reduce: points", bytes=size_bytes, microseconds=seconds)
        for (smaller, faster), (larger, slower) in pairwise(self.points):
            if smaller >= larger or faster > slower:
                raise UsageError(
                    f"all_reduce: points: {larger:g} bytes come after {smaller:g}; sizes must "
                    "grow, and times must not fall"
                )

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the measured seconds, interpolated."""
        if ranks == 1:
            return 0.0
        sizes = [size for size, _ in self.points]
        place = bisect_right(sizes, size_bytes)
        if place == 0:
            return self.points[0][1]
        size, seconds = self.points[place - 1]
        if place == len(sizes):
            return seconds * size_bytes / size
        next_size, next_seconds = self.points[place]
        return seconds + (next_seconds - seconds) * (size_bytes - size) / (next_size - size)

    def all_to_all_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds that `otherwise` takes."""
        if self.otherwise is None:
            raise UsageError("all_reduce: points: the all-to-all of experts needs a link besides")
        return self.otherwise.all_to_all_s(size_bytes, ranks)
