"""Read the output of nccl-tests for an all-reduce, in place of measured points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenflow.config.yaml_file import MOST_BYTES, Document, assign, find
from evenflow.errors import UsageError
from evenflow.specs.gpu import links

KEY = "all_reduce"
RIGHT = "the table that nccl-tests' all_reduce_perf prints is right, or points"


def with_points(document: Document) -> Document:
    """Return the document with points wherever `costs.all_reduce` names a file of nccl-tests.

    A relative path starts from the current folder, or from the document's. UsageError names the
    place of another file.
    """
    for path, around, value in list(_named(document.data)):
        place = document.place(path)
        file = Path(find(value, Path(document.name).parent))
        try:
            points = points_of(file)
        except ValueError as error:
            raise UsageError(f"{place}: {'.'.join(path)}: {value}: {error}; {RIGHT}") from None
        document = assign(document, path, {**around, "points": points}, place)
    return document


def _named(
    data: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], str]]:
    """Yield the keys of each `costs.all_reduce` with a file, its other keys, and the file."""
    for key, value in data.items():
        path, inner = (*above, key), value if isinstance(value, Mapping) else {}
        if path[-2:] != ("costs", KEY):
            yield from _named(inner, path)
        elif isinstance(inner.get("points"), str):
            yield path, inner, inner["points"]
        elif isinstance(value, str) and _is_file(value):
            yield path, {}, value


def _is_file(word: str) -> bool:
    """Say whether a word is a file's name rather than a link's."""
    return word not in {spec.name for spec in links()} and bool({".", "/"} & set(word))


def points_of(file: Path) -> list[list[float]]:
    """Return pairs [bytes, microseconds], out of place; the mean of a repeated size.

    Raises ValueError for a file without a table of an all-reduce.
    """
    if not file.is_file():
        raise ValueError("no such file")
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES} bytes")
    lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    header = next((each[1:] for each in lines if each[:2] == ["#", "size"] and "time" in each), [])
    if not header:
        raise ValueError("has no columns size and time")
    place, times = header.index("time"), dict[float, list[float]]()
    for row in lines:
        if len(row) > place and row[0].isdigit():
            if "redop" in header and row[header.index("redop")] == "none":
                raise ValueError("is of another collective: it adds nothing up")
            size, time = float(row[0]), _positive(row[place])
            if size:
                times.setdefault(size, []).append(time)
    if not times:
        raise ValueError("has no row of bytes and microseconds")
    return [[size, sum(found) / len(found)] for size, found in sorted(times.items())]


def _positive(word: str) -> float:
    try:
        if 0 < (time := float(word)) < float("inf"):
            return time
    except ValueError:
        pass
    raise ValueError(f"has {word} where microseconds are right")
