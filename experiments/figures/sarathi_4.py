"""Sarathi-Serve's figure 4: linear operators, attention and the rest of prefill and decode."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.costs import decode_work, prefill_work
from experiments.figures.iterations import Parts, parts_of, roofline_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import PART_COLORS, grid_lines


def make(study: Study) -> Drawing:
    """Take one prompt of each length apart, and decodes of each batch size."""
    cost, numbers = roofline_of(study), study.numbers
    context = int(numbers["decode_context"])
    works = [("prefill", tokens, prefill_work(tokens)) for tokens in numbers["prompt_tokens"]]
    works += [("decode", n, decode_work(n, n * context)) for n in numbers["batch_sizes"]]
    table = pd.DataFrame(
        {
            "phase": phase,
            "tokens": tokens,
            **{f"{part}_ms": 1e3 * s for part, s in parts_of(cost, work)._asdict().items()},
            "total_ms": 1e3 * sum(cost.times(work)),
        }
        for phase, tokens, work in works
    )
    table["linear_share"] = table.linear_ms / table.total_ms
    return Drawing(_draw(table, context), table)


def _draw(table: pd.DataFrame, context: int) -> Figure:
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    prefill, decode = figure.subplots(1, 2)
    _stack(prefill, table[table.phase == "prefill"])
    _stack(decode, table[table.phase == "decode"])
    prefill.set(title="prefill, one prompt", xlabel="prompt tokens", ylabel="time, ms")
    decode.set(
        title=f"decode, {context} tokens of context each", xlabel="batch size", ylabel="time, ms"
    )
    grid_lines(figure.axes)
    prefill.legend(fontsize=8, title="%: linear operators", title_fontsize=8)
    return figure


def _stack(axes: Axes, rows: pd.DataFrame) -> None:
    labels = [str(tokens) for tokens in rows.tokens]
    below = 0 * rows.total_ms
    for part in Parts._fields:
        height = rows[f"{part}_ms"]
        if height.any():
            label = part.replace("_", "-")
            axes.bar(labels, height, bottom=below, color=PART_COLORS[part], width=0.65, label=label)
        below = below + height
    for x, (total, share) in enumerate(zip(rows.total_ms, rows.linear_share, strict=True)):
        axes.annotate(f"{share:.0%}", (x, total), ha="center", va="bottom", fontsize=7)
