"""TD-Pipe with variants of one of its rules, offline, on pairs of a GPU and a model: figures 13, 15
and 16. Knows which run is TD-Pipe's own, and not what the variants are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.layers import Keys
from experiments.figures.pairs import pairs
from experiments.figures.study import Study
from experiments.figures.style import bars, grid_lines

OUTPUT, STEADY = "offline_output_throughput", "steady_output_throughput"
OWN = "TD-Pipe"
SHOWN = ("pair", "rule", "seed", OUTPUT, STEADY, "over_own", "preemptions", "kv_pages", "error")


def run_variants(study: Study, variants: Mapping[str, Keys]) -> pd.DataFrame:
    """Run TD-Pipe and its `variants`, keys of its scheduler, on every pair; TD-Pipe comes last.

    `over_own` is output tokens/s over those of TD-Pipe's own rule, on the same seed.
    """
    system = study.system(OWN, study.gpus)
    requests = {"workload": {"requests": study.numbers["requests"]}}
    cases = {
        (pair, rule): study.config(keys, requests, system, {"scheduler": scheduler})
        for pair, keys in pairs(study).items()
        for rule, scheduler in {**variants, OWN: {"name": "td_pipe"}}.items()
    }
    table = study.run(cases, ("pair", "rule"))
    own = table[table.rule == OWN].set_index(["pair", "seed"])[OUTPUT]
    reference = own.reindex(pd.MultiIndex.from_frame(table[["pair", "seed"]])).to_numpy()
    return table.assign(over_own=table[OUTPUT] / reference)


def draw_variants(table: pd.DataFrame, xlabel: str, gpus: int) -> Figure:
    """Draw a panel a pair: a bar a rule, its throughput over TD-Pipe's own written above it."""
    names = list(dict.fromkeys(table.pair))
    figure = Figure(figsize=(max(5.2 * len(names), 8), 4.2), layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        rows = table[table.pair == pair].assign(system=OWN)
        bars(axes, rows, "rule", "system", OUTPUT, steady=STEADY)
        _annotate(axes, rows)
        axes.set(title=f"{gpus} x {pair}", xlabel=xlabel)
    grid_lines(figure.axes)
    figure.axes[0].set_ylabel("output tokens/s (ring: steady window)")
    return figure


def _annotate(axes: Axes, rows: pd.DataFrame) -> None:
    """Write the mean throughput over TD-Pipe's own rule above each bar, and pale all but its."""
    found = rows.groupby("rule", sort=False)
    top, ratios = found[[OUTPUT, STEADY]].max().max(axis=1), found.over_own.mean()
    for place, (rule, ratio, height) in enumerate(zip(top.index, ratios, top, strict=True)):
        axes.patches[place].set_alpha(1.0 if rule == OWN else 0.45)
        if not math.isnan(ratio):
            axes.text(place, 1.02 * height, f"x {ratio:.3f}", ha="center", fontsize=8)
    axes.set_ylim(0, 1.1 * top.max())
