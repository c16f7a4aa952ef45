"""Pairs of a GPU and a model that a figure compares systems on, as layers of a run's keys.

What a figure's `run` says itself holds for every pair, so that `--set gpu=H100` puts all of a
figure's models on that GPU. Knows no system and no workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenflow.errors import UsageError
from experiments.figures.hosts import gpu_name
from experiments.figures.layers import Keys
from experiments.figures.study import Study


def pairs(study: Study) -> dict[str, Keys]:
    """Return the keys of each of `study.pairs`, [GPU, model], by its label in the figure.

    Raises UsageError for a pair that is none.
    """
    run: Mapping[str, Any] = study.plan.run.data
    found: dict[str, Keys] = {}
    for pair in study.numbers["pairs"]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UsageError(f"study.pairs: {pair} is no pair; write [GPU, model]")
        gpu, model = run.get("gpu", pair[0]), run.get("model", pair[1])
        found[f"{gpu_name(gpu)} + {model}"] = {"gpu": gpu, "model": model}
    return found
