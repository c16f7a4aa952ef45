"""The columns of a csv that has a request in every row and nothing amiss, read by NumPy.

Any other file is left to `traces.formats`, which reads row by row and says what is wrong where.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenflow.traces.formats import MAX_NEW, MOST_TOKENS, PRIORITY, UNITS, ShareGpt, TraceTable
from evenflow.traces.lines import Source, csv_header, delimiter_of

Column: TypeAlias = NDArray[Any]

AT_ONCE = 1 << 16
"""Rows in memory as text."""

SINCE_2000 = re.compile(r"20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?", re.ASCII)
"""Calendar times without a zone that NumPy reads as `formats.timestamp` does."""


def plain_columns(
    source: Source, reader: TraceTable | ShareGpt, limit: int | None
) -> tuple[Column, Column, Column] | None:
    """Return times in the reader's ticks, prompt and output tokens of the first `limit` rows.

    None, with the file at its start, where a row is no plain request.
    """
    head = source.head().lstrip()
    if not isinstance(reader, TraceTable) or head[:1] in ("{", "["):
        return None
    header, delimiter = csv_header(source, head), delimiter_of(head.splitlines()[0])
    names = reader.time, reader.prompt, reader.output
    more = {reader.blocks, MAX_NEW, PRIORITY}.intersection(header)
    if more or reader.unit not in UNITS or any(header.count(name) != 1 for name in names):
        return None
    kinds = dict.fromkeys(names, "f8") | ({reader.time: "U32"} if reader.unit == "iso" else {})
    dtype = [(str(place), kinds.get(name, "U1")) for place, name in enumerate(header)]
    try:
        blocks = [
            [make(block[str(header.index(name))]) for make, name in zip(MAKERS, names, strict=True)]
            for block in _blocks(_rows(source.stream), dtype, delimiter, limit)
        ]
        ticks, prompts, outputs = map(np.concatenate, zip(*blocks, strict=True))
    except ValueError:
        source.stream.seek(0)
        return None
    return ticks, prompts, outputs


def _rows(stream: Iterable[str]) -> Iterator[str]:
    """Yield the lines below the header. ValueError for a quote: its row may go on below."""
    lines = (line for line in stream if line.strip("\r\n"))
    next(lines)
    for line in lines:
        if '"' in line or "\0" in line:
            raise ValueError
        yield line


def _blocks(
    lines: Iterator[str], dtype: list[tuple[str, str]], delimiter: str, limit: int | None
) -> Iterator[Column]:
    """Yield rows of these columns. ValueError where a row has others, or no numbers in them."""
    left = limit
    while left != 0 and (first := next(lines, None)) is not None:
        most = AT_ONCE if left is None else min(left, AT_ONCE)
        text = chain([first], lines)
        block = np.loadtxt(text, dtype, delimiter=delimiter, comments=None, max_rows=most, ndmin=1)
        left = None if left is None else left - len(block)
        yield block


def _ticks(values: Column) -> Column:
    """Return times in ticks of their unit. ValueError for other texts or numbers."""
    if values.dtype.kind == "U":
        _require(all(map(SINCE_2000.fullmatch, values.tolist())))
        return values.astype("datetime64[ns]").astype(np.int64)
    _require(np.isfinite(values) & (values >= 0))
    return values


def _tokens(values: Column) -> Column:
    """Return whole numbers, 1 to 10^9. ValueError for others."""
    _require((values >= 1) & (values <= MOST_TOKENS) & (values == np.floor(values)))
    return values.astype(np.int64)


MAKERS = _ticks, _tokens, _tokens


def _require(right: Any) -> None:
    if not np.all(right):
        raise ValueError
