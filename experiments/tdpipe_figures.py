"""TD-Pipe's figures 12 and 2: KV use over steps with phases coloured, stages busy over time.

Draws results it is given. Does not make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenflow.result import Floats, RunResult
from experiments.report.data import used_share
from experiments.report.style import DECODE, PREFILL

BINS = 160


def draw_kv_usage(result: RunResult, path: Path) -> None:
    """Write a PNG: the share of KV pages in use at each micro-batch, coloured by its phase."""
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    used = 100 * used_share(result)
    edges = np.arange(len(used) + 1) - 0.5
    prefill = result.prefill_tokens > 0
    axes.stairs(used, edges, fill=True, color=DECODE)
    # A phase of few micro-batches is narrower than a pixel: its outline keeps it visible.
    axes.stairs(np.where(prefill, used, 0), edges, fill=True, color=PREFILL, linewidth=0.8)
    axes.plot(used, color="0.25", linewidth=0.8)
    axes.set(xlim=(0, len(used) - 1), ylim=(0, 104), xlabel="micro-batch (step)")
    axes.set_ylabel("KV pages in use (%)")
    axes.set_title(f"{count_phases(prefill)} prefill phases", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    key = [Patch(color=PREFILL, label="prefill"), Patch(color=DECODE, label="decode")]
    figure.legend(handles=key, loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Software": None})


def count_phases(prefill: np.ndarray) -> int:
    """Count the runs of prefill micro-batches."""
    return int(prefill[0]) + int((np.diff(prefill.astype(int)) == 1).sum())


def busy_over_time(result: RunResult, edges: Floats) -> Floats:
    """Return the share of stages that compute, a mean over each interval between `edges` (s)."""
    total = np.zeros(len(edges))
    for stage in range(result.depth):
        start, end = result.start_s[:, stage], result.end_s[:, stage]
        done = np.concatenate([[0.0], np.cumsum(end - start)])
        # Busy seconds before each edge: micro-batches that ended, and the part of the current one.
        ended = np.searchsorted(end, edges, side="right")
        current = np.minimum(ended, len(start) - 1)
        part = np.clip(edges - start[current], 0.0, None)
        total += done[ended] + np.where(ended < len(start), part, 0.0)
    shares: Floats = np.diff(total) / (np.diff(edges) * result.depth)
    return shares


def draw_utilisation(results: Mapping[str, RunResult], path: Path) -> None:
    """Write a PNG with a panel a system: the share of stage time that computes, over time."""
    figure = Figure(figsize=(10, 1.0 + 1.7 * len(results)), dpi=150, layout="constrained")
    grid = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    stop_s = max(float(result.returned_s[-1]) for result in results.values())
    for axes, (name, result) in zip(grid, results.items(), strict=True):
        _draw_busy(axes, name, result)
        axes.set_xlim(0, stop_s)
    grid[-1].set_xlabel("time (s)")
    figure.savefig(path, metadata={"Software": None})


def _draw_busy(axes: Axes, name: str, result: RunResult) -> None:
    edges = np.linspace(0.0, float(result.returned_s[-1]), BINS + 1)
    busy = 100 * busy_over_time(result, edges)
    axes.stairs(busy, edges, fill=True, color=DECODE)
    mean = float(busy.mean())
    axes.axhline(mean, color="0.25", linewidth=0.8, linestyle="--")
    axes.set(ylim=(0, 104), ylabel="stages busy (%)")
    axes.set_title(f"{name}: {mean:.0f} % busy on average", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
