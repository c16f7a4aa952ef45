"""gLLM's figure 11: distributions of prompt and output lengths. Simulates nothing."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.loads import traces
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.run_file.yaml_file import find
from traces import load_trace

PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 60


def make(study: Study) -> Drawing:
    """Load or draw each trace and compare its lengths."""
    limit, seed = study.numbers["requests"], study.seeds[0]
    loaded = {
        label: load_trace(find(name, study.plan.beside), limit=limit, seed=seed)
        for label, name in traces(study).items()
    }
    lengths = {
        (label, side): tokens
        for label, trace in loaded.items()
        for side, tokens in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens))
    }
    table = pd.DataFrame(
        {
            "trace": label,
            "side": side,
            "requests": len(tokens),
            "mean": tokens.mean(),
            **{f"p{q}": value for q, value in _percentiles(tokens)},
        }
        for (label, side), tokens in lengths.items()
    )
    table["over_first"] = table["mean"] / table.groupby("side")["mean"].transform("first")
    return Drawing(_draw(lengths), table, tuple(table.columns))


def _percentiles(tokens: np.ndarray) -> list[tuple[int, float]]:
    return list(zip(PERCENTILES, np.percentile(tokens, PERCENTILES).tolist(), strict=True))


def _draw(lengths: dict[tuple[str, str], np.ndarray]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, side in zip(figure.subplots(1, 2), ("prompt", "output"), strict=True):
        own = {label: tokens for (label, each), tokens in lengths.items() if each == side}
        most = max(np.percentile(tokens, 99) for tokens in own.values())
        edges = np.linspace(0, most, BINS + 1)
        for label, tokens in own.items():
            share = np.histogram(tokens, edges)[0] / len(tokens)
            axes.stairs(
                100 * share, edges, fill=True, alpha=0.5, label=f"{label}: mean {tokens.mean():.0f}"
            )
        axes.set(xlabel=f"{side} tokens (to the largest P99)", xlim=(0, most))
        axes.legend()
    figure.axes[0].set_ylabel("requests (%)")
    grid_lines(figure.axes)
    return figure
