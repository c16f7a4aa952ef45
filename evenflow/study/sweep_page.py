"""The folder of a sweep: its tables, its pictures, the page, and where the findings come from."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.config.provenance import code_version
from evenflow.report import plots
from evenflow.report.page import figure, in_words, page, parallel, picture, plotly_library, section
from evenflow.report.tables import html_table, is_number, write_json, write_rows, write_table
from evenflow.report.words import metric_words
from evenflow.study.points import code_digest
from evenflow.study.slo import question_words
from evenflow.study.swept import Swept, as_json, label, short_names, spread, trial_rows

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


HEADINGS = {
    "pareto_front": "Pareto front",
    "sensitivity": "Sensitivity around the default",
    "main_effects": "Effect of each parameter",
}
"""The heading of each picture of the page, in the page's order."""

LATENCIES = ("mean_ttft_ms", "mean_tpot_ms")
"""Metrics in tables beside the deciding ones; the table of all points has the GPUs, too."""


def write_findings(folder: Path, found: Swept, title: str) -> None:
    """Write the tables, the pictures, the page and sweep.json.

    check.csv is there where unseen parts were simulated.
    """
    write_table(folder / "points.csv", found.point_cells(as_json))
    write_table(folder / "summary.csv", found.summary_cells(as_json))
    if found.checks:
        rows = (
            {"unseen": check.kind, "point": name, **row}
            for check in found.checks
            for name, trial in (("best", check.best), ("default", check.default))
            for row in trial_rows(trial, as_json)
        )
        write_rows(folder / "check.csv", rows)
    drawn = {name: plots.save(each, folder / name) for name, each in pictures(found).items()}
    source = facts(found)
    text = page(title, list(_parts(found, drawn)), source, plotly_library())
    (folder / "report.html").write_text(text, encoding="utf-8")
    write_json(folder / "sweep.json", source)


def facts(found: Swept) -> dict[str, Any]:
    """Return where the findings come from, the same for every executor."""
    records = [record for trial in found.trials for record in trial.records]
    several = len(found.config.objectives) > 1
    return {
        **code_version(),
        "code_sha256": code_digest(),
        "sweep": found.config.model_dump(mode="json") | {"run": found.sweep.run.data},
        "points": len(found.trials),
        "simulations": len({record.key for record in records}),
        "failed": sum(record.error is not None for record in records),
        "host": platform.node(),
        "default": found.default,
        "best": [] if several else found.ranked[:1],
        "pareto_front": found.ranked if several else [],
        **({"allow_refused": True} if found.allow_refused else {}),
        **({"check": {each.kind: each.facts for each in found.checks}} if found.checks else {}),
    }


def _parts(found: Swept, drawn: Mapping[str, str]) -> Iterator[str]:
    first = found.trials[(found.ranked or found.nearest or [0])[0]]
    about = question_words(found.sweep.study.config(first.labels), found.config.conditions)
    yield f'<p class="caption">{"<br>".join(map(escape, about))}</p>'
    yield f'<div class="verdict"><p>{escape(" ".join(found.sentences()))}</p></div>'
    yield "<h2>Best points</h2>"
    yield html_table(*found.best_table(LATENCIES))
    for name, heading in HEADINGS.items():
        if name in drawn:
            yield section(heading)
            yield picture(drawn[name])
    yield from _all_points(found)
    if lost := found.failures:
        yield f"<h2>{len(lost)} points failed</h2>"
        yield html_table(["point", *found.config.parameters, "error"], lost)


def _all_points(found: Swept) -> Iterator[str]:
    """Yield all points that were completed as parallel coordinates, and as a table that sorts."""
    metrics = list(dict.fromkeys([*found.config.metrics, *LATENCIES, "gpus"]))
    heads = [*short_names(list(found.config.parameters)), *map(metric_words, metrics)]
    cells = {
        index: [
            *(v if is_number(v) else label(v) for v in trial.labels.values()),
            *map(trial.mean, metrics),
        ]
        for index, trial in enumerate(found.trials)
        if not trial.errors
    }
    if not cells:
        return
    columns = dict(zip(heads, zip(*cells.values(), strict=True), strict=True))
    shown = found.ranked if len(found.config.objectives) > 1 else found.ranked[:1]
    best = list(map(list(cells).index, shown))
    yield section("All points")
    yield figure("parallel", parallel(columns, [f"point {index}" for index in cells], best))
    rows = [[found.name(index), *map(in_words, row)] for index, row in cells.items()]
    yield html_table(["point", *heads], rows, sorts=True)
