"""Pictures as data: which columns of a figure's table stand in which panel, and how.

Knows tables and axes, not what a figure computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from evenflow.keys import Keys
from experiments.figures.style import colors_of, grid_lines

MARKERS = "osD^v<>"
GROUP_WIDTH, BAR_WIDTH = 0.82, 0.65
"""Of the room between two ticks, what bars side by side take, and a bar alone."""

Words = Mapping[str, Any]


class Panel(Keys):
    """What one panel shows: column `x` across, and upwards each column of `y`, with its words.

    Words may name numbers of the study in braces. `hue`: columns whose values make a curve each, of
    one `y`, and which its words may name; `each`: a column whose values make a panel each. `where`
    chooses rows as `pandas.DataFrame.query` does; `@name` is a number of the study. `write`: the
    format of what stands over a bar, of its height; over a stack, of the row's columns. `line`: a
    level to compare with. `log_2`: powers of two across. `width` is in inches. `axes`, `legend`:
    what matplotlib's `Axes.set` and `Axes.legend` take.
    """

    kind: Literal["bars", "stack", "lines"]
    x: str
    y: dict[str, str]
    hue: list[str] = Field(default_factory=list)
    each: str | None = None
    where: str | None = None
    colors: list[str] = Field(default_factory=list)
    write: str | None = None
    line: float | None = None
    log_2: bool = False
    width: float = 4.5
    axes: dict[str, Any] = Field(default_factory=dict)
    legend: dict[str, Any] | None = None


class Plot(Keys):
    """A figure's panels side by side, `height` inches high."""

    height: float = 3.9
    panels: list[Panel]


Curves = list[tuple[str, "pd.Series[float]", str]]
"""Words, values by what is across, and a colour."""


def draw(plot: Mapping[str, Any], table: pd.DataFrame, numbers: Words) -> Figure:
    """Draw a table as a figure's `plot` says, with the numbers of its study in the words."""
    keys = Plot.model_validate(plot)
    panels = [own for panel in keys.panels for own in _panels(panel, table, numbers)]
    widths = [panel.width for panel, _ in panels]
    figure = Figure(figsize=(sum(widths), keys.height), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, (panel, rows) in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, rows, numbers)
    grid_lines(grid)
    return figure


def _panels(
    panel: Panel, table: pd.DataFrame, numbers: Words
) -> Iterator[tuple[Panel, pd.DataFrame]]:
    """Yield a panel with its rows, or one for each value of its `each`, of which it is the title.

    Only the first of several has a legend, and words beside its axis.
    """
    rows = table.query(panel.where, local_dict=dict(numbers)) if panel.where else table
    if panel.each is None:
        yield panel, rows
        return
    for index, (value, own) in enumerate(rows.groupby(panel.each, sort=False)):
        title = str(panel.axes.get("title", "{}")).replace("{}", str(value))
        axes = panel.axes | {"title": title} | ({"ylabel": None} if index else {})
        legend = None if index else panel.legend
        yield panel.model_copy(update={"axes": axes, "legend": legend}), own


def _draw_panel(axes: Axes, panel: Panel, rows: pd.DataFrame, numbers: Words) -> None:
    curves = _curves(panel, rows, numbers)
    (_draw_lines if panel.kind == "lines" else _draw_bars)(axes, panel, curves, rows)
    if panel.line is not None:
        axes.axhline(panel.line, color="0.4", lw=0.8)
    axes.set(**_in_words(panel.axes, numbers))
    axes.title.set_fontsize(10)
    if panel.legend is not None:
        axes.legend(**{"fontsize": 8, "title_fontsize": 8, **_in_words(panel.legend, numbers)})


def _in_words(given: Words, numbers: Words) -> dict[str, Any]:
    return {k: v.format_map(numbers) if isinstance(v, str) else v for k, v in given.items()}


def _curves(panel: Panel, rows: pd.DataFrame, numbers: Words) -> Curves:
    found: list[tuple[str, pd.Series[float]]] = []
    for column, words in panel.y.items():
        groups = rows.groupby(panel.hue, sort=False) if panel.hue else [((), rows)]
        for values, own in groups:
            named = dict(zip(panel.hue, values, strict=True))
            found.append((words.format_map({**numbers, **named}), own.set_index(panel.x)[column]))
    own_colors = colors_of([name for name, _ in found])
    colors = panel.colors or list(own_colors.values())
    return [
        (name, values, colors[index % len(colors)]) for index, (name, values) in enumerate(found)
    ]


def _draw_lines(axes: Axes, panel: Panel, curves: Curves, rows: pd.DataFrame) -> None:
    for index, (name, values, color) in enumerate(curves):
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(values.index, values, marker=marker, ms=4, label=name, color=color)
    if panel.log_2:
        axes.set_xscale("log", base=2)
        across = sorted(rows[panel.x].unique())
        axes.set_xticks(across, [str(value) for value in across])


def _draw_bars(axes: Axes, panel: Panel, curves: Curves, rows: pd.DataFrame) -> None:
    """Draw bars side by side, or one on the other."""
    stacked = panel.kind == "stack"
    room = BAR_WIDTH if stacked or len(curves) == 1 else GROUP_WIDTH / len(curves)
    below = np.zeros(len(curves[0][1]))
    ticks = np.arange(len(below))
    for index, (name, values, color) in enumerate(curves):
        places = ticks if stacked else ticks + room * (index - (len(curves) - 1) / 2)
        drawn = axes.bar(places, values, 0.92 * room, below, color=color)
        drawn.set_label(name if values.any() else "_")
        if stacked:
            below = below + values.to_numpy()
        elif panel.write:
            axes.bar_label(drawn, fmt=panel.write, fontsize=7)
    if stacked and panel.write:
        words = [panel.write.format_map(row) for row in rows.to_dict("records")]
        axes.bar_label(drawn, words, fontsize=7)
        axes.set_ylim(0, 1.12 * below.max())
    axes.set_xticks(ticks, [str(value) for value in curves[0][1].index])
