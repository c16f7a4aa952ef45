"""Draw what a sweep found as PNG and SVG: sensitivity, main effects, the Pareto front.

Draws numbers it is given. Does not make them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from experiments.report.style import SCHEDULER_COLOURS
from experiments.report.words import metric_words
from experiments.study.sweep import Findings, ranked
from experiments.sweep.effects import Panel, Series, label, main_effects, sensitivity
from experiments.sweep.words import without_unit

COLUMNS = 4
MARKS = "os^Dvp*"
NEUTRAL = "#9AA5B1"


def write_figures(folder: Path, findings: Findings) -> None:
    """Write main_effects, and sensitivity and pareto_front where there is one, as .png and .svg."""
    rows = [main_effects(findings, metric) for metric in findings.sweep.config.metrics]
    _save(folder / "main_effects", draw_main_effects(rows))
    panels = sensitivity(findings)
    if panels:
        _save(folder / "sensitivity", draw_sensitivity(panels))
    if len(findings.sweep.config.objectives) > 1 and ranked(findings):
        _save(folder / "pareto_front", draw_front(findings))


def _save(path: Path, figure: Figure) -> None:
    with mpl.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def draw_sensitivity(panels: Sequence[Panel]) -> Figure:
    """Draw a panel a parameter: metrics relative to the default, as gLLM's figure 16."""
    figure, grid = _grid(len(panels), 3.4)
    for axes, panel in zip(grid, panels, strict=True):
        axes.axhline(1.0, color=NEUTRAL, linewidth=0.8)
        for index, series in enumerate(panel.series):
            _draw_series(axes, panel, series, index, without_unit(series.metric))
        _finish(axes, panel)
    grid[0].set_ylabel("relative to the default")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False
    )
    return figure


def draw_main_effects(rows: Sequence[Sequence[Panel]]) -> Figure:
    """Draw a row a metric and a panel a parameter: the mean over all points with a value."""
    width = len(rows[0])
    figure = Figure((0.8 + 3 * width, 2.9 * len(rows)), dpi=150, layout="constrained")
    grid = figure.subplots(len(rows), width, squeeze=False, sharey="row")
    for index, panels in enumerate(rows):
        for axes, panel in zip(grid[index], panels, strict=True):
            _draw_series(axes, panel, panel.series[0], index, metric_words(panel.series[0].metric))
            _finish(axes, panel)
        grid[index, 0].set_ylabel(metric_words(panels[0].series[0].metric))
    return figure


def draw_front(findings: Findings) -> Figure:
    """Draw all points by the first two objectives; those on the Pareto front in colour."""
    x, y = (objective.metric for objective in findings.sweep.config.objectives[:2])
    front = ranked(findings)
    figure = Figure((6.4, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    done = [index for index, trial in enumerate(findings.trials) if not trial.errors]

    def at(indices: Sequence[int]) -> tuple[list[float], list[float]]:
        trials = [findings.trials[index] for index in indices]
        return [trial.mean(x) for trial in trials], [trial.mean(y) for trial in trials]

    axes.plot(*at(done), "o", color="0.8", markersize=5, label="all points")
    axes.plot(*at(front), "o-", color=SCHEDULER_COLOURS[0], label="Pareto front")
    if findings.default in done:
        default = at([findings.default])
        axes.plot(*default, "D", color=SCHEDULER_COLOURS[1], label="default", zorder=3)
    axes.set(xlabel=metric_words(x), ylabel=metric_words(y))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    width = min(count, COLUMNS)
    rows = math.ceil(count / width)
    figure = Figure((0.8 + 2.9 * width, height * rows), dpi=150, layout="constrained")
    cells = list(figure.subplots(rows, width, squeeze=False, sharey=True).flat)
    for spare in cells[count:]:
        spare.set_visible(False)
    return figure, cells[:count]


def _draw_series(axes: Axes, panel: Panel, series: Series, index: int, name: str) -> None:
    colour, mark = SCHEDULER_COLOURS[index % len(SCHEDULER_COLOURS)], MARKS[index % len(MARKS)]
    at = panel.values if panel.scattered else range(len(panel.values))
    axes.errorbar(
        list(at),
        series.mean,
        yerr=[0.0 if math.isnan(width) else width for width in series.half_width],
        fmt=mark if panel.scattered else f"{mark}-",
        color=colour,
        markersize=4.5,
        linewidth=1.4,
        elinewidth=1.0,
        capsize=2.5,
        label=name,
    )


def _finish(axes: Axes, panel: Panel) -> None:
    if panel.scattered:
        if panel.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
    else:
        labels = list(map(label, panel.values))
        crowded = sum(map(len, labels)) > 36
        axes.set_xticks(range(len(labels)), labels, rotation=30 if crowded else 0)
        if crowded:
            axes.set_xticklabels(labels, ha="right", rotation=30)
        axes.margins(x=0.08)
        if panel.default is not None:
            axes.axvline(panel.default, color=NEUTRAL, linewidth=0.9, linestyle=":")
    axes.set_xlabel(panel.parameter)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
