"""The tables beside this file: CSVs with a row a model, a GPU or a link. Knows no column."""

from __future__ import annotations

import csv
import json
from importlib import resources
from typing import TypeVar, get_type_hints

Spec = TypeVar("Spec")


def read_table(name: str, kind: type[Spec]) -> tuple[Spec, ...]:
    """Return the specs of a table, in its order; an empty cell leaves the default."""
    text = resources.files("evenflow.specs").joinpath(f"{name}.csv").read_text(encoding="utf-8")
    hints = get_type_hints(kind)
    rows = [
        {key: cell if hints[key] is str else json.loads(cell) for key, cell in row.items() if cell}
        for row in csv.DictReader(text.splitlines())
    ]
    return tuple(kind(**row) for row in rows)
