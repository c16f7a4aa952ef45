"""How the papers' figures look: a colour and a marker a system, means with whiskers over seeds."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes

_LOOKS = {
    "gLLM": ("#0b5fa5", "o"),
    "vLLM": ("#d9730d", "s"),
    "SGLang": ("#3f8f3f", "^"),
    "Sarathi-Serve": ("#8a4fb0", "D"),
    "Orca": ("#7a7a7a", "v"),
    "vLLM TP8": ("#3f8f3f", "^"),
    "vLLM TP4-PP2": ("#d9730d", "s"),
    "Sarathi-Serve TP4-PP2": ("#8a4fb0", "D"),
    "hybrid_only": ("#d9730d", "s"),
    "chunked_only": ("#3f8f3f", "^"),
    "both": ("#8a4fb0", "D"),
    "vLLM, at most 32": ("#f2c48d", "v"),
    "vLLM, at most 64": ("#e89a45", "^"),
    "vLLM, at most 128": ("#d9730d", "s"),
    "Sarathi-Serve, budget 512": ("#8a4fb0", "D"),
    "Sarathi-Serve, budget 2048": ("#c4a1da", "o"),
    "TD-Pipe": ("#0b5fa5", "o"),
    "TP+SB": ("#3f8f3f", "^"),
    "TP+HB": ("#8fbf5f", "v"),
    "PP+SB": ("#d9730d", "s"),
    "PP+HB": ("#8a4fb0", "D"),
}
COLORS = {label: color for label, (color, _) in _LOOKS.items()}
PART_COLORS = {
    "linear": "#0b5fa5",
    "attention": "#d9730d",
    "all_reduce": "#3f8f3f",
    "other": "0.65",
    "link_and_cpu": "#b02a37",
}
"""Parts of an iteration."""
MARKERS = {label: marker for label, (_, marker) in _LOOKS.items()}


def spread(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Return the mean, least and most of column `y` over the seeds, by column `x`."""
    return table.groupby(x)[y].agg(["mean", "min", "max"])


def whiskers(axes: Axes, table: pd.DataFrame, x: str, y: str, label: str) -> None:
    """Draw column `y` against `x`: a line through the means, whiskers from least to most."""
    values = spread(table, x, y)
    reach = [values["mean"] - values["min"], values["max"] - values["mean"]]
    color, marker = _LOOKS.get(label, ("0.3", "."))
    axes.errorbar(
        values.index, values["mean"], reach, label=label, color=color, marker=marker, capsize=2
    )


def grid_lines(figure_axes: Iterable[Axes]) -> None:
    """Give axes light lines and no box."""
    for axes in figure_axes:
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
