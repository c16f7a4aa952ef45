"""Whether a run keeps up with what arrives: a test of whether the number in the system grows.

The number in the system counts requests that have arrived and are not done. It is looked at from
the end of the warm-up to the last arrival. Its variance is that of batches of equal time (batch
means), which have the autocorrelation in them.

A queue at `SUSTAINABLE` of its capacity begins empty. In the diffusion limit it is a Brownian
motion that falls and is reflected at zero. Its growth is known (Harrison, Brownian Motion and
Stochastic Flow Systems, 1985, section 1.8). The variance is estimated. So the normal distribution
becomes Student's, and the exponential its mean over the distribution of the variance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from evenflow.results.run import Floats


def student_cdf(value: float, degrees: int) -> float:
    """Return the probability that Student's t is at most `value`, for whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4. In closed form,
    as SciPy's takes 0.2 s of each command to import.
    """
    angle = math.atan(value / math.sqrt(degrees))
    odd, square = degrees % 2, math.cos(angle) ** 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= square * (power - 1) / power
    within = math.sin(angle) * total
    return 0.5 + (angle + within) / math.pi if odd else 0.5 + within / 2


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t for a probability of one half or more."""
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return high


SUSTAINABLE = 0.95
"""Load, as a share of the capacity, up to which a deployment counts as keeping up."""

FALSE_ALARMS = 0.01
"""The share of runs at a sustainable load that are called overloaded, at most."""

NOTICED = 0.15
"""Growth of the queue, as a share of arrivals, that a run has to detect; else it is too short to
tell.
"""

MISSED = 0.05
"""The share of runs with this growth that are called sustainable, at most."""

STAYED = 0.05
"""The warm-up ends when no more than this share of the first batch of requests is left."""

FINER = (1, 2, 4)
"""Batch lengths are divided by these; the largest variance counts, as short queues vary fastest."""


class QueueGrowth(NamedTuple):
    """By how many `requests` the number in the system grew while `arrivals` came.

    `deviation` is its standard deviation by chance, infinite where unknown, with `degrees` of
    freedom; `first` is the number to begin with.
    """

    requests: int
    arrivals: int
    first: int
    deviation: float
    degrees: int

    @property
    def share(self) -> float:
        """The growth as a share of what arrives; 0 where the number falls."""
        return max(self.requests, 0) / self.arrivals

    @property
    def overloaded(self) -> bool | None:
        """Whether the queue grows without end; None: the run is too short to tell.

        The number in service, which no queue keeps from varying, varies as Poisson's at most.
        """
        if math.isinf(self.deviation):
            return None
        in_service = self.deviation * math.sqrt(self.first / self.arrivals)
        at_rest = student_cdf(-self.requests / in_service, self.degrees) if in_service else 0.0
        if max(at_rest, self.chance) < FALSE_ALARMS:
            return True
        noticed = (self.requests - NOTICED * self.arrivals) / self.deviation
        return False if student_cdf(noticed, self.degrees) < MISSED else None

    @property
    def chance(self) -> float:
        """Probability of a growth as large at a load of SUSTAINABLE, the queue empty at first."""
        grown, deviation, degrees = self.requests, self.deviation, self.degrees
        if grown <= 0:
            return 1.0
        falls = (1 / SUSTAINABLE - 1) * self.arrivals
        odds = (1 + 4 * falls * grown / deviation**2 / degrees) ** (-degrees / 2)
        above = student_cdf(-(grown + falls) / deviation, degrees)
        return float(above + odds * student_cdf((falls - grown) / deviation, degrees))


def growth(arrived_s: Floats, left_s: Floats) -> QueueGrowth:
    """Return how the number in the system grows; from 0 where the warm-up outlasts the arrivals.

    Times of two or more requests in seconds, in the order of arrival. Batches are the square root
    of the requests in number. The variance is at least that of Poisson arrivals.
    """
    batches = max(math.isqrt(len(arrived_s)), 2)
    warm_s = float(np.quantile(left_s[:batches], 1 - STAYED, method="higher"))
    finest = max(FINER)
    edges_s = np.linspace(warm_s, max(warm_s, arrived_s[-1]), finest * batches + 1)
    came = np.searchsorted(arrived_s, edges_s, "left")
    there = came - np.searchsorted(np.sort(left_s), edges_s, "right")
    if (arrivals := int(came[-1] - came[0])) < 1:
        waiting = int((left_s[:-1] > arrived_s[-1]).sum())
        return QueueGrowth(waiting, len(arrived_s) - 1, 0, math.inf, batches - 1)
    steps = (np.diff(there[:: finest // finer]) for finer in FINER)
    variance = max(arrivals, *(float(step.var(ddof=1)) * len(step) for step in steps))
    grown, first = int(there[-1] - there[0]), int(there[0])
    return QueueGrowth(grown, arrivals, first, math.sqrt(variance), batches - 1)
