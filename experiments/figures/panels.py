"""Pictures as data: which columns of a figure's table stand in which panel, and how they look.

A colour and a marker a system, means with whiskers over seeds. Knows tables and axes, not what a
figure computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from evenflow.config.yaml_file import Document, checked
from evenflow.errors import UsageError
from evenflow.experiments.figures.formulas import chosen, evaluated, filled
from evenflow.experiments.figures.looks import (
    MARKERS,
    MISS_MARK,
    PAPER_MARK,
    PAPER_WORDS,
    Words,
    colors_of,
    decades,
    grid_lines,
)
from evenflow.experiments.figures.schema import MISSED, PAPER, layered
from evenflow.experiments.figures.within import WITHIN, draw_within
from evenflow.keys import Keys, expect, needed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPARE_MARKERS = "osD^v<>"
GROUP_WIDTH, BAR_WIDTH = 0.82, 0.65
"""Of the room between two ticks, what bars side by side take, and a bar alone."""

COVERED, DIAMOND = (-0.02, 0.08), 0.025
"""Of a panel's top: how far over a bar's end a diamond covers its words, and half a diamond."""

PALE, FEW = 0.45, 4
NO_RATIO = "1.00"
"""What a bar is over itself, which is not written."""
LEGEND_INCHES, LEAST_INCHES = 1.5, 2.2
"""Across: of a legend beside the panels, and of a panel at least where a width is asked for."""
MOST_PANELS = 100


Line = Annotated[str, Field(max_length=300)]
Inches = Annotated[float, Field(ge=0.5, le=100)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Limits = Annotated[list[Number | None], Field(min_length=2, max_length=2)]
Scale = Literal["linear", "log"]


class AxesKeys(Keys):
    """Words and limits of a panel's axes, as matplotlib's `Axes.set` has them."""

    title: Line | None = None
    xlabel: Line | None = None
    ylabel: Line | None = None
    xlim: Limits | None = None
    ylim: Limits | None = None
    xscale: Scale = "linear"
    yscale: Scale = "linear"


class LegendKeys(Keys):
    """Words and place of a legend, as matplotlib's `Axes.legend` has them."""

    title: Line | None = None
    loc: str = "best"
    ncols: Annotated[int, Field(ge=1, le=20)] = 1
    fontsize: Annotated[float, Field(ge=1, le=40)] = 8
    bbox_to_anchor: Annotated[list[Number], Field(min_length=2, max_length=4)] | None = None


WRITES = "null, or a text with a number in braces, like {:.2f}"


class Panel(Keys):
    """Contents of one panel: column `x` across, and upwards each column of `y`, with its words.

    A point is a mean over the seeds, with a whisker from least to most. Words may name numbers of
    the study in braces. `x`: several columns are lines of one word. `hue`: columns whose values
    make curves, of a `y` whose words name one of them. `each`: columns with a panel for a value.
    `where`: the formula that holds for the rows shown (`formulas`). `also`: the column of the
    steady window by that of the whole run, dotted or as rings. `write`: what stands over a bar,
    `{:.2f}` for its height, or the row's columns by name in braces. Over a stack, and in the legend
    of lines for all points but the first, those columns. `strong`: the value of `x` whose bar is
    not pale, and has no words. `line`: a level to compare with. `levels`: columns of a level for
    each bar, by their words; `bands`: ranges by theirs. `mark`: the column that has the default of
    `x`, whose values then stand at equal distance. `log_2`: powers of two across; `decades`: powers
    of ten upwards, with plain numbers. `width` is in inches; `words` are what `each` is called.

    `tokens`, `stages`, `busy` and `kv` show columns of `measures.micro_batches` within the run of
    the first seed. They have no `x` and `y`. Words may name numbers of the runs, and their
    `[mean]`, `[min]` and `[max]` over the seeds.
    """

    kind: Literal["bars", "stack", "lying", "lines", "tokens", "stages", "busy", "kv"] = Field(
        examples=["bars"]
    )
    x: str | list[str] = ""
    y: dict[str, str] = Field(default_factory=dict)
    hue: list[str] = Field(default_factory=list)
    each: str | list[str] = Field(default_factory=list)
    where: str | None = None
    also: dict[str, str] = Field(default_factory=dict)
    colors: list[str] = Field(default_factory=list)
    write: Annotated[
        str | None, expect(lambda v: v is None or (isinstance(v, str) and "{" in v), WRITES)
    ] = None
    strong: str | None = None
    line: float | None = None
    levels: dict[str, str] = Field(default_factory=dict)
    bands: dict[str, list[float]] = Field(default_factory=dict)
    mark: str | None = None
    log_2: bool = False
    decades: bool = False
    width: Inches = 4.5
    words: dict[str, str] = Field(default_factory=dict)
    axes: AxesKeys = AxesKeys()
    legend: LegendKeys | None = None

    @model_validator(mode="after")
    def _of_columns(self) -> Self:
        if self.kind not in WITHIN and not (self.x and self.y):
            raise needed(f"kind: {self.kind}", '"x", and y')
        return self


