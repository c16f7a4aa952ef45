"""Sarathi-Serve's figure 13: tensor parallelism across machines against a pipeline of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evenflow.costs import decode_work
from experiments.figures.capacity_bars import SHOWN, measured, panel
from experiments.figures.deployments import served
from experiments.figures.iterations import iteration, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, MARKERS, grid_lines


def make(study: Study) -> Drawing:
    """Predict decodes alone on each layout, then search the capacity of each system on its own.

    The first rows of the table are the capacities, the last the times between tokens.
    """
    decodes = pd.DataFrame(_decodes(study))
    found = measured(study)
    found["layout"] = [_layout(study, label) for label in found.system]
    table = pd.concat([found, decodes], ignore_index=True)
    shown = (*SHOWN, "decode_batch", "tbt_ms")
    return Drawing(_draw(found, decodes, study), table, shown)


def _decodes(study: Study) -> Iterator[dict[str, Any]]:
    """A pipeline has a batch a stage in flight: its requests get a token when theirs is through."""
    one, context = served(study)[0], int(study.numbers["decode_context"])
    for layout, system in _layouts(study).items():
        seconds = iteration(world_of(study, one.keys, study.system(system)))
        for batch in study.numbers["decode_batches"]:
            tbt_s = seconds(decode_work(batch, batch * context))
            yield {"layout": layout, "system": system, "decode_batch": batch, "tbt_ms": 1e3 * tbt_s}


def _layouts(study: Study) -> dict[str, str]:
    """Each layout of stages and ranks, with the first of the systems that are on it."""
    found: dict[str, str] = {}
    for label in study.plan.keys.systems:
        found.setdefault(_layout(study, label), label)
    return found


def _words(study: Study, label: str) -> str:
    """Return a system's label, with the layout that it has in place of the one in its label."""
    return f"{label.rpartition(' ')[0]} {_layout(study, label).removesuffix('-PP1')}"


def _layout(study: Study, label: str) -> str:
    keys = {**study.plan.run.data, **study.system(label)}
    return f"TP{keys['tensor_parallel']}-PP{keys['stages']}"


def _draw(capacity: pd.DataFrame, decodes: pd.DataFrame, study: Study) -> Figure:
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for layout, rows in decodes.groupby("layout", sort=False):
        look = {
            "color": COLORS.get(rows.system.iloc[0]),
            "marker": MARKERS.get(rows.system.iloc[0]),
        }
        left.plot(rows.decode_batch, rows.tbt_ms, label=layout, **look)
    context = study.numbers["decode_context"]
    left.set(title=f"decodes alone, {context} tokens of context", xlabel="batch size")
    left.set_xscale("log", base=2)
    batches = sorted(decodes.decode_batch.unique())
    left.set_xticks(batches, [str(batch) for batch in batches])
    left.set(ylabel="TBT, ms", ylim=(0, None))
    panel(right, capacity)
    right.set(title=str(capacity.deployment.iloc[0]), ylabel="capacity, requests/s")
    grid_lines(figure.axes)
    left.legend(fontsize=8)
    handles, labels = right.get_legend_handles_labels()
    words = [_words(study, label) for label in labels]
    right.legend(handles, words, fontsize=8, loc="upper left")
    if capacity.capacity.max() > 0:  # else nothing was found
        right.set_ylim(0, 1.5 * capacity.capacity.max())
    return figure
