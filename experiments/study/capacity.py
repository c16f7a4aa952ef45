"""A capacity from its question to its folder: what is written, said and drawn of the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from evenflow.errors import UsageError
from experiments.report import plots
from experiments.report.style import colour
from experiments.report.tables import number, write_json, write_table
from experiments.study.capacity_search import Capacity, Measured, Question, capacity_of, rate_cells
from experiments.study.fair import alone, marked
from experiments.study.intervals import interval
from experiments.study.prices import S_PER_HOUR
from experiments.study.slo import KEEPS_UP
from experiments.study.trials import How

SHOWN = (
    "attainment",
    "gap_attainment",
    "request_goodput",
    "request_throughput",
    "total_token_throughput",
    "median_queue_ms",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "busy_share",
    "preemptions",
)
"""Numbers of the capacity's own run that are shown beside those that the SLO limits."""


def capacity(question: Question, how: How) -> Capacity:
    """Return the largest rate that keeps the SLO and at which the queue does not grow.

    UsageError as for `capacity_of`, and for a search that ran out of requests before it found a
    rate that fails.
    """
    asked = replace(question, slo=(*question.slo, KEEPS_UP))
    with how.simulator("rates simulated", None) as who:
        answer = capacity_of(asked, who)
    for end in answer.searches:
        if end.status == "too_short":
            ran = max(each.rate for each in answer.measured if not each.failed)
            raise UsageError(
                "workload.requests: too few to find a capacity: "
                f"{' and '.join(map(str, question.slo))} still holds at {ran:g} requests/s, where "
                "all requests arrive before one is served; give more, like "
                f"{end.enough_requests}, or also limit the queue (--max-median-queue-s 2)"
            )
    how.write(lambda folder: _write(folder, answer))
    return answer


def _write(folder: Path, capacity: Capacity) -> None:
    """Write capacity.json, rates.csv, and the picture as capacity.png and .svg."""
    write_json(folder / "capacity.json", facts(capacity) | {"provenance": capacity.provenance})
    write_table(folder / "rates.csv", rate_cells(capacity))
    plots.save(_draw_capacity(capacity), folder / "capacity")


def facts(capacity: Capacity) -> dict[str, Any]:
    """Return the content of capacity.json but where it comes from."""
    question, searches = capacity.question, capacity.searches
    rate = capacity.rate
    told: dict[str, Any] = {
        "status": capacity.status,
        "capacity_requests_per_s": None if rate is None else rate.mean,
        "interval_95": None if rate is None or rate.n < 2 else list(rate.ends),
        "slo": [str(condition) for condition in question.slo],
        "tolerance": question.tolerance,
        "replications": question.replications,
        "rates": [found.rate for found in searches],
        "fails_at": [found.fails_at for found in searches],
        "limited_by": dict(Counter(metric for found in searches for metric in found.failed)),
        "contradictions": [
            {"replication": each.replication, "rate": each.rate, "passes": not each.failed}
            for each in capacity.contradictions
        ],
        "enough_requests": max(found.enough_requests for found in searches),
    }
    if rate is None:
        alone = min(capacity.measured, key=lambda each: each.rate)
        told["at_lowest_rate"] = {each.metric: alone.values[each.metric] for each in question.slo}
    if rate is not None:
        told["at_capacity"] = _at_capacity(capacity)
        if question.per_hour is not None:
            told["per_dollar"] = _per_dollar(capacity, rate.mean, question.per_hour)
    return told


def _at_capacity(capacity: Capacity) -> dict[str, Any]:
    runs = [at.values for at, _ in capacity.at_knee()]
    metrics = dict.fromkeys((*(each.metric for each in capacity.question.slo), *SHOWN))
    known = [metric for metric in metrics if all(metric in run for run in runs)]
    return {metric: interval([run[metric] for run in runs]).mean for metric in known}


def _per_dollar(capacity: Capacity, rate: float, per_hour: float) -> dict[str, float]:
    """Return what a rate costs: `per_hour` dollars buy it for an hour.

    Tokens are those of a mean request, input and output.
    """
    runs = [at.values for at, _ in capacity.at_knee()]
    tokens = fmean(_tokens(run, "input", "output") for run in runs)
    output_tokens = fmean(_tokens(run, "output") for run in runs)
    millions_per_hour = S_PER_HOUR * rate / 1e6
    return {
        "dollars_per_hour": per_hour,
        "requests_per_s_per_dollar_per_hour": rate / per_hour,
        "requests_per_dollar": S_PER_HOUR * rate / per_hour,
        "dollars_per_million_tokens": per_hour / (millions_per_hour * tokens),
        "dollars_per_million_output_tokens": per_hour / (millions_per_hour * output_tokens),
    }


def _tokens(values: Mapping[str, Any], *kinds: str) -> float:
    return float(sum(values[f"total_{kind}_tokens"] for kind in kinds) / values["completed"])


def knee_rows(capacity: Capacity) -> list[tuple[str, str, str, str]]:
    """Return a row for each condition: its limit, and its value at the capacity and just above."""
    knee = capacity.at_knee()
    rows = []
    for condition in capacity.question.slo:
        sign = "at least" if condition.at_least else "at most"
        below = _mean([at for at, _ in knee], condition.metric)
        above = _mean([fails for _, fails in knee], condition.metric)
        rows.append((condition.metric, f"{sign} {condition.limit:g}", below, above))
    return rows


def _mean(runs: Sequence[Measured], metric: str) -> str:
    return f"{fmean(run.values[metric] for run in runs):.4g}" if runs else "-"