class Plot(Keys):
    """A figure's panels side by side, in rows `height` inches high.

    `width`: inches of the whole figure, such as a column's; as many panels as fit are in a row.
    `rows`: columns whose values make a row of all panels each, with `title` at its left. `down`:
    each panel is a row. `let`: columns to draw, by their formulas (`formulas`). `common`: keys of
    all panels. `legend`: one for all, at the right. `share`: the axes, x and y, that panels of a
    column have in common.
    """

    height: Inches = 3.9
    width: Inches | None = None
    panels: list[dict[str, Any]] = Field(examples=[[{"kind": "bars"}]])
    common: dict[str, Any] = Field(default_factory=dict)
    rows: list[str] = Field(default_factory=list)
    title: str = "{}"
    down: bool = False
    share: list[Literal["x", "y"]] = Field(default_factory=list)
    let: dict[str, str] = Field(default_factory=dict)
    legend: LegendKeys | None = None


class PanelLine(NamedTuple):
    """A name, what is at each place across, the rows it is of, and the looks.

    `points` are `mean`, `min` and `max`, the `paper`'s value, and whether it is `missed`. Beside
    them are that of the `steady` window, and the `words` to write there.
    """

    name: str
    points: pd.DataFrame
    rows: pd.DataFrame
    color: str
    marker: str


class Placed(NamedTuple):
    """A panel, its rows, and the words of the values that these share."""

    panel: Panel
    rows: pd.DataFrame
    words: Words


