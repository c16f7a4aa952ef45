"""What each parameter of a sweep does to its metrics, as panels, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.report import plots
from evenflow.report.tables import is_number
from evenflow.report.words import metric_words
from evenflow.study.sweep_findings import Findings, spread
from evenflow.study.sweep_words import label, short_names

SHOWN = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "total_token_throughput")
"""The metrics of gLLM's sensitivity figure."""

FEW_VALUES = 12
"""A parameter with more values than this is drawn as single points on a scale of numbers."""

COLUMNS = 4
LINE = 36
"""Letters that stand side by side below a panel."""

NEUTRAL = "#9AA5B1"


@dataclass(frozen=True, slots=True)
class ParameterPanel:
    """A parameter, its values in order, and for each metric its mean and half-width at each.

    `default` is the position of the run's own value. `scattered`: each point has its own value
    and there is nothing to average over.
    """

    parameter: str
    values: list[Any]
    default: int | None
    means: Mapping[str, pd.DataFrame]
    scattered: bool = False


def sensitivity(found: Findings) -> list[ParameterPanel]:
    """Return a panel a parameter: metrics relative to the default, all other parameters as there.

    Ratios are taken within a replication. A parameter with no other value than the default is left
    out. There are no panels without a default, nor of points that are drawn or searched for: hardly
    any of those differ in one parameter only.
    """
    default = found.default
    chosen = found.config.method.kind in ("grid", "one_at_a_time")
    if not chosen or default is None or found.base is None:
        return []
    ratios = {}
    for metric in dict.fromkeys((*SHOWN, *found.config.metrics)):
        runs = found.values(metric)
        ratios[metric] = runs / runs.loc[default].replace(0, math.nan)
    panels = []
    for name in found.config.parameters:
        near = _in_order(found, _beside_default(found, name), name)
        if len(near) > 1:
            values = [found.trials[index].labels[name] for index in near]
            means = {metric: spread(ratio.loc[near]) for metric, ratio in ratios.items()}
            panels.append(ParameterPanel(name, values, near.index(default), means))
    return panels


def main_effects(found: Findings, metric: str) -> list[ParameterPanel]:
    """Return a panel a parameter: the metric's mean over all points with a value.

    Points are averaged within a replication first: the interval is that of the replications. Of
    a parameter with many values, each point by itself.
    """
    values = found.values(metric)
    return [_main_effect(found, name, metric, values) for name in found.config.parameters]


def _main_effect(found: Findings, name: str, metric: str, values: pd.DataFrame) -> ParameterPanel:
    points = _in_order(found, _compared(found, name), name)
    labels = {index: found.trials[index].labels[name] for index in points}
    keys = found.keys[name].loc[points]
    scattered = keys.nunique() > FEW_VALUES and all(map(is_number, labels.values()))
    by = pd.Series(points, points) if scattered else keys
    groups = {part.index[0]: part for _, part in values.loc[points].groupby(by, sort=False)}
    means = pd.DataFrame({first: part.mean(skipna=False) for first, part in groups.items()}).T
    own = None if found.default is None else found.keys[name].loc[found.default]
    default = next((place for place, first in enumerate(groups) if keys[first] == own), None)
    of_each = [labels[first] for first in groups]
    return ParameterPanel(name, of_each, default, {metric: spread(means)}, scattered)


def _beside_default(found: Findings, name: str) -> list[int]:
    """Return the points that answer, and differ from the default in no other parameter."""
    others = found.keys.drop(columns=name)
    alike = (others == others.loc[found.default]).all(axis=1)
    return [index for index in found.answered if alike[index]]


def _compared(found: Findings, name: str) -> list[int]:
    """Return the points that give fair means by a parameter's value: all, if balanced.

    For one_at_a_time, points that differ in nothing else; the run as it is only if the method
    chose it.
    """
    if found.base is not None and found.config.method.kind == "one_at_a_time":
        return _beside_default(found, name)
    extra = found.default if found.default_is_extra else None
    return [index for index in found.answered if index != extra]


def _in_order(found: Findings, points: Sequence[int], name: str) -> list[int]:
    """Sort by a parameter where its values are numbers; else keep the order of the points."""
    values = {index: found.trials[index].labels[name] for index in points}
    numbers = all(map(is_number, values.values()))
    return sorted(values, key=values.__getitem__) if numbers else list(points)


def pictures(found: Findings) -> dict[str, Figure]:
    """Draw main_effects, sensitivity and pareto_front, each where there is something to draw."""
    config = found.config
    if not found.answered:
        return {}
    drawn = {"main_effects": _draw_main_effects([main_effects(found, m) for m in config.metrics])}
    if around := sensitivity(found):
        drawn["sensitivity"] = _draw_sensitivity(around)
    if len(config.objectives) > 1 and found.ranked:
        drawn["pareto_front"] = _draw_front(found)
    return drawn


def _draw_sensitivity(around: Sequence[ParameterPanel]) -> Figure:
    """Draw a panel a parameter: metrics relative to the default, as gLLM's figure 16."""
    figure, grid = plots.panels(len(around), 3.0, 3.4, columns=COLUMNS, sharey=True)
    for axes, panel in zip(grid, around, strict=True):
        axes.axhline(1.0, color=NEUTRAL, linewidth=0.8)
        for index, metric in enumerate(panel.means):
            _draw_means(axes, panel, metric, index, metric_words(metric).partition(" (")[0])
        _finish(axes, panel)
    grid[0].set_ylabel("relative to the default")
    handles, labels = grid[0].get_legend_handles_labels()
    fit = min(2 * len(around), len(labels))  # two are as wide as a panel
    figure.legend(handles, labels, loc="outside upper left", ncols=fit, frameon=False, fontsize=9)
    return figure


def _draw_main_effects(rows: Sequence[Sequence[ParameterPanel]]) -> Figure:
    """Draw a row a metric and a panel a parameter: the mean over all points with a value."""
    width = len(rows[0])
    figure, grid = plots.panels(len(rows) * width, 3.1, 2.9, columns=width, sharey="row")
    for index, row in enumerate(rows):
        (metric,) = row[0].means
        words = metric_words(metric)
        cells = grid[index * width : (index + 1) * width]
        for axes, panel in zip(cells, row, strict=True):
            _draw_means(axes, panel, metric, index, words)
            _finish(axes, panel)
        cells[0].set_ylabel(words)
    return figure


def _draw_front(found: Findings) -> Figure:
    """Draw all points by the first two objectives; those on the Pareto front in colour."""
    x, y = (objective.metric for objective in found.config.objectives[:2])
    figure, (axes,) = plots.panels(1, 6.4, 4.4)
    shown = found.answered
    points = [(found.trials[i].mean(x), found.trials[i].mean(y)) for i in shown]
    default = [shown.index(i) for i in shown if i == found.default]
    plots.front(axes, points, [shown.index(i) for i in found.ranked], default)
    axes.set(xlabel=metric_words(x), ylabel=metric_words(y))
    return figure


def _draw_means(axes: Axes, panel: ParameterPanel, metric: str, index: int, words: str) -> None:
    at = panel.values if panel.scattered else range(len(panel.values))
    means = panel.means[metric]
    reach = 0 * means.half_width if panel.scattered else means.half_width
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
