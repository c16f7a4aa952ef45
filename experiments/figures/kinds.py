"""Whether what a user sets of a figure's study is of the kind that the figure has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenflow.errors import UsageError


def check_like(value: Any, known: Any, assignment: str) -> None:
    """Raise a UsageError unless `value` is of the kind of `known`, the figure's own.

    Counts and rates are positive, lists and mappings hold something; where the figure has null, a
    list may stand.
    """
    if not _like(value, known):
        raise UsageError(f"--set {assignment}: should be {_words(known)}")


def _like(value: Any, known: Any) -> bool:
    if known is None:
        numbers = isinstance(value, list) and bool(value) and _all_like(value, [[1.0], 1.0])
        return value is None or numbers
    if isinstance(known, bool | str):
        return type(value) is type(known)
    if isinstance(known, int | float):
        whole = isinstance(known, int)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        return number and value > 0
    if isinstance(known, Mapping):
        return isinstance(value, Mapping) and bool(value) and _all_like(value.values(), known)
    return isinstance(value, list) and bool(value) and _all_like(value, known)


def _all_like(values: Any, known: Any) -> bool:
    """Say whether each value is like one of the known ones; numbers in lists may have fractions."""
    examples = list(known.values()) if isinstance(known, Mapping) else list(known)
    if not examples:
        return True
    return all(any(_like_inside(value, example) for example in examples) for value in values)


def _like_inside(value: Any, example: Any) -> bool:
    if isinstance(example, bool) or not isinstance(example, int | float):
        return isinstance(example, Mapping) == isinstance(value, Mapping) and (
            isinstance(example, Mapping) or _like(value, example)
        )
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _words(known: Any) -> str:
    match known:
        case None:
            return "null, or a list of numbers above 0"
        case bool():
            return "true or false"
        case int():
            return f"a whole number of at least 1, like {known}"
        case float():
            return f"a number above 0, like {known:g}"
        case str():
            return f"a text, like {known}"
        case Mapping():
            return f"a mapping that is not empty, like {{{next(iter(known))}: ...}}"
    shown: Sequence[Any] = known[:3]
    return f"a list that is not empty, like {str(shown).replace(chr(39), '')}"
