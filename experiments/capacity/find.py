"""The capacity of a deployment: the largest request rate that keeps its SLO.

All rates see the same requests and the same draws of arrivals, stretched (common random numbers);
a replication is another seed, and has a search of its own. Knows points, no files, no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError
from evenflow.types import Request
from experiments.capacity.rate_search import (
    LEAST_TOLERANCE,
    Found,
    Probe,
    found,
    next_rates,
    rounded,
)
from experiments.run_file.build import load_workload
from experiments.run_file.run import RunConfig
from experiments.study.intervals import Interval, interval
from experiments.study.points import Point, Record, Store, run_points
from experiments.study.slo import Condition, Limits, check_metrics, request_limits, service_levels
from experiments.study.trials import dry_run, seed_matters
from traces import AnyArrivals, Replay

CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Rates of the curve, as multiples of the capacity."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a configuration, its SLO, how exactly, and over how many seeds.

    The capacity is known within `tolerance` (0.02: 2 %) of itself. Seeds count up from that of the
    configuration. `beside` is the folder of the configuration's file.
    """

    config: RunConfig
    slo: tuple[Condition, ...]
    beside: Path = field(default_factory=Path)
    tolerance: float = 0.02
    replications: int = 1

    def __post_init__(self) -> None:
        if not LEAST_TOLERANCE <= self.tolerance < 1:
            raise UsageError(
                f"--tolerance {self.tolerance:g}: should be a share of the rate, from "
                f"{LEAST_TOLERANCE:g} to below 1, like 0.02"
            )
        if self.replications < 1:
            raise UsageError(f"--replications {self.replications}: should be at least 1")


@dataclass(frozen=True, slots=True)
class Measured:
    """One rate (requests/s) of one replication: the numbers of its run, and what fails."""

    replication: int
    rate: float
    values: Mapping[str, Any]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer: how the search of each replication ended, and every rate that was simulated.

    `curve` are the rates at multiples of the capacity, and `measured` all, by replication and rate.
    """

    question: Question
    searches: tuple[Found, ...]
    measured: tuple[Measured, ...]
    curve: tuple[float, ...] = ()

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


@dataclass(frozen=True, slots=True)
class Proof:
    """A question that makes sense: the rate (requests/s) to start from, where results come from."""

    start: float
    provenance: Mapping[str, Any]


def capacity_of(
    question: Question,
    store: Store,
    executor: Executor,
    *,
    curve: Sequence[float] = CURVE,
    proof: Proof | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Capacity:
    """Return the largest rate that keeps the SLO, and the metrics at `curve` times that rate.

    `on_done` is called with the number of rates simulated so far. Raises UsageError for a mistake
    in the configuration, arrivals without a rate, a metric that a run has not, and a run that
    fails. `proof`: what `prove` said of the question, if it was asked already. The result does not
    depend on the executor.
    """
    start = (proof or prove(question)).start
    replications = range(question.replications)
    width = 2 if question.replications == 1 else 1
    searches = _Searches(question, start, store, executor, on_done)
    while True:
        wanted = [
            (index, rate)
            for index in replications
            for rate in next_rates(searches.probes(index), start, question.tolerance, width)
        ]
        if not wanted:
            break
        searches.measure(wanted)
    ends = tuple(found(searches.probes(index)) for index in replications)
    capacity = Capacity(question, ends, searches.all())
    if capacity.rate is None:
        return capacity
    rates = tuple(rounded(factor * capacity.rate.mean) for factor in curve)
    searches.measure([(index, rate) for index in replications for rate in rates])
    return replace(capacity, measured=searches.all(), curve=rates)


def prove(question: Question) -> Proof:
    """Find mistakes before the first long run, by a run of the two smallest requests."""
    config = question.config
    if question.replications > 1 and not seed_matters(config):
        raise UsageError(
            f"--replications {question.replications}: all would be alike, as the seed draws "
            f"nothing of trace {config.workload.trace} with {config.workload.arrivals.kind} "
            "arrivals; give random arrivals, such as poisson, or one replication"
        )
    workload = load_workload(config, question.beside)
    start = own_rate(config.workload.arrivals, workload.requests)
    outcome = dry_run(config, workload, question.beside)
    metrics, limits = _more(question)
    values = service_levels(outcome, metrics=metrics, limits=limits)
    check_metrics([each.metric for each in question.slo], values, "--slo")
    for each in question.slo:
        if each.metric.endswith("_throughput") or each.metric == "request_goodput":
            raise UsageError(
                f"--slo {each.metric}: grows with the rate, so that no rate is the largest to keep "
                "it; limit a latency, or attainment"
            )
    return Proof(start, outcome.result.provenance)


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


def at_rate(config: RunConfig, rate: float, start: float, seed: int) -> RunConfig:
    """Return the configuration with its arrivals at `rate` (at `start` as it is) and a seed."""
    arrivals = config.workload.arrivals
    if isinstance(arrivals, Replay):
        changed: AnyArrivals = Replay(scale=arrivals.scale * rate / start)
    else:
        changed = arrivals.model_copy(update={"rate": rate})
    workload = config.workload.model_copy(update={"arrivals": changed, "seed": seed})
    return config.model_copy(update={"workload": workload})


class _Searches:
    """What has been simulated so far, by replication and rate."""

    def __init__(
        self,
        question: Question,
        start: float,
        store: Store,
        executor: Executor,
        on_done: Callable[[int], None] | None,
    ) -> None:
        self._question = question
        self._start = start
        self._store = store
        self._executor = executor
        self._tell = on_done or (lambda count: None)
        self._measured: dict[tuple[int, float], Measured] = {}

    def measure(self, wanted: Sequence[tuple[int, float]]) -> None:
        """Simulate rates of replications, those that are not known yet all at once."""
        new = [place for place in dict.fromkeys(wanted) if place not in self._measured]
        points = [self._point(*place) for place in new]
        before = len(self._measured)
        records = run_points(
            points, self._store, self._executor, lambda count: self._tell(before + count)
        )
        for place, record in zip(new, records, strict=True):
            self._measured[place] = _measured(self._question.slo, *place, record)

    def probes(self, replication: int) -> list[Probe]:
        """Return what the search of one replication has probed."""
        return [_probe(each) for each in self.all() if each.replication == replication]

    def all(self) -> tuple[Measured, ...]:
        """Return every run, by replication and rate."""
        return tuple(self._measured[place] for place in sorted(self._measured))

    def _point(self, replication: int, rate: float) -> Point:
        question = self._question
        seed = question.config.workload.seed + replication
        config = at_rate(question.config, rate, self._start, seed)
        metrics, limits = _more(question)
        more = (("metrics", metrics), ("limits", limits))
        return Point(config, question.beside, service_levels, more)


def _more(question: Question) -> tuple[tuple[str, ...], Limits]:
    metrics = tuple(each.metric for each in question.slo)
    return metrics, request_limits(question.slo, question.config.goodput)


def _measured(slo: Sequence[Condition], replication: int, rate: float, record: Record) -> Measured:
    if record.error is not None:
        raise UsageError(f"at {rate:g} requests/s: {record.error}")
    failed = tuple(each.metric for each in slo if not each.holds(record.values))
    return Measured(replication, rate, record.values, failed)


def _probe(measured: Measured) -> Probe:
    values = measured.values
    completed = int(values["completed"])
    in_system = measured.rate * values["mean_e2el_ms"] / 1e3
    return Probe(measured.rate, measured.failed, in_system, completed)
