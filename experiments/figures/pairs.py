"""Pairs of a GPU and a model that a figure compares systems on, as layers of a run's keys.

What a figure's `run` says itself holds for every pair, so that `--set gpu=H100` puts all of a
figure's models on that GPU. Knows no system and no workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenflow.errors import UsageError
from experiments.figures.study import Keys, Study, layered


def pairs(study: Study) -> dict[str, Keys]:
    """Return the keys of each of `study.pairs`, [GPU, model], by its label in the figure.

    `study.links` has the keys that come with a GPU: its links. Raises UsageError for a pair that is
    none, and for a GPU whose links are known neither there nor in the run.
    """
    run: Mapping[str, Any] = study.plan.run.data
    found: dict[str, Keys] = {}
    for pair in study.numbers["pairs"]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UsageError(f"study.pairs: {pair} is no pair; write [GPU, model]")
        gpu, model = run.get("gpu", pair[0]), run.get("model", pair[1])
        keys = {"gpu": gpu, "model": model, **_links(study, gpu)}
        found[f"{_name(gpu)} + {model}"] = keys
    return found


def _name(gpu: str | Mapping[str, Any]) -> str:
    return gpu if isinstance(gpu, str) else str(gpu.get("name", "gpu"))


def _links(study: Study, gpu: str | Mapping[str, Any]) -> Keys:
    run, known = study.plan.run.data, study.numbers["links"]
    if _name(gpu) in known:
        own = known[_name(gpu)]
        return {key: value for key, value in layered(own, run).items() if key in own}
    if "link" in run:
        return {}
    raise UsageError(
        f"study.links has no {_name(gpu)}, only {', '.join(known)}; give --set link=NAME "
        "(and --set costs.all_reduce=NAME)"
    )
