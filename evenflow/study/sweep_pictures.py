"""The pictures of a sweep: effects of its parameters, sensitivity around the default, the front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from textwrap import fill
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.report import plots
from evenflow.report.tables import is_number
from evenflow.report.words import metric_words
from evenflow.study.swept import Swept, label, short_names, spread

SHOWN = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "total_token_throughput")
"""The metrics of gLLM's sensitivity figure."""

FEW_VALUES = 12
"""A parameter with more values than this is drawn as single points on a scale of numbers."""

COLUMNS = 4
LINE = 36
"""Letters that stand side by side below a panel."""

NEUTRAL = "#9AA5B1"


class ParameterPanel(NamedTuple):
    """A parameter, its values in order, and for each metric its mean and half-width at each.

    `default` is the position of the run's own value. `scattered`: each point has its own value
    and there is nothing to average over.
    """

    parameter: str
    values: list[Any]
    default: int | None
    means: Mapping[str, pd.DataFrame]
    scattered: bool


def sensitivity(found: Swept) -> list[ParameterPanel]:
    """Return a panel a parameter: metrics relative to the default, all other parameters as there.

    Ratios are taken within a replication. A parameter with no other value than the default is left
    out. There are no panels without a default, nor of points that are drawn or searched for. Hardly
    any of those differ in one parameter only.
    """
    chosen = found.config.method.kind in ("grid", "one_at_a_time")
    if not chosen or found.base is None:
        return []
    ratios = {}
    for metric in dict.fromkeys((*SHOWN, *found.config.metrics)):
        runs = found.values(metric)
        ratios[metric] = runs / runs.loc[found.default].replace(0, math.nan)
    panels = (_panel(found, k, _around(found, k), ratios) for k in found.config.parameters)
    return [panel for panel in panels if len(panel.values) > 1]


def main_effects(found: Swept) -> list[ParameterPanel]:
    """Return a panel a parameter: the mean of each metric that decides over points with a value.

    Points are averaged within a replication first: the interval is over replications. A parameter
    with many values has single points. Means are fair over all points of a balanced method. Those
    of `one_at_a_time` are over points that differ from the default in nothing else. The run as it
    is counts only if the method chose it.
    """
    values = {metric: found.values(metric) for metric in found.config.metrics}
    alone = found.base is not None and found.config.method.kind == "one_at_a_time"
    extra = found.default if found.default_is_extra else None
    points = [index for index in found.answered if index != extra]
    return [
        _panel(found, name, _around(found, name) if alone else points, values, FEW_VALUES)
        for name in found.config.parameters
    ]


def _around(found: Swept, name: str) -> list[int]:
    """Return the points that answer, and differ from the default in no other parameter."""
    others = found.keys.drop(columns=name)
    alike = (others == others.loc[found.default]).all(axis=1)
    return [index for index in found.answered if alike[index]]


def _panel(
    found: Swept,
    name: str,
    points: list[int],
    metrics: Mapping[str, pd.DataFrame],
    most: float = math.inf,
) -> ParameterPanel:
    """Return the means of points with each value; of more than `most` numbers, of each point."""
    labels = {index: found.trials[index].labels[name] for index in points}
    numbers = all(map(is_number, labels.values()))
    points = sorted(labels, key=labels.__getitem__) if numbers else points
    keys = found.keys[name].loc[points]
    scattered = numbers and keys.nunique() > most
    by = pd.Series(points, points) if scattered else keys
    values = [labels[index] for index in by.index[~by.duplicated()]]
    own = None if found.default is None else found.keys.at[found.default, name]
    default = next((at for at, key in enumerate(by.unique()) if key == own), None)
    means = {
        metric: spread(runs.loc[points].groupby(by, sort=False).agg(pd.Series.mean, skipna=False))
        for metric, runs in metrics.items()
    }
    return ParameterPanel(name, values, default, means, scattered)


