"""Sarathi-Serve's figure 6: time of the linear operators against the tokens of a micro-batch."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from evenflow.costs import prefill_work
from experiments.figures.iterations import parts_of, roofline_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines


def make(study: Study) -> Drawing:
    """Predict the linear operators of all layers on each number of GPUs."""
    rows = []
    for ranks in study.numbers["tensor_parallel"]:
        cost = roofline_of(study, {"tensor_parallel": ranks})
        for tokens in study.numbers["tokens"]:
            linear_s = parts_of(cost, prefill_work(tokens)).linear
            rows.append({"tensor_parallel": ranks, "tokens": tokens, "linear_ms": 1e3 * linear_s})
    table = pd.DataFrame(rows)
    return Drawing(_draw(table), table)


def _draw(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (ranks, rows), marker in zip(table.groupby("tensor_parallel"), "osD^v<>", strict=False):
        axes.plot(rows.tokens, rows.linear_ms, marker=marker, ms=4, label=f"TP-{ranks}")
    axes.set(xlabel="tokens in the micro-batch", ylabel="linear operators, ms")
    axes.set(yscale="log", xlim=(0, None))
    axes.legend()
    grid_lines(figure.axes)
    return figure
