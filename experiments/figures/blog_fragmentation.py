"""The blog's fragmentation figure: KV memory that requests hold and do not fill, by policy."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evenflow.results.run import Floats, Ints
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import bars, grid_lines
from experiments.runs import Outcome

SHOWN = ("trace", "system", "seed", "waste", "known", "request_throughput", "error")
SAID = {"contiguous": (20, 30), "paged": (0, 5)}
"""What the blog says is wasted, in percent."""


def make(study: Study) -> Drawing:
    """Run each policy on each trace with all requests waiting at the start."""
    numbers = study.numbers
    cases = {
        (trace, label): study.config(
            study.system(label),
            {"max_model_len": longest},
            {"workload": {"trace": trace, "requests": numbers["requests"]}},
        )
        for trace, longest in _traces(study).items()
        for label in study.plan.keys.systems
    }
    table = study.run(cases, ("trace", "system"), waste)
    return Drawing(_draw(table), table, SHOWN)


def _traces(study: Study) -> dict[str, int | None]:
    """Return the longest request by trace; a trace that the run has itself is the only one."""
    run = study.plan.run.data
    own = run.get("workload", {}).get("trace")
    return dict(study.numbers["traces"]) if own is None else {own: run.get("max_model_len")}


def waste(outcome: Outcome) -> dict[str, Any]:
    """Return the percentage of held token slots that hold no token.

    `known`: that of reserving each request's own final length, were it known in advance.
    """
    result = outcome.result
    return {
        **overview(outcome),
        "waste": 100 * outcome.summary["kv_waste_share"],
        "known": 100 * known_in_advance(result.prompt_tokens, result.output_tokens),
    }


def known_in_advance(prompt_tokens: Ints, output_tokens: Ints) -> float:
    """Return the empty share of reservations of each request's own final length.

    A request that decodes a token a step fills prompt + output / 2 of its prompt + output slots on
    average, and holds them for a time in proportion to its output.
    """
    output: Floats = output_tokens.astype(float)
    filled = (output * (prompt_tokens + output / 2)).sum()
    return float(1 - filled / (output * (prompt_tokens + output)).sum())


def _draw(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    bars(axes, table, "trace", "system", "waste")
    for place, (_, rows) in enumerate(table.groupby("trace", sort=False)):
        known = rows.known.mean()
        axes.hlines(known, place - 0.4, place + 0.4, color="0.2", ls=":", lw=1)
        axes.text(place + 0.4, known, "own length known", fontsize=7, ha="right", va="bottom")
    for name, (low, high) in SAID.items():
        axes.axhspan(low, high, color="0.3", alpha=0.12, lw=0)
        axes.text(1.01, (low + high) / 200, f"said:\n{name}", transform=axes.transAxes, fontsize=8)
    axes.set(ylabel="empty slots in held KV memory (%)", ylim=(0, 100))
    axes.legend(fontsize=8)
    grid_lines([axes])
    return figure
