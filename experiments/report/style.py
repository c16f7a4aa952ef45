"""How the report's figures look: colours that stay the same from figure to figure, axes, lines.

A figure is a plain Plotly dict, so that no plotting library is needed to make one. The colours are
chosen by search to be told apart by the colour-blind, on white and on the dark page, as
`tests/test_palette.py` measures. Does not know what is drawn.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

import numpy as np

Figure = dict[str, Any]

WIDTH = 1000
"""Of the page, in pixels; figures are as wide as their place."""

PREFILL, DECODE, BUSY, GRID = "#E69F00", "#56B4E9", "#D5DAE1", "#E9ECF0"
SCHEDULER_COLOURS = ("#0072B2", "#D55E00", "#8BD18B", "#74465D", "#A2B9FF", "#A22E2E", "#8B8B8B")
CAUSE_COLOURS = {
    "fill_drain": "#A28B74",
    "starvation": "#8BE8A2",
    "kv_limited": "#D174A2",
    "policy": "#46005D",
    "uneven_prefill": "#002E00",
    "prefill_decode": "#0000FF",
    "uneven_decode": "#2E74FF",
    "uneven_stages": "#747400",
    "link": "#5D5D46",
    "cpu": "#8B4674",
}
DASHES = ("0", "9px,4px", "3px,3px", "9px,3px,2px,3px", "16px,4px", "6px,2px", "2px,6px")
NEUTRAL = "#7B8794"
PARTS = {"computing": BUSY, **CAUSE_COLOURS}
"""What the time of a stage goes to, and its colour."""


def compact(values: Any, digits: int = 5) -> list[float]:
    """Return numbers rounded to `digits` significant digits, to keep the page light."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values).tolist()]


def colour(index: int) -> str:
    """Return the colour of the run at position `index`."""
    return SCHEDULER_COLOURS[index % len(SCHEDULER_COLOURS)]


def dash(index: int) -> str:
    """Return the dashes of its line, as Plotly and SVG take them: a colour is never all."""
    return DASHES[index % len(DASHES)]


def blend(share: float) -> str:
    """Return the colour between DECODE (0) and PREFILL (1) for a share of prefill tokens."""
    ends = [[int(end[at : at + 2], 16) for at in (1, 3, 5)] for end in (DECODE, PREFILL)]
    mixed = (round(low + share * (high - low)) for low, high in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def faint(solid: str, share: float = 0.15) -> str:
    """Return a colour `#RRGGBB` made transparent but for a share, by default nearly."""
    red, green, blue = (int(solid[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


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


class Drawing:
    """A Plotly figure of one panel as it grows, `height` pixels high and as wide as its place.

    `keys` go into Plotly's layout.
    """

    def __init__(self, height: int, **keys: Any) -> None:
        self.data: list[Figure] = []
        margin = {"l": 72, "r": 12, "t": 12, "b": 46}
        self.layout: Figure = {"height": height, "margin": margin, "showlegend": False}
        self.set(**keys)

    @property
    def figure(self) -> Figure:
        """What Plotly draws."""
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

    def level(self, y: Any, edges: Any, shade: str) -> None:
        """Draw a step curve between equal edges, and fill from the one before in a colour.

        Heights are whole numbers, to keep the page light.
        """
        line = {"width": 0, "shape": "hv"}
        steps = {"x0": float(edges[0]), "dx": float(edges[1] - edges[0]), "line": line}
        fill = {"fill": "tonexty", "fillcolor": shade} if shade else {}
        values = np.append(y, y[-1:]).round().astype(int).tolist()
        self.data.append({"type": "scatter", "mode": "lines", "y": values, **steps, **fill})

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

    def bars(
        self,
        name: str,
        shade: str | list[float],
        x: list[Any],
        y: list[Any],
        *,
        edge: float = 0,
        **trace: Any,
    ) -> None:
        """Draw bars of a colour, or from DECODE (0) to PREFILL (1); `edge`: its width in white."""
        white = {"color": "white"} if edge else {}
        scale = {"colorscale": [[0, DECODE], [1, PREFILL]], "cmin": 0, "cmax": 1}
        ramp = {} if isinstance(shade, str) else scale
        marker = {"color": shade, **ramp, "line": {"width": edge, **white}}
        self.data.append({"type": "bar", "name": name, "x": x, "y": y, "marker": marker, **trace})
