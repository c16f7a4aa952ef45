"""What decides the results: one metric or more of systems, under variants of one factor.

A figure's `study.variants` has keys laid over every system, by label; `gpus` in them is the number
of GPUs. With one variant, the traces are side by side instead.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.loads import Place, places
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import bars, grid_lines, write_on_bars
from experiments.run_file.run import RunConfig
from experiments.runs import Outcome

WORDS = {
    "total_token_throughput": "input + output tokens/s",
    "steady_total_token_throughput": "tokens/s, steady window",
    "offline_output_throughput": "output tokens/s, offline",
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
    "kv_pages": "KV pages",
    "busy_share": "stages busy (share)",
}
LEGEND_INCHES = 1.5
RUN = [*Place._fields, "variant", "seed"]


def make(study: Study) -> Drawing:
    """Run every system in every variant, everywhere."""
    metrics = list(study.numbers["metrics"])
    table = study.run(_cases(study), (*Place._fields, "variant", "system"), prepared)
    first = next(iter(study.plan.keys.systems))
    best = table[table.system == first].set_index(RUN)[metrics[0]]
    own = table.set_index(RUN)[metrics[0]]
    table["over_first"] = (own / best.reindex(own.index)).to_numpy()
    shown = (*RUN, "system", *metrics, "over_first", "preemptions", "error")
    claims = _claims(table) if study.numbers.get("coupling") else {}
    return Drawing(_draw(table, metrics), table, shown, claims)


def _cases(study: Study) -> dict[tuple[Any, ...], RunConfig]:
    cases = {}
    for place, keys in places(study).items():
        for variant, given in study.numbers["variants"].items():
            over = dict(given)
            gpus = over.pop("gpus", None)
            for label in study.plan.keys.systems:
                layers = keys, study.system(label, gpus), over
                cases[*place, variant, label] = study.config(*layers)
    return cases


def prepared(outcome: Outcome) -> dict[str, Any]:
    """Return a run's summary, and its CPU work before executions over its execution time."""
    result = outcome.result
    free_s = result.end_s.copy()
    free_s[1:], free_s[0] = result.end_s[:-1], 0.0
    waited_s = result.start_s - result.available_s.clip(free_s)
    executed_s = result.end_s - result.start_s
    share = float(waited_s.sum() / executed_s.sum()) if len(executed_s) else 0.0
    return {**overview(outcome), "prepare_over_execute": share}


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    own = table[(table.system == "vLLM") & (table.variant == "as published")]
    return {} if own.empty else {"gllm-vllm-coupling": float(own.prepare_over_execute.mean())}


def _draw(table: pd.DataFrame, metrics: list[str]) -> Figure:
    group = "variant" if table.variant.nunique() > 1 else "trace"
    columns = ["pair"] if group == "trace" else ["pair", "trace"]
    panels = list(table.groupby(columns, sort=False))
    across = table[group].nunique() * table.system.nunique()
    letters = sum(len(str(name)) + 2 for name in table[group].unique())
    width = max(3.2, 0.34 * across + 0.8, 0.09 * letters) * len(panels) + LEGEND_INCHES
    height = 0.8 + 2.6 * len(metrics)
    figure = Figure(figsize=(max(7.0, width), height), layout="constrained")
    grid = figure.subplots(len(metrics), len(panels), squeeze=False)
    for column, (names, own) in zip(grid.T, panels, strict=True):
        for axes, metric in zip(column, metrics, strict=True):
            bars(axes, own, group, "system", metric)
            axes.tick_params(axis="x", labelsize=8)
        _write_ratios(column[0], own, group)
        column[0].set_title(", ".join(map(str, names)), fontsize=10)
    for line, metric in zip(grid, metrics, strict=True):
        line[0].set_ylabel(WORDS.get(metric, metric))
    words = f"number: {table.system.iloc[0]}\nover it"
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", title=words, title_fontsize=8, fontsize=8)
    grid_lines(figure.axes)
    return figure


def _write_ratios(axes: Axes, own: pd.DataFrame, group: str) -> None:
    """Write over each bar what the first system has over it."""
    mean = own.groupby(["system", group])["over_first"].mean()
    systems, groups = dict.fromkeys(own.system), dict.fromkeys(own[group])
    ratios = [float(mean[system, name]) for system in systems for name in groups]
    words = [f"{1 / ratio:.2f}" if math.isfinite(ratio) else "" for ratio in ratios]
    write_on_bars(axes, ["" if word == "1.00" else word for word in words])
