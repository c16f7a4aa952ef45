"""gLLM's figure 16: each metric against each hyperparameter, over that of the default."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.schedulers import parameters, policy
from experiments.figures.loads import Place, places, rates, saturated
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines, spread

METRICS = {
    "TTFT": "mean_ttft_ms",
    "TPOT": "mean_tpot_ms",
    "E2EL": "mean_e2el_ms",
    "throughput": "total_token_throughput",
}
WORDS = {"iterations": "#T", "max_prefill": "MaxP", "min_prefill": "MinP", "kv_thresh": "KVthresh"}
RUN = [*Place._fields, "rate", "load", "parameter", "seed"]


def make(study: Study) -> Drawing:
    """Vary one parameter at a time, on the same arrivals."""
    label = next(iter(study.plan.keys.systems))
    cases = {}
    where = places(study)
    for place, most in saturated(study, where).items():
        for rate in rates(study, most):
            arrivals = {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}}
            base = study.config(where[place], study.system(label), arrivals)
            for parameter, values in study.numbers["vary"].items():
                for value in values:
                    key = (*place, rate, round(rate / most, 2), parameter, value)
                    over = {"scheduler": {"name": base.scheduler.name, parameter: value}}
                    layers = (where[place], study.system(label), arrivals, over)
                    cases[key] = study.config(*layers)
    table = study.run(cases, (*RUN[:-1], "value"))
    table["default"] = [_default(base.scheduler.name, name) for name in table.parameter]
    table = normalised(table)
    shown = (*RUN, "value", *METRICS, "preemptions")
    return Drawing(_draw(table), table, shown, _claims(table))


def normalised(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with each metric over that of the default value in the same run."""
    rows = table.set_index(RUN)
    base = rows[rows.value == rows.default]
    for name, column in METRICS.items():
        table[name] = (rows[column] / base[column].reindex(rows.index)).to_numpy()
    return table


def _default(scheduler: str, parameter: str) -> Any:
    return parameters(policy(scheduler))[parameter].default


def _draw(table: pd.DataFrame) -> Figure:
    rows = list(table.groupby([*Place._fields, "load", "rate"], sort=False))
    names = list(dict.fromkeys(table.parameter))
    figure = Figure(
        figsize=(max(7.0, 3.5 * len(names)), 0.9 + 2.8 * len(rows)), layout="constrained"
    )
    grid = figure.subplots(len(rows), len(names), squeeze=False)
    for line, ((*place, load, rate), own) in zip(grid, rows, strict=True):
        for axes, parameter in zip(line, names, strict=True):
            _draw_panel(axes, own[own.parameter == parameter])
            axes.set_xlabel(WORDS.get(parameter, parameter))
        line[0].set_ylabel("over the default")
        words = f"{', '.join(map(str, place))}, {rate:g} requests/s = {load:.2f} of saturation"
        line[0].set_title(words, loc="left", fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center")
    grid_lines(figure.axes)
    return figure


def _draw_panel(axes: Axes, own: pd.DataFrame) -> None:
    values = sorted(own.value.unique())
    place = {value: index for index, value in enumerate(values)}
    for name in METRICS:
        found = spread(own, "value", name)
        below, above = found["mean"] - found["min"], found["max"] - found["mean"]
        reach = [below.clip(lower=0), above.clip(lower=0)]
        at = [place[value] for value in found.index]
        axes.errorbar(at, found["mean"], reach, label=name, marker="o", markersize=4, capsize=2)
    axes.axvline(place[own.default.iloc[0]], color="0.6", linestyle=":")
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])


def _claims(table: pd.DataFrame) -> dict[str, float]:
    """Return the largest spread of any metric over the MinP settings at the largest rate."""
    own = table[(table.parameter == "min_prefill") & (table.load == table.load.max())]
    mean = own.groupby([*Place._fields, "value"])[list(METRICS)].mean()
    spreads = mean.groupby(list(Place._fields)).agg(lambda column: column.max() - column.min())
    return {} if own.empty else {"gllm-minp": float(spreads.max().max())}
