"""TD-Pipe's published ratios under readings of what the paper leaves open of its set-up."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.errors import UsageError
from experiments.figures.claims import published_value
from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, MARKERS, grid_lines
from experiments.run_file.run import RunConfig

OUTPUT, BEST = "offline_output_throughput", "TD-Pipe"
RATE = "output tokens/s"


def make(study: Study) -> Drawing:
    """Run every system under every reading, and TD-Pipe on half of the GPUs besides."""
    if study.gpus < 2:
        raise UsageError("stages: this figure compares all GPUs with half of them; give at least 2")
    runs = study.run(_cases(study), ("reading", "system", "gpus"))
    table = ratios(runs, study.gpus)
    shown = ("reading", "quantity", "seed", "value")
    pair = next(iter(pairs(study)))
    return Drawing(_draw(study, table, f"{study.gpus} x {pair}"), table, shown)


def _cases(study: Study) -> dict[tuple[str, str, int], RunConfig]:
    own = next(iter(pairs(study).values()))
    requests = {"workload": {"requests": study.numbers["requests"]}}
    wanted = [(label, study.gpus) for label in study.plan.keys.systems]
    cases = {}
    for reading, given in study.numbers["readings"].items():
        keys = {key: value for key, value in given.items() if key != "of"}
        for label, gpus in [*wanted, (BEST, study.gpus // 2)]:
            layer = keys if label in given.get("of", [label]) else {}
            system = study.system(label, gpus)
            cases[reading, label, gpus] = study.config(own, requests, system, layer)
    return cases


def ratios(runs: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Return a row for each reading, quantity and seed: TD-Pipe over each system, its scaling."""
    found = []
    for (reading, seed), rows in runs.groupby(["reading", "seed"], sort=False):
        whole, half = (rows[rows.gpus == n].set_index("system")[OUTPUT] for n in (gpus, gpus // 2))
        own = float(whole[BEST])
        values = {f"over {label}": own / rate for label, rate in whole.drop(BEST).items()}
        values |= {scaling(gpus): own / float(half[BEST]), RATE: own}
        found += [
            {"reading": reading, "quantity": name, "seed": seed, "value": value}
            for name, value in values.items()
        ]
    return pd.DataFrame(found)


def scaling(gpus: int) -> str:
    """Return what TD-Pipe's throughput on all GPUs over that on half of them is called."""
    return f"{gpus} GPUs over {gpus // 2}"


def _draw(study: Study, table: pd.DataFrame, title: str) -> Figure:
    readings = list(dict.fromkeys(table.reading))
    figure = Figure(figsize=(13, 1.6 + 0.36 * len(readings)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[2.4, 1, 1])
    published = published_value("tdpipe-best-case")
    for label in COLORS:
        if f"over {label}" not in set(table.quantity):
            continue
        _dots(left, table, f"over {label}", readings, label)
        value = published.get(label.lower().replace("+", "_"))
        if study.plan.published and value is not None:
            left.axvline(value, color=COLORS[label], ls="--", lw=0.9)
    left.set(title=f"TD-Pipe over each system, {title}", xlabel="ratio of output tokens/s")
    words = "dashed: published, largest of all pairs" if study.plan.published else None
    left.legend(fontsize=8, title=words, title_fontsize=8)
    for axes, quantity, claim in (
        (middle, scaling(study.gpus), "tdpipe-superlinear"),
        (right, RATE, "tdpipe-l20-32b"),
    ):
        _dots(axes, table, quantity, readings, BEST)
        if study.plan.published:
            axes.axvline(published_value(claim), color=COLORS[BEST], ls="--", lw=0.9)
        axes.set(title="TD-Pipe", xlabel=quantity)
    left.set_yticks(range(len(readings)), readings, fontsize=8)
    left.invert_yaxis()
    grid_lines(figure.axes)
    return figure


def _dots(axes: Axes, table: pd.DataFrame, quantity: str, readings: list[str], label: str) -> None:
    rows = table[table.quantity == quantity].groupby("reading").value.agg(["mean", "min", "max"])
    rows = rows.reindex(readings)
    reach = [rows["mean"] - rows["min"], rows["max"] - rows["mean"]]
    axes.errorbar(
        rows["mean"],
        range(len(readings)),
        xerr=reach,
        ls="",
        capsize=2,
        label=quantity,
        color=COLORS[label],
        marker=MARKERS[label],
        markersize=5,
    )
