"""Checks that specifications share. Knows no specification."""

from __future__ import annotations

import math

from evenflow.errors import UsageError


def require_positive(owner: str, **values: float) -> None:
    """Raise a UsageError unless each value is a finite number above 0."""
    for key, value in values.items():
        if not _is_number(value) or value <= 0:
            raise UsageError(f"{owner}: {key} is {value!r}; it must be a finite number above 0")


def require_not_negative(owner: str, **values: float) -> None:
    """Raise a UsageError unless each value is a finite number, 0 or above."""
    for key, value in values.items():
        if not _is_number(value) or value < 0:
            raise UsageError(f"{owner}: {key} is {value!r}; it must be a finite number, 0 or above")


def require_counts(owner: str, **values: int) -> None:
    """Raise a UsageError unless each value is a whole number above 0."""
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{owner}: {key} is {value!r}; it must be a whole number, 1 or above")


def _is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]
