"""TD-Pipe's figure 12: KV in use at each step, prefill and decode phases in their colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenflow.results.run import Ints
from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import grid_lines
from experiments.report.data import used_share
from experiments.report.style import DECODE, PREFILL
from experiments.runs import Outcome

SHOWN = ("pair", "seed", "phase", "kind", "first_step", "steps", "start_s", "kv_before", "kv_after")


def make(study: Study) -> Drawing:
    """Run TD-Pipe offline on every pair."""
    requests = {"workload": {"requests": study.numbers["requests"]}}
    cases = {
        (pair,): study.config(keys, requests, study.system("TD-Pipe"))
        for pair, keys in pairs(study).items()
    }
    runs = study.run(cases, ("pair",), kv_steps)
    found = [
        phases(row["used"], row["prefill"], row["start_s"]).assign(
            pair=row["pair"], seed=row["seed"]
        )
        for row in runs[runs.error.isna()].to_dict("records")
    ]
    table = pd.concat(found, ignore_index=True)
    return Drawing(_draw(runs, table, study.gpus), table, SHOWN)


def kv_steps(outcome: Outcome) -> dict[str, Any]:
    """Return for each micro-batch when it starts, the share of pages held, and if it prefills."""
    result = outcome.result
    return {
        **overview(outcome),
        "start_s": result.start_s[:, 0].tolist(),
        "used": used_share(result).round(4).tolist(),
        "prefill": (result.prefill_tokens > 0).astype(int).tolist(),
    }


def phases(used: list[float], prefill: list[int], start_s: list[float]) -> pd.DataFrame:
    """Return a row for each run of micro-batches of one kind: where it starts, KV before, after."""
    kinds: Ints = np.asarray(prefill)
    first = np.flatnonzero(np.diff(kinds, prepend=1 - kinds[0]))
    last = np.append(first[1:], len(kinds)) - 1
    held = np.asarray(used)
    return pd.DataFrame(
        {
            "phase": np.arange(len(first)),
            "kind": np.where(kinds[first] == 1, "prefill", "decode"),
            "first_step": first,
            "steps": last - first + 1,
            "start_s": np.asarray(start_s)[first],
            "kv_before": np.where(first > 0, held[first - 1], 0.0),
            "kv_after": held[last],
        }
    )


def _draw(runs: pd.DataFrame, table: pd.DataFrame, gpus: int) -> Figure:
    shown = runs[(runs.seed == runs.seed.iloc[0]) & runs.error.isna()]
    figure = Figure(figsize=(10, 1.2 + 2.4 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, row in zip(grid, shown.to_dict("records"), strict=True):
        _draw_steps(axes, np.asarray(row["used"]), np.asarray(row["prefill"]))
        own = table[(table.pair == row["pair"]) & (table.kind == "prefill")]
        counts = own.groupby("seed").size()
        span = f"{counts.min()}-{counts.max()} prefill phases"
        text = f"{gpus} x {row['pair']}, seed {row['seed']}; {span}"
        axes.set_title(f"{text} over {len(counts)} seeds", loc="left", fontsize=10)
    grid_lines(grid)
    grid[-1].set_xlabel("step (micro-batch)")
    key = [Patch(color=PREFILL, label="prefill"), Patch(color=DECODE, label="decode")]
    grid[0].legend(handles=key, loc="lower right", ncols=2, fontsize=8)
    return figure


def _draw_steps(axes: Axes, used: np.ndarray, prefill: np.ndarray) -> None:
    edges = np.arange(len(used) + 1) - 0.5
    axes.stairs(100 * used, edges, fill=True, color=DECODE)
    # A phase of few micro-batches is narrower than a pixel: its outline keeps it visible.
    axes.stairs(np.where(prefill, 100 * used, 0), edges, fill=True, color=PREFILL, linewidth=0.8)
    axes.plot(100 * used, color="0.25", linewidth=0.8)
    axes.set(xlim=(0, len(used) - 1), ylim=(0, 104), ylabel="KV in use (%)")
