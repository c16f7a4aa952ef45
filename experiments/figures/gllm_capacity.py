"""gLLM's section 4.2: maximum throughput on every pair and trace, gLLM's over the others'."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.loads import Place, places
from experiments.figures.study import Drawing, Study
from experiments.figures.style import bars, grid_lines, write_on_bars

WHOLE, STEADY = "total_token_throughput", "steady_total_token_throughput"
PLACE = list(Place._fields)


def make(study: Study) -> Drawing:
    """Run every system everywhere with all requests at once."""
    cases = {
        (*place, label): study.config(keys, study.system(label))
        for place, keys in places(study).items()
        for label in study.plan.keys.systems
    }
    table = study.run(cases, (*PLACE, "system"))
    table["first_over"] = first_over(table, next(iter(study.plan.keys.systems)))
    shown = (*PLACE, "system", "seed", WHOLE, STEADY, "first_over", "preemptions", "error")
    return Drawing(_draw(table), table, shown, _claims(table))


def first_over(table: pd.DataFrame, first: str) -> pd.Series:
    """Return for each row the throughput of system `first` over that of the row, seed by seed."""
    best = table[table.system == first].set_index([*PLACE, "seed"])[WHOLE]
    keys = zip(*(table[name] for name in (*PLACE, "seed")), strict=True)
    return pd.Series([best[key] for key in keys], table.index) / table[WHOLE]


def _draw(table: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(table.pair))
    figure = Figure(figsize=(max(6.0, 3.4 * len(names)), 4.4), layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = table[table.pair == pair]
        bars(axes, own, "trace", "system", WHOLE)
        write_on_bars(axes, _ratios(own))
        axes.set(title=pair)
    grid_lines(figure.axes)
    figure.axes[0].set_ylabel("input + output tokens/s")
    first = own.system.iloc[0]
    key = {"title": f"number: {first}\nover it", "title_fontsize": 8}
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", **key)
    return figure


def _ratios(own: pd.DataFrame) -> list[str]:
    """Return what is written over each bar, in their order: systems, and in each the traces."""
    mean = own.groupby(["system", "trace"])["first_over"].mean()
    systems, traces = dict.fromkeys(own.system), dict.fromkeys(own.trace)
    ratios = [float(mean[system, trace]) for system in systems for trace in traces]
    return [f"{ratio:.2f}" if math.isfinite(ratio) and ratio != 1 else "" for ratio in ratios]


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    mean = table.groupby(["system", *PLACE])["first_over"].mean()
    found = {}
    for label in ("vLLM", "SGLang"):
        if label in mean:
            found[f"gllm-capacity-vs-{label.lower()}"] = [mean[label].min(), mean[label].max()]
    return found
