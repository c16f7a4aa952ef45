"""gLLM's figure 12: maximum throughput of each system on 1, 2, 4 ... GPUs, over its smallest."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, MARKERS, grid_lines, whiskers

WHOLE, STEADY = "total_token_throughput", "steady_total_token_throughput"


def make(study: Study) -> Drawing:
    """Run every system, model and number of GPUs with all requests at once."""
    cases = {
        (model, label, count): study.config(
            {"model": model, "workload": {"requests": study.numbers["requests"]}},
            study.system(label, count),
        )
        for model in study.numbers["models"]
        for label in study.plan.keys.systems
        for count in study.gpu_counts
    }
    table = study.run(cases, ("model", "system", "gpus"))
    shown = ("model", "system", "gpus", "seed", WHOLE, STEADY, "kv_pages", "error")
    return Drawing(_draw(study, table), table, shown, _claims(table))


def _draw(study: Study, table: pd.DataFrame) -> Figure:
    models = study.numbers["models"]
    figure = Figure(figsize=(5 * len(models), 4.2), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for label in study.plan.keys.systems:
            rows = table[(table.model == model) & (table.system == label) & table.error.isna()]
            whiskers(axes, rows, "gpus", WHOLE, label)
            mean = rows.groupby("gpus")[STEADY].mean()
            axes.plot(mean, color=COLORS[label], marker=MARKERS[label], ls=":", mfc="white")
        axes.set(title=model, xlabel=f"GPUs ({study.plan.run.data['gpu']})", ylim=(0, None))
        axes.set_xticks(sorted(table.gpus.unique()))
    grid_lines(figure.axes)
    axes.legend(title="solid: whole run, dotted: steady window", title_fontsize=8)
    figure.axes[0].set_ylabel("input + output tokens/s")
    return figure


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    mean = table.groupby(["model", "system", "gpus"])[WHOLE].mean()
    found: dict[str, Any] = {}
    for model, name, shape in (
        ("Qwen2.5-14B", "gllm-scaling-l20-14b", (1, 2, 4)),
        ("Qwen2.5-32B", "gllm-scaling-l20-32b", (2, 4)),
    ):
        found[name] = {}
        for label in ("vLLM", "SGLang", "gLLM"):
            rates = [float(mean.get((model, label, count), float("nan"))) for count in shape]
            ratios = [rate / rates[0] for rate in rates]
            found[name][label.lower()] = ratios if len(shape) > 2 else ratios[-1]
    return found
