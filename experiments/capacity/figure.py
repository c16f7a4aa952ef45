"""Draw what a search for capacity found: attainment and the SLO's numbers against the rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from experiments.capacity.find import Capacity, Measured
from experiments.capacity.report import ends
from experiments.report.style import colour

SHARES = {"attainment": "requests within limits", "gap_attainment": "token gaps within limit"}
RATES = {"request_throughput": "served", "request_goodput": "served within limits"}


def draw_capacity(capacity: Capacity, folder: Path) -> None:
    """Write capacity.png and capacity.svg: means over replications, and their least and most."""
    figure = Figure(figsize=(13, 3.8), dpi=150, layout="constrained")
    shares, rates, limits = figure.subplots(1, 3)
    _draw_metrics(shares, capacity, SHARES)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylim(0, 1.03)
    shares.set_title("SLO attainment", loc="left", fontsize=11)
    _draw_metrics(rates, capacity, RATES)
    most = max(run.rate for run in _shown(capacity))
    rates.plot([0, most], [0, most], color="black", linewidth=1, linestyle=":", label="arriving")
    rates.set_title("Requests/s", loc="left", fontsize=11)
    rates.set_ylim(bottom=0)
    _draw_limits(limits, capacity)
    for axes in (shares, rates, limits):
        _finish(axes, capacity)
    figure.suptitle(_title(capacity), fontsize=10)
    with matplotlib.rc_context({"svg.hashsalt": "evenflow"}):
        figure.savefig(folder / "capacity.png", metadata={"Software": None})
        figure.savefig(folder / "capacity.svg", metadata={"Date": None})


def _shown(capacity: Capacity) -> list[Measured]:
    """Return the runs of the curve; where no rate was found, all that were tried."""
    wanted = capacity.curve
    return [run for run in capacity.measured if not wanted or run.rate in wanted]


def _draw_metrics(axes: Axes, capacity: Capacity, labels: Mapping[str, str]) -> None:
    known = [name for name in labels if all(name in run.values for run in capacity.measured)]
    for index, name in enumerate(known):
        _draw(axes, capacity, itemgetter(name), labels[name], index)


def _draw_limits(axes: Axes, capacity: Capacity) -> None:
    for index, condition in enumerate(capacity.question.slo):
        metric, limit = condition.metric, condition.limit

        def of_limit(
            values: Mapping[str, Any], metric: str = metric, limit: float = limit
        ) -> float:
            return float(values[metric]) / limit

        _draw(axes, capacity, of_limit, str(condition), index)
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_title("Value / limit", loc="left", fontsize=11)


def _title(capacity: Capacity) -> str:
    rate, name = capacity.rate, capacity.question.config.scheduler.name
    found = "no rate" if rate is None else f"{rate.mean:.3g} requests/s"
    requests, seeds = int(capacity.measured[0].values["completed"]), capacity.question.replications
    return f"{name}: {found} ({requests} requests, {seeds} seed{'s' if seeds > 1 else ''})"


def _draw(
    axes: Axes,
    capacity: Capacity,
    value: Callable[[Mapping[str, Any]], float],
    label: str,
    index: int,
) -> None:
    by_rate: dict[float, list[float]] = defaultdict(list)
    for run in _shown(capacity):
        by_rate[run.rate].append(value(run.values))
    rates = np.array(sorted(by_rate))
    rows = [by_rate[rate] for rate in rates]
    mean = np.array([np.mean(row) for row in rows])
    axes.plot(rates, mean, marker="o", markersize=3, color=colour(index), label=label)
    least, most = ([pick(row) for row in rows] for pick in (min, max))
    axes.fill_between(rates, least, most, color=colour(index), alpha=0.2, linewidth=0)


def _finish(axes: Axes, capacity: Capacity) -> None:
    axes.set_xlabel("requests/s arriving")
    axes.set_xlim(left=0)
    axes.grid(color="#E9ECF0")
    axes.spines[["top", "right"]].set_visible(False)
    if capacity.rate is not None:
        axes.axvline(capacity.rate.mean, color="#7F7F7F", linestyle="--", linewidth=1)
        if capacity.rate.n > 1:
            axes.axvspan(*ends(capacity.rate), color="#7F7F7F", alpha=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
