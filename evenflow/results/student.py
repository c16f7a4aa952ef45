"""Student's distribution, in its closed form: SciPy's takes 0.2 s of each command to import."""

from __future__ import annotations

import math


def student_cdf(value: float, degrees: int) -> float:
    """Return the probability that Student's t is at most `value`, for whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
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
