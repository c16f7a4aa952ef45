"""Sarathi-Serve's table 4: chunked prefills and hybrid batches, each alone and together."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evenflow.errors import UsageError
from experiments.figures.capacities import capacities, tbt_slo
from experiments.figures.deployments import Served, datasets, served
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines, whiskers

SHOWN = (
    *("dataset", "load", "rate", "system", "seed", "ttft_p50_s", "tbt_p99_s"),
    *("total_token_throughput", "steady_total_token_throughput", "kv_pages", "error"),
)


def make(study: Study) -> Drawing:
    """Find the capacity of each data set, then run the three systems at shares of it."""
    numbers, sets, one = study.numbers, datasets(study), served(study)[0]
    budget = {"scheduler": {"name": "sarathi", "token_budget": numbers["token_budget"]}}
    cases = {
        (dataset, load, round(load * capacity, 3), label): study.config(
            one.keys,
            sets[dataset],
            {"workload": {"requests": numbers["requests"]}},
            {"workload": {"arrivals": {"rate": round(load * capacity, 3)}}},
            budget,
            study.keys_of(label),
        )
        for dataset, capacity in _capacity(study, one).items()
        for load in numbers["loads"]
        for label in study.plan.keys.systems
    }
    table = study.run(cases, ("dataset", "load", "rate", "system"))
    table["ttft_p50_s"] = table.median_ttft_ms / 1e3
    table["tbt_p99_s"] = table.p99_itl_ms / 1e3
    return Drawing(_draw(table, study), table, SHOWN, _claims(table, study))


def _capacity(study: Study, one: Served) -> dict[str, float]:
    """The rate that both techniques together carry within the strict limit, by data set."""
    numbers = study.numbers
    limits = tbt_slo(one.slo_s["strict"], numbers["median_queue_s"])
    cases = {
        (dataset,): (
            study.config(
                one.keys,
                keys,
                {"workload": {"requests": numbers["capacity_requests"]}},
                {"scheduler": {"name": "sarathi", "token_budget": one.budgets["strict"]}},
                study.keys_of("both"),
            ),
            limits,
        )
        for dataset, keys in datasets(study).items()
    }
    table = capacities(study, cases, ("dataset",))
    found = table.groupby("dataset", sort=False).capacity.mean()
    if not (found > 0).all():
        ends = ", ".join(dict.fromkeys(table.status))
        raise UsageError(
            f"the search for a rate with {limits[0]} ended: {ends}; a larger "
            "study.capacity_requests may tell"
        )
    return {str(dataset): float(rate) for dataset, rate in found.items()}


def _draw(table: pd.DataFrame, study: Study) -> Figure:
    datasets = list(dict.fromkeys(table.dataset))
    figure = Figure(figsize=(4.8 * len(datasets), 6.2), layout="constrained")
    panels = figure.subplots(2, len(datasets), squeeze=False)
    for column, dataset in enumerate(datasets):
        rows = table[(table.dataset == dataset) & table.error.isna()]
        for axes, metric in zip(panels[:, column], ("ttft_p50_s", "tbt_p99_s"), strict=True):
            for label in study.plan.keys.systems:
                whiskers(axes, rows[rows.system == label], "rate", metric, label)
            axes.set(xlabel="request rate, 1/s", ylim=(0, None))
        panels[0, column].set(title=dataset, yscale="linear")
    panels[0, 0].set_ylabel("P50 TTFT, s")
    panels[1, 0].set_ylabel("P99 TBT, s")
    panels[0, 0].legend(fontsize=8)
    grid_lines(figure.axes)
    return figure


def _claims(table: pd.DataFrame, study: Study) -> dict[str, Any]:
    at = table[(table.dataset == "sharegpt4") & (table.load == study.numbers["claimed_load"])]
    mean = at.groupby("system", sort=False)[["ttft_p50_s", "tbt_p99_s"]].mean()
    return {"sarathi-table4-sharegpt": {str(name): list(row) for name, *row in mean.itertuples()}}
