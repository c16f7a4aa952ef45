"""What journals of every engine have in common: a file of events, and how far ours are equal."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.errors import UsageError

Event = Mapping[str, Any]


class Outcome(NamedTuple):
    """How many steps a journal has, how many are equal before the first `difference`, and that."""

    steps: int
    equal: int
    difference: str | None = None


def lines(path: Path) -> Iterator[Event]:
    """Iterate over the events of a file; UsageError when it cannot be read to its end."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                event = json.loads(line)
                if not isinstance(event, dict):
                    raise UsageError(f"{path}, line {number}: no event: {line.strip()[:40]}")
                yield event
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {number}: no JSON: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read to its end: {error}") from None


def first_line(path: Path) -> Event:
    """Return the first event of a file, or an empty one if it has none."""
    return next(lines(path), {})


def differ(name: str, ours: object, theirs: object) -> str:
    """Say of which request a part of an answer is not as recorded, and what is."""
    if isinstance(ours, int) or isinstance(theirs, int):
        return f"{name}: {ours}, recorded {theirs}"
    assert isinstance(ours, Collection)
    assert isinstance(theirs, Collection)
    request = next((one for one, other in zip(ours, theirs, strict=False) if one != other), None)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        unequal = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        request = unequal[0]
        ours, theirs = ours.get(request, 0), theirs.get(request, 0)
    elif request is None:
        request = next(
            number for number in (*ours, *theirs) if (number in ours) != (number in theirs)
        )
    return f"request {request}, {name}: {ours}, recorded {theirs}"
