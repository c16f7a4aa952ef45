"""What a few replications say about a mean: Student's confidence intervals, plain and paired.

Knows numbers only, and how to write them. Replications are taken as independent draws of nearly
normal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.report.tables import number

LEVEL = 0.95

MOST_DEGREES = 10_000
"""Of more degrees of freedom the quantile is that of so many: 0.01 % above the normal one."""


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


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of one or more values with its confidence interval at LEVEL.

    The half-width is t * s / sqrt(n), t being the (1 + LEVEL) / 2 quantile of Student's
    distribution with n - 1 degrees of freedom and s the sample standard deviation.
    """
    mean, square = _mean_and_error(values)
    return _interval(mean, square, len(values) - 1, len(values))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the square of its standard error; NaN of one value."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    return mean, spread / (n - 1) / n if n > 1 else math.nan


def _interval(mean: float, square: float, degrees: int, n: int) -> Interval:
    if math.isnan(square):
        return Interval(mean, math.nan, n)
    return Interval(mean, student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(square), n)


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the mean of `values` less `others`, pair by pair, with its confidence interval.

    Under common random numbers (pairs that saw the same arrivals) it is far narrower than the two
    intervals side by side, since what the arrivals do to both cancels.
    """
    return interval([a - b for a, b in zip(values, others, strict=True)])


def unpaired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the mean of `values` less that of `others`, independent draws, with its interval.

    Welch's: the squares of the two standard errors add up, and the degrees of freedom are those of
    Welch and Satterthwaite, rounded down; `n` is the smaller number of values.
    """
    (mean, square), (other, other_square) = _mean_and_error(values), _mean_and_error(others)
    both, n, m = square + other_square, len(values), len(others)
    degrees = 1
    if both > 0:  # NaN of one value
        degrees = max(int(both**2 / (square**2 / (n - 1) + other_square**2 / (m - 1))), 1)
    return _interval(mean - other, both, degrees, min(n, m))


def with_width(mean: Interval) -> str:
    """Return a mean and, where there is one, the half-width of its interval."""
    width = "" if math.isnan(mean.half_width) else f" ± {number(mean.half_width, 2)}"
    return f"{number(mean.mean)}{width}"


def signed(gap: Interval) -> str:
    """Return a difference with its sign and half-width."""
    return f"{'+' if gap.mean >= 0 else ''}{with_width(gap)}"


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's distribution at a probability between 0.5 and 1.

    The distribution function is the finite sum for whole degrees of freedom of Abramowitz and
    Stegun, 26.7.3 and 26.7.4, inverted by bisection in the angle atan(t / sqrt(degrees)).
    """
    degrees = min(degrees, MOST_DEGREES)
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
