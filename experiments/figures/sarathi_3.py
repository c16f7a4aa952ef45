"""Sarathi-Serve's figure 3: tokens per second of prefill and of decode against the batch size."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from evenflow.costs import decode_work
from experiments.figures.iterations import iteration, prompts, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines


def make(study: Study) -> Drawing:
    """Predict an iteration of whole prompts, and one of decodes, of each batch size."""
    seconds, length = iteration(world_of(study)), int(study.numbers["length"])
    table = pd.DataFrame(
        {
            "batch_size": size,
            "prefill_tokens_per_s": size * length / seconds(prompts(size, length)),
            "decode_tokens_per_s": size / seconds(decode_work(size, size * length)),
        }
        for size in study.numbers["batch_sizes"]
    )
    return Drawing(_draw(table, length), table)


def _draw(table: pd.DataFrame, length: int) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    labels = [str(size) for size in table.batch_size]
    for axes, phase, color in zip(
        figure.subplots(1, 2), ("prefill", "decode"), ("#d9730d", "#0b5fa5"), strict=True
    ):
        bars = axes.bar(labels, table[f"{phase}_tokens_per_s"], color=color, width=0.65)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set(title=f"{phase}, {length} tokens a request", xlabel="batch size")
        axes.set_ylabel(f"{phase} tokens/s")
    grid_lines(figure.axes)
    return figure
