"""Sarathi-Serve's figure 12: capacity against the limit on P99 TBT."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.capacities import capacities, tbt_slo
from experiments.figures.deployments import served
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines, whiskers

NAMES = ("deployment", "slo_s", "system")
SHOWN = (*NAMES, "seed", "capacity", "failed", "status", "enough_requests", "kv_pages", "error")


def make(study: Study) -> Drawing:
    """Search the capacity of every deployment, limit and system."""
    numbers = study.numbers
    size = {"workload": {"requests": numbers["requests"]}}
    cases = {
        (one.label, float(limit_s), label): (
            study.config(one.keys, size, study.keys_of(label)),
            tbt_slo(float(limit_s), numbers["median_queue_s"]),
        )
        for one in served(study)
        for limit_s in np.linspace(one.slo_s["strict"], one.slo_s["relaxed"], numbers["limits"])
        for label in study.plan.keys.systems
    }
    table = capacities(study, cases, NAMES)
    return Drawing(_draw(table), table, SHOWN)


def _draw(table: pd.DataFrame) -> Figure:
    labels = list(dict.fromkeys(table.deployment))
    figure = Figure(figsize=(5 * len(labels), 4.2), layout="constrained")
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, label in zip(panels, labels, strict=True):
        rows = table[(table.deployment == label) & table.error.isna()]
        for system, found in rows.groupby("system", sort=False):
            whiskers(axes, found, "slo_s", "capacity", str(system))
        axes.set(title=label, xlabel="limit on P99 TBT, s", ylim=(0, None))
    figure.axes[0].set_ylabel("capacity, requests/s")
    figure.axes[-1].legend(fontsize=7)
    grid_lines(figure.axes)
    return figure
