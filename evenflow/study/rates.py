"""The search for the largest request rate that keeps an SLO: for `capacity` and for `plan`.

All rates see the same requests and the same draws of arrivals, stretched. Knows rates of arrivals
and what a trial says of one; simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evenflow.config.yaml_file import Patch
from evenflow.errors import UsageError
from evenflow.report.words import sure_numbers
from evenflow.study import searches
from evenflow.study.slo import KEEPS_UP, Condition
from evenflow.study.trials import Search, Trial, Variant
from evenflow.traces import AnyArrivals, Replay
from evenflow.types import Request

if TYPE_CHECKING:
    from pandas import DataFrame

RATE_DIGITS = 4
"""Significant digits of a rate: readable, and found again in a store."""

LEAST_TOLERANCE = 0.002
"""Below it, neighbouring rates round to one."""

IDLE_REQUESTS = 0.1
"""With fewer requests in the system, on average, no two of them share anything."""

ENOUGH_TIMES = 10
"""A run has a steady state with this many times the requests in the system at once."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one rate (requests/s): it passes, or these conditions fail.

    `in_system` is the mean number of the run's `requests` in the system (Little's law: rate x mean
    E2EL).
    """

    rate: float
    failed: tuple[str, ...]
    in_system: float
    requests: int

    @property
    def passes(self) -> bool:
        return not self.failed

    @property
    def crowded(self) -> bool:
        """Whether all requests arrive before one is served, on average.

        Its queue is as long as the run has requests: it says nothing of longer runs.
        """
        return self.in_system >= self.requests

    @property
    def idle(self) -> bool:
        """Whether a lower rate would change nothing: a request mostly has the system to itself."""
        return self.in_system < IDLE_REQUESTS


@dataclass(frozen=True, slots=True)
class TriedRate(Probe):
    """A rate that was simulated, with its trial."""

    trial: Trial

    @property
    def values(self) -> Mapping[str, Any]:
        """The numbers of the first part's run."""
        return self.trial.records[0].values


def tried(trial: Trial, rate: float, slo: Iterable[Condition]) -> TriedRate:
    """Return what a trial says of its rate."""
    latency_ms, served = trial.mean("mean_e2el_ms"), trial.served
    in_system = 0.0 if math.isnan(latency_ms) else served.share * rate * latency_ms / 1e3
    failed = tuple(each.metric for each in slo if not keeps(trial, each))
    return TriedRate(rate, failed, in_system, served.completed // len(trial.records), trial)


def keeps(trial: Trial, condition: Condition) -> bool:
    """Say whether a trial keeps a limit, on the mean of its parts; one that fails keeps none."""
    if condition is KEEPS_UP:
        return trial.keeps_up and not trial.errors
    return condition.holds({key: trial.mean(key) for key in ("completed", condition.metric)})


Status = Literal["found", "never", "too_short"]


@dataclass(frozen=True, slots=True)
class RateFound:
    """The result of a search for a rate.

    `found`: `rate` passes and `fails_at`, within the tolerance above it, does not. `never`: even
    where requests do not meet, at `fails_at`, it fails. `too_short`: rates pass up to one at which
    all requests arrive before one is served, on average; `rate` None. `failed` are the conditions
    at `fails_at`. `enough_requests`: how many the run should have so that its length does not
    matter much.
    """

    status: Status
    rate: float | None
    fails_at: float | None
    failed: tuple[str, ...]
    enough_requests: int


def bisect(
    start: float,
    tolerance: float,
    case: Callable[[float], Variant],
    probe: Callable[[Trial], Probe],
    *,
    width: int = 1,
) -> Search:
    """Find the largest rate that passes: bracket it by doubling, then narrow the bracket.

    Up to `width` rates are probed at once. It assumes that what fails at one rate fails at all
    higher ones. Where that is not so, it finds one that passes just below one that fails.
    """
    known: list[Probe] = []
    while rates := next_rates(known, start, tolerance, width):
        trials = yield list(map(case, rates))
        known += map(probe, trials)


def next_rates(
    probes: Sequence[Probe], start: float, tolerance: float, width: int = 1
) -> list[float]:
    """Return the rates to probe next, up to `width` at once; none when the search has ended.

    Doubles from `start` while all pass, halves while all fail. Then it divides the bracket in equal
    ratios until its ends differ by at most `tolerance` (0.02: 2 %).
    """
    low, high = bracket(probes)
    steps = range(1, width + 1)
    if low is None:
        if high is None:
            rates = [start * 2 ** (step - 1) for step in steps]
        else:
            rates = [] if high.idle else [high.rate / 2**step for step in steps]
    elif low.crowded or (high is not None and high.rate <= low.rate * (1 + tolerance)):
        rates = []
    elif high is None:
        rates = [low.rate * 2**step for step in steps]
    else:
        ratio = high.rate / low.rate
        rates = [low.rate * ratio ** (step / (width + 1)) for step in steps]
    return sorted({rounded(rate) for rate in rates} - {probe.rate for probe in probes})


def rate_found(probes: Sequence[Probe]) -> RateFound:
    """Return what the probes of an ended search say."""
    low, high = bracket(probes)
    failed = () if high is None else high.failed
    fails_at = None if high is None else high.rate
    if low is None:
        return RateFound("never", None, fails_at, failed, 0)
    enough = math.ceil(ENOUGH_TIMES * low.in_system)
    if low.crowded:
        return RateFound("too_short", None, fails_at, failed, enough)
    return RateFound("found", low.rate, fails_at, failed, enough)


def bracket(probes: Sequence[Probe]) -> tuple[Probe | None, Probe | None]:
    """Return the highest rate that passes below the lowest that fails, and that one.

    A rate that passes above one that fails is nothing to rely on.
    """
    high = min((p for p in probes if not p.passes), key=lambda probe: probe.rate, default=None)
    below = (p for p in probes if p.passes and (high is None or p.rate < high.rate))
    return max(below, key=lambda probe: probe.rate, default=None), high


def rounded(rate: float) -> float:
    return searches.rounded(rate, RATE_DIGITS)


def rate_patch(arrivals: AnyArrivals, rate: float, start: float) -> Patch:
    """Return a patch that puts arrivals at `rate`; their own rate is `start`."""
    if isinstance(arrivals, Replay):
        return {"workload.arrivals.scale": arrivals.scale * rate / start}
    return {"workload.arrivals.rate": rate}


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
            f"workload.arrivals: {arrivals.kind} has no rate to search for; give poisson, gamma "
            "or replay"
        )
    return float(rate)


def measured(runs: Sequence[TriedRate]) -> DataFrame:
    """Return a row of numbers for each run at each rate, which is the index."""
    from pandas import DataFrame

    records = [(run.rate, record.values) for run in runs for record in run.trial.records]
    return DataFrame([sure_numbers(values) for _, values in records], [at for at, _ in records])
