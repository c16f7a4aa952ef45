"""The lines of a profile file: which operators there are, their sizes, and what a point may be.

Knows no header and no file; `evenflow.costs.profile.file` does.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from evenflow.errors import UsageError, instead_of

MAX_SECONDS = 3600.0
"""A longer time is a mistake of units: no operator takes an hour."""

COLUMNS = (
    "operator",
    "tokens",
    "context_tokens",
    "bytes",
    "ranks",
    "median_s",
    "p10_s",
    "p90_s",
    "repeats",
)
SIZE_COLUMNS = ("tokens", "context_tokens", "bytes")
TIME_COLUMNS = ("median_s", "p10_s", "p90_s")

OPERATORS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("tokens",),
    "linear_o": ("tokens",),
    "linear_up": ("tokens",),
    "linear_down": ("tokens",),
    "norm": ("tokens",),
    "rope": ("tokens",),
    "activation": ("tokens",),
    "kv_write": ("tokens",),
    "attention_prefill": ("tokens", "context_tokens"),
    "attention_decode": ("tokens", "context_tokens"),
    "attention_decode_uneven": ("tokens", "context_tokens"),
    "layer": ("tokens",),
    "embedding": ("tokens",),
    "head": ("tokens",),
    "sample": ("tokens",),
    "all_reduce": ("bytes",),
    "transfer": ("bytes",),
    "cpu_schedule": ("tokens",),
    "cpu_prepare": ("tokens",),
    "cpu_sample": ("tokens",),
    "cpu_detokenise": ("tokens",),
    "model_prefill": ("tokens",),
}
"""Operator -> the sizes it is measured against."""


class Point(NamedTuple):
    """One measured point: sizes (None where the operator has none of that kind), seconds, repeats.

    `ranks`: the operator has the shape of one of so many tensor-parallel shards.
    """

    operator: str
    tokens: int | None
    context_tokens: int | None
    size_bytes: int | None
    ranks: int
    median_s: float
    p10_s: float
    p90_s: float
    repeats: int

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What makes the point distinct, and the order of the file."""
        sizes = (self.tokens or 0, self.context_tokens or 0, self.size_bytes or 0)
        return (self.operator, self.ranks, *sizes)


def read_points(lines: Iterable[str], first: int, name: str) -> Iterator[Point]:
    seen: dict[tuple[str, int, int, int, int], int] = {}
    for number, cells in enumerate(csv.reader(lines), first):
        place = f"{name}, line {number}"
        if len(cells) != len(COLUMNS):
            raise UsageError(f"{place}: {len(cells)} columns, not {len(COLUMNS)}: truncated?")
        point = _point(dict(zip(COLUMNS, cells, strict=True)), place)
        if point.key in seen:
            raise UsageError(f"{place}: the same point as in line {seen[point.key]}")
        seen[point.key] = number
        yield point


def _point(cells: dict[str, str], place: str) -> Point:
    operator = cells["operator"]
    if operator not in OPERATORS:
        hint = instead_of(operator, OPERATORS)
        raise UsageError(f'{place}: unknown operator "{operator}"; {hint}')
    needed = OPERATORS[operator]
    for column in SIZE_COLUMNS:
        if (cells[column] != "") != (column in needed):
            what = "lacks" if column in needed else "has no"
            raise UsageError(f"{place}: {operator} {what} {column}; sizes: {', '.join(needed)}")
    read = _reader(cells, place)
    tokens, context_tokens, size_bytes = (
        read(column, 0 if column == "context_tokens" else 1) if column in needed else None
        for column in SIZE_COLUMNS
    )
    median_s, p10_s, p90_s = (_seconds(cells[column], column, place) for column in TIME_COLUMNS)
    if not p10_s <= median_s <= p90_s:
        raise UsageError(f"{place}: p10_s <= median_s <= p90_s does not hold")
    sizes = (tokens, context_tokens, size_bytes)
    return Point(operator, *sizes, read("ranks", 1), median_s, p10_s, p90_s, read("repeats", 1))


def _reader(cells: dict[str, str], place: str) -> Callable[[str, int], int]:
    def read(column: str, least: int) -> int:
        text = cells[column]
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise UsageError(
                f'{place}: {column} is "{text}"; it should be a whole number from {least}'
            )
        return int(text)

    return read


def _seconds(text: str, column: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < MAX_SECONDS:  # NaN compares false
        raise UsageError(
            f'{place}: {column} is "{text}"; it should be seconds above 0 and below an hour'
        )
    return value
