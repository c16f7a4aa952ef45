"""The one place that draws with matplotlib: how our pictures look, and how they are saved.

`panels` gives a figure and its axes, `finish` and `key` their look, `save` writes it: equal figures
give equal bytes.

Colours are those of `evenflow.report.style`. Import it late: it loads matplotlib.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from evenflow.errors import UsageError
from evenflow.report.data import shares, steady
from evenflow.report.style import DECODE, FORMATS, GRID, PARTS, PREFILL, colour
from evenflow.report.words import LEAST_SHARE, cause_label
from evenflow.results.bubbles import CAUSES
from evenflow.results.outcome import Outcome

DOTS_PER_INCH = 150
MARKS = "os^Dvp*"
SHOWN_BATCHES = 250
WORDS_INCHES = 0.45
"""Below axes: the numbers of their ticks, and a line of words."""


def panels(
    count: int, width: float, height: float, *, columns: int | None = None, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its `count` axes, row by row; each `width` x `height` inches.

    `columns` axes in a row, all where None. More arguments go to matplotlib's `subplots`.
    """
    across = min(count, columns or count)
    down = math.ceil(count / across)
    size = across * width, down * height
    figure = Figure(size, dpi=DOTS_PER_INCH, layout="constrained")
    cells = list(figure.subplots(down, across, squeeze=False, **subplots).flat)
    for spare in cells[count:]:
        spare.set_visible(False)
    return figure, cells[:count]


def finish(axes: Axes, title: str = "", *, grid: Literal["both", "x", "y", ""] = "both") -> None:
    """Give axes their title at the left, light lines behind what is drawn, and no box."""
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def key(axes: Axes, **where: Any) -> None:
    """Give axes a plain legend, if there is something to name; `where` goes to matplotlib's.

    Without it the legend is below the axes and their words, where it covers nothing.
    """
    if axes.get_legend_handles_labels()[0]:
        below = axes.transAxes + ScaledTranslation(0, -WORDS_INCHES, axes.figure.dpi_scale_trans)
        place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
        axes.legend(**{"frameon": False, "fontsize": 8, **(where or place)})


def plain_decades(axis: Axis) -> None:
    """Give a logarithmic axis plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def whiskers(
    axes: Axes, x: Any, mean: Any, reach: Any, index: int, *, joined: bool = True, **more: Any
) -> None:
    """Draw means and how far they reach, one number both ways or a pair; NaN: no whisker.

    The position `index` of the series gives colour and mark; `more` goes to matplotlib's errorbar.
    """
    mark = MARKS[index % len(MARKS)]
    look = {"color": colour(index), "markersize": 4.5, "linewidth": 1.4, "capsize": 2.5}
    axes.errorbar(
        list(x),
        mean,
        np.nan_to_num(np.asarray(reach, dtype=float)),
        fmt=f"{mark}-" if joined else mark,
        elinewidth=1.0,
        **{**look, **more},
    )


def front(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    best: Sequence[int],
    default: Collection[int] = (),
) -> None:
    """Draw points (x, y); in colour those at the positions `best` on the Pareto front, in order."""
    at = np.asarray(points, dtype=float).reshape(-1, 2)
    axes.plot(*at.T, "o", color="0.8", markersize=5, label="all points")
    axes.plot(*at[list(best)].T, "o", color=colour(0), label="Pareto front")
    if default:
        axes.plot(*at[list(default)].T, "D", color=colour(1), label="default", zorder=3)
    for axis, values in ((axes.xaxis, at[:, 0]), (axes.yaxis, at[:, 1])):
        if len(values) and values.min() > 0 and values.max() > 10 * values.min():
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            plain_decades(axis)
    finish(axes)
    key(axes)


def stage_time(axes: Axes, runs: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a horizontal bar a run: percents of its stage time `computing`, and idle by cause.

    Values are times or shares; each bar is a whole.
    """
    columns = {part: np.array([own[part] for own in runs.values()]) for part in PARTS}
    total = sum(columns.values())
    so_far = np.zeros(len(runs))
    for part, shade in PARTS.items():
        share = 100 * columns[part] / total
        label = cause_label(part) if share.max() > 100 * LEAST_SHARE else None
        axes.barh(list(runs), share, 0.55, left=so_far, color=shade, label=label)
        so_far += share
    axes.set_xlim(0, 100)


