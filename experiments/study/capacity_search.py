"""The capacity of a deployment: the largest request rate that keeps its SLO, and what it costs.

All rates see the same requests and the same draws of arrivals, stretched (common random numbers);
a replication is another seed, and has a search of its own. Knows points, no pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from evenflow.errors import UsageError
from evenflow.types import Request
from experiments.run_file.build import load_workload
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import Patch
from experiments.study.fair import Side, of_trial
from experiments.study.intervals import Interval, interval
from experiments.study.searches import (
    LEAST_TOLERANCE,
    Found,
    Probe,
    bisect,
    found,
    rounded,
    side_by_side,
)
from experiments.study.slo import KEEPS_UP, Condition, check_metrics, request_limits, service_levels
from experiments.study.trials import (
    Case,
    Simulator,
    Study,
    Trial,
    all_alike,
    dry_run,
    run,
    seed_matters,
)
from traces import AnyArrivals, Replay

CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Rates of the curve, as multiples of the capacity."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a configuration, its SLO, how exactly, and over how many seeds.

    The capacity is known within `tolerance` (0.02: 2 %) of itself. Seeds count up from that of the
    configuration. `beside` is the folder of the configuration's file; `per_hour` what the
    deployment costs in dollars.
    """

    config: RunConfig
    slo: tuple[Condition, ...]
    beside: Path = field(default_factory=Path)
    tolerance: float = 0.02
    replications: int = 1
    per_hour: float | None = None

    def __post_init__(self) -> None:
        if not LEAST_TOLERANCE <= self.tolerance < 1:
            raise UsageError(
                f"--tolerance {self.tolerance:g}: should be a share of the rate, from "
                f"{LEAST_TOLERANCE:g} to below 1, like 0.02"
            )
        if self.replications < 1:
            raise UsageError(f"--replications {self.replications}: should be at least 1")

    @property
    def study(self) -> Study:
        """The configuration, and its summary with what the SLO needs."""
        more = {
            "metrics": tuple(each.metric for each in self.slo),
            "limits": request_limits(self.slo, self.config.goodput),
        }
        return Study(self.config, self.beside, measure=service_levels, more=tuple(more.items()))


