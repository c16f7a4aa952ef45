"""How the report's figures look: colours that stay the same from figure to figure, axes, lines.

A figure is a plain Plotly dict, so that no plotting library is needed to make one. The colours are
chosen to be told apart by the colour-blind. Does not know what is drawn.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

Figure = dict[str, Any]

WIDTH = 1000
PREFILL, DECODE, BUSY, GRID = "#E69F00", "#56B4E9", "#DDE3EA", "#E9ECF0"
SCHEDULER_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#8C6D1F", "#7F7F7F")
CAUSE_COLOURS = {
    "fill_drain": "#BBBBBB",
    "starvation": "#DDCC77",
    "kv_limited": "#CC6677",
    "policy": "#882255",
    "uneven_prefill": "#117733",
    "prefill_decode": "#332288",
    "uneven_decode": "#44AA99",
    "uneven_stages": "#999933",
    "link": "#555555",
    "cpu": "#AA4499",
}
PARTS = {"computing": BUSY, **CAUSE_COLOURS}
"""What the time of a stage goes to, and its colour."""


def compact(values: Any, digits: int = 5) -> list[float]:
    """Return numbers rounded to `digits` significant digits, to keep the page light."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values).tolist()]


def colour(index: int) -> str:
    """Return the colour of the run at position `index`."""
    return SCHEDULER_COLOURS[index % len(SCHEDULER_COLOURS)]


def blend(share: float) -> str:
    """Return the colour between DECODE (0) and PREFILL (1) for a share of prefill tokens."""
    ends = [[int(end[at : at + 2], 16) for at in (1, 3, 5)] for end in (DECODE, PREFILL)]
    mixed = (round(low + share * (high - low)) for low, high in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def faint(solid: str) -> str:
    """Return a colour `#RRGGBB` made nearly transparent."""
    red, green, blue = (int(solid[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


AXIS: Figure = {
    "gridcolor": GRID,
    "linecolor": "#9AA5B1",
    "zeroline": False,
    "ticks": "outside",
    "exponentformat": "none",
    "separatethousands": True,
}
LAYOUT: Figure = {
    "width": WIDTH,
    "margin": {"l": 75, "r": 20, "t": 62, "b": 50},
    "font": {"family": "system-ui, Segoe UI, Helvetica, Arial, sans-serif", "size": 13},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "legend": {
        "orientation": "h",
        "x": 0,
        "y": 1.02,
        "yanchor": "bottom",
        "bgcolor": "rgba(0,0,0,0)",
    },
}


class Drawing:
    """A Plotly figure as it grows: rows x columns of panels, counted row by row from 1.

    It is plain and white, `height` pixels high; `keys` go into Plotly's layout.
    """

    def __init__(self, height: int, rows: int = 1, columns: int = 1, **keys: Any) -> None:
        grid = {"rows": rows, "columns": columns, "pattern": "independent", "xgap": 0.12}
        axes = {f"{x}axis{_number(i)}": AXIS for i in range(1, rows * columns + 1) for x in "xy"}
        self.data: list[Figure] = []
        self.layout = {**LAYOUT, "height": height, "annotations": [], "grid": grid, **axes}
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

    def axis(self, letter: str, panel: int = 1, title: str | None = None, **keys: Any) -> None:
        """Change keys of an axis, "x" or "y", and its title."""
        titled = {} if title is None else {"title": {"text": title}}
        self.set(**{f"{letter}axis{_number(panel)}": titled | keys})

    def head(self, panel: int, text: str) -> None:
        """Write above a panel, at its left edge."""
        refs = {f"{letter}ref": f"{letter}{_number(panel)} domain" for letter in "xy"}
        place = {"x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        self.layout["annotations"].append({"text": text, **refs, **place})

    def add(self, panel: int = 1, **trace: Any) -> None:
        """Put a trace on a panel."""
        axes = {f"{letter}axis": f"{letter}{_number(panel)}" for letter in "xy"}
        self.data.append(trace | axes)

    def line(self, name: str, index: int, x: Any, y: Any, panel: int = 1, **trace: Any) -> None:
        """Draw the line of the run at position `index`; only panel 1 enters the legend."""
        look = {
            "legendgroup": name,
            "showlegend": panel == 1,
            "line": {"color": colour(index), "width": 2},
            "hovertemplate": "%{x:.4g}, %{y:.4g}<extra>" + escape(name) + "</extra>",
        }
        points = {"x": compact(x), "y": compact(y)}
        self.add(panel, type="scatter", mode="lines", name=escape(name), **points, **look | trace)

    def bars(
        self,
        name: str,
        shade: str | list[str],
        x: list[Any],
        y: list[Any],
        *,
        panel: int = 1,
        edge: float = 0,
        **trace: Any,
    ) -> None:
        """Draw bars of one or several colours, with white edges where `edge` is their width."""
        white = {"color": "white"} if edge else {}
        marker = {"color": shade, "line": {"width": edge, **white}}
        self.add(panel, type="bar", name=name, x=x, y=y, marker=marker, **trace)


def _number(panel: int) -> str:
    """Return how Plotly's names of axes end: nothing for the first panel."""
    return str(panel) if panel > 1 else ""
