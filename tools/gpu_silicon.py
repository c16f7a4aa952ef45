"""A measured profile beside the silicon tables of the same GPU, operator by operator.

Needs the extra `silicon`. Knows no device and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.costs.base import Span, Work
from evenflow.costs.profile.cost import profile_cost
from evenflow.costs.profile.file import Profile, read_profile
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.costs.tables import TableCost
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from evenflow.specs.model import ModelSpec, model

TABLED = ("H200", "H100", "L40S")
"""GPUs that the tables measured, by what their device's name holds."""

TOKENS = (1, 16, 128, 512, 2048)
CHUNKS = ((512, 0), (2048, 0), (512, 4096))
DECODES = ((1, 1024), (16, 1024), (64, 1024), (64, 4096))
"""(tokens, context before) of a chunk; (rows, context of each) of a step."""


def compare(name: str, path: Path) -> dict[str, Any]:
    """Return measured / tabled seconds of a layer's parts, and the median of each part.

    `left_out` says why where nothing can be compared.
    """
    profile = read_profile(path)
    found = next((each for each in TABLED if each in profile.header.device), None)
    if found is None:
        return {"left_out": f"no tables of {profile.header.device}"}
    if find_spec("aiconfigurator_core") is None or find_spec("pyarrow") is None:
        return {"left_out": "needs pip install 'evenflow[silicon]'"}
    spec = model(name)
    rows = list(_rows(_of_profile(profile, spec), _of_silicon(found, spec)))
    parts = dict.fromkeys(row["part"] for row in rows)
    medians = {
        part: float(np.median([row["ratio"] for row in rows if row["part"] == part]))
        for part in parts
    }
    return {"gpu": found, "median_ratio": medians, "points": rows}


LayerSeconds = Callable[[Work], float]


def _rows(measured: LayerSeconds, tabled: LayerSeconds) -> Iterator[dict[str, Any]]:
    for part, tokens, context, work, without in _works():
        seconds = [cost(work) - (cost(without) if without else 0.0) for cost in (measured, tabled)]
        yield {
            "part": part,
            "tokens": tokens,
            "context": context,
            "measured_us": 1e6 * seconds[0],
            "tabled_us": 1e6 * seconds[1],
            "ratio": seconds[0] / seconds[1],
        }


def _works() -> Iterator[tuple[str, int, int, Work, Work | None]]:
    """Name parts of a layer as what a work takes more than the same without it."""
    for tokens in TOKENS:
        yield "matrices and the like", tokens, 0, Work(prefill_tokens=tokens), None
    for tokens, context in CHUNKS:
        plain = Work(prefill_tokens=tokens)
        chunk = plain._replace(chunks=(Span(context, context + tokens),))
        yield "prefill attention", tokens, context, chunk, plain
    for rows, context in DECODES:
        step = Work(decode_tokens=rows, decode_context=rows * context)
        yield "decode attention", rows, context, step, Work(prefill_tokens=rows)


def _of_profile(profile: Profile, spec: ModelSpec) -> LayerSeconds:
    def cost(layers: int) -> TableCost:
        return profile_cost(profile, replace(spec, num_layers=layers), (layers,))

    return _one_layer(cost)


def _of_silicon(gpu_name: str, spec: ModelSpec) -> LayerSeconds:
    def cost(layers: int) -> TableCost:
        deployment = Deployment(replace(spec, num_layers=layers), gpu(gpu_name), (layers,))
        return silicon_cost(deployment, silicon_source(deployment))

    return _one_layer(cost)


def _one_layer(cost: Callable[[int], TableCost]) -> LayerSeconds:
    """Return the seconds of a layer: what the second one adds."""
    one, two = cost(1), cost(2)
    return lambda work: two.times(work)[0] - one.times(work)[0]
