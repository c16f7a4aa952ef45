"""Sarathi-Serve's figure 9: time between tokens of decodes that a prompt joins, over without."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.costs import decode_work, prefill_work
from experiments.figures.deployments import Served, served
from experiments.figures.iterations import in_chunks, iteration, joined, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines

COLORS = {"decode only": "0.65", "chunked": "#8a4fb0", "full": "#d9730d"}


def make(study: Study) -> Drawing:
    """Predict the iterations of every batch, context and prompt on every deployment."""
    table = pd.DataFrame(row for each in served(study) for row in _rows(study, each))
    reference = study.numbers["reference"]
    at = table[
        (table.decode_batch == reference["batch"]) & (table.decode_context == reference["context"])
    ]
    papers = at[at.deployment.isin(study.numbers["deployments"])]
    claims = {"sarathi-coalescing": float(papers.full_ratio.max())} if len(papers) else {}
    return Drawing(_draw(at, study), table, claims=claims)


def _rows(study: Study, one: Served) -> Iterator[dict[str, Any]]:
    """The chunk is the largest of the prompt that fills the budget beside the decodes."""
    seconds, numbers = iteration(world_of(study, one.keys)), study.numbers
    budget = one.budgets["strict"]
    for batch, context, prompt in product(
        numbers["decode_batches"], numbers["decode_contexts"], numbers["prompt_tokens"]
    ):
        decodes = decode_work(batch, batch * context)
        alone_s = seconds(decodes)
        chunks = in_chunks(prompt, max(1, budget - batch))
        chunked_s = max(seconds(joined(decodes, chunk)) for chunk in chunks)
        full_s = seconds(joined(decodes, prefill_work(prompt)))
        yield {
            "deployment": one.label,
            "decode_batch": batch,
            "decode_context": context,
            "prompt_tokens": prompt,
            "decode_only_ms": 1e3 * alone_s,
            "chunked_ratio": chunked_s / alone_s,
            "full_ratio": full_s / alone_s,
        }


def _draw(table: pd.DataFrame, study: Study) -> Figure:
    labels = list(table.deployment.unique())
    figure = Figure(figsize=(4.8 * len(labels), 4.0), layout="constrained")
    for axes, label in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
        _bars(axes, table[table.deployment == label])
        axes.set(title=label, xlabel="prompt tokens", yscale="log")
    reference = study.numbers["reference"]
    figure.axes[0].set_ylabel("time between tokens, over decode only")
    figure.axes[0].legend(
        fontsize=8, title=f"{reference['batch']} decodes of {reference['context']} tokens"
    )
    grid_lines(figure.axes)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    heights = {
        "decode only": rows.full_ratio * 0 + 1,
        "chunked": rows.chunked_ratio,
        "full": rows.full_ratio,
    }
    for index, (label, values) in enumerate(heights.items()):
        name = label if label == "decode only" else f"decode + {label} prefill"
        places = [place + 0.27 * (index - 1) for place in range(len(values))]
        bars = axes.bar(places, values, 0.25, color=COLORS[label], label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(rows)), [str(tokens) for tokens in rows.prompt_tokens])
