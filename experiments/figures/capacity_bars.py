"""Capacities by deployment, data set, SLO and system, as bars: Sarathi-Serve's 10, 11 and 13."""

from __future__ import annotations

import math
from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.capacities import capacities, tbt_slo
from experiments.figures.deployments import Served, datasets, served
from experiments.figures.layers import Keys, layered
from experiments.figures.study import Study
from experiments.figures.style import COLORS, grid_lines

NAMES = ("deployment", "dataset", "slo", "system")
SHOWN = (*NAMES, "seed", "capacity", "failed", "status", "enough_requests", "kv_pages", "error")


def with_budget(study: Study, label: str, one: Served, slo: str) -> Keys:
    """Return the keys of one of the figure's systems; Sarathi's policy gets the SLO's budget."""
    budget = {"scheduler": {"name": "sarathi", "token_budget": one.budgets[slo]}}
    return layered(budget, study.keys_of(label))


def measured(study: Study) -> pd.DataFrame:
    """Search the capacity of every deployment, data set, SLO and system; a row a seed."""
    numbers, sets = study.numbers, datasets(study)
    size = {"workload": {"requests": numbers["requests"]}}
    cases = {}
    for one, dataset, label in product(served(study), sets, study.plan.keys.systems):
        for slo, limit_s in one.slo_s.items():
            system = with_budget(study, label, one, slo)
            config = study.config(one.keys, sets[dataset], size, system)
            limits = tbt_slo(limit_s, numbers["median_queue_s"])
            cases[one.label, dataset, slo, label] = (config, limits)
    return capacities(study, cases, NAMES)


def best_ratio(table: pd.DataFrame, over: str, **places: str) -> float | None:
    """Return the largest ratio of Sarathi-Serve's mean capacity over another system's.

    `places` fix columns of NAMES, such as `slo="strict"`; the best is over the others. None where
    the table has no such pair. A system that never meets an SLO has no ratio there.
    """
    for name, value in places.items():
        table = table[table[name] == value]
    mean = table.groupby(list(NAMES), sort=False).capacity.mean().unstack("system")
    if not {over, "Sarathi-Serve"} <= set(mean):
        return None
    ratios = (mean["Sarathi-Serve"] / mean[over])[mean[over] > 0].dropna()
    return float(ratios.max()) if len(ratios) else None


def bars(table: pd.DataFrame) -> Figure:
    """Draw a panel a deployment, a group a data set and SLO, a bar a system; whiskers to the least
    and most of the seeds.
    """
    labels = list(dict.fromkeys(table.deployment))
    figure = Figure(figsize=(6.2 * len(labels), 4.4), layout="constrained")
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, label in zip(panels, labels, strict=True):
        rows = table[table.deployment == label]
        panel(axes, rows)
        axes.set_title(label)
    figure.axes[0].set_ylabel("capacity, requests/s")
    figure.axes[0].legend(fontsize=8)
    grid_lines(figure.axes)
    return figure


def panel(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the bars of one deployment."""
    groups = list(dict.fromkeys(zip(rows.dataset, rows.slo, strict=True)))
    systems = list(dict.fromkeys(rows.system))
    by_place = rows.groupby(["dataset", "slo"], sort=False)
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        found = [group.capacity[group.system == system] for _, group in by_place]
        mean = [each.mean() for each in found]
        reach = [[v.mean() - v.min() for v in found], [v.max() - v.mean() for v in found]]
        places = [place + width * (index - (len(systems) - 1) / 2) for place in range(len(groups))]
        color = COLORS.get(system, "0.6")
        drawn = axes.bar(places, mean, width, yerr=reach, capsize=2, label=system, color=color)
        axes.bar_label(drawn, fmt="%.2f", fontsize=6.5)
        for place, value, (_, group) in zip(places, mean, by_place, strict=True):
            if math.isnan(value):
                word = f" {_ended(group[group.system == system])}"
                axes.text(place, 0, word, rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), [f"{dataset}\n{slo}" for dataset, slo in groups])


def _ended(rows: pd.DataFrame) -> str:
    """Return in a word or two why a search found no capacity."""
    errors = rows.error.dropna()
    if len(errors):
        return "OOM" if "does not fit" in errors.iloc[0] else "not possible"
    return str(rows.status.iloc[0]).replace("_", " ")
