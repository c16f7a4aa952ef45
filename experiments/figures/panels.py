"""Pictures as data: which columns of a figure's table stand in which panel, and how they look.

A colour and a marker a system, means with whiskers over seeds. Knows tables and axes, not what a
figure computes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field, model_validator

from evenflow.config.yaml_file import Document, checked
from evenflow.errors import UsageError
from evenflow.experiments.figures.formulas import chosen, evaluated, filled
from evenflow.experiments.figures.schema import MISSED, PAPER, layered
from evenflow.keys import Keys, expect, needed
from evenflow.report.plots import finish
from evenflow.report.style import DECODE, PREFILL

_LOOKS = pd.read_csv(Path(__file__).with_name("looks.csv"), index_col="label", dtype=str)
COLORS: Mapping[str, str] = _LOOKS.colour.to_dict()
MARKERS: Mapping[str, str] = _LOOKS.marker.dropna().to_dict()
"""Looks of the labels that several figures have: of systems, and of parts of an iteration."""
SPARE = ("#2a9d8f", "#b02a37", "#8c6d31", "#5b5b5b", "#e377c2")
"""Colours of labels without one, or with that of another beside them."""
SHORT, TIGHT = 3.0, 1.5
"""The ratios of ends below which a logarithmic axis has a number at each tick, and one more digit.
"""
TITLE_CHARACTERS_PER_INCH, NOTE_CHARACTERS_PER_INCH = 10.5, 15.5
LINE_INCHES = 0.125
MARKS_INCHES = 1.7
"""Across: of the legend of the paper's marks, at the right of the title."""


def colors_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each label: its own, or one that no label before it has."""
    found: dict[str, str] = {}
    spare = iter(SPARE)
    for index, label in enumerate(labels):
        own = COLORS.get(label)
        taken = own is None or own in found.values()
        found[label] = next(spare, f"C{index % 10}") if taken else str(own)
    return found


def decades(axes: Axes) -> None:
    """Give axes a logarithmic y with plain numbers: 1, 2 and 5 of each decade, or every tick."""

    def words(value: float, _: float) -> str:
        low, high = axes.get_ylim()
        digits = 3 if high < TIGHT * low else 2
        shown = high < SHORT * low or f"{value:e}"[0] in "25"
        return f"{float(f'{value:.{digits}g}'):g}" if shown else ""

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(words)


def grid_lines(axes: Iterable[Axes]) -> None:
    """Give axes light lines and no box."""
    for each in axes:
        finish(each)


def fit(figure: Figure, width: float) -> None:
    """Give a figure this width in inches; one that has another keeps its shape."""
    across, high = figure.get_size_inches()
    figure.set_size_inches(width, high * width / across)


def annotate(figure: Figure, title: str, note: str) -> None:
    """Put a title above and a footnote below, in lines as wide as the figure; add their height."""
    across, high = figure.get_size_inches()
    room = across - (2 * MARKS_INCHES if marks_paper(figure) else 0.0)
    above = textwrap.wrap(title, int(room * TITLE_CHARACTERS_PER_INCH), break_on_hyphens=False)
    below = textwrap.wrap(note, int(across * NOTE_CHARACTERS_PER_INCH))
    figure.set_figheight(high + LINE_INCHES * (len(below) + 1.5 * (len(above) - 1)))
    figure.suptitle("\n".join(above), fontsize=11)
    figure.supxlabel("\n".join(below), fontsize=7, color="0.3")


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

Words = Mapping[str, Any]


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
    """What one panel shows: column `x` across, and upwards each column of `y`, with its words.

    A point is a mean over the seeds, with a whisker from least to most. Words may name numbers of
    the study in braces. `x`: several columns are lines of one word. `hue`: columns whose values
    make curves, of a `y` whose words name one of them; `each`: columns whose values make panels.
    `where`: the formula that holds for the rows shown (`formulas`). `also`: the column of the
    steady window by that of the whole run, dotted or as rings. `write`: what stands over a bar,
    `{:.2f}` for its height, or the row's columns by name in braces; over a stack, and in the legend
    of lines for all points but the first, those columns. `strong`: the value of `x` whose bar is
    not pale, and has no words. `line`: a level to compare with, `levels`: columns of a level for
    each bar, by their words, `bands`: ranges by theirs; `mark`: the column that has the default of
    `x`, whose values then stand at equal distance. `log_2`: powers of two across; `decades`: powers
    of ten upwards, with plain numbers. `width` is in inches; `words` are what `each` is called.

    `tokens`, `stages`, `busy` and `kv` show columns of `measures.micro_batches` within the run of
    the first seed, with no `x` and `y`; words may name numbers of the runs, and their `[mean]`,
    `[min]` and `[max]` over the seeds.
    """

    kind: Literal["bars", "stack", "lying", "lines", "tokens", "stages", "busy", "kv"]
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
    `rows`: columns whose values make a row of all panels each, with `title` at its left; or `down`:
    each panel is a row. `let`: columns to draw, by their formulas (`formulas`).
    `common`: keys of all panels. `legend`: one for all, at the right. `share`: the axes, x and y,
    that panels of a column have in common.
    """

    height: Inches = 3.9
    width: Inches | None = None
    panels: list[dict[str, Any]]
    common: dict[str, Any] = Field(default_factory=dict)
    rows: list[str] = Field(default_factory=list)
    title: str = "{}"
    down: bool = False
    share: list[Literal["x", "y"]] = Field(default_factory=list)
    let: dict[str, str] = Field(default_factory=dict)
    legend: LegendKeys | None = None


