"""gLLM's figure 12: maximum throughput of each system on 1, 2, 4 ... GPUs, over its smallest."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, MARKERS, grid_lines, whiskers

WHOLE, STEADY = "total_token_throughput", "steady_total_token_throughput"
KEY = "numbers: over the fewest GPUs\ndotted: steady window"
CLAIMED = (
    ("L20 + Qwen2.5-14B", "gllm-scaling-l20-14b", (1, 2, 4)),
    ("L20 + Qwen2.5-32B", "gllm-scaling-l20-32b", (2, 4)),
)


def make(study: Study) -> Drawing:
    """Run every pair, system and number of GPUs with all requests at once."""
    requests = {"workload": {"requests": study.numbers["requests"]}}
    cases = {
        (pair, label, count): study.config(keys, requests, study.system(label, count))
        for pair, keys in pairs(study).items()
        for label in study.plan.keys.systems
        for count in study.gpu_counts
    }
    table = study.run(cases, ("pair", "system", "gpus"))
    table["over_smallest"] = over_smallest(table)
    shown = ("pair", "system", "gpus", "seed", WHOLE, STEADY, "over_smallest", "kv_pages", "error")
    return Drawing(_draw(table), table, shown, _claims(table))


def over_smallest(table: pd.DataFrame) -> pd.Series:
    """Return for each row its mean throughput over that of the fewest GPUs that hold the model."""
    mean = table.groupby(["pair", "system", "gpus"])[WHOLE].mean()
    ratio = mean / mean.groupby(["pair", "system"]).transform("first")  # the first that is no NaN
    return pd.Series([ratio[key] for key in zip(table.pair, table.system, table.gpus, strict=True)])


def _draw(table: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(table.pair))
    figure = Figure(figsize=(max(6.0, 3.7 * len(names)), 4.2), layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        rows = table[(table.pair == pair) & table.error.isna()]
        for label, own in rows.groupby("system", sort=False):
            _draw_system(axes, own, str(label))
        axes.set(title=pair, xlabel="GPUs", ylim=(0, None))
        axes.set_xticks(sorted(table.gpus.unique()))
        if len(rows):
            axes.legend(fontsize=7.5, loc="upper left", title=KEY, title_fontsize=6.5)
            axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        else:
            axes.text(0.5, 0.5, "does not fit", transform=axes.transAxes, ha="center")
    grid_lines(figure.axes)
    figure.axes[0].set_ylabel("input + output tokens/s")
    return figure


def _draw_system(axes: Axes, own: pd.DataFrame, label: str) -> None:
    ratios = own.groupby("gpus")["over_smallest"].mean()
    more = ", ".join(f"{ratio:.2f}" for ratio in ratios[1:])
    whiskers(axes, own, "gpus", WHOLE, label, words=f"{label}: {more}" if more else None)
    color, marker = COLORS.get(label, "0.3"), MARKERS.get(label, ".")
    axes.plot(own.groupby("gpus")[STEADY].mean(), color=color, marker=marker, ls=":", mfc="white")


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    mean = table.groupby(["pair", "system", "gpus"])[WHOLE].mean()
    found: dict[str, Any] = {}
    for pair, name, shape in CLAIMED:
        found[name] = {}
        for label in ("vLLM", "SGLang", "gLLM"):
            rates = [float(mean.get((pair, label, count), float("nan"))) for count in shape]
            ratios = [rate / rates[0] for rate in rates]
            found[name][label.lower()] = ratios if len(shape) > 2 else ratios[-1]
    return found
