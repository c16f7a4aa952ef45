"""From timed runs to the points of a profile file: medians and spread of each operator.

Knows how often an operator runs in a layer; no device and no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from evenflow.costs.profile.file import Point
from profiler.journal import Shot, undisturbed
from profiler.shapes import Shape

PER_LAYER = {
    "linear_qkv": 1,
    "linear_o": 1,
    "linear_up": 1,
    "linear_down": 1,
    "norm": 2,
    "rope": 1,
    "activation": 1,
    "kv_write": 1,
    "attention_prefill": 1,
    "attention_decode": 1,
}
"""Operator -> how often a layer runs it. Others run once a stage."""
PER_ROW = ("head", "sample", "cpu_prepare")
ATTENTION = ("attention_prefill", "attention_decode")
OUTSIDE = ("cpu_prepare",)
"""Work that a worker does for a micro-batch while the one before computes."""

Key = tuple[str, int | None, int | None, int | None]
"""Operator, tokens, context_tokens, bytes."""


def stage_s(seconds: Mapping[str, float]) -> float:
    """Return the seconds that the stage was busy, of a run's seconds by operator."""
    return sum(value for name, value in seconds.items() if name not in OUTSIDE)


def operator_times(shape: Shape, shot: Shot, layers: int) -> Iterator[tuple[Key, float]]:
    """Return each operator of a run with its sizes, and the seconds of one time it ran.

    Shapes with several chunks say nothing of one chunk: their prefill attention is left out.
    """
    for name, seconds in shot.seconds.items():
        key = _key(name, shape)
        if key is not None:
            yield key, seconds / (PER_LAYER[name] * layers if name in PER_LAYER else 1)


def _key(name: str, shape: Shape) -> Key | None:
    if name == "attention_prefill":
        return (name, *shape.chunks[0], None) if len(shape.chunks) == 1 else None
    if name == "attention_decode":
        operator = "attention_decode_uneven" if shape.is_uneven else name
        return operator, len(shape.decodes), sum(shape.decodes), None
    return name, shape.rows if name in PER_ROW else shape.tokens, None, None


def operator_points(shots: Mapping[Shape, Sequence[Shot]], layers: int, ranks: int) -> list[Point]:
    """Return a point for each operator and size that was timed, of the runs left undisturbed.

    Tokens met in one context only say nothing of how attention grows with the context: they are
    left out, so that the attention of a profile is a grid.
    """
    samples: dict[Key, list[float]] = {}
    for shape, runs in shots.items():
        for shot in undisturbed(runs):
            for key, seconds in operator_times(shape, shot, layers):
                samples.setdefault(key, []).append(seconds)
    met = Counter(key[:2] for key in samples)
    return [
        point(key, seconds, ranks)
        for key, seconds in samples.items()
        if key[0] not in ATTENTION or met[key[:2]] > 1
    ]


def point(key: Key, seconds: Sequence[float], ranks: int = 1) -> Point:
    """Return the median, P10 and P90 of repeats as a point."""
    p10_s, median_s, p90_s = (float(q) for q in np.percentile(seconds, (10, 50, 90)))
    return Point(*key, ranks, median_s, p10_s, p90_s, len(seconds))
