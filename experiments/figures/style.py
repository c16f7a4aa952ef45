"""How the papers' figures look: a colour and a marker a system, means with whiskers over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer

_LOOKS = {
    "gLLM": ("#0b5fa5", "o"),
    "vLLM": ("#d9730d", "s"),
    "SGLang": ("#3f8f3f", "^"),
    "Token Throttling": ("#0b5fa5", "o"),
    "w/o WT": ("#8a4fb0", "D"),
    "w/o UT": ("#c23b6b", "v"),
    "w/ CK": ("#7a7a7a", "X"),
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
    "static": ("#b59a3a", "P"),
    "DistServe": ("#0b5fa5", "X"),
    "TD-Pipe": ("#0b5fa5", "o"),
    "TP+SB": ("#3f8f3f", "^"),
    "TP+HB": ("#8fbf5f", "v"),
    "PP+SB": ("#d9730d", "s"),
    "PP+HB": ("#8a4fb0", "D"),
}
SPARE = ("#2a9d8f", "#b02a37", "#8c6d31", "#5b5b5b", "#e377c2")
"""Colours of labels that have none of their own, or the same as another beside them."""
SHORT = 3.0
"""A logarithmic axis from one number to less than so many times it has a number at each tick."""
PARTS = {"prefill": "#E69F00", "decode": "#56B4E9"}
PARTS_OF_TIME = {
    "linear": "#0b5fa5",
    "attention": "#d9730d",
    "all reduce": "#3f8f3f",
    "other": "0.65",
    "link and cpu": "#b02a37",
}
"""Parts of an iteration."""
COLORS = {label: color for label, (color, _) in _LOOKS.items()} | PARTS_OF_TIME
MARKERS = {label: marker for label, (_, marker) in _LOOKS.items()}


def spread(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Return the mean, least and most of column `y` over the seeds, by column `x`."""
    return table.groupby(x)[y].agg(["mean", "min", "max"])


def whiskers(
    axes: Axes, table: pd.DataFrame, x: str, y: str, label: str, *, words: str | None = None
) -> None:
    """Draw column `y` against `x`: a line through the means, whiskers from least to most.

    `label` decides the look; the legend has `words`, or else the label.
    """
    values = spread(table, x, y)
    # Of equal values, the mean may be off by a rounding.
    below, above = values["mean"] - values["min"], values["max"] - values["mean"]
    reach = [below.clip(lower=0), above.clip(lower=0)]
    color, marker = _LOOKS.get(label, ("0.3", "."))
    axes.errorbar(
        values.index,
        values["mean"],
        reach,
        label=words or label,
        color=color,
        marker=marker,
        capsize=2,
    )


def grid_lines(figure_axes: Iterable[Axes]) -> None:
    """Give axes light lines and no box."""
    for axes in figure_axes:
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def bars(
    axes: Axes, table: pd.DataFrame, group: str, label: str, y: str, *, steady: str | None = None
) -> None:
    """Draw a group of bars for each value of column `group`, in it one for each of `label`.

    A bar is the mean over the seeds, with a whisker from least to most; in the place of one whose
    runs all failed is why: OOM, or that it cannot be. A ring is the mean of column `steady`.
    """
    groups, labels = list(dict.fromkeys(table[group])), list(dict.fromkeys(table[label]))
    colors = colors_of([str(name) for name in labels])
    width = 0.8 / len(labels)
    for index, name in enumerate(labels):
        found = table[table[label] == name].groupby(group, sort=False)
        own = found[y].agg(["mean", "min", "max"]).reindex(groups)
        place = [number - 0.4 + (index + 0.5) * width for number in range(len(groups))]
        reach = [
            (own["mean"] - own["min"]).clip(lower=0),
            (own["max"] - own["mean"]).clip(lower=0),
        ]
        color = colors[str(name)]
        axes.bar(place, own["mean"].fillna(0), 0.92 * width, label=str(name), color=color)
        axes.errorbar(place, own["mean"], reach, fmt="none", color="0.2", capsize=2, linewidth=0.9)
        if steady is not None:
            rings = found[steady].mean().reindex(groups)
            axes.plot(place, rings, "o", mfc="white", mec=color, markersize=4)
        for x, (value, missing) in zip(place, own["mean"].isna().items(), strict=True):
            if missing:
                rows = table[(table[label] == name) & (table[group] == value)]
                word = f" {_failure(rows)}"
                axes.text(x, 0, word, rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), [str(value) for value in groups])
    axes.set_ylim(0, None)


def colors_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each label: its own, or one that no label before it has."""
    found: dict[str, str] = {}
    spare = iter(SPARE)
    for index, label in enumerate(labels):
        own = COLORS.get(label)
        taken = own is None or own in found.values()
        found[label] = next(spare, f"C{index % 10}") if taken else str(own)
    return found


def _failure(rows: pd.DataFrame) -> str:
    """Return in a word why runs have no value."""
    errors = rows["error"].dropna() if "error" in rows else ()
    return "OOM" if any("does not fit" in error for error in errors) else "not possible"


def write_on_bars(axes: Axes, words: Iterable[str]) -> None:
    """Write a word over each bar and its whisker, in the order in which `bars` drew them."""
    left = iter(words)
    for drawn, whisker in pairwise(axes.containers):
        if not isinstance(drawn, BarContainer) or not isinstance(whisker, ErrorbarContainer):
            continue
        tops = np.asarray(whisker.lines[1][1].get_ydata(), float)
        for bar, top in zip(drawn, tops, strict=True):
            place = bar.get_x() + bar.get_width() / 2, max(bar.get_height(), np.nan_to_num(top))
            axes.annotate(next(left), place, (0, 2), textcoords="offset points", ha="center",
                          va="bottom", fontsize=6.5)  # fmt: skip
    axes.margins(y=0.12)


def decades(axes: Axes) -> None:
    """Give axes a logarithmic y with plain numbers: 1, 2 and 5 of each decade, or every tick."""

    def words(value: float, _: float) -> str:
        low, high = axes.get_ylim()
        return f"{value:.2g}" if high < SHORT * low or f"{value:e}"[0] in "25" else ""

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(words)
