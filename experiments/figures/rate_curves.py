"""gLLM's figures 10 and 13: latency and throughput of each system against the request rate."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.loads import Place, under_load
from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, decades, grid_lines, whiskers

WHOLE, STEADY = "total_token_throughput", "steady_total_token_throughput"
TTFT = "mean_ttft_ms"
PANELS = {
    "TTFT (s)": TTFT,
    "TPOT (ms)": "mean_tpot_ms",
    "E2EL (s)": "mean_e2el_ms",
    "input + output tokens/s": WHOLE,
}
TURN = 5.0
"""TTFT has turned where its mean is so many times that at the lowest rate."""


def make(study: Study) -> Drawing:
    """Run every system at every rate on every pair of GPU and model, with each trace."""
    table = under_load(study)
    table["turn_rate"] = turning_points(table)
    shown = (*Place._fields, "rate", "system", "seed", *PANELS.values(), STEADY, "turn_rate")
    return Drawing(_draw(table), table, shown)


def turning_points(table: pd.DataFrame) -> pd.Series:
    """Return for each row the largest rate before its system's TTFT turns there, by mean TTFT."""
    group = [*Place._fields, "system"]
    mean = table.groupby([*group, "rate"])[TTFT].mean().sort_index()
    lowest = mean.groupby(group).transform("first")
    turned = (mean > TURN * lowest).groupby(group).cummax()
    last = mean[~turned].reset_index("rate").groupby(group)["rate"].max()
    return pd.Series([last[key] for key in zip(*(table[name] for name in group), strict=True)])


def _draw(table: pd.DataFrame) -> Figure:
    rows = list(table.groupby(list(Place._fields), sort=False))
    figure = Figure(figsize=(14, 0.9 + 2.45 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(PANELS), squeeze=False)
    for line, (place, own) in zip(grid, rows, strict=True):
        for axes, (title, column) in zip(line, PANELS.items(), strict=True):
            _draw_panel(axes, own, title, column)
        line[0].set_title(", ".join(map(str, place)), loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("request rate (1/s)")
    grid_lines(figure.axes)
    grid[0, -1].legend(fontsize=8, title="dotted: steady window", title_fontsize=7)
    return figure


def _draw_panel(axes: Axes, own: pd.DataFrame, title: str, column: str) -> None:
    in_s = title.endswith("(s)")
    scaled = own.assign(**{column: own[column] * (1e-3 if in_s else 1.0)})
    for label, runs in scaled.groupby("system", sort=False):
        whiskers(axes, runs, "rate", column, str(label))
        if column == WHOLE:
            steady = runs.groupby("rate")[STEADY].mean()
            axes.plot(steady, color=COLORS.get(str(label), "0.3"), linestyle=":")
    axes.set(ylabel=title, xlim=(0, None))
    if in_s:
        decades(axes)
    else:
        axes.set_ylim(0, None)
