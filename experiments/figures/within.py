"""Panels within a run: its micro-batches, stages, busy share and pages, as `measures` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.experiments.figures.looks import COLORS, Words
from evenflow.report.style import DECODE, PREFILL

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Run = Mapping[str, Any]
"""A row of a table of runs."""

NUMBERED = 20
"""The most micro-batches that get numbers."""


def draw_within(axes: Axes, kind: str, rows: pd.DataFrame, numbers: Words) -> Words:
    """Draw the run of the first seed; return words on all of them, and the study's."""
    first = {str(name): value for name, value in rows.iloc[0].items()}
    WITHIN[kind](axes, first, numbers)
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
    """Times at which each stage computes each micro-batch, which its number names."""
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
    """Busy share of the stages over the time shown, and in the whole run."""
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
