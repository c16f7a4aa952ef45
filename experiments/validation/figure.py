"""The figure of a validation: each request measured against predicted, and the timelines.

Draws what it is given: a real run, that run simulated from its own times, and a prediction.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from evenflow.results.metrics import request_metrics
from evenflow.results.run import RunResult
from experiments.report.style import DECODE, PREFILL, SCHEDULER_COLOURS, blend

BAND = 0.05
SHOWN = 14
"""So many micro-batches fill the window of the timelines."""

KINDS = (
    ("simulated from the run's own times", SCHEDULER_COLOURS[2], "x"),
    ("predicted", SCHEDULER_COLOURS[1], "o"),
)


def draw_validation(
    measured: RunResult, again: RunResult, predicted: RunResult, title: str, folder: Path
) -> None:
    """Write validation.png and validation.svg to a folder."""
    figure = Figure(figsize=(10, 8.4), dpi=150, layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=[3.4, 1, 1, 1])
    for column, name in enumerate(("ttft", "e2el")):
        _scatter(figure.add_subplot(grid[0, column]), name, measured, again, predicted)
    window = _window(measured)
    rows = {"measured": measured, "from its own times": again, "predicted": predicted}
    first: Axes | None = None
    for row, (label, result) in enumerate(rows.items(), start=1):
        axes = figure.add_subplot(grid[row, :], sharex=first)
        first = first or axes
        _timeline(axes, label, result, window)
        axes.tick_params(labelbottom=row == len(rows))
    axes.set_xlabel("time (s)")
    axes.set_xlim(window)
    keys = [Patch(color=PREFILL, label="all prefill"), Patch(color=DECODE, label="all decode")]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for kind in ("png", "svg"):
        metadata = {"Software": None} if kind == "png" else {"Date": None}
        figure.savefig(folder / f"validation.{kind}", metadata=metadata)


def _scatter(
    axes: Axes, name: str, measured: RunResult, again: RunResult, predicted: RunResult
) -> None:
    """Draw every request, on logarithmic scales, with the diagonal and the band around it."""
    real_s = getattr(request_metrics(measured), f"{name}_s")
    found = [getattr(request_metrics(result), f"{name}_s") for result in (again, predicted)]
    seen_s = np.concatenate([real_s, *found])
    seen_s = seen_s[seen_s > 0]
    ends = np.array([seen_s.min(), seen_s.max()]) * [0.9, 1.1]
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="0.88", linewidth=0)
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    for (label, colour, marker), theirs_s in zip(KINDS, found, strict=True):
        apart = np.abs(theirs_s / real_s - 1)
        inside = np.mean(apart[np.isfinite(apart)] <= BAND)
        axes.scatter(
            real_s,
            theirs_s,
            s=9,
            marker=marker,
            linewidth=0.6,
            facecolor=colour if marker == "x" else "none",
            edgecolor=None if marker == "x" else colour,
            label=f"{label}: {inside:.0%} within 5 %",
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for one in (axes.xaxis, axes.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.set_major_formatter("{x:g}")
        one.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{name.upper()} measured (s)")
    axes.set_ylabel(f"{name.upper()} simulated (s)")
    axes.legend(loc="upper left", frameon=False, fontsize=8, handletextpad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _window(result: RunResult) -> tuple[float, float]:
    """Return the time of a few micro-batches in the middle of a run."""
    first = max(0, (len(result.scheduled_s) - SHOWN) // 2)
    last = min(first + SHOWN, len(result.scheduled_s)) - 1
    return float(result.start_s[first, 0]), float(result.end_s[last, -1])


def _timeline(axes: Axes, label: str, result: RunResult, window: tuple[float, float]) -> None:
    """Draw what each stage computes; the first stage is on top."""
    tokens = result.prefill_tokens + result.decode_tokens
    shares = result.prefill_tokens / np.maximum(tokens, 1)
    for stage in range(result.depth):
        start_s, end_s = result.start_s[:, stage], result.end_s[:, stage]
        seen = np.flatnonzero((end_s > window[0]) & (start_s < window[1]))
        axes.broken_barh(
            [(start_s[index], end_s[index] - start_s[index]) for index in seen],
            (stage - 0.42, 0.84),
            facecolors=[blend(float(shares[index])) for index in seen],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_ylim(result.depth - 0.5, -0.5)
    axes.set_yticks(range(result.depth))
    axes.set_ylabel("stage")
    axes.set_title(label, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