class PanelLine(NamedTuple):
    """A name, what is at each place across, the rows it is of, and the looks.

    `points` are `mean`, `min` and `max`, the `paper`'s value, whether it is `missed`, that of the
    `steady` window, and the `words` to write there.
    """

    name: str
    points: pd.DataFrame
    rows: pd.DataFrame
    color: str
    marker: str


PAPER_MARK: Words = {"marker": "D", "ls": "", "mfc": (1, 1, 1, 0.7), "ms": 9}
PAPER_WORDS = "paper"
MARKS = (
    "Diamonds are the paper's values, of a ratio times ours; crossed are those that ours misses by "
    "more than 25 %."
)
MISS_MARK: Words = {"marker": "x", "ls": "", "mec": "#c1121f", "mew": 1.6, "ms": 6}

Placed = list[tuple[Panel, pd.DataFrame]]


def draw(plot: Mapping[str, Any], table: pd.DataFrame, numbers: Words) -> Figure:
    """Draw a table as a figure's `plot` says, with the numbers of its study in the words."""
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
    widths = [_width(panel, rows) for panel, rows in max(lines, key=len)]
    size = (keys.width or max(6.0, sum(widths) + beside), keys.height * len(lines))
    figure = Figure(figsize=size, layout="constrained")
    lying = all(panel.kind == "lying" for panel in panels)
    share: Words = {f"share{axis}": "col" for axis in keys.share} or {"sharey": lying}
    grid = figure.subplots(len(lines), len(widths), squeeze=False, width_ratios=widths, **share)
    for row, line in zip(grid, lines, strict=True):
        for axes, (panel, rows) in zip(row, line, strict=False):
            draw_panel(axes, panel, rows, numbers)
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


def marks_paper(figure: Figure) -> bool:
    """Say whether a figure shows values of the paper's."""
    return any(text.get_text() == PAPER_WORDS for one in figure.legends for text in one.get_texts())


def checked_plot(plot: Mapping[str, Any]) -> tuple[Plot, list[Panel]]:
    """Return the keys of a plot and of its panels; UsageError for what is wrong with them."""
    keys = checked(Plot, Document("plot", dict(plot), {}))
    panels = [layered(keys.common, panel) for panel in keys.panels]
    return keys, [checked(Panel, Document("plot.panels", panel, {})) for panel in panels]


