"""gLLM's figure 15: gLLM without WT, without UT, with CK, and vLLM, over gLLM, by load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.loads import Place, under_load
from experiments.figures.study import Drawing, Study
from experiments.figures.style import decades, grid_lines, whiskers

METRICS = {
    "ttft": "mean_ttft_ms",
    "tpot": "mean_tpot_ms",
    "e2el": "mean_e2el_ms",
    "throughput": "total_token_throughput",
}
RUN = [*Place._fields, "load", "rate", "seed"]


def make(study: Study) -> Drawing:
    """Run gLLM and its ablations on the same arrivals, at every load."""
    first, *others = study.plan.keys.systems
    table = under_load(study)
    for name, ratio in over(table, first).items():
        table[name] = ratio
    shown = (*RUN, "system", *METRICS, "preemptions")
    return Drawing(_draw(table, others), table, shown, _claims(study, table))


def over(table: pd.DataFrame, system: str) -> pd.DataFrame:
    """Return each metric of each row over that of `system` in the same run, by name."""
    rows = table.set_index(RUN)
    own = rows[rows.system == system]
    ratios = {
        name: rows[column] / own[column].reindex(rows.index) for name, column in METRICS.items()
    }
    return pd.DataFrame(ratios).set_index(table.index)


def _draw(table: pd.DataFrame, systems: list[str]) -> Figure:
    rows = list(table.groupby(list(Place._fields), sort=False))
    figure = Figure(figsize=(14, 0.9 + 2.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(METRICS), squeeze=False)
    for line, (place, own) in zip(grid, rows, strict=True):
        for axes, name in zip(line, METRICS, strict=True):
            axes.axhline(1, color="0.4", linewidth=0.8)
            for label in systems:
                whiskers(axes, own[own.system == label], "load", name, label)
            decades(axes)
            axes.set_ylabel(f"{'throughput' if name == 'throughput' else name.upper()} over gLLM's")
        line[0].set_title(", ".join(map(str, place)), loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("request rate over gLLM's saturated rate")
    grid[0, 0].legend(fontsize=8)
    grid_lines(figure.axes)
    return figure


def _claims(study: Study, table: pd.DataFrame) -> dict[str, Any]:
    """Return geometric means over the seeds at the run that the claims are read at."""
    trace, load = study.numbers["claims_at"]
    own = table[table.trace == trace]
    if own.empty:
        return {}
    own = own[own.load == min(own.load, key=lambda each: abs(each - load))]
    mean = {
        label: np.exp(np.log(rows[list(METRICS)]).mean()) for label, rows in own.groupby("system")
    }
    found: dict[str, Any] = {}
    for label, claim in (("w/o WT", "gllm-ablation-no-wt"), ("w/o UT", "gllm-ablation-no-ut")):
        if label in mean:
            found[claim] = mean[label][["ttft", "tpot", "e2el"]].to_dict()
    if {"w/ CK", "vLLM"} <= mean.keys():
        ratio = mean["w/ CK"] / mean["vLLM"]
        found["gllm-ck-vs-vllm"] = ratio[["throughput", "e2el"]].to_dict()
    return found
