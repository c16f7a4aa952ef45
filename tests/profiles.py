"""What tests predict: models on GPUs by name, and a profile of formulas, so that all is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from evenflow.costs.profile.file import Header, LayerShapes, Profile, ProfilePoint
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.costs.tables import TableCost
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GpuSpec, gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec

TINY = ModelSpec("tiny", 4, 64, 4, 2, 16, 128, 1000, 2048, 1e4)
PLAIN = GpuSpec("plain", 1000, 1000, 80, 1.0, 1.0, 0.0)
"""1e15 operations and 1e12 bytes a second, nothing lost: seconds can be counted by hand."""

LINEARS = {"linear_qkv": 2.0, "linear_o": 1.0, "linear_up": 4.0, "linear_down": 3.0}
OTHERS = {"norm": 0.5, "rope": 0.25, "activation": 0.25, "kv_write": 0.125}
ENDS = {"embedding": 0.1, "head": 5.0, "sample": 1.0}
SIZES = (1, 16, 128, 129, 256, 257, 512)
"""Microseconds = factor x (100 + tokens), measured at these tokens."""


def deployed(
    of: str | ModelSpec,
    on: str = "H200",
    stages: int | Sequence[int] = 1,
    ranks: int = 1,
    **more: Any,
) -> Deployment:
    """Return a model on GPUs of a name, its layers evenly over stages."""
    spec = model(of) if isinstance(of, str) else of
    return Deployment(spec, gpu(on), split_layers(spec.num_layers, stages), ranks, **more)


def measured(deployment: Deployment, framework: str = "vllm", **how: Any) -> TableCost:
    """Return costs from the tables of real GPUs; without them the test is skipped."""
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    return silicon_cost(deployment, silicon_source(deployment, framework, **how))


def point(
    operator: str,
    tokens: int | None = None,
    context: int | None = None,
    size_bytes: int | None = None,
    *,
    seconds: float,
    ranks: int = 1,
) -> ProfilePoint:
    """Return a point without spread."""
    return ProfilePoint(operator, tokens, context, size_bytes, ranks, seconds, seconds, seconds, 1)


def prefill_s(tokens: int, context: int) -> float:
    """Return seconds of attention of a chunk: a launch, and a nanosecond a pair."""
    return 1e-5 + 1e-9 * (tokens * context + tokens * (tokens + 1) / 2)


def decode_s(rows: int, context_tokens: int) -> float:
    """Return seconds of attention of a step: a launch, and a nanosecond a key."""
    return 1e-5 + 1e-9 * context_tokens


def header(spec: ModelSpec = TINY, **changed: object) -> Header:
    """Return a header; keywords change its keys."""
    keys: dict[str, object] = {
        "device": "NVIDIA L20",
        "device_kind": "cuda",
        "driver": "550.1",
        "libraries": "torch 2.4.0",
        "dtype": "bfloat16",
        "date": "2026-01-31",
        "threads": 1,
        "grid": "made by a test",
        "tile_tokens": 128,
        "source": "tests",
        "model": spec.name,
        "shapes": LayerShapes.of(spec),
    }
    return Header(**(keys | changed))


def points(ranks: int = 1) -> list[ProfilePoint]:
    """Return every operator that a prediction needs."""
    found = [
        point(operator, tokens, seconds=factor * (100 + tokens) * 1e-6, ranks=ranks)
        for operator, factor in (LINEARS | OTHERS | ENDS).items()
        for tokens in SIZES
    ]
    for tokens in (16, 128, 512):
        for context in (0, 128, 1024):
            seconds = prefill_s(tokens, context)
            found.append(point("attention_prefill", tokens, context, seconds=seconds, ranks=ranks))
    for rows in (1, 8, 64):
        for each in (16, 256, 1024):
            seconds = decode_s(rows, rows * each)
            found.append(point("attention_decode", rows, rows * each, seconds=seconds, ranks=ranks))
    return found


def profile(found: list[ProfilePoint] | None = None, **changed: object) -> Profile:
    """Return a profile of these points, or of all that a prediction needs."""
    chosen = points() if found is None else found
    return Profile(header(**changed), tuple(sorted(chosen, key=lambda each: each.key)))