def _lines(
    plot: Plot, panels: Sequence[Panel], table: pd.DataFrame, numbers: Words
) -> Iterator[Placed]:
    """Yield the panels of each row of the figure; only the last has words under it."""
    if plot.down:
        for index, panel in enumerate(panels):
            line = list(_panels(panel, table, numbers))
            yield [(_without(each, "title") if index else each, rows) for each, rows in line]
        return
    groups = list(table.groupby(plot.rows, sort=False)) if plot.rows else [((), table)]
    for index, (values, own) in enumerate(groups):
        line = [placed for panel in panels for placed in _panels(panel, own, numbers)]
        if index:
            line = [(panel.model_copy(update={"legend": None}), rows) for panel, rows in line]
        if index < len(groups) - 1:
            line = [(_without(panel, "xlabel"), rows) for panel, rows in line]
        if plot.rows:
            first, rows = line[0]
            title = _titled(plot.title, plot.rows, values)
            line[0] = _with_axes(first, {"title": title}), rows
        yield line


def _without(panel: Panel, word: str) -> Panel:
    return _with_axes(panel, {word: None})


def _with_axes(panel: Panel, words: Words) -> Panel:
    return panel.model_copy(update={"axes": panel.axes.model_copy(update=dict(words))})


def _titled(title: str, columns: Sequence[str], values: Sequence[Any]) -> str:
    """Return a title with the values of columns in it: by their names, or all for {}."""
    joined = title.replace("{}", ", ".join(map(str, values)))
    for name, value in zip(columns, values, strict=True):
        joined = joined.replace(
            f"{{{name}}}", f"{value:g}" if isinstance(value, float) else str(value)
        )
    return joined


def _panels(
    panel: Panel, table: pd.DataFrame, numbers: Words
) -> Iterator[tuple[Panel, pd.DataFrame]]:
    """Yield a panel with its rows, or one for each value of its `each`, of which it is the title.

    Only the first of several has a legend, and words beside its axis.
    """
    where = panel.where
    rows = chosen(where, table, numbers, "plot.panels.where") if where else table
    each = [panel.each] if isinstance(panel.each, str) else panel.each
    if not each:
        yield panel, rows
        return
    words = panel.axes.model_dump(include={"title", "xlabel"}, exclude_none=True)
    words = {name: text for name, text in words.items() if "{" in text} or {"title": "{}"}
    for index, (values, own) in enumerate(rows.groupby(each, sort=False)):
        shown = [panel.words.get(str(value), value) for value in values]
        named = {name: _titled(text, each, shown) for name, text in words.items()}
        legend = panel.legend if (panel.kind == "lines" and panel.write) or not index else None
        titled = _with_axes(panel, named | ({"ylabel": None} if index else {}))
        yield titled.model_copy(update={"legend": legend}), own


def _width(panel: Panel, rows: pd.DataFrame) -> float:
    """Return the width in inches: as given, or as bars and the words under them need."""
    if panel.kind != "bars":
        return panel.width
    groups = _across(panel, rows).unique()
    bars = len(groups) * len(panel.y) * rows.groupby(panel.hue).ngroups if panel.hue else 1
    letters = sum(max(len(line) for line in str(word).split("\n")) + 2 for word in groups)
    room = 0.34 if panel.write else 0.22
    return max(panel.width, room * bars + 0.8, 0.09 * letters)


