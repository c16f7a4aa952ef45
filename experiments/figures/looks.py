"""Looks of figures: colours of labels, logarithmic axes, title and footnote, the paper's marks.

Knows no table and no panel. matplotlib is loaded when something is drawn.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow.errors import UsageError, instead_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Words = Mapping[str, Any]

_TEXT = Path(__file__).with_name("looks.csv").read_text(encoding="utf-8")
_LOOKS = list(csv.DictReader(_TEXT.splitlines()))
COLORS: Mapping[str, str] = {look["label"]: look["colour"] for look in _LOOKS}
MARKERS = {look["label"]: look["marker"] for look in _LOOKS if look["marker"]}
"""Looks of the labels that several figures have: of systems, and of parts of an iteration."""
SPARE = ("#2a9d8f", "#b02a37", "#8c6d31", "#5b5b5b", "#e377c2")
"""Colours of labels without one, or with that of another beside them."""
SHORT, TIGHT = 3.0, 1.5
"""Ratios of ends below which a logarithmic axis numbers each tick, and adds a digit."""
TITLE_CHARACTERS_PER_INCH, NOTE_CHARACTERS_PER_INCH = 10.5, 15.5
LINE_INCHES = 0.125
MARKS_INCHES = 1.7
"""Across: of the legend of the paper's marks, at the right of the title."""

PAPER_MARK: Words = {"marker": "D", "ls": "", "mfc": (1, 1, 1, 0.7), "ms": 9}
PAPER_WORDS = "paper"
MARKS = (
    "Diamonds are the paper's values, of a ratio times ours; crossed are those that ours misses by "
    "more than 25 %."
)
MISS_MARK: Words = {"marker": "x", "ls": "", "mec": "#c1121f", "mew": 1.6, "ms": 6}


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
    from evenflow.report.plots import finish

    for each in axes:
        finish(each)


@contextmanager
def styled(name: str | None) -> Iterator[None]:
    """Draw in a style of matplotlib, a name or a file; UsageError for one that is not there."""
    with ExitStack() as stack:
        if name is not None:
            from matplotlib import style

            try:
                stack.enter_context(style.context(name))
            except OSError:
                known = instead_of(name, style.available)
                raise UsageError(f"--style {name}: no such style, nor a file; {known}") from None
        yield


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


def marks_paper(figure: Figure) -> bool:
    return any(text.get_text() == PAPER_WORDS for one in figure.legends for text in one.get_texts())
