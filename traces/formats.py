"""The trace formats: which columns hold what, in which unit, and how to tell one from another.

A reader turns an open file into rows, one at a time, so that the head of a huge trace is cheap. It
knows nothing of filters, limits or arrival processes. A new format of the usual kind is one line in
FORMATS.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from evenflow.errors import UsageError, instead_of, once
from traces.sharegpt import ShareGpt
from traces.source import Row, Source, block_ids, number, priority_of, shown, token_count

MAX_NEW, PRIORITY = "max_new", "priority"
HEAD_CHARACTERS = 65536
NANOSECONDS_PER_S = 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)

Layout = Literal["csv", "jsonl", "json"]
Ticks = int | float


def elapsed(column: str, value: object) -> float:
    """Return a time counted from some start: a number, 0 or more, in the column's own unit."""
    time = number(value)
    if not 0 <= time < math.inf:
        raise ValueError(f"{column} is {shown(value)}; expected a time, a number of at least 0")
    return time


def timestamp(column: str, value: object) -> int:
    """Return a calendar time as whole nanoseconds since 1970.

    Any precision to nine digits is kept (Azure 2023 has seven), and a time without a zone counts as
    UTC.
    """
    match = TIMESTAMP.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        second, fraction, zone = match.groups()
        since = datetime.fromisoformat(second + (zone or "Z")) - EPOCH
    except ValueError:
        example = "2023-11-16 18:15:46.6805900, with or without a zone"
        raise ValueError(f"{column} is {shown(value)}; expected a time such as {example}") from None
    nanoseconds = int((fraction or "").ljust(9, "0"))
    return (since.days * 86400 + since.seconds) * NANOSECONDS_PER_S + nanoseconds


class Reader(Protocol):
    """Reads one format. `columns` must all be in the file; a row's time has `ticks_per_s`.

    A row's blocks have `block_tokens` tokens each; 0: the format has none.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def ticks_per_s(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    def rows(self, source: Source) -> Iterator[Row]: ...


class Table(NamedTuple):
    """A format with one request a line, in named columns (csv) or keys (jsonl).

    `time` is the column of arrival times (None: the format has none) and `ticks_per_s` its unit.
    `no_output` says why a row without output tokens is dropped. `blocks` is the column, if there is
    one, that names the content of each `block_tokens` tokens of the prompt. A file of any such
    format may have the columns `max_new`, the output that the client allows, and `priority`.
    """

    layout: Literal["csv", "jsonl"]
    prompt: str
    output: str
    time: str | None = None
    ticks_per_s: int = 1
    parse_time: Callable[[str, object], Ticks] = elapsed
    time_required: bool = True
    no_output: str = "no output tokens"
    blocks: str | None = None
    block_tokens: int = 0

    @property
    def columns(self) -> Sequence[str]:
        required = (self.time,) if self.time and self.time_required else ()
        return (*required, self.prompt, self.output)

    def read_time(self, value: object) -> Ticks | None:
        """Return a row's time; None where the file need not have one and does not."""
        if self.time is None or (value is None and not self.time_required):
            return None
        return self.parse_time(self.time, value)

    def rows(self, source: Source) -> Iterator[Row]:
        """Yield the file's rows. Raises UsageError naming the line and the column that is wrong."""
        wanted = (self.time, self.prompt, self.output, self.blocks, MAX_NEW, PRIORITY)
        lines = csv_lines if self.layout == "csv" else jsonl_lines
        for line, values in lines(source, wanted, self.columns):
            time, prompt, output, blocks, max_new, priority = values
            try:
                row = Row(
                    self.read_time(time),
                    token_count(self.prompt, prompt),
                    token_count(self.output, output),
                    blocks=() if blocks is None else block_ids(str(self.blocks), blocks),
                    max_new=None if max_new in (None, "") else token_count(MAX_NEW, max_new),
                    priority=priority_of(PRIORITY, priority),
                )
                if row.max_new is not None and row.max_new < row.output_tokens:
                    raise ValueError(
                        f"{MAX_NEW} is {row.max_new}; expected at least the {row.output_tokens} "
                        f"tokens of {self.output}"
                    )
            except ValueError as error:
                raise source.error(str(error), line=line) from None
            yield row if row.output_tokens else row._replace(dropped=self.no_output)


Lines = Iterator[tuple[int, list[object]]]


