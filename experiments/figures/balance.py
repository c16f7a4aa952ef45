"""gLLM's figures 1 and 4: tokens of successive micro-batches, and how busy the stages are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.loads import Place, under_load
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import COLORS, PARTS, grid_lines
from experiments.figures.tdpipe_2 import busy_over_time
from experiments.runs import Outcome

BATCHES = ["batch", "scheduled_s", "prefill_tokens", "decode_tokens"]
BUSY = ["time_s", "busy"]
RUN = [*Place._fields, "load", "rate", "system", "seed"]


def make(study: Study) -> Drawing:
    """Run the systems under load; show the micro-batches in the middle of the run."""
    batches, bins = study.numbers["batches"], study.numbers["bins"]
    runs = under_load(study, middle, batches=batches, bins=bins)
    kept = ["mean_change", "busy_share"]
    series = [runs[[*RUN, *kept, *names]].explode(names) for names in (BATCHES, BUSY)]
    table = pd.concat(series, ignore_index=True)
    return Drawing(_draw(runs, study.numbers["parts"]), table, (*RUN, *kept))


def middle(outcome: Outcome, batches: int, bins: int) -> dict[str, Any]:
    """Return the tokens of so many micro-batches from the middle, and the busy share over them.

    `mean_change` is how many tokens a micro-batch differs from the one before it, in the mean.
    """
    result = outcome.result
    start = max(0, (len(result.scheduled_s) - batches) // 2)
    shown = slice(start, start + batches)
    tokens = (result.prefill_tokens + result.decode_tokens)[shown]
    scheduled_s = result.scheduled_s[shown]
    edges = np.linspace(scheduled_s[0], scheduled_s[-1], bins + 1)
    return {
        **overview(outcome),
        "mean_change": float(np.abs(np.diff(tokens)).mean()),
        "batch": list(range(start, start + len(tokens))),
        "scheduled_s": scheduled_s.tolist(),
        "prefill_tokens": result.prefill_tokens[shown].tolist(),
        "decode_tokens": result.decode_tokens[shown].tolist(),
        "time_s": edges[:-1].tolist(),
        "busy": busy_over_time(result, edges).tolist(),
    }


def _draw(runs: pd.DataFrame, parts: bool) -> Figure:
    groups = list(runs.groupby([*Place._fields, "system"], sort=False))
    height = 3.4 * len(groups) / 2
    figure = Figure(figsize=(14, 1.0 + height), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, sharey="col", sharex="col")
    for line, ((pair, trace, system), own) in zip(grid, groups, strict=True):
        first = own.iloc[0]
        _draw_tokens(line[0], first, parts)
        _draw_busy(line[1], first)
        spread = f"{own.mean_change.mean():.0f} tokens from one to the next"
        line[0].set_title(f"{system}: {spread}  ({pair}, {trace})", loc="left", fontsize=9)
        low, high = 100 * own.busy_share.min(), 100 * own.busy_share.max()
        words = f"{system}: busy {low:.0f}-{high:.0f} % of the whole run, {len(own)} seeds"
        line[1].set_title(words, loc="left", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylim(0, None)
    grid[-1, 0].set_xlabel("micro-batch, from the middle of the run")
    grid[-1, 1].set_xlabel("time over those micro-batches (s)")
    if parts:
        grid[0, 0].legend(fontsize=8, ncols=2, loc="upper right")
    grid_lines(figure.axes)
    return figure


def _draw_tokens(axes: Axes, run: pd.Series, parts: bool) -> None:
    decode, prefill = np.array(run.decode_tokens), np.array(run.prefill_tokens)
    edges = np.arange(len(decode) + 1)
    if parts:
        for tokens, base, name in ((decode, 0, "decode"), (prefill + decode, decode, "prefill")):
            axes.stairs(tokens, edges, baseline=base, fill=True, color=PARTS[name], label=name)
    else:
        color = COLORS.get(run.system, "0.3")
        axes.stairs(prefill + decode, edges, color=color, linewidth=1.2)
    axes.set(ylabel="tokens", xlim=(0, len(decode)))


def _draw_busy(axes: Axes, run: pd.Series) -> None:
    start_s = run.time_s[0]
    edges = [time_s - start_s for time_s in run.time_s]
    edges.append(2 * edges[-1] - edges[-2])
    color = COLORS.get(run.system, "0.3")
    axes.stairs([100 * busy for busy in run.busy], edges, fill=True, color=color, alpha=0.6)
    axes.set(ylabel="GPUs busy (%)", ylim=(0, 104), xlim=(0, None))
