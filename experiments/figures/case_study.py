"""gLLM's figures 7 and 8: a few requests, the tokens of each micro-batch, the stages over time."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.study import Drawing, Study
from experiments.figures.style import PARTS, grid_lines
from experiments.runs import Outcome

COLUMNS = ["batch", "prefill_tokens", "decode_tokens", "start_s", "end_s"]


def make(study: Study) -> Drawing:
    """Run each system on the same few requests; keep the micro-batches shown."""
    cases = {(label,): study.config(study.system(label)) for label in study.plan.keys.systems}
    shown = {"first": study.numbers["first"], "count": study.numbers["batches"]}
    runs = study.run(cases, ("system",), micro_batches, **shown)
    table = runs[["system", *COLUMNS]].explode(COLUMNS).explode(["start_s", "end_s"])
    return Drawing(_draw(runs), table, ("system", *COLUMNS))


def micro_batches(outcome: Outcome, first: int, count: int) -> dict[str, Any]:
    """Return the tokens of micro-batches, and when each stage starts and ends them."""
    result = outcome.result
    shown = slice(first, first + count)
    return {
        "batch": list(range(len(result.scheduled_s)))[shown],
        **{name: getattr(result, name)[shown].tolist() for name in COLUMNS[1:]},
    }


def _draw(runs: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    grid = figure.subplots(2, len(runs), sharey="row", squeeze=False)
    ends_s = [run[-1][-1] for run in runs.end_s]
    span_s = max(end - run[0][0] for end, run in zip(ends_s, runs.start_s, strict=True))
    for column, (_, run) in zip(grid.T, runs.iterrows(), strict=True):
        _draw_tokens(column[0], run)
        _draw_stages(column[1], run)
        start_s = run.start_s[0][0]
        column[1].set_xlim(start_s, start_s + span_s)
        column[0].set_title(run.system)
    grid[0, 0].set_ylabel("tokens")
    grid[0, 0].set_ylim(0, 1.15 * max(grid[0, 0].get_ylim()[1], 1))
    grid[1, 0].set_ylabel("stage")
    grid[1, 0].invert_yaxis()
    grid[0, 0].legend(fontsize=8)
    grid_lines(grid[0])
    return figure


def _draw_tokens(axes: Axes, run: pd.Series) -> None:
    below = [0] * len(run.batch)
    for name in ("decode", "prefill"):
        tokens = run[f"{name}_tokens"]
        axes.bar(run.batch, tokens, bottom=below, color=PARTS[name], label=name)
        below = [low + more for low, more in zip(below, tokens, strict=True)]
    for batch, total in zip(run.batch, below, strict=True):
        axes.annotate(str(total), (batch, total), (0, 2), textcoords="offset points",
                      ha="center", fontsize=8)  # fmt: skip
    axes.set(xlabel="micro-batch", xticks=run.batch)


def _draw_stages(axes: Axes, run: pd.Series) -> None:
    for index, batch in enumerate(run.batch):
        prefills = run.prefill_tokens[index] > 0
        for stage, (start_s, end_s) in enumerate(
            zip(run.start_s[index], run.end_s[index], strict=True)
        ):
            color = PARTS["prefill" if prefills else "decode"]
            axes.barh(stage, end_s - start_s, 0.8, start_s, color=color, edgecolor="white")
            axes.text(
                (start_s + end_s) / 2, stage, str(batch), ha="center", va="center", fontsize=7
            )
    axes.set(xlabel="time (s); micro-batch by number", yticks=range(len(run.start_s[0])))
    axes.spines[["top", "right"]].set_visible(False)
