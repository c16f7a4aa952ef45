"""The deployments that a figure serves: models on GPUs, the SLO on each, the budget under it.

A figure's `study.deployments` has an entry for each, by label: `run` (keys of RUN.yaml), and where
they were published `slo_s` and `budgets` by SLO. What the user sets of `run` by hand holds in every
deployment, and a `model` set by hand is the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.figures.iterations import REFERENCE, iteration, world_of
from experiments.figures.study import Keys, Study, layered


@dataclass(frozen=True, slots=True)
class Served:
    """A model on its GPUs: keys of a run, the limit on P99 TBT and the token budget by SLO."""

    label: str
    keys: Keys
    slo_s: Mapping[str, float]
    budgets: Mapping[str, int]


def served(study: Study) -> list[Served]:
    """Return the figure's deployments.

    Where an SLO is not given it is Sarathi-Serve's: `study.slo_iterations` (by SLO) times the
    reference iteration, by prediction. `study.budgets` are those of a deployment without its own.
    """
    by_hand = set_by_hand(study)
    given: Mapping[str, Any] = study.numbers["deployments"]
    if "model" in by_hand:
        given = {str(by_hand["model"]): {}}
    return [_one(study, label, entry, by_hand) for label, entry in given.items()]


def set_by_hand(study: Study) -> dict[str, Any]:
    """Return the keys of the run that the user has set, as a layer."""
    layer: dict[str, Any] = {}
    for path, place in study.plan.run.places.items():
        if place.startswith("--set"):
            value: Any = study.plan.run.data
            for key in path:
                value = value[key]
            for key in reversed(path):
                value = {key: value}
            layer = layered(layer, value)
    return layer


def _one(study: Study, label: str, entry: Mapping[str, Any], by_hand: Keys) -> Served:
    keys = layered(entry.get("run", {}), by_hand)
    slo_s = entry.get("slo_s")
    if slo_s is None:
        reference_s = iteration(world_of(study, keys))(REFERENCE)
        slo_s = {name: n * reference_s for name, n in study.numbers["slo_iterations"].items()}
    return Served(label, keys, slo_s, {**study.numbers["budgets"], **entry.get("budgets", {})})
