"""The tables beside this file: CSVs with a row a model, a GPU, a link or an engine's CPU time.

Knows no column.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, TypeVar, get_type_hints

Spec = TypeVar("Spec")


@cache
def read_table(name: str, kind: type[Spec]) -> tuple[Spec, ...]:
    """Return the specs of a table, in its order; an empty cell leaves the default."""
    return tuple(kind(**row) for row in read_rows(name, kind))


def read_rows(name: str, kind: type[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without empty cells, of the types that a class declares."""
    text = resources.files("evenflow.specs").joinpath(f"{name}.csv").read_text(encoding="utf-8")
    hints = get_type_hints(kind)
    for row in csv.DictReader(text.splitlines()):
        known = {key: cell for key, cell in row.items() if cell}
        plain = {key for key in known if hints.get(key) in (bool, int, float)}
        yield {key: json.loads(cell) if key in plain else cell for key, cell in known.items()}
