"""TD-Pipe's figure 2: how busy the stages are over time, chunked prefill against TD-Pipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.run import Floats, RunResult
from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import COLORS, grid_lines
from experiments.runs import Outcome


def make(study: Study) -> Drawing:
    """Run each system offline on the first of the figure's pairs."""
    pair, keys = next(iter(pairs(study).items()))
    requests = {"workload": {"requests": study.numbers["requests"]}}
    cases = {
        (label,): study.config(keys, requests, study.system(label))
        for label in study.plan.keys.systems
    }
    runs = study.run(cases, ("system",), busy_series, bins=study.numbers["bins"])
    table = runs[["system", "seed", "time_s", "busy"]].explode(["time_s", "busy"])
    table = table.assign(time_s=table.time_s.astype(float), busy=table.busy.astype(float))
    title = f"{study.gpus} x {pair}"
    return Drawing(_draw(runs, table, title), table, ("system", "seed", "time_s", "busy"))


def busy_series(outcome: Outcome, bins: int) -> dict[str, Any]:
    """Return the share of stages that compute in each of `bins` equal parts of the run."""
    result = outcome.result
    edges = np.linspace(0.0, float(result.returned_s[-1]), bins + 1)
    busy = busy_over_time(result, edges)
    return {**overview(outcome), "time_s": edges[:-1].tolist(), "busy": busy.tolist()}


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


def _draw(runs: pd.DataFrame, table: pd.DataFrame, title: str) -> Figure:
    labels = list(dict.fromkeys(runs.system))
    figure = Figure(figsize=(10, 1.4 + 1.8 * len(labels)), layout="constrained")
    grid = figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, label in zip(grid, labels, strict=True):
        seed = runs.seed.iloc[0]
        _draw_busy(axes, table[(table.system == label) & (table.seed == seed)], label)
        own = runs[runs.system == label]
        span = f"{100 * own.busy_share.min():.0f}-{100 * own.busy_share.max():.0f} %"
        rate = own.offline_output_throughput.mean()
        text = f"{label}: {span} busy over {len(own)} seeds, {rate:.0f} output tokens/s"
        axes.set_title(text, loc="left", fontsize=10)
    grid_lines(grid)
    grid[0].set_title(title, loc="right", fontsize=10)
    grid[-1].set(xlabel=f"time (s), seed {runs.seed.iloc[0]}", xlim=(0, None))
    return figure


def _draw_busy(axes: Axes, rows: pd.DataFrame, label: str) -> None:
    width = rows.time_s.iloc[1] - rows.time_s.iloc[0]
    edges = [*rows.time_s, rows.time_s.iloc[-1] + width]
    axes.stairs(100 * rows.busy, edges, fill=True, color=COLORS.get(label, "0.5"), alpha=0.6)
    axes.axhline(100 * rows.busy.mean(), color="0.2", linewidth=0.8, linestyle="--")
    axes.set(ylim=(0, 104), ylabel="stages busy (%)")
