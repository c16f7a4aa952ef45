"""Many points in many columns as one figure: parallel coordinates. Does not know what they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from experiments.report.style import NEUTRAL, Drawing, colour, faint
from experiments.report.tables import is_number, number

Column = Sequence[float | str]
SPREAD = 10
"""A column of numbers that spans more than this factor stands on a logarithmic axis."""


def parallel(columns: Mapping[str, Column], names: Sequence[str], best: Collection[int]) -> Any:
    """Draw a line a point across an upright axis a column; those at the positions `best` in colour.

    NaN breaks a line.
    """
    drawing = Drawing(380, hovermode="closest", margin={"l": 30, "r": 70})
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
                "text": [f" {escape(word)}" for word in ticks],
                "textposition": "middle right",
                "textfont": {"size": 11},
                "cliponaxis": False,
            }
        )
    wrapped = [escape(name).replace(" (", "<br>(") for name in columns]
    drawing.axis("x", tickvals=list(range(len(wrapped))), ticktext=wrapped, automargin=True)
    drawing.axis("y", visible=False, range=[-0.05, 1.05])
    return drawing.figure


def in_words(value: float | str) -> str:
    """Return a value as the figure tells it."""
    return number(float(value)) if is_number(value) else str(value)


def _axis(column: Column) -> tuple[list[float | None], dict[str, float]]:
    """Return where each value stands, from 0 to 1 (None: nowhere), and the words at the places."""
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