def sentences(capacity: Capacity) -> list[str]:
    """Return what to say of the answer: the rate, what limits it, what it costs, what to doubt."""
    told = facts(capacity)
    if capacity.rate is None:
        return [_never(capacity)]
    rate, question = capacity.rate, capacity.question
    low, high = rate.ends
    spread = f" (95 %: {low:.4g} to {high:.4g})" if rate.n > 1 else ""
    seeds = "1 seed" if rate.n == 1 else f"{rate.n} seeds"
    limits = ", ".join(f"{name} ({n} of {rate.n})" for name, n in told["limited_by"].items())
    said = [
        f"capacity: {rate.mean:.4g} requests/s{spread}, within {question.tolerance:.1%}, {seeds}",
        f"what fails first above it: {limits}",
    ]
    if "per_dollar" in told:
        cost = told["per_dollar"]
        said.append(
            f"{cost['requests_per_s_per_dollar_per_hour']:.4g} requests/s for a dollar an hour; "
            f"{cost['dollars_per_million_tokens']:.4g} dollars for a million tokens, "
            f"{cost['dollars_per_million_output_tokens']:.4g} for a million of output"
        )
    return said + _doubts(capacity, told)


def _never(capacity: Capacity) -> str:
    found = next(each for each in capacity.searches if each.status == "never")
    alone = min(capacity.measured, key=lambda each: each.rate).values
    missed = [each for each in capacity.question.slo if each.metric in found.failed]
    values = [
        f"{each.metric} is {number(alone[each.metric])}, not {each.limit:g}" for each in missed
    ]
    return (
        f"no rate keeps the SLO: at {found.fails_at:g} requests/s, where requests hardly meet, "
        f"{', '.join(values)}; this deployment does not serve one request in time: try a smaller "
        "budget, more tensor parallelism, or evenflow plan"
    )


def _doubts(capacity: Capacity, told: Mapping[str, Any]) -> list[str]:
    weak = [alone("the run at this rate", at.side) for at, _ in capacity.at_knee()]
    said = marked(dict.fromkeys(chain.from_iterable(weak)))
    completed = min(int(at.values["completed"]) for at, _ in capacity.at_knee())
    if completed < told["enough_requests"]:
        said.append(
            f"run length matters here: {completed} requests are few beside those in the system at "
            f"once; with workload.requests={told['enough_requests']} the capacity may be smaller"
        )
    noisy = sorted({each.rate for each in capacity.contradictions})
    if noisy:
        listed = ", ".join(f"{rate:g}" for rate in noisy)
        said.append(f"not monotone: the verdict is the other way at {listed} requests/s")
    return said


SHARES = {"attainment": "requests within limits", "gap_attainment": "token gaps within limit"}
RATES = {"request_throughput": "served", "request_goodput": "served within limits"}


def _draw_capacity(capacity: Capacity) -> Figure:
    """Draw the SLO's shares, the rates and its numbers against the rate that arrives.

    Lines are means over replications, bands their least and most.
    """
    figure, (shares, rates, limits) = plots.panels(3, 4.33, 3.8)
    _draw_metrics(shares, capacity, SHARES)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylim(0, 1.03)
    _draw_metrics(rates, capacity, RATES)
    most = max(run.rate for run in _shown(capacity))
    rates.plot([0, most], [0, most], color="black", linewidth=1, linestyle=":", label="arriving")
    rates.set_ylim(bottom=0)
    _draw_limits(limits, capacity)
    titles = {"SLO attainment": shares, "Requests/s": rates, "Value / limit": limits}
    for title, axes in titles.items():
        _finish(axes, capacity, title)
    figure.suptitle(_title(capacity), fontsize=10)
    return figure


def _shown(capacity: Capacity) -> list[Measured]:
    """Return the runs of the curve; where no rate was found, all that were tried."""
    wanted = capacity.curve
    return [run for run in capacity.measured if not wanted or run.rate in wanted]


def _draw_metrics(axes: Axes, capacity: Capacity, labels: Mapping[str, str]) -> None:
    known = [name for name in labels if all(name in run.values for run in capacity.measured)]
    for index, name in enumerate(known):
        _draw(axes, capacity, itemgetter(name), labels[name], index)


def _draw_limits(axes: Axes, capacity: Capacity) -> None:
    limited = [condition for condition in capacity.question.slo if condition.limit]
    for index, condition in enumerate(limited):
        metric, limit = condition.metric, condition.limit

        def of_limit(
            values: Mapping[str, Any], metric: str = metric, limit: float = limit
        ) -> float:
            return float(values[metric]) / limit

        _draw(axes, capacity, of_limit, str(condition), index)
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


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
    runs = _shown(capacity)
    values = pd.Series([value(run.values) for run in runs], [run.rate for run in runs])
    rows = values.groupby(level=0).agg(["mean", "min", "max"])
    axes.plot(rows["mean"], marker="o", markersize=3, color=colour(index), label=label)
    least, most = rows["min"], rows["max"]
    axes.fill_between(rows.index, least, most, color=colour(index), alpha=0.2, linewidth=0)


def _finish(axes: Axes, capacity: Capacity, title: str) -> None:
    axes.set_xlabel("requests/s arriving")
    axes.set_xlim(left=0)
    plots.finish(axes, title)
    if capacity.rate is not None:
        axes.axvline(capacity.rate.mean, color="#7F7F7F", linestyle="--", linewidth=1)
        if capacity.rate.n > 1:
            axes.axvspan(*capacity.rate.ends, color="#7F7F7F", alpha=0.15)
    plots.key(axes)
