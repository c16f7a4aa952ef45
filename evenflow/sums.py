"""Sums of floats to the same last digit on every Python: `sum` compensates from 3.12 on."""

from __future__ import annotations

from collections.abc import Iterable


def plain_sum(values: Iterable[float]) -> float:
    """Add from left to right, and round after each."""
    total = 0.0
    for value in values:
        total += value
    return total
