"""Confidence intervals of means over a few replications, alone or in pairs.

Student's t: the replications are taken for independent and roughly normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % points of Student's t for 1 to 30 degrees of freedom; beyond, the last is kept."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval; NaN for a single value."""

    mean: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of the values with its 95 % confidence interval."""
    count = len(values)
    if count < 2:
        return Interval(fmean(values), math.nan, count)
    t = T_975[min(count - 1, len(T_975)) - 1]
    return Interval(fmean(values), t * stdev(values) / math.sqrt(count), count)


def paired(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the mean of the differences `values - others` with its 95 % confidence interval.

    For runs on the same requests in pairs: what the pairs share drops out.
    """
    return interval([value - other for value, other in zip(values, others, strict=True)])