def draw(plot: Mapping[str, Any], table: pd.DataFrame, numbers: Words) -> Figure:
    """Draw a table as a figure's `plot` says, with the numbers of its study in the words."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    keys, panels = checked_plot(plot)
    table = table.copy()
    if any(panel.kind in WITHIN for panel in panels):
        table = table[table.error.isna()]
    for name, of in keys.let.items():
        table[name] = evaluated(of, table, numbers, f"plot.let.{name}")
    lines = list(_lines(keys, panels, table, numbers))
    if (count := sum(map(len, lines))) > MOST_PANELS:
        raise UsageError(f"plot: has {count} panels; at most {MOST_PANELS} are right")
    beside = 0.0 if keys.legend is None else LEGEND_INCHES
    if keys.width is not None:
        across = max(1, int((keys.width - beside) / LEAST_INCHES))
        lines = [line[at : at + across] for line in lines for at in range(0, len(line), across)]
    widths = [_width(each.panel, each.rows) for each in max(lines, key=len)]
    size = (keys.width or max(6.0, sum(widths) + beside), keys.height * len(lines))
    figure = Figure(figsize=size, layout="constrained")
    lying = all(panel.kind == "lying" for panel in panels)
    share: Words = {f"share{axis}": "col" for axis in keys.share} or {"sharey": lying}
    grid = figure.subplots(len(lines), len(widths), squeeze=False, width_ratios=widths, **share)
    for row, line in zip(grid, lines, strict=True):
        for axes, placed in zip(row, line, strict=False):
            draw_panel(axes, *placed[:2], numbers, placed.words)
        for axes in row[len(line) :]:
            axes.remove()
        if keys.rows:
            row[0].set_title(row[0].get_title(), loc="left", fontsize=10)
            row[0].set_title("")
    if keys.legend is not None:
        handles = grid[0, 0].get_legend_handles_labels()
        words = {"title_fontsize": 8, **_in_words(keys.legend, numbers, "plot.legend")}
        figure.legend(*handles, **{"loc": "outside right center", "fontsize": 8, **words})
    drawn = {name for panel in panels for name in panel.y if f"{name}{PAPER}" in table}
    if drawn:
        marks = {PAPER_WORDS: Line2D([], [], **PAPER_MARK, mec="k", mew=1.4)}
        if any(table[f"{name}{MISSED}"].any() for name in drawn):
            marks["missed"] = Line2D([], [], **MISS_MARK)
        where: Words = {"loc": "outside upper right", "frameon": False, "fontsize": 8}
        figure.legend([*marks.values()], [*marks], ncols=len(marks), **where)
    grid_lines(figure.axes)
    return figure


def checked_plot(plot: Mapping[str, Any]) -> tuple[Plot, list[Panel]]:
    """Return the keys of a plot and of its panels; UsageError for what is wrong with them."""
    keys = checked(Plot, Document("plot", dict(plot), {}))
    panels = [layered(keys.common, panel) for panel in keys.panels]
    return keys, [checked(Panel, Document("plot.panels", panel, {})) for panel in panels]


def _lines(
    plot: Plot, panels: Sequence[Panel], table: pd.DataFrame, numbers: Words
) -> Iterator[list[Placed]]:
    """Yield the panels of each row of the figure; only the last has words under it."""
    if plot.down:
        for index, panel in enumerate(panels):
            line = _panels(panel, table, numbers, {})
            yield [_with_axes(each, title=None) if index else each for each in line]
        return
    groups = list(table.groupby(plot.rows, sort=False)) if plot.rows else [((), table)]
    for index, (values, own) in enumerate(groups):
        words = _words(plot.rows, values)
        row = [each for panel in panels for each in _panels(panel, own, numbers, words)]
        if index:
            row = [p._replace(panel=p.panel.model_copy(update={"legend": None})) for p in row]
        if index < len(groups) - 1:
            row = [_with_axes(each, xlabel=None) for each in row]
        if plot.rows:
            row[0] = _with_axes(row[0], title=plot.title.replace("{}", words[""]))
        yield row


def _with_axes(placed: Placed, **words: str | None) -> Placed:
    axes = placed.panel.axes.model_copy(update=words)
    return placed._replace(panel=placed.panel.model_copy(update={"axes": axes}))


def _words(columns: Sequence[str], values: Sequence[Any]) -> dict[str, str]:
    """Return the values of columns as words: by their names, and all for {}."""
    words = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return dict(zip(columns, words, strict=True)) | {"": ", ".join(map(str, values))}


def _panels(panel: Panel, table: pd.DataFrame, numbers: Words, words: Words) -> Iterator[Placed]:
    """Yield a panel with its rows, or one for each value of its `each`, of which it is the title.

    Only the first of several has a legend, and words beside its axis.
    """
    where = panel.where
    rows = chosen(where, table, numbers, "plot.panels.where") if where else table
    each = [panel.each] if isinstance(panel.each, str) else panel.each
    if not each:
        yield Placed(panel, rows, words)
        return
    named = any("{" in (text or "") for text in (panel.axes.title, panel.axes.xlabel))
    for index, (values, own) in enumerate(rows.groupby(each, sort=False)):
        shown = [panel.words.get(str(value), value) for value in values]
        legend = panel.legend if (panel.kind == "lines" and panel.write) or not index else None
        one = panel.model_copy(update={"legend": legend})
        changed: dict[str, str | None] = {} if named else {"title": "{}"}
        changed |= {"ylabel": None} if index else {}
        yield _with_axes(Placed(one, own, {**words, **_words(each, shown)}), **changed)


def _width(panel: Panel, rows: pd.DataFrame) -> float:
    """Return the width in inches: as given, or as bars and the words under them need."""
    if panel.kind != "bars":
        return panel.width
    groups = _across(panel, rows).unique()
    bars = len(groups) * len(panel.y) * rows.groupby(panel.hue).ngroups if panel.hue else 1
    letters = sum(max(len(line) for line in str(word).split("\n")) + 2 for word in groups)
    room = 0.34 if panel.write else 0.22
    return max(panel.width, room * bars + 0.8, 0.09 * letters)


def draw_panel(
    axes: Axes, panel: Panel, rows: pd.DataFrame, numbers: Words, words: Words | None = None
) -> None:
    """Draw rows on axes as the panel says; `words` go before numbers of that name."""
    if panel.kind in WITHIN:
        numbers = draw_within(axes, panel.kind, rows, numbers)
    elif panel.kind == "lines":
        _draw_lines(axes, panel, list(_curves(panel, rows, numbers)), rows)
    else:
        _draw_bars(axes, panel, list(_curves(panel, rows, numbers)))
    numbers = {**numbers, **(words or {})}
    if panel.line is not None:
        axes.axhline(panel.line, color="0.4", lw=0.8)
    for name, (low, high) in panel.bands.items():
        axes.axhspan(low, high, color="0.3", alpha=0.10, lw=0)
        axes.annotate(name, (1, (low + high) / 2), (4, 0), textcoords="offset points",
                      xycoords=("axes fraction", "data"), fontsize=8)  # fmt: skip
    axes.set(**_in_words(panel.axes, numbers, "plot.panels.axes"))
    axes.title.set_fontsize(10)
    if panel.decades:
        decades(axes)
    if panel.legend is not None and axes.get_legend_handles_labels()[0]:
        keys = _in_words(panel.legend, numbers, "plot.panels.legend")
        axes.legend(**{"fontsize": 8, "title_fontsize": 8, **keys})


def _in_words(given: Keys, numbers: Words, key: str) -> dict[str, Any]:
    return {
        name: filled(value, numbers, f"{key}.{name}") if isinstance(value, str) else value
        for name, value in given.model_dump(exclude_unset=True).items()
    }


def _across(panel: Panel, rows: pd.DataFrame) -> pd.Series:
    """Return each row's place across: a value, or the words of several columns."""
    if isinstance(panel.x, str):
        return rows[panel.x]
    return rows[panel.x].astype(str).agg("\n".join, axis=1)


