"""Which tile a GPU's matrix products compute in, told by their times.

Knows seconds against tokens; no device and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenflow.costs.profile.file import Point
from evenflow.costs.tables import Curve

TILES = (64, 128, 256)
"""Tokens of a tile that kernels of GPUs are known for. A grid has points on both sides of the edges
of each, some of them no edges of the next."""


def tile_of(points: Sequence[Point], tiles: Sequence[int] = TILES) -> int:
    """Return by which of `tiles` points of products are told best, each point from the others.

    1 where a straight line does it: no steps. The measure is the mean relative error.
    """
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        curves.setdefault(point.operator, {})[point.tokens or 0] = point.median_s
    return min((1, *tiles), key=lambda tile: _error(list(curves.values()), tile))


def _error(curves: Sequence[dict[int, float]], tile: int) -> float:
    off = []
    for times in curves:
        sizes = sorted(times)
        for size in sizes[1:-1]:
            others = [each for each in sizes if each != size]
            told_s = Curve(others, [times[each] for each in others], tile)(size)
            off.append(abs(told_s / times[size] - 1))
    return float(np.mean(off)) if off else 0.0
