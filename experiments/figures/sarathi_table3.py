"""Sarathi-Serve's table 3: the decode iteration of each deployment, and the limits made of it."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.deployments import Served, layout_of, served
from experiments.figures.iterations import REFERENCE, iteration, parts_of, roofline_of, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import PART_COLORS, grid_lines


def make(study: Study) -> Drawing:
    """Predict the reference iteration on every deployment, all stages one after the other."""
    table = pd.DataFrame(_row(study, each) for each in served(study))
    claims = {"sarathi-decode-iteration": dict(zip(table.deployment, table.total_s, strict=True))}
    return Drawing(_draw(table), table, claims=claims)


def _row(study: Study, one: Served) -> dict[str, object]:
    parts = parts_of(roofline_of(study, one.keys), REFERENCE)
    total_s = iteration(world_of(study, one.keys))(REFERENCE)
    return {
        "deployment": one.label,
        **{f"{name}_s": seconds for name, seconds in parts._asdict().items()},
        "layout": layout_of(study, one.keys),
        "link_and_cpu_s": total_s - sum(parts),
        "total_s": total_s,
        "strict_slo_s": one.slo_s["strict"],
        "strict_over_iteration": one.slo_s["strict"] / total_s,
    }


def _draw(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    below = 0 * table.total_s
    for part, color in PART_COLORS.items():
        height = 1e3 * table[f"{part}_s"]
        axes.bar(table.deployment, height, 0.6, below, color=color, label=part.replace("_", " "))
        below = below + height
    places, limits_ms = range(len(table)), 200 * table.strict_slo_s
    axes.hlines(limits_ms, [p - 0.3 for p in places], [p + 0.3 for p in places], color="k",
                label="strict limit / 5")  # fmt: skip
    axes.set_xticks(places, table.deployment + "\n" + table.layout)
    axes.set(ylabel="decode iteration, ms", ylim=(0, 1.1 * max(limits_ms.max(), below.max())))
    axes.legend(fontsize=8, loc="upper left")
    grid_lines(figure.axes)
    return figure