def _curves(panel: Panel, rows: pd.DataFrame, numbers: Words) -> Iterator[PanelLine]:
    found = []
    for column, words in panel.y.items():
        hue = panel.hue if any(f"{{{name}" in words for name in panel.hue) else []
        for values, own in rows.groupby(hue, sort=False) if hue else [((), rows)]:
            named = dict(zip(hue, values, strict=True))
            name = filled(words, {**numbers, **named}, f"plot.panels.y.{column}")
            found.append((name, column, own))
    spare = colors_of([name for name, _, _ in found])
    colors = panel.colors or list(spare.values())
    ticks = _across(panel, rows).dropna().unique()
    for index, (name, column, own) in enumerate(found):
        by_place = own.groupby(_across(panel, own))
        means = by_place.mean(numeric_only=True)
        points = by_place[column].agg(["mean", "min", "max"])
        others = {"paper": f"{column}{PAPER}", "missed": f"{column}{MISSED}"}
        for told, of in (*others.items(), ("steady", panel.also.get(column))):
            points[told] = means.get(of, np.nan)
        points["words"] = [*_written(panel.write, means, points["mean"])] if panel.write else ""
        points = points.reindex(ticks).fillna({"words": ""})
        marker = MARKERS.get(name, SPARE_MARKERS[index % len(SPARE_MARKERS)])
        yield PanelLine(name, points, own, colors[index % len(colors)], marker)


def _written(write: str, means: pd.DataFrame, heights: pd.Series) -> Iterator[str]:
    """Yield the words at each place across, from the height there or from columns."""
    columns = means.assign(**{"": heights}).to_dict("records")
    for row in columns:
        named = {str(name): value for name, value in row.items()}
        words = filled(write, named, "plot.panels.write")
        yield "" if "nan" in words or words == NO_RATIO else words


def _reach(values: pd.DataFrame) -> list[pd.Series]:
    """Return the distances of least and most from the mean, which may be off by a rounding."""
    below, above = values["mean"] - values["min"], values["max"] - values["mean"]
    return [below.clip(lower=0), above.clip(lower=0)]


def _draw_lines(axes: Axes, panel: Panel, curves: Sequence[PanelLine], rows: pd.DataFrame) -> None:
    places = _ticks(axes, panel, rows)
    for curve in curves:
        points = curve.points.dropna(subset="mean").sort_index()
        across = [places[value] for value in points.index]
        look: Words = {"color": curve.color, "marker": curve.marker, "ms": 5}
        words = list(points["words"])[1:] if panel.write else []
        name = f"{curve.name}: {', '.join(words)}" if words else curve.name
        whiskers = _reach(points) if "seed" in rows else None
        axes.errorbar(across, points["mean"], whiskers, label=name, capsize=2, **look)
        _mark_paper(axes, points, curve.color, across)
        if points["steady"].notna().any():
            axes.plot(across, points["steady"], ls=":", mfc="white", **look)
    if curves and all(curve.points["mean"].isna().all() for curve in curves):
        axes.text(0.5, 0.5, "does not fit", transform=axes.transAxes, ha="center")


def _mark_paper(axes: Axes, points: pd.DataFrame, color: str, places: Any) -> None:
    """Draw the paper's own values as hollow diamonds, crossed where ours misses."""
    if points["paper"].notna().any():
        for edge, width in (("k", 2.4), (color, 1.4)):
            axes.plot(places, points["paper"], **PAPER_MARK, mec=edge, mew=width, label="_")
        axes.plot(places, points["paper"].where(points["missed"] > 0), **MISS_MARK, label="_")


