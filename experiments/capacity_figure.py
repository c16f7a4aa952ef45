"""Draw what a search for capacity found: attainment and the SLO's numbers against the rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from experiments.capacity import Capacity, Measured
from experiments.capacity_report import ends
from experiments.report_style import colour

SHARES = {"attainment": "requests within limits", "gap_attainment": "token gaps within limit"}


def draw_capacity(capacity: Capacity, folder: Path) -> None:
    """Write capacity.png and capacity.svg: means over replications, and their least and most."""
    figure = Figure(figsize=(9.5, 3.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = [name for name in SHARES if all(name in run.values for run in capacity.measured)]
    for index, name in enumerate(shares):

        def share(run: Measured, name: str = name) -> float:
            return float(run.values[name])

        _draw(left, capacity, share, SHARES[name], index)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set_ylim(0, 1.03)
    left.set_title("SLO attainment", loc="left", fontsize=11)
    for index, condition in enumerate(capacity.question.slo):
        metric, limit = condition.metric, condition.limit

        def of_limit(run: Measured, metric: str = metric, limit: float = limit) -> float:
            return float(run.values[metric]) / limit

        _draw(right, capacity, of_limit, str(condition), index)
    right.axhline(1, color="black", linewidth=1, linestyle=":")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.set_title("Value / limit", loc="left", fontsize=11)
    for axes in (left, right):
        _finish(axes, capacity)
    requests = int(capacity.measured[0].values["completed"])
    figure.suptitle(
        f"{capacity.question.config.scheduler.name}, {requests} requests, "
        f"{capacity.question.replications} seeds",
        fontsize=10,
    )
    with matplotlib.rc_context({"svg.hashsalt": "evenflow"}):
        figure.savefig(folder / "capacity.png", metadata={"Software": None})
        figure.savefig(folder / "capacity.svg", metadata={"Date": None})


def _draw(
    axes: Axes, capacity: Capacity, value: Callable[[Measured], float], label: str, index: int
) -> None:
    by_rate: dict[float, list[float]] = defaultdict(list)
    for run in capacity.measured:
        if not capacity.curve or run.rate in capacity.curve:
            by_rate[run.rate].append(value(run))
    rates = np.array(sorted(by_rate))
    rows = [by_rate[rate] for rate in rates]
    mean = np.array([np.mean(row) for row in rows])
    axes.plot(rates, mean, marker="o", markersize=3, color=colour(index), label=label)
    least, most = ([pick(row) for row in rows] for pick in (min, max))
    axes.fill_between(rates, least, most, color=colour(index), alpha=0.2, linewidth=0)


def _finish(axes: Axes, capacity: Capacity) -> None:
    axes.set_xlabel("requests/s")
    axes.set_xlim(left=0)
    axes.grid(color="#E9ECF0")
    axes.spines[["top", "right"]].set_visible(False)
    if capacity.rate is not None:
        axes.axvline(capacity.rate.mean, color="#7F7F7F", linestyle="--", linewidth=1)
        text = f" {capacity.rate.mean:.3g}/s"
        axes.text(capacity.rate.mean, 0.02, text, transform=axes.get_xaxis_transform(), fontsize=9)
        if capacity.rate.n > 1:
            axes.axvspan(*ends(capacity.rate), color="#7F7F7F", alpha=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
