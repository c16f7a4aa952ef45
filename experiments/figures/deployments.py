"""The deployments that a figure serves: models on GPUs, the SLO on each, the budget under it.

A figure's `study.deployments` has an entry for each, by label: `run` (keys of RUN.yaml), and where
they were published `slo_s` and `budgets` by SLO. What the user sets of `run` by hand holds in every
deployment, and a `model` set by hand is the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.figures.hosts import gpu_name
from experiments.figures.iterations import REFERENCE, iteration, world_of
from experiments.figures.layers import Keys, layered, without_links
from experiments.figures.study import Study

HARDWARE = frozenset({"gpu", "stages", "tensor_parallel", "link", "nodes"})
"""Keys of a run that make another deployment of a published one."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model on its GPUs: keys of a run, the limit on P99 TBT and the token budget by SLO."""

    label: str
    keys: Keys
    slo_s: Mapping[str, float]
    budgets: Mapping[str, int]


def served(study: Study) -> list[Served]:
    """Return the figure's deployments.

    Where an SLO is not given, or other hardware is set by hand, it is Sarathi-Serve's rule:
    `study.slo_iterations` (by SLO) times the reference iteration, by prediction. `study.budgets`
    are those of a deployment without its own.
    """
    by_hand = study.plan.by_hand
    given: Mapping[str, Any] = study.numbers["deployments"]
    if "model" in by_hand:
        given = {str(by_hand["model"]): {}}
    return [_one(study, label, entry, by_hand) for label, entry in given.items()]


def datasets(study: Study) -> dict[str, Keys]:
    """Return the keys of the figure's data sets by label; a trace set by hand is the only one."""
    by_hand = study.plan.by_hand
    trace = by_hand.get("workload", {}).get("trace")
    given = study.numbers["datasets"] if trace is None else {str(trace): {}}
    return {
        label: layered(keys, {key: by_hand[key] for key in keys if key in by_hand})
        for label, keys in given.items()
    }


def _one(study: Study, label: str, entry: Mapping[str, Any], by_hand: Keys) -> Served:
    own = entry.get("run", {})
    keys = layered(without_links(own) if "gpu" in by_hand else own, by_hand)
    slo_s = entry.get("slo_s")
    if slo_s is None or not HARDWARE.isdisjoint(by_hand):
        reference_s = iteration(world_of(study, keys))(REFERENCE)
        slo_s = {name: n * reference_s for name, n in study.numbers["slo_iterations"].items()}
    budgets = {**study.numbers["budgets"], **entry.get("budgets", {})}
    return Served(_name(study, label, keys, by_hand), keys, slo_s, budgets)


def _name(study: Study, label: str, keys: Keys, by_hand: Keys) -> str:
    """Return a deployment's label; of other hardware, what it is made of."""
    if HARDWARE.isdisjoint(by_hand) and "model" not in by_hand:
        return label
    model = str({**study.plan.run.data, **keys}["model"])
    ranks_and_stages = layout_of(study, keys).split(", ")[1:]
    return " ".join([model, *ranks_and_stages])


def layout_of(study: Study, keys: Keys) -> str:
    """Return the GPU of a deployment, and its ranks and stages where there are several."""
    run = {**study.plan.run.data, **keys}
    ranks, stages = run.get("tensor_parallel", 1), run.get("stages", 1)
    parts = [f"TP{ranks}"] * (ranks != 1) + [f"PP{stages}"] * (stages != 1)
    return ", ".join([gpu_name(run["gpu"]), *filter(None, ["-".join(parts)])])
