"""The frame of every HTML report, and the figures on it; equal input, equal bytes.

A page needs nothing else. A figure is a plain Plotly dict, so that no plotting library is needed to
make one. Knows no run and no sweep.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.report.shown import Table
from evenflow.report.style import DECODE, GRID, NEUTRAL, PARTS, PREFILL, colour, dash, faint
from evenflow.report.tables import html_table, is_number, number
from evenflow.report.words import cause_label, meaning

Figure = dict[str, Any]


def _theme(text: str, grid: str, line: str) -> Figure:
    axis = {
        "gridcolor": grid,
        "linecolor": line,
        "tickcolor": line,
        "zeroline": False,
        "ticks": "outside",
        "exponentformat": "none",
        "separatethousands": True,
    }
    family = "system-ui, Segoe UI, Helvetica, Arial, sans-serif"
    return {
        "font": {"family": family, "size": 13, "color": text},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": text},
        "xaxis": axis,
        "yaxis": axis,
    }


THEMES = (_theme("#1F2933", GRID, "#9AA5B1"), _theme("#D5DAE1", "#2B323B", "#6B7785"))
"""What Plotly's layouts are made of where the reader's system is light, and where it is dark."""


def page(
    title: str, parts: Sequence[str], provenance: Mapping[str, Any], plotly_js: str = ""
) -> str:
    """Return a page as HTML: the title, its parts, the provenance.

    With Plotly's library inside, where a part is a `figure`; a `picture` needs none. Figures are
    drawn when all has its place, in colours that follow the reader's system.
    """
    draw = plotly_js and f"{plotly_js}\n{scripts()}"
    facts = json.dumps(provenance, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    told = f"<pre>{escape(facts)}</pre></details>"
    body = [
        f"<h1>{escape(title)}</h1>",
        *parts,
        f"<details><summary>Configuration and provenance</summary>{told}",
    ]
    return document(title, f"{draw}\n{_beside('sort.js')}", "\n".join(body))


def document(title: str, script: str, body: str) -> str:
    """Return an HTML document with our stylesheet and a script inside."""
    text = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}'
        f"</title>\n<style>\n{_beside('page.css')}</style>\n"
        f"<script>{script}</script></head>\n<body>\n{body}\n</body></html>\n"
    )
    return text.encode("utf-8", "backslashreplace").decode()  # of names that are not UTF-8


def section(heading: str, caption: str | None = None, **values: object) -> str:
    """Return a heading with a caption, by default what captions.csv has, filled with `values`."""
    caption = _captions()[heading].format(**values) if caption is None else caption
    return f'<h2>{heading}</h2>\n<p class="caption">{caption}</p>'


@cache
def _captions() -> dict[str, str]:
    rows = csv.DictReader(_beside("captions.csv").splitlines())
    return {row["heading"]: row["caption"] for row in rows}


@dataclass(frozen=True, slots=True)
class Addition:
    """A table added to a run's numbers: rows under heads, and a sentence on their basis.

    `write` writes it into a folder, as a table.
    """

    heading: str
    sentence: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    write: Callable[[Path], None]

    def told(self) -> Iterator[str | Table]:
        """Yield the table and the sentence as a terminal shows them."""
        yield Table(self.heads, self.rows)
        yield self.sentence

    @property
    def html(self) -> str:
        """The section for a run's page."""
        return section(self.heading, self.sentence) + html_table(self.heads, self.rows)


def figure(name: str, drawn: Figure, head: str = "") -> str:
    """Return an element with the id `name`, and the script that draws a figure in it.

    `head`: HTML to stand over it. A fixed id and an escaped "<" keep the page deterministic and
    whole.
    """
    text = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    over = f'<p class="head">{head}</p>' if head else ""
    return f'<div>{over}<div id="{name}"></div>\n<script>draw("{name}",{text})</script></div>'


def scripts() -> str:
    """Return the scripts that draw figures and timelines."""
    look = {
        "parts": [[cause_label(part), shade, meaning(part)] for part, shade in PARTS.items()],
        "prefill": PREFILL,
        "decode": DECODE,
    }
    drawing = _beside("draw.js").replace("THEMES", json.dumps(THEMES, separators=(",", ":")))
    return drawing + _beside("timeline.js").replace("LOOK", json.dumps(look))


def timeline(name: str, data: Mapping[str, Any], head: str) -> str:
    """Return an element with the id `name`, and the script that draws a timeline in it.

    `data` is made by `segments.timeline_data`, `head` is HTML over it.
    """
    text = json.dumps(data, separators=(",", ":"))
    return (
        f'<div><p class="head">{head}</p><div id="{name}" class="timeline"></div>\n'
        f'<script>timelines.push(["{name}",{text}])</script></div>'
    )


def picture(svg: str) -> str:
    """Return a drawing as part of a page, as `plots.svg` makes it."""
    return f'<div class="picture">{svg[svg.index("<svg") :]}</div>'


