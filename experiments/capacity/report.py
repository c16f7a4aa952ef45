"""What a search for capacity writes and says: capacity.json, the table of rates, sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from evenflow.errors import UsageError
from experiments.capacity.find import Capacity, Measured
from experiments.report.outputs import write_json
from experiments.report.tables import write_table
from experiments.study.intervals import Interval, interval

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

S_PER_HOUR = 3600


def refuse_short(capacity: Capacity) -> None:
    """Raise UsageError when a search ran out of requests before it found a rate that fails."""
    for found in capacity.searches:
        if found.status == "too_short":
            ran = max(each.rate for each in capacity.measured if not each.failed)
            slo = " and ".join(map(str, capacity.question.slo))
            raise UsageError(
                f"workload.requests: too few to find a capacity: {slo} still holds at {ran:g} "
                "requests/s, where all requests arrive before one is served; give more, like "
                f"{found.enough_requests}, or also limit the queue (--max-median-queue-s 2)"
            )


def facts(capacity: Capacity, per_hour: float | None = None) -> dict[str, Any]:
    """Return the content of capacity.json; `per_hour` is what the deployment costs in dollars."""
    question, searches = capacity.question, capacity.searches
    rate = capacity.rate
    told: dict[str, Any] = {
        "status": capacity.status,
        "capacity_requests_per_s": None if rate is None else rate.mean,
        "interval_95": None if rate is None or rate.n < 2 else list(ends(rate)),
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
    if rate is not None:
        told["at_capacity"] = _at_capacity(capacity)
        if per_hour is not None:
            told["per_dollar"] = per_dollar(capacity, per_hour)
    return told


def ends(rate: Interval) -> tuple[float, float]:
    """Return the ends of an interval."""
    return rate.mean - rate.half_width, rate.mean + rate.half_width


def _at_capacity(capacity: Capacity) -> dict[str, Any]:
    runs = [at.values for at, _ in capacity.at_knee()]
    metrics = dict.fromkeys((*(each.metric for each in capacity.question.slo), *SHOWN))
    known = [metric for metric in metrics if all(metric in run for run in runs)]
    return {metric: interval([run[metric] for run in runs]).mean for metric in known}


def per_dollar(capacity: Capacity, per_hour: float) -> dict[str, float]:
    """Return what the capacity costs: `per_hour` dollars buy it for an hour.

    Tokens are those of a mean request, input and output, at the rate of the capacity.
    """
    assert capacity.rate is not None
    runs = [at.values for at, _ in capacity.at_knee()]
    rate = capacity.rate.mean
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


def write_capacity(folder: Path, capacity: Capacity, told: Mapping[str, Any]) -> None:
    """Write capacity.json, and rates.csv: a row for each replication and rate simulated.

    `misses` are the metrics whose limits are not kept there.
    """
    write_json(folder / "capacity.json", told)
    runs = capacity.measured
    keys = [key for key, value in runs[0].values.items() if isinstance(value, int | float)]
    columns: dict[str, list[Any]] = {
        "replication": [run.replication for run in runs],
        "rate": [run.rate for run in runs],
        "misses": [" ".join(run.failed) for run in runs],
        **{key: [run.values.get(key, "") for run in runs] for key in keys},
    }
    write_table(folder / "rates.csv", columns)


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


def sentences(capacity: Capacity, told: Mapping[str, Any]) -> list[str]:
    """Return what to say of the answer: the rate, what limits it, what it costs, what to doubt."""
    if capacity.rate is None:
        return [_never(capacity)]
    rate, question = capacity.rate, capacity.question
    low, high = ends(rate)
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
    return (
        f"no rate keeps the SLO: at {found.fails_at:g} requests/s, where requests hardly meet, "
        f"{', '.join(found.failed)} still fails; this deployment does not serve one request in time"
    )


def _doubts(capacity: Capacity, told: Mapping[str, Any]) -> list[str]:
    said = []
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
