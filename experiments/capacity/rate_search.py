"""Find the largest rate that passes: bracket it by doubling, then narrow the bracket.

Pure functions of the rates probed so far, so that whoever probes them may do several at once and
stop and go on at will. It assumes that what fails at one rate fails at all higher ones; where that
is not so, it finds one rate that passes just below one that fails. Knows no runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DIGITS = 4
"""Rates are rounded to so many significant digits: readable, and found again in a store."""

LEAST_TOLERANCE = 0.002
"""Below it, neighbouring rates round to one."""

IDLE_REQUESTS = 0.1
"""With fewer requests in the system, on average, no two of them share anything."""

ENOUGH_TIMES = 10
"""A run with so many times the requests that are in the system at once has a steady state."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rate (requests/s) came to: it passes, or these conditions fail.

    `in_system` is the mean number of requests in the system (Little's law: rate x mean E2EL) of the
    `requests` of the run.
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
        """Whether all requests arrive before, on average, one of them is served.

        The queue of such a run is as long as the run has requests: it says nothing of longer ones.
        """
        return self.in_system >= self.requests

    @property
    def idle(self) -> bool:
        """Whether a lower rate would change nothing: a request mostly has the system to itself."""
        return self.in_system < IDLE_REQUESTS


Status = Literal["found", "never", "too_short"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with.

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


def next_rates(
    probes: Sequence[Probe], start: float, tolerance: float, width: int = 1
) -> list[float]:
    """Return the rates to probe next, up to `width` at once; none when the search has ended.

    Doubles from `start` while all pass, halves while all fail, then divides the bracket in equal
    ratios until its ends differ by no more than `tolerance` (0.02: 2 %).
    """
    low, high = _bracket(probes)
    steps = range(1, width + 1)
    if low is None and high is None:
        rates = [start * 2 ** (step - 1) for step in steps]
    elif low is None:
        assert high is not None
        rates = [] if high.idle else [high.rate / 2**step for step in steps]
    elif low.crowded:
        rates = []
    elif high is None:
        rates = [low.rate * 2**step for step in steps]
    elif high.rate <= low.rate * (1 + tolerance):
        rates = []
    else:
        ratio = high.rate / low.rate
        rates = [low.rate * ratio ** (step / (width + 1)) for step in steps]
    known = {probe.rate for probe in probes}
    return [rate for rate in sorted({rounded(rate) for rate in rates}) if rate not in known]


def found(probes: Sequence[Probe]) -> Found:
    """Return what the probes of an ended search say."""
    low, high = _bracket(probes)
    failed = () if high is None else high.failed
    fails_at = None if high is None else high.rate
    if low is None:
        return Found("never", None, fails_at, failed, 0)
    enough = math.ceil(ENOUGH_TIMES * low.in_system)
    if low.crowded:
        return Found("too_short", None, fails_at, failed, enough)
    return Found("found", low.rate, fails_at, failed, enough)


def _bracket(probes: Sequence[Probe]) -> tuple[Probe | None, Probe | None]:
    """Return the lowest rate that fails, and the highest below it that passes."""
    high = min((p for p in probes if not p.passes), key=_rate, default=None)
    below = (p for p in probes if p.passes and (high is None or p.rate < high.rate))
    return max(below, key=_rate, default=None), high


def _rate(probe: Probe) -> float:
    return probe.rate


def rounded(rate: float) -> float:
    """Return a rate with DIGITS significant digits."""
    return float(f"{rate:.{DIGITS}g}")
