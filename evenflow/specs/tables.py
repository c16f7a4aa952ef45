"""The tables beside this file: CSVs with a row a model, a GPU, a link or an engine's CPU time.

Knows no column.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

Spec = TypeVar("Spec")


@cache
def read_table(name: str, kind: type[Spec]) -> dict[str, Spec]:
    """Return the specs of a table by name, in its order; an empty cell leaves the default."""
    return {row["name"]: kind(**row) for row in read_rows(name, kind)}


def read_rows(
    name: str, kind: type[Any], folder: Path = Path(__file__).parent
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without empty cells, of the types that a class declares."""
    as_json = {key for key, hint in get_type_hints(kind).items() if hint in (bool, int, float)}
    text = (folder / f"{name}.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        known = {key: cell for key, cell in row.items() if cell}
        yield {key: json.loads(cell) if key in as_json else cell for key, cell in known.items()}
