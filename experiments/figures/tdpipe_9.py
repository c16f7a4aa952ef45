"""TD-Pipe's figure 9: decode batches that finish unevenly are evened out as they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evenflow.results.run import RunResult
from evenflow.types import Request
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.run_file.build import build
from sim import simulate

SHOWN = ("round", "batch", "returned", "average", "submitted", "withheld")
ENDS_AT_ONCE, LASTS = 2, 50
"""Output tokens: the first comes with the prefill, the second with the first decode step."""


def make(study: Study) -> Drawing:
    """Play the example: as many batches as stages, of which some requests end at once."""
    numbers = study.numbers
    requests = example(numbers["batch_rows"], numbers["finished"])
    world = build(study.config({"stages": study.gpus}), requests, study.plan.beside).world
    table = first_rounds(simulate(world), numbers["rounds"])
    first = table[table["round"] == 1]
    claim = {"average": first.average.tolist(), "submitted": first.submitted.tolist()}
    claims: dict[str, Any] = {"tdpipe-stealing-example": claim}
    return Drawing(_draw(table), table, SHOWN, claims)


def example(batch_rows: int, finished: list[int]) -> list[Request]:
    """Return `batch_rows` requests a batch; the first `finished` of it end in a decode step."""
    outputs = [
        ENDS_AT_ONCE if row < short else LASTS for short in finished for row in range(batch_rows)
    ]
    return [Request(number, 0.0, 8, tokens) for number, tokens in enumerate(outputs)]


def first_rounds(result: RunResult, rounds: int) -> pd.DataFrame:
    """Return a row for each decode batch that returns in the first `rounds` of them.

    `average` is that of the live requests over the batches; `withheld` counts those kept back.
    """
    sent = result.decode_tokens[result.decode_tokens > 0]
    back_s = result.returned_s[result.decode_tokens > 0]
    ends = np.searchsorted(np.sort(result.completion_s), back_s, side="right")
    live = len(result.completion_s) - ends
    rows, kept = [], 0
    for number in range(rounds * result.depth):
        finished = int(ends[number] - (ends[number - 1] if number else 0))
        returned, submitted = int(sent[number]) - finished, int(sent[number + result.depth])
        kept += returned - submitted
        place = {"round": number // result.depth + 1, "batch": number % result.depth}
        average = float(live[number] / result.depth)
        found = {"returned": returned, "average": average, "submitted": submitted}
        rows.append({**place, **found, "withheld": kept})
    return pd.DataFrame(rows)


def _draw(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    place = np.arange(len(table))
    axes.bar(place - 0.2, table.returned, 0.38, color="#c9d6e3", label="returned, less finished")
    axes.bar(place + 0.2, table.submitted, 0.38, color="#0b5fa5", label="submitted")
    axes.step(place, table.average, where="mid", color="#d9730d", label="average of live requests")
    axes.plot(place, table.withheld, color="0.4", marker=".", ls=":", label="withheld so far")
    for x, value in zip(place, table.submitted, strict=True):
        axes.text(x + 0.2, value, str(value), ha="center", va="bottom", fontsize=8)
    names = [
        f"batch {batch}\nround {turn}"
        for turn, batch in zip(table["round"], table.batch, strict=True)
    ]
    axes.set_xticks(place, names, fontsize=8)
    axes.set_ylabel("requests")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.17), frameon=False)
    grid_lines([axes])
    return figure
