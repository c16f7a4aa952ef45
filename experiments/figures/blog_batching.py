"""The blog's batching figure: seats that do work, and throughput, against the size of the batch."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evenflow.results.run import Ints
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import grid_lines, whiskers
from experiments.runs import Outcome

SHOWN = ("system", "seats", "seed", "seat_use", "mean_over_max", "output_throughput", "error")
SAID = {"static": (20, 40), "continuous": (80, 95)}
"""What the blog says of the use of the GPU, in percent."""


def make(study: Study) -> Drawing:
    """Run each system with each number of seats, all requests waiting at the start."""
    table = pd.concat([_runs(study, seats) for seats in study.numbers["seats"]], ignore_index=True)
    return Drawing(_draw(study, table), table, SHOWN)


def _runs(study: Study, seats: int) -> pd.DataFrame:
    workload = {"workload": {"requests": study.numbers["requests"]}}
    capped = {"scheduler": {"max_num_seqs": seats}}
    cases = {
        (label, seats): study.config(study.system(label), workload, capped)
        for label in study.plan.keys.systems
    }
    return study.run(cases, ("system", "seats"), seat_use, seats=seats)


def seat_use(outcome: Outcome, seats: int) -> dict[str, Any]:
    """Return the share of `seats` x time in which a seat's request gets a token.

    `mean_over_max` is what a static batch makes of its decode steps.
    """
    result = outcome.result
    seconds = result.end_s[:, -1] - result.start_s[:, 0]
    used = float((result.sampled_rows * seconds).sum() / (seats * seconds.sum()))
    return {
        **overview(outcome),
        "seat_use": used,
        "mean_over_max": mean_over_max(result.output_tokens, seats),
    }


def mean_over_max(output_tokens: Ints, seats: int) -> float:
    """Return the steps that members need over those their batches take: sum over sum of longest.

    Batches of `seats` requests in their order; each decodes until its longest output ends.
    """
    batches = [output_tokens[at : at + seats] for at in range(0, len(output_tokens), seats)]
    return float(output_tokens.sum() / (seats * sum(int(batch.max()) for batch in batches)))


def _draw(study: Study, table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label in study.plan.keys.systems:
        rows = table[(table.system == label) & table.error.isna()]
        whiskers(left, rows.assign(percent=100 * rows.seat_use), "seats", "percent", label)
        whiskers(right, rows, "seats", "output_throughput", label)
    bound = 100 * table.groupby("seats").mean_over_max.mean()
    left.plot(bound, color="0.4", ls=":", label="mean / longest output of a static batch")
    for name, (low, high) in SAID.items():
        left.axhspan(low, high, color="0.3", alpha=0.10, lw=0)
        left.text(1.02, (low + high) / 204, f"said:\n{name}", transform=left.transAxes, fontsize=8)
    left.set(ylim=(0, 102), ylabel="seats that work (% of their time)")
    right.set(ylim=(0, None), ylabel="output tokens/s")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(study.numbers["seats"], [str(seats) for seats in study.numbers["seats"]])
        axes.set_xlabel("seats (requests that run at once)")
    right.legend(*left.get_legend_handles_labels(), fontsize=8)
    grid_lines(figure.axes)
    return figure