def _ticks(axes: Axes, panel: Panel, rows: pd.DataFrame) -> Mapping[Any, Any]:
    """Put ticks where values are few, powers of two, or around a default; return their places."""
    values = sorted(_across(panel, rows).dropna().unique())
    places = {value: value for value in values}
    if panel.mark is not None:
        places = {value: place for place, value in enumerate(values)}
        axes.axvline(places[rows[panel.mark].iloc[0]], color="0.6", linestyle=":")
    if panel.log_2:
        axes.set_xscale("log", base=2)
    few = len(values) <= FEW and all(value % 1 == 0 for value in values)
    if panel.mark is not None or panel.log_2 or few:
        axes.set_xticks(list(places.values()), [f"{value:g}" for value in values])
    return places


def _draw_bars(axes: Axes, panel: Panel, curves: Sequence[PanelLine]) -> None:
    """Draw bars side by side, or one on the other: standing, or lying."""
    stacked = panel.kind != "bars"
    room = BAR_WIDTH if stacked or len(curves) == 1 else GROUP_WIDTH / len(curves)
    words = curves[0].points.index
    highest = np.nanmax([curve.points[["max", "paper"]].max() for curve in curves])
    ticks, below = np.arange(len(words)), np.zeros(len(words))
    for index, curve in enumerate(curves):
        heights = curve.points["mean"].to_numpy()
        places = ticks if stacked else ticks + room * (index - (len(curves) - 1) / 2)
        bar = axes.barh if panel.kind == "lying" else axes.bar
        drawn = bar(places, np.nan_to_num(heights), 0.92 * room, below, color=curve.color)
        drawn.set_label(curve.name if heights.any() else "_")
        if stacked:
            below = below + heights
            continue
        for patch, value in zip(drawn, words, strict=True):
            patch.set_alpha(1.0 if panel.strong in (None, value) else PALE)
        _finish_bars(axes, panel, curve, places, highest)
    written = curves[0].points["words"] if stacked and panel.write else ()
    if panel.kind == "lying":
        axes.set_yticks(ticks, [str(value) for value in words])
        axes.set_ylim(len(ticks) - 0.5, -0.5)
        for place, word in enumerate(written):
            axes.text(0.01 * below.max(), place, word, va="center", fontsize=8)
        return
    if len(written):
        axes.bar_label(drawn, list(written), fontsize=7)
    for column, name in panel.levels.items():
        levels = curves[0].rows.groupby(_across(panel, curves[0].rows))[column].mean()
        axes.hlines(levels.reindex(words), ticks - 0.3, ticks + 0.3, color="k", label=name)
    top = max(below.max(), axes.dataLim.ymax)
    axes.set_ylim(0, (1.12 if panel.write else 1.05) * top if top > 0 else None)
    axes.set_xticks(ticks, [str(value) for value in words])


def _finish_bars(axes: Axes, panel: Panel, curve: PanelLine, places: Any, highest: float) -> None:
    """Draw whiskers, the rings of the steady window, what is written over bars, and why not.

    What is written stands above a diamond that would cover it; `highest` is the panel's top.
    """
    values, tops = curve.points, curve.points["max"]
    covered = ((values["paper"] - tops) / highest).between(*COVERED)
    tops = tops.mask(covered, values["paper"] + DIAMOND * highest)
    _mark_paper(axes, values, curve.color, places)
    if "seed" in curve.rows:
        looks: Words = {"fmt": "none", "color": "0.2", "capsize": 2, "lw": 0.9}
        axes.errorbar(places, values["mean"], _reach(values), **looks)
    rings = values["steady"]
    if rings.notna().any():
        axes.plot(places, rings, "o", mfc="white", mec=curve.color, ms=4)
        tops = tops.where(tops > rings, rings + 0.01 * rings.max())
    for x, word, (value, top) in zip(places, values["words"], tops.items(), strict=True):
        if not np.isfinite(top):
            rows = curve.rows[_across(panel, curve.rows) == value]
            axes.text(x, 0, f" {_failure(rows)}", rotation=90, ha="center", va="bottom", fontsize=7)
        elif value != panel.strong:
            axes.annotate(word, (x, top), (0, 2), textcoords="offset points", ha="center",
                          va="bottom", fontsize=7)  # fmt: skip


def _failure(rows: pd.DataFrame) -> str:
    """Return why runs have no value, in a word or two."""
    told = rows.reindex(columns=["error", "status"]).astype(object)
    if any("does not fit" in str(error) for error in told["error"].dropna()):
        return "OOM"
    ends = told["status"].dropna().tolist()
    return str(ends[0]).replace("_", " ") if ends else "not possible"
