"""What a few replications say about a mean: Student's confidence intervals, plain and paired.

Knows numbers only. Replications are taken as independent draws of nearly normal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` replications; it is uncertain by `half_width` both ways, NaN where n is 1."""

    mean: float
    half_width: float
    n: int

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def is_above_zero(self) -> bool:
        return self.mean - self.half_width > 0

    @property
    def is_below_zero(self) -> bool:
        return self.mean + self.half_width < 0


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the mean of one or more values with its confidence interval.

    The half-width is t * s / sqrt(n), t being the (1 + level) / 2 quantile of Student's
    distribution with n - 1 degrees of freedom and s the sample standard deviation.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, student_quantile((1 + level) / 2, n - 1) * math.sqrt(variance / n), n)


def paired_difference(
    values: Sequence[float], others: Sequence[float], level: float = LEVEL
) -> Interval:
    """Return the mean of `values` less `others`, pair by pair, with its confidence interval.

    Under common random numbers (pairs that saw the same arrivals) it is far narrower than the two
    intervals side by side, since what the arrivals do to both cancels.
    """
    return interval([a - b for a, b in zip(values, others, strict=True)], level)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's distribution at a probability between 0.5 and 1.

    The distribution function is the finite sum for whole degrees of freedom of Abramowitz and
    Stegun, 26.7.3 and 26.7.4, inverted by bisection in the angle atan(t / sqrt(degrees)).
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if 0.5 + _central_probability(middle, degrees) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """Return P(|T| < t) for t = sqrt(degrees) * tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