@dataclass(frozen=True, slots=True)
class Measured(Probe):
    """A probe of one replication, with the numbers of its run."""

    replication: int
    values: Mapping[str, Any]
    side: Side


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer: how the search of each replication ended, and every rate that was simulated.

    `curve` are the rates at multiples of the capacity, and `measured` all, by replication and rate.
    `provenance` says where they come from.
    """

    question: Question
    searches: tuple[Found, ...]
    measured: tuple[Measured, ...]
    curve: tuple[float, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def points(self) -> pd.DataFrame:
        """A row for each replication and rate simulated, as rates.csv has them."""
        return rate_cells(self).infer_objects()

    @property
    def status(self) -> str:
        """`found` if every search found a rate; otherwise how the first other one ended."""
        return next((each.status for each in self.searches if each.status != "found"), "found")

    @property
    def rate(self) -> Interval | None:
        """The capacity in requests/s over the replications; None unless all found one."""
        rates = [each.rate for each in self.searches if each.rate is not None]
        return interval(rates) if len(rates) == len(self.searches) else None

    @property
    def contradictions(self) -> list[Measured]:
        """The rates that pass above one that fails, or fail below one that passes: noise."""
        return [
            each
            for each in self.measured
            for end in (self.searches[each.replication],)
            if end.rate is not None
            and (bool(each.failed) if each.rate <= end.rate else not each.failed)
        ]

    def at_knee(self) -> list[tuple[Measured, Measured]]:
        """Return, for each search that found a rate, the runs at it and at the next that fails."""
        runs = {(each.replication, each.rate): each for each in self.measured}
        return [
            (runs[index, each.rate], runs[index, each.fails_at])
            for index, each in enumerate(self.searches)
            if each.rate is not None and each.fails_at is not None
        ]


def rate_cells(capacity: Capacity) -> pd.DataFrame:
    """Return a row for each replication and rate simulated, as objects: numbers as runs gave them.

    `misses` are the metrics whose limits are not kept there.
    """
    runs = capacity.measured
    keys = [key for key, value in runs[0].values.items() if isinstance(value, int | float)]
    rows = [
        {
            "replication": run.replication,
            "rate": run.rate,
            "misses": " ".join(run.failed),
            **{key: run.values.get(key, math.nan) for key in keys},
        }
        for run in runs
    ]
    return pd.DataFrame(rows, dtype=object)


def capacity_of(
    question: Question, simulator: Simulator, curve: Sequence[float] = CURVE
) -> Capacity:
    """Return the largest rate that keeps the SLO, and the metrics at `curve` times that rate.

    Raises UsageError for a mistake in the configuration, arrivals without a rate, a metric that a
    run has not, and a run that fails. The result does not depend on who simulates.
    """
    start, provenance = _prove(question)
    replications = range(question.replications)
    cases = [partial(_case, question.config, start, index) for index in replications]
    probe, width = partial(_measure, question), 2 if question.replications == 1 else 1
    searches = [bisect(start, question.tolerance, case, probe, width) for case in cases]
    trials = run(question.study, simulator, side_by_side(searches))
    measured = _measured(question, trials)
    ends = tuple(
        found([each for each in measured if each.replication == index]) for index in replications
    )
    answer = Capacity(question, ends, measured, provenance=provenance)
    if answer.rate is None:
        return answer
    rates = tuple(rounded(factor * answer.rate.mean) for factor in curve)
    trials += simulator.trials(question.study, [case(rate) for case in cases for rate in rates])
    return replace(answer, measured=_measured(question, trials), curve=rates)


def _case(config: RunConfig, start: float, replication: int, rate: float) -> Case:
    seed = {"workload.seed": config.workload.seed + replication}
    patch = {**seed, **rate_patch(config.workload.arrivals, rate, start)}
    return Case({"replication": replication, "rate": rate}, patch)


def rate_patch(arrivals: AnyArrivals, rate: float, start: float) -> Patch:
    """Return what puts arrivals at `rate`; at `start` they are as they are."""
    if isinstance(arrivals, Replay):
        return {"workload.arrivals.scale": arrivals.scale * rate / start}
    return {"workload.arrivals.rate": rate}


def _measured(question: Question, trials: Iterable[Trial]) -> tuple[Measured, ...]:
    """Return each rate of each replication once, by replication and rate."""
    runs = [_measure(question, trial) for trial in trials]
    by_place = {(each.replication, each.rate): each for each in runs}
    return tuple(by_place[place] for place in sorted(by_place))


def _measure(question: Question, trial: Trial) -> Measured:
    """Return what a rate came to, by Little's law and the SLO."""
    (record,) = trial.records
    rate, values = trial.labels["rate"], record.values
    if record.error is not None:
        raise UsageError(f"at {rate:g} requests/s: {record.error}")
    failed = tuple(each.metric for each in question.slo if not each.holds(values))
    in_system = rate * values["mean_e2el_ms"] / 1e3
    replication = trial.labels["replication"]
    completed, side = int(values["completed"]), of_trial(trial)
    return Measured(rate, failed, in_system, completed, replication, values, side)


def _prove(question: Question) -> tuple[float, Mapping[str, Any]]:
    """Find mistakes before the first long run, by a run of the two smallest requests.

    Return the rate (requests/s) to start from, and where results come from.
    """
    config = question.config
    if question.replications > 1 and not seed_matters(config):
        raise UsageError(
            f"--replications {question.replications}: {all_alike(config)}, or one replication"
        )
    workload = load_workload(config, question.beside)
    start = own_rate(config.workload.arrivals, workload.requests)
    outcome = dry_run(config, workload, question.beside)
    values = service_levels(outcome, **dict(question.study.more))
    asked = [each.metric for each in question.slo if each is not KEEPS_UP]
    check_metrics(asked, values, "--slo")
    for each in question.slo:
        if "_throughput" in each.metric or each.metric == "request_goodput":
            raise UsageError(
                f"--slo {each.metric}: grows with the rate, so that no rate is the largest to keep "
                "it; limit a latency, or attainment"
            )
    return start, outcome.result.provenance


def own_rate(arrivals: AnyArrivals, requests: Sequence[Request]) -> float:
    """Return the mean rate at which requests arrive, in requests/s.

    UsageError for arrivals that have none: offline, closed, or a trace that comes all at once.
    """
    if len(requests) < 2:
        raise UsageError(f"workload: {len(requests)} request has no rate; give more requests")
    if isinstance(arrivals, Replay):
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        if span_s > 0:
            return (len(requests) - 1) / span_s
        raise UsageError("workload.trace: all its requests arrive at once; give poisson arrivals")
    rate = getattr(arrivals, "rate", None)
    if rate is None:
        raise UsageError(
            f"workload.arrivals: {arrivals.kind} has no rate to search for; give poisson, gamma, "
            "onoff or replay"
        )
    return float(rate)
