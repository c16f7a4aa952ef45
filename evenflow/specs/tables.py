"""The tables beside this file: CSVs with a row a model, a GPU, a link or an engine's CPU time.

Knows no column.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

Spec = TypeVar("Spec")


class Table(Mapping[str, Spec]):
    """The specs of a table by name, in its order; a row becomes a spec when it is asked for."""

    def __init__(self, name: str, kind: type[Spec]) -> None:
        self._rows = {row["name"]: row for row in _cells(name)}
        self._kind, self._plain = kind, _plain(kind)
        self._made: dict[str, Spec] = {}

    def __getitem__(self, name: str) -> Spec:
        if name not in self._made:
            self._made[name] = self._kind(**_typed(self._rows[name], self._plain))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@cache
def read_table(name: str, kind: type[Spec]) -> Table[Spec]:
    """Return the specs of a table; an empty cell leaves the default."""
    return Table(name, kind)


def read_rows(name: str, kind: type[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without empty cells, of the types that a class declares."""
    plain = _plain(kind)
    return (_typed(row, plain) for row in _cells(name))


def _cells(name: str) -> Iterator[dict[str, str]]:
    text = Path(__file__).with_name(f"{name}.csv").read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def _plain(kind: type[Any]) -> set[str]:
    """Return the fields of numbers and flags, whose cells are as JSON has them."""
    return {key for key, hint in get_type_hints(kind).items() if hint in (bool, int, float)}


def _typed(row: Mapping[str, str], plain: set[str]) -> dict[str, Any]:
    known = {key: cell for key, cell in row.items() if cell}
    return {key: json.loads(cell) if key in plain else cell for key, cell in known.items()}
