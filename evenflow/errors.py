"""Exceptions, and the checks of numbers that raise them.

A message is one line: what, where, what is right.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from importlib.util import find_spec
from numbers import Integral
from typing import Annotated, Any, get_type_hints

from evenflow.compiled import own_annotations

MOST_RUNS = 100_000
"""The most runs that one command is asked for: points, trials, seeds."""

MOST = 10**12
"""The highest count of anything, such as pages; what is of a machine has lower limits."""


class UsageError(Exception):
    """A mistake in what the user gave; the command line prints it and exits with its `status`."""

    status = 2


class LostProcessError(UsageError):
    """A process that computed is gone: killed, for want of memory, or ended by a policy."""

    status = 1


class DoesNotFitError(UsageError):
    """A deployment, validly described, that has too few GPUs or layers."""


class PolicyError(UsageError):
    """A policy broke its promise: it raised, or returned a plan that cannot be carried out."""


class StallError(PolicyError):
    """The run cannot end: requests wait, and the policy sends nothing.

    Nothing is in flight, or it is asked again and again at one instant.
    """


class UserProcessError(UsageError):
    """A process that joins a simulation raised, does not yield, or yields what is no event."""

    status = 1


class DryPoolError(PolicyError):
    """An engine needs pages that it cannot get, and dies, as the real one does."""


class WorkerError(Exception):
    """A worker died, failed, or does not answer; the message says which stage and how."""


MOST_NAMED = 12
"""The most names that an error lists instead of an unknown one."""


def instead_of(word: object, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown word: the nearest known one, and `known_near`.

    One that begins like the word, or that the word begins with (`H100-PCIe`: `H100`), goes first.
    """
    known, given = list(known), _folded(word)
    begun = [
        name
        for name in known
        if min(len(name), len(given)) >= 3
        and (_folded(name).startswith(given) or given.startswith(_folded(name)))
    ]
    nearest = near(word, begun) or near(word, known, cutoff=0.5)
    hint = f'did you mean "{nearest[0]}"? ' if nearest else ""
    return f"{hint}{known_near(word, known)}"


def known_near(word: object, known: Iterable[str]) -> str:
    """Return "known: " and the names, of more than MOST_NAMED the nearest to a word."""
    names = sorted(known)
    if (more := len(names) - MOST_NAMED) <= 0:
        return f"known: {', '.join(names)}"
    return f"known: {', '.join(near(word, names, MOST_NAMED))} and {more} more"


def near(word: object, names: Iterable[str], most: int = 1, cutoff: float = 0.0) -> list[str]:
    """Return the `most` names nearest to a word that are alike by `cutoff` (0 to 1)."""
    folded = {_folded(name): name for name in sorted(names)}
    found = difflib.get_close_matches(_folded(word), folded, n=most, cutoff=cutoff)
    return [folded[name] for name in found]


def _folded(word: object) -> str:
    """Return a word in small letters, `-` as `_`: `vllm-v1` is near `vllm_v1`, not `vllm`."""
    return str(word).lower().replace("-", "_")


MOST_LETTERS, MOST_OF_A_WORD = 300, 120
"""A longer line of an error is cut, and a longer word in it first."""


def shortened(line: str, most: int = MOST_LETTERS) -> str:
    """Shorten to `most` letters: cut the middle of long words, then of the line, between words."""
    if len(line) > most:
        long_word = rf"\S{{{MOST_OF_A_WORD},}}"
        line = re.sub(long_word, lambda word: f"{word[0][:60]}...{word[0][-30:]}", line)
    if len(line) <= most:
        return line
    end = most // 3
    head = re.sub(r"\s\S{0,40}$", "", line[: most - end - 5])
    tail = re.sub(r"^\S{0,40}\s", "", line[-end:])
    return f"{head} ... {tail}"


def told_in_a_line(message: str, before: str = "") -> str:
    """Return the words of an error on a line; one of several mistakes, each short, is longer."""
    line = f"{before}{' '.join(message.split())}"
    several = re.match(r"\d+ mistakes\b", line[len(before) :])
    return shortened(line, (4 if several else 1) * MOST_LETTERS)


def require_package(module: str, who: str, packages: str = "") -> None:
    """Raise a UsageError unless a module is installed, which `packages` bring; by default itself.

    It names packages of the index, where evenflow and its extras need not be.
    """
    if find_spec(module) is None:
        raise UsageError(f"{who} needs {module}: pip install {packages or module}")


def _require(is_right: Callable[[Any], bool], right: str, owner: str, /, **values: float) -> None:
    """Raise a UsageError that names the owner and the key unless each value is right."""
    for key, value in values.items():
        if not is_right(value):
            raise UsageError(f"{owner}: {key} is {value!r}; it must be {right}")


def _is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


require_positive = partial(
    _require, lambda value: _is_number(value) and value > 0, "a finite number above 0"
)
require_not_negative = partial(
    _require, lambda value: _is_number(value) and value >= 0, "a finite number, 0 or above"
)
require_counts = partial(
    _require, lambda value: type(value) is int and value > 0, "a whole number, 1 or above"
)
"""Raise a UsageError, in the name of an owner, unless each value, given by its key, is such."""

Positive = Annotated[float, require_positive]
NonNegative = Annotated[float, require_not_negative]
Count = Annotated[int, require_counts]
Whole = Annotated[int, require_not_negative]
"""Types of a dataclass's fields that name the check of their values; `require_declared` does it."""


def require_declared(owner: str, described: object) -> None:
    """Raise a UsageError unless the fields of a dataclass pass the checks that their types name."""
    kind: Any = type(described)
    for name, require in _checks(kind):
        require(owner, **{name: getattr(described, name)})


@cache
def _checks(kind: Any) -> list[tuple[str, Callable[..., None]]]:
    hints = (get_type_hints(kind, include_extras=True) | own_annotations(kind)).items()
    return [(name, hint.__metadata__[0]) for name, hint in hints if hasattr(hint, "__metadata__")]


LATEST_S = 1e12
"""The latest time of a run, 30,000 years: beyond it, float seconds no longer tell milliseconds."""


def within_a_run(last_s: float, whose: str) -> None:
    """Raise UsageError where the last arrival, in seconds, is after LATEST_S, or NaN."""
    if not last_s <= LATEST_S:
        raise UsageError(
            f"{whose}: the last request would arrive after {last_s:g} s; at most "
            f"{LATEST_S:g} s is right"
        )


def is_count(value: object, most: int = MOST) -> bool:
    """Say whether a value is a whole number from 1 to `most`."""
    return type(value) is int and 0 < value <= most


def is_whole(value: object) -> bool:
    """Say whether a value is a whole number, also NumPy's."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def one_of(words: Collection[str], word: Any) -> Any:
    """Return a word if it is one of some; ValueError for another."""
    if word not in words:
        raise ValueError(f"{word!r} is none of {', '.join(words)}")
    return word


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys of a JSON object with their values; ValueError for a duplicate key."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f'the key "{key}" is given twice')
        values[key] = value
    return values