def draw_panel(axes: Axes, panel: Panel, rows: pd.DataFrame, numbers: Words) -> None:
    """Draw rows on axes as the panel says."""
    if panel.kind in WITHIN:
        numbers = _draw_within(axes, panel, rows, numbers)
    elif panel.kind == "lines":
        _draw_lines(axes, panel, list(_curves(panel, rows, numbers)), rows)
    else:
        _draw_bars(axes, panel, list(_curves(panel, rows, numbers)))
    if panel.line is not None:
        axes.axhline(panel.line, color="0.4", lw=0.8)
    for words, (low, high) in panel.bands.items():
        axes.axhspan(low, high, color="0.3", alpha=0.10, lw=0)
        axes.annotate(words, (1, (low + high) / 2), (4, 0), textcoords="offset points",
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
        words = filled(write, row, "plot.panels.write")
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


Run = Mapping[str, Any]
"""A row of a table of runs."""

NUMBERED = 20
"""The most micro-batches that get numbers."""


def _draw_within(axes: Axes, panel: Panel, rows: pd.DataFrame, numbers: Words) -> Words:
    """Draw the run of the first seed; return words on all of them, and the study's."""
    first = {str(name): value for name, value in rows.iloc[0].items()}
    WITHIN[panel.kind](axes, first, numbers)
    spread: dict[Any, Any] = rows.select_dtypes("number").agg(["mean", "min", "max"]).to_dict()
    return {**numbers, **first, **spread, "seeds": len(rows)}


def _draw_tokens(axes: Axes, run: Run, numbers: Words) -> None:
    """Tokens of micro-batches, by phase if the figure has `parts`; of few also in numbers."""
    decode, prefill = np.array(run["decode_tokens"]), np.array(run["prefill_tokens"])
    total, places = prefill + decode, np.arange(len(decode))
    edges = np.append(places, len(places)) - 0.5
    if len(total) <= NUMBERED:
        axes.bar(places, decode, color=DECODE, label="decode")
        tops = axes.bar(places, prefill, bottom=decode, color=PREFILL, label="prefill")
        axes.bar_label(tops, [str(tokens) for tokens in total], padding=2, fontsize=8)
        axes.set_xticks(places, [str(batch) for batch in run["batch"]])
    elif numbers.get("parts", True):
        axes.stairs(decode, edges, baseline=0, fill=True, color=DECODE, label="decode")
        axes.stairs(total, edges, baseline=decode, fill=True, color=PREFILL, label="prefill")
    else:
        axes.stairs(total, edges, color=COLORS.get(run["system"], "0.3"), linewidth=1.2)
    axes.margins(x=0)
    axes.set(ylabel="tokens", ylim=(0, max(1.15 * total.max(), axes.get_ylim()[1])))


def _draw_stages(axes: Axes, run: Run, numbers: Words) -> None:
    """When each stage computes each micro-batch, which its number names."""
    begin_s = run["start_s"][0][0]
    for batch, prefill, starts_s, ends_s in zip(
        run["batch"], run["prefill_tokens"], run["start_s"], run["end_s"], strict=True
    ):
        color = PREFILL if prefill else DECODE
        for stage, (start_s, end_s) in enumerate(zip(starts_s, ends_s, strict=True)):
            left_s, width_s = start_s - begin_s, end_s - start_s
            axes.barh(stage, width_s, 0.8, left_s, color=color, edgecolor="white")
            middle_s = left_s + width_s / 2
            axes.text(middle_s, stage, str(batch), ha="center", va="center", fontsize=7)
    depth = len(run["start_s"][0])
    axes.set(ylabel="stage", yticks=range(depth), ylim=(depth - 0.5, -0.5))
    axes.margins(x=0)


def _draw_busy(axes: Axes, run: Run, numbers: Words) -> None:
    """How busy the stages are over the time shown, and in the whole run."""
    edges = np.array(run["time_s"]) - run["time_s"][0]
    edges = np.append(edges, edges[-1] + edges[1])
    color = COLORS.get(run["system"], "0.5")
    axes.stairs(100 * np.array(run["busy"]), edges, fill=True, color=color, alpha=0.6)
    axes.axhline(100 * run["busy_share"], color="0.2", linewidth=0.8, linestyle="--")
    axes.set(ylabel="stages busy (%)", ylim=(0, 104))
    axes.margins(x=0)


def _draw_kv(axes: Axes, run: Run, numbers: Words) -> None:
    used, prefill = 100 * np.array(run["used"]), np.array(run["prefill_tokens"]) > 0
    edges = np.arange(len(used) + 1) - 0.5
    axes.stairs(used, edges, fill=True, color=DECODE, label="decode")
    # A phase of few micro-batches is narrower than a pixel: its outline keeps it visible.
    axes.stairs(
        np.where(prefill, used, 0), edges, fill=True, color=PREFILL, linewidth=0.8,
        label="prefill",
    )  # fmt: skip
    axes.plot(used, color="0.25", linewidth=0.8)
    axes.set(xlim=(0, len(used) - 1), ylim=(0, 104), ylabel="KV in use (%)")


WITHIN: Mapping[str, Callable[[Axes, Run, Words], None]] = {
    "tokens": _draw_tokens,
    "stages": _draw_stages,
    "busy": _draw_busy,
    "kv": _draw_kv,
}
