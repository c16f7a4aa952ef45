"""Sarathi-Serve's figure 1: tokens that come out over time, and P99 TBT against the rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import COLORS, grid_lines, whiskers
from experiments.runs import Outcome

SHOWN = (
    *("system", "rate", "seed", "p99_itl_ms", "p50_itl_ms", "longest_stall_s"),
    *("total_token_throughput", "steady_total_token_throughput", "kv_pages", "error"),
)


def stalls(outcome: Outcome) -> dict[str, Any]:
    """Return a run's overview and its longest time between two micro-batches that yield tokens.

    `returned_s` and `tokens` are those micro-batches, thinned where more than 10 come in a second.
    The time in which no request has its first token yet, or all are done, is no stall.
    """
    result = outcome.result
    yields = result.sampled_rows > 0
    returned_s, rows = result.returned_s[yields], result.sampled_rows[yields]
    gaps_s = np.diff(returned_s)
    waits = _anyone_decodes(result.first_token_s, result.completion_s, returned_s[:-1])
    longest = int(np.argmax(np.where(waits, gaps_s, 0.0)))
    tenth = np.unique(np.floor(returned_s * 10), return_index=True)[1]
    return {
        **overview(outcome),
        "longest_stall_s": float(gaps_s[longest]),
        "stall_start_s": float(returned_s[longest]),
        "returned_s": returned_s[tenth].tolist(),
        "tokens": np.cumsum(rows)[tenth].tolist(),
    }


def _anyone_decodes(first_s: Any, done_s: Any, times_s: Any) -> Any:
    """Say of each time whether some request has its first token and not its last."""
    begun = np.searchsorted(np.sort(first_s[np.isfinite(first_s)]), times_s, side="right")
    ended = np.searchsorted(np.sort(done_s[np.isfinite(done_s)]), times_s, side="right")
    return begun > ended


def make(study: Study) -> Drawing:
    """Run both systems at every rate."""
    numbers = study.numbers
    rates = sorted({*numbers["rates"], numbers["shown_rate"]})
    cases = {
        (label, rate): study.config(
            study.keys_of(label),
            {"workload": {"requests": numbers["requests"]}},
            {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}},
        )
        for label in study.plan.keys.systems
        for rate in rates
    }
    table = study.run(cases, ("system", "rate"), stalls)
    figure = _draw(study, table)
    return Drawing(figure, table.drop(columns=["returned_s", "tokens"]), SHOWN)


def _draw(study: Study, table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    _over_time(left, table, study)
    done = table[table.error.isna()].assign(p99_s=table.p99_itl_ms / 1e3)
    for label, rows in done.groupby("system", sort=False):
        whiskers(right, rows, "rate", "p99_s", str(label))
    right.set(title="tail latency", xlabel="request rate, 1/s", ylabel="P99 TBT, s", ylim=(0, None))
    grid_lines(figure.axes)
    left.legend(fontsize=8)
    return figure


def _over_time(axes: Axes, table: pd.DataFrame, study: Study) -> None:
    """One seed at one rate, around the longest stall of the first system."""
    numbers = study.numbers
    rows = table[(table.rate == numbers["shown_rate"]) & (table.seed == study.seeds[0])]
    first = rows.iloc[0]
    start_s = first.stall_start_s + first.longest_stall_s / 2 - numbers["shown_s"] / 2
    for label, row in rows.set_index("system").iterrows():
        times_s, tokens = np.array(row.returned_s) - start_s, np.array(row.tokens)
        inside = (times_s >= 0) & (times_s <= numbers["shown_s"])
        before = tokens[times_s < 0].max(initial=0)
        axes.step(
            times_s[inside],
            tokens[inside] - before,
            where="post",
            label=label,
            color=COLORS.get(label, "0.3"),
        )
    axes.set(title=f"tokens generated, {numbers['shown_rate']} requests/s")
    axes.set(xlabel="time, s", ylabel="tokens since the left edge", xlim=(0, numbers["shown_s"]))