def pictures(found: Swept) -> dict[str, Figure]:
    """Draw main_effects, sensitivity and pareto_front, each where there is something to draw."""
    if not found.answered:
        return {}
    drawn = {"main_effects": _draw_main_effects(main_effects(found))}
    if around := sensitivity(found):
        drawn["sensitivity"] = _draw_sensitivity(around)
    if len(found.config.objectives) > 1 and found.ranked:
        drawn["pareto_front"] = _draw_front(found)
    return drawn


def _draw_sensitivity(around: Sequence[ParameterPanel]) -> Figure:
    """Draw a panel a parameter: metrics relative to the default, as gLLM's figure 16."""
    figure, grid = plots.panels(len(around), 3.0, 3.4, columns=COLUMNS, sharey=True)
    for axes, panel in zip(grid, around, strict=True):
        axes.axhline(1.0, color=NEUTRAL, linewidth=0.8)
        for index, metric in enumerate(panel.means):
            _draw_means(axes, panel, metric, index)
        _finish(axes, panel)
    grid[0].set_ylabel("relative to the default")
    handles, labels = grid[0].get_legend_handles_labels()
    fit = min(2 * len(around), len(labels))  # two are as wide as a panel
    figure.legend(handles, labels, loc="outside upper left", ncols=fit, frameon=False, fontsize=9)
    return figure


def _draw_main_effects(effects: Sequence[ParameterPanel]) -> Figure:
    """Draw a row a metric and a panel a parameter: the mean over all points with a value."""
    metrics, width = list(effects[0].means), len(effects)
    figure, grid = plots.panels(len(metrics) * width, 3.1, 2.9, columns=width, sharey="row")
    for axes, (metric, panel) in zip(grid, product(metrics, effects), strict=True):
        _draw_means(axes, panel, metric, metrics.index(metric))
        _finish(axes, panel)
        if panel is effects[0]:
            axes.set_ylabel(metric_words(metric))
    return figure


def _draw_front(found: Swept) -> Figure:
    """Draw all points by the first two objectives; those on the Pareto front in colour."""
    x, y = (objective.metric for objective in found.config.objectives[:2])
    figure, (axes,) = plots.panels(1, 6.4, 4.4)
    shown = found.answered
    points = [(found.trials[i].mean(x), found.trials[i].mean(y)) for i in shown]
    default = [shown.index(i) for i in shown if i == found.default]
    plots.front(axes, points, [shown.index(i) for i in found.ranked], default)
    axes.set(xlabel=metric_words(x), ylabel=metric_words(y))
    return figure


def _draw_means(axes: Axes, panel: ParameterPanel, metric: str, index: int) -> None:
    at = panel.values if panel.scattered else range(len(panel.values))
    means, words = panel.means[metric], metric_words(metric).partition(" (")[0]
    reach = 0 * means["half_width"] if panel.scattered else means["half_width"]
    joined = not panel.scattered and all(map(is_number, panel.values))
    plots.whiskers(axes, at, means["mean"], reach, index, joined=joined, label=words)


def _finish(axes: Axes, panel: ParameterPanel) -> None:
    if panel.scattered:
        if 0 < panel.values[0] < panel.values[-1] / 10:
            axes.set_xscale("log")
            plots.plain_decades(axes.xaxis)
    else:
        room = max(LINE // max(len(panel.values), 1), 7)
        labels = [fill(label(value), room, break_long_words=False) for value in panel.values]
        crowded = any(len(line) > room for text in labels for line in text.split("\n"))
        turned: dict[str, Any] = {"ha": "right", "rotation": 30} if crowded else {}
        axes.set_xticks(range(len(labels)), labels, **turned)
        axes.margins(x=0.08)
        if panel.default is not None:
            axes.axvline(panel.default, color=NEUTRAL, linewidth=0.9, linestyle=":")
    axes.set_xlabel(short_names([panel.parameter])[0])
    plots.finish(axes, grid="y")