def draw_comparison(runs: Mapping[str, Outcome]) -> Figure:
    """Return a row a run: tokens of consecutive micro-batches, and shares of stage time."""
    figure, cells = panels(2 * len(runs), 5, 1.35 + 1 / len(runs), columns=2, width_ratios=[2.6, 1])
    shown: set[str] = set()
    for (name, run), tokens, time in zip(runs.items(), cells[::2], cells[1::2], strict=True):
        _draw_tokens(tokens, name, run)
        parts = shares(run)
        busy = parts["computing"]
        stage_time(time, {name: parts})
        time.text(50 * busy, 0, f"{100 * busy:.0f} %", ha="center", va="center", fontsize=10)
        time.set(ylim=(-0.6, 0.6), yticks=[])
        finish(time, grid="")
        time.spines["left"].set_visible(False)
        shown |= {cause for cause in CAUSES if parts[cause] > LEAST_SHARE}
    top = max(axes.get_ylim()[1] for axes in cells[::2])
    for axes in cells[::2]:
        axes.set_ylim(0, top)
    for axes in cells[:-2]:
        axes.tick_params(labelbottom=False)
    cells[-2].set_xlabel(f"{SHOWN_BATCHES} consecutive micro-batches of the steady state")
    cells[-1].set_xlabel("share of stage time (%)")
    finish(cells[0], "Tokens in each micro-batch", grid="")
    finish(cells[1], "Computing, and idle by cause", grid="")
    colours = {"prefill tokens": PREFILL, "decode tokens": DECODE, "computing": PARTS["computing"]}
    colours |= {cause_label(cause): PARTS[cause] for cause in CAUSES if cause in shown}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_tokens(axes: Axes, name: str, run: Outcome) -> None:
    shown = steady(run, SHOWN_BATCHES)
    decode, prefill = run.result.decode_tokens[shown], run.result.prefill_tokens[shown]
    at = np.arange(len(decode))
    axes.bar(at, decode, width=1.0, color=DECODE)
    axes.bar(at, prefill, width=1.0, bottom=decode, color=PREFILL)
    axes.set(xlim=(-0.5, len(at) - 0.5), ylabel="tokens")
    axes.margins(y=0.25)
    axes.text(0.01, 0.95, name, transform=axes.transAxes, va="top", weight="bold", fontsize=10)
    finish(axes, grid="")


def save(figure: Figure, path: Path, formats: Collection[str] = ("png", "svg")) -> str:
    """Write a figure as `path`.FORMAT for some of FORMATS, return its SVG; equal figures, equal
    bytes. Raises UsageError for a figure too narrow for its words.
    """
    with _laid_out(figure, path.name), mpl.rc_context({"pdf.fonttype": 42}):
        for kind in ("png", "pdf"):
            if kind in formats:
                file, metadata = path.with_name(f"{path.name}.{kind}"), FORMATS[kind]
                figure.savefig(file, dpi=DOTS_PER_INCH, metadata=dict(metadata))
        drawn = _svg(figure, path.name)
    if "svg" in formats:
        path.with_name(f"{path.name}.svg").write_text(drawn, encoding="utf-8")
    return drawn


def svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG, with text that stays text; `name` makes its ids unlike another's."""
    with _laid_out(figure, name):
        return _svg(figure, name)


@contextmanager
def _laid_out(figure: Figure, name: str) -> Iterator[None]:
    """Lay a figure out as for its PNG, once: each `savefig` would draw it once more for that."""
    engine, dpi, figure.dpi = figure.get_layout_engine(), figure.dpi, DOTS_PER_INCH
    _as_words(figure)
    with warnings.catch_warnings(), mpl.rc_context({"figure.autolayout": False}):
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the font lacks is an empty box
        warnings.filterwarnings("error", "constrained_layout not applied")
        try:
            if engine is not None:
                engine.execute(figure)
            figure.set_layout_engine(None)
            yield
        except UserWarning:
            across = f"{figure.get_figwidth():g}"
            raise UsageError(
                f"{name}: {across} inches are too narrow for it; a wider figure is right"
            ) from None
        finally:
            figure.set_layout_engine(engine)
            figure.dpi = dpi


def _svg(figure: Figure, name: str) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _as_words(figure: Figure) -> None:
    """Draw dollars in labels as they are: only the numbers of logarithmic axes are mathematics."""
    for axes in figure.axes:
        axes.get_xticklabels()  # which gives the ticks their labels
        axes.get_yticklabels()
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if "$" in (words := text.get_text()) and r"\mathdefault" not in words:
            text.set_parse_math(False)
