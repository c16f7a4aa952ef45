"""What decides the results: busy stages and idle time by cause, under each policy."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.bubbles import CAUSES, attribute
from experiments.figures.loads import Place, places
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import grid_lines
from experiments.report.style import BUSY, CAUSE_COLOURS
from experiments.runs import Outcome

PARTS = {"busy": BUSY, **CAUSE_COLOURS}


def make(study: Study) -> Drawing:
    """Run every system everywhere with all requests at once."""
    cases = {
        (*place, label): study.config(keys, study.system(label))
        for place, keys in places(study).items()
        for label in study.plan.keys.systems
    }
    table = study.run(cases, (*Place._fields, "system"), shares)
    names = [name for name in PARTS if table[name].max() > 0]
    shown = (*Place._fields, "system", "seed", "total_token_throughput", *names)
    return Drawing(_draw(table, names), table, shown)


def shares(outcome: Outcome) -> dict[str, Any]:
    """Return the share of stage time that is busy, and that of each cause of idle time."""
    bubbles = attribute(outcome.result)
    total_s = bubbles.busy_s + bubbles.idle_s
    idle = {cause: seconds / total_s for cause, seconds in bubbles.totals().items()}
    return {**overview(outcome), "busy": 1 - sum(idle[cause] for cause in CAUSES), **idle}


def _draw(table: pd.DataFrame, names: list[str]) -> Figure:
    panels = list(table.groupby(list(Place._fields), sort=False))
    figure = Figure(figsize=(max(7.0, 6.2 * len(panels)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (place, own) in zip(grid, panels, strict=True):
        _draw_shares(axes, own, names)
        axes.set(title=", ".join(map(str, place)), xlabel="share of stage time (%), mean of seeds")
    grid[0].invert_yaxis()
    handles = grid[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize=8)
    grid_lines(grid)
    return figure


def _draw_shares(axes: Axes, own: pd.DataFrame, names: list[str]) -> None:
    mean = 100 * own.groupby("system", sort=False)[names].mean()
    left = pd.Series(0.0, mean.index)
    for name in names:
        label = name.replace("_", " ")
        axes.barh(mean.index, mean[name], left=left, color=PARTS[name], label=label)
        left += mean[name]
    for place, busy in enumerate(mean["busy"]):
        axes.text(1, place, f"{busy:.0f} %", va="center", fontsize=8)
