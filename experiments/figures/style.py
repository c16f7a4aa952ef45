"""How the papers' figures look: a colour and a marker a system, means with whiskers over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from experiments.report.plots import finish

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
SHORT, TIGHT = 3.0, 1.5
"""A logarithmic axis from one number to less than so many times it has a number at each tick, and
one more digit.
"""
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


def grid_lines(figure_axes: Iterable[Axes]) -> None:
    """Give axes light lines and no box."""
    for axes in figure_axes:
        finish(axes)


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