def csv_lines(source: Source, wanted: Sequence[str | None], required: Sequence[str]) -> Lines:
    """Yield (line number, wanted values) of a csv file; None where there is no such column."""
    reader = csv.reader(source.stream)
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in required:
            if name not in header:
                raise source.error(missing_column(name, header, required), line=1)
        twice = next((name for name in wanted if name and header.count(name) > 1), None)
        if twice is not None:
            raise source.error(f'the column "{twice}" is there twice', line=1)
        places = [header.index(name) if name in header else None for name in wanted]
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                message = f"{len(values)} fields; expected {len(header)}, as in the header"
                raise source.error(message, line=reader.line_num)
            yield reader.line_num, [None if p is None else values[p] for p in places]
    except csv.Error as error:
        raise source.error(f"not readable as csv ({error})", line=reader.line_num) from error


def jsonl_lines(source: Source, wanted: Sequence[str | None], required: Sequence[str]) -> Lines:
    """Yield (line number, wanted values) of a file with a JSON object on each line."""
    for line, text in enumerate(source.stream, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            message = f"not a JSON object on one line, perhaps truncated ({error})"
            raise source.error(message, line=line) from None
        if not isinstance(record, dict):
            raise source.error(f"{shown(record)}; expected a JSON object", line=line)
        for name in required:
            if name not in record:
                raise source.error(missing_column(name, list(record), required), line=line)
        yield line, [None if name is None else record.get(name) for name in wanted]


def missing_column(name: str, found: Sequence[str], required: Sequence[str]) -> str:
    """Say which column is missing, which are there and which are needed."""
    return f'no column "{name}" among {", ".join(found) or "none"}; needed: {", ".join(required)}'


FORMATS: Mapping[str, Reader] = MappingProxyType(
    {
        "azure": Table(
            "csv", "ContextTokens", "GeneratedTokens", "TIMESTAMP", NANOSECONDS_PER_S, timestamp
        ),
        "vidur": Table(
            "csv", "num_prefill_tokens", "num_decode_tokens", "arrived_at", time_required=False
        ),
        "burstgpt": Table(
            "csv", "Request tokens", "Response tokens", "Timestamp", no_output="failed: no response"
        ),
        "distserve": Table("csv", "prompt_len", "output_len", "start_time"),
        "splitwise-sim": Table("csv", "prompt_size", "token_size", "arrival_timestamp"),
        "mooncake": Table(
            "jsonl",
            "input_length",
            "output_length",
            "timestamp",
            1000,
            blocks="hash_ids",
            block_tokens=512,
        ),
        "llmservingsim": Table(
            "jsonl", "input_toks", "output_toks", "arrival_time_ns", NANOSECONDS_PER_S
        ),
        "sharegpt": ShareGpt(),
    }
)
"""The readers by name. Columns decide which one a file needs, so no two may share all of theirs."""


def find_format(source: Source, name: str | None = None) -> str:
    """Return the name of the file's format, from its first characters unless `name` is given.

    Leaves the stream at its start. Raises UsageError for an unknown name, an empty file and unknown
    columns.
    """
    if name is not None and name not in FORMATS:
        raise UsageError(f'trace format "{name}" is unknown; {instead_of(name, FORMATS)}')
    head = source.stream.read(HEAD_CHARACTERS)
    source.stream.seek(0)
    if not head.strip():
        raise source.error("the file is empty; expected a header or JSON")
    return name if name is not None else detect(source, head.lstrip())


def detect(source: Source, head: str) -> str:
    """Return the name of the format whose columns are all in the head of the file."""
    if head.startswith("["):
        return "sharegpt"
    layout = "jsonl" if head.startswith("{") else "csv"
    header = [name.strip() for name in next(csv.reader([head.splitlines()[0]]))]

    def has(column: str) -> bool:
        return column in header if layout == "csv" else f'"{column}"' in head

    candidates = {n: reader for n, reader in FORMATS.items() if reader.layout == layout}
    for name, reader in candidates.items():
        if all(map(has, reader.columns)):
            return name
    nearest = max(candidates, key=lambda n: sum(map(has, candidates[n].columns)))
    lacking = [column for column in candidates[nearest].columns if not has(column)]
    raise source.error(
        f"unknown format; the nearest is {nearest}, which also needs {', '.join(lacking)} "
        f"(give format: one of {', '.join(FORMATS)})",
        line=1,
    )