def plotly_library() -> str:
    """Return Plotly's script: its own smaller build, of which the file beside says the source."""
    return _beside("plotly-basic.min.js")


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def compact(values: Any, digits: int = 5) -> list[float]:
    """Return numbers rounded to `digits` significant digits, to keep the page light."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values).tolist()]


class PlotlyFigure:
    """A Plotly figure of one panel as it grows, `height` pixels high and as wide as its place.

    `keys` go into Plotly's layout.
    """

    def __init__(self, height: int, **keys: Any) -> None:
        self.data: list[Figure] = []
        margin = {"l": 72, "r": 20, "t": 12, "b": 46}
        self.layout: Figure = {"height": height, "margin": margin, "showlegend": False}
        self.set(**keys)

    @property
    def figure(self) -> Figure:
        return {"data": self.data, "layout": self.layout}

    def set(self, **keys: Any) -> None:
        """Change keys of the layout; what is a mapping there keeps its other keys."""
        for key, value in keys.items():
            old = self.layout.get(key)
            self.layout[key] = old | value if isinstance(old, dict) else value

    def axis(self, letter: str, title: str | None = None, **keys: Any) -> None:
        """Change keys of an axis, "x" or "y", and its title."""
        titled = {} if title is None else {"title": {"text": title}}
        self.set(**{f"{letter}axis": titled | keys})

    def limit(self, x: float, words: str) -> None:
        """Draw an upright line at `x` that the words at its top name."""
        look = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        line = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": look}
        log = self.layout.get("xaxis", {}).get("type") == "log"
        place = {"x": math.log10(x) if log else x, "yref": "paper", "y": 1, "yanchor": "bottom"}
        note = {**place, "text": words, "showarrow": False, "font": {"size": 11}}
        self.set(shapes=[line], annotations=[note], margin={"t": 24})

    def line(self, name: str, index: int, x: Any, y: Any, **trace: Any) -> None:
        """Draw the line of the run at position `index`."""
        look = {
            "line": {"color": colour(index), "width": 2, "dash": dash(index)},
            "hovertemplate": "%{x:.4g}, %{y:.4g}<extra>" + escape(name) + "</extra>",
        }
        points = {"x": compact(x), "y": compact(y)}
        self.data.append(
            {"type": "scatter", "mode": "lines", "name": escape(name), **points, **look, **trace}
        )

    def bars(self, name: str, shade: str, x: list[Any], y: list[Any], **trace: Any) -> None:
        marker = {"color": shade, "line": {"width": 0}}
        self.data.append({"type": "bar", "name": name, "x": x, "y": y, "marker": marker, **trace})


Column = Sequence[float | str]
SPREAD = 10
"""A column of numbers that spans more than this factor stands on a logarithmic axis."""


def parallel(columns: Mapping[str, Column], names: Sequence[str], best: Collection[int]) -> Any:
    """Draw a line a point across an upright axis a column; those at the positions `best` in colour.

    NaN breaks a line. An axis' ends have their values above and below, where no line crosses them.
    """
    drawing = PlotlyFigure(380, hovermode="closest", margin={"l": 50, "r": 50})
    ends = {0.0: "bottom center", 1.0: "top center"}
    places, marks = zip(*map(_axis, columns.values()), strict=True)
    order = [*(i for i in range(len(names)) if i not in best), *best]
    for index in order:
        told = ", ".join(f"{k} {in_words(v[index])}" for k, v in columns.items())
        look = (
            {"color": colour(0), "width": 2.5} if index in best else {"color": faint(NEUTRAL, 0.5)}
        )
        line = [place[index] for place in places]
        drawing.data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "line": look,
                "marker": {"size": 4},
                "x": list(range(len(line))),
                "y": line,
                "name": escape(names[index]),
                "hovertemplate": f"{escape(told)}<extra>{escape(names[index])}</extra>",
            }
        )
    for at, ticks in enumerate(marks):
        drawing.data.append(
            {
                "type": "scatter",
                "mode": "text",
                "hoverinfo": "skip",
                "x": [at] * len(ticks),
                "y": list(ticks.values()),
                "text": list(map(escape, ticks)),
                "textposition": [ends.get(place, "middle right") for place in ticks.values()],
                "textfont": {"size": 11},
                "cliponaxis": False,
            }
        )
    wrapped = [escape(name).replace(" (", "<br>(") for name in columns]
    drawing.axis(
        "x",
        tickvals=list(range(len(wrapped))),
        ticktext=wrapped,
        autotickangles=[0, 90],
        automargin=True,
    )
    drawing.axis("y", visible=False, range=[-0.1, 1.1])
    return drawing.figure


def in_words(value: float | str) -> str:
    """Return a value as text of the figure."""
    return number(float(value)) if is_number(value) else str(value)


def _axis(column: Column) -> tuple[list[float | None], dict[str, float]]:
    """Return the position of each value, from 0 to 1 (None: not drawn), and of each label."""
    if all(is_number(value) for value in column):
        numbers = [float(value) for value in column]
        known = [value for value in numbers if math.isfinite(value)] or [0.0]
        low, high = min(known), max(known)
        scale = math.log if low > 0 and high > SPREAD * low else float
        bottom, length = scale(low), scale(high) - scale(low)
        places = [
            (scale(v) - bottom) / (length or 1) if math.isfinite(v) else None for v in numbers
        ]
        return places, {number(low): 0.0, **({number(high): 1.0} if length else {})}
    words = list(dict.fromkeys(map(str, column)))
    at = {word: index / max(len(words) - 1, 1) for index, word in enumerate(words)}
    return [at[str(value)] for value in column], at
