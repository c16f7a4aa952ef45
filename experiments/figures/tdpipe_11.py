"""TD-Pipe's figure 11: offline throughput of five systems on 1, 2, 4 ... GPUs, four pairs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study
from experiments.figures.style import bars, grid_lines

OUTPUT, STEADY = "offline_output_throughput", "steady_output_throughput"
TOTAL = "offline_total_throughput"
BEST = "TD-Pipe"
PUBLISHED = {
    "L20 + Llama2-13B",
    "L20 + Qwen2.5-32B",
    "A100-80G-PCIe + Qwen2.5-32B",
    "A100-80G-PCIe + Llama2-70B",
}
"""The paper's pairs: its largest ratios are over these."""


def make(study: Study) -> Drawing:
    """Run every pair, system and number of GPUs with all requests waiting at the start."""
    requests = {"workload": {"requests": study.numbers["requests"]}}
    cases = {
        (pair, label, count): study.config(keys, requests, study.system(label, count))
        for pair, keys in pairs(study).items()
        for count in study.gpu_counts
        for label in study.plan.keys.systems
    }
    table = study.run(cases, ("pair", "system", "gpus"))
    shown = ("pair", "system", "gpus", "seed", OUTPUT, STEADY, TOTAL, "kv_pages", "error")
    return Drawing(_draw(table), table, shown, _claims(table))


def _draw(table: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(table.pair))
    figure = Figure(figsize=(3.9 * len(names) + 1.3, 4.4), layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        bars(axes, table[table.pair == pair], "gpus", "system", OUTPUT, steady=STEADY)
        axes.set(title=pair, xlabel="GPUs")
    grid_lines(figure.axes)
    figure.axes[0].set_ylabel("output tokens/s")
    key: dict[str, Any] = {"title": "ring: steady window", "title_fontsize": 8, "fontsize": 8}
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", **key)
    return figure


def speedups(table: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Return TD-Pipe's throughput over each baseline's: a row a pair, a column a baseline."""
    mean = table[table.gpus == gpus].groupby(["pair", "system"], sort=False)[OUTPUT].mean()
    rates = mean.unstack("system")
    return rates.rdiv(rates[BEST], axis=0).drop(columns=BEST)


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    claims: dict[str, Any] = {}
    if 4 in set(table.gpus) and set(table.pair) >= PUBLISHED:
        best = speedups(table, 4).max()
        claims["tdpipe-best-case"] = {
            str(label).lower().replace("+", "_"): float(ratio) for label, ratio in best.items()
        }
    mean = table[table.system == BEST].groupby(["pair", "gpus"])[OUTPUT].mean()
    two, four = (float(mean.get(("L20 + Qwen2.5-32B", count), math.nan)) for count in (2, 4))
    return claims | {"tdpipe-superlinear": four / two}
