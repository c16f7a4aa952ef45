"""The formats of traces, and the rows that a reader makes of a file's records.

A format knows which columns hold what, in which unit, and how to tell it from the others. It knows
nothing of layouts, filters, limits or arrival processes. A new format of the usual kind is one line
of formats.csv. A log with other columns is read by a mapping, or by usual names (`ROLES`).

ShareGPT is a JSON array of conversations, which is never in memory as a whole. Its entries are
texts to be tokenized, `conversations: [{from, value}, ...]`. The first turn is the prompt, the
second the reply, whatever their roles (as in vLLM's benchmark). Or they are lengths,
`input_token_length` and `output_token_length`, as TD-Pipe's predictor writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from evenflow.errors import UsageError, instead_of
from evenflow.files import load_tokenizer
from evenflow.specs.tables import read_rows
from evenflow.traces import lines

MOST_TOKENS = 10**9
TOKENS = "a whole number of tokens, 0 to 10^9"
UNREADABLE = "cannot be read"
"""Why a row that is skipped is dropped."""


class Row(NamedTuple):
    """A request as the file has it. `time` is in the format's ticks (None: no arrival times).

    `dropped` says why the format itself does not count the row as a request; "" keeps it. `text` is
    the prompt, where the file holds it. `blocks` name the content of its blocks of tokens, () where
    the file does not. `max_new` is the output that the client allows, where the file says so.
    `priority` is what the client says of its urgency.
    """

    time: int | float | None
    prompt_tokens: int
    output_tokens: int
    dropped: str = ""
    text: str | None = None
    blocks: tuple[int, ...] = ()
    max_new: int | None = None
    priority: int = 0


def unlike(column: str, value: object, expected: str) -> ValueError:
    """Return the error for a column's value that is not as `expected`."""
    return ValueError(f"{column} is {lines.shown(value)}; expected {expected}")


def whole(column: str, value: object, least: int = 0, expected: str = TOKENS) -> int:
    """Return a whole number from text or JSON, `least` to 10^9. Raises ValueError otherwise."""
    count = number(value)
    if not (least <= count <= MOST_TOKENS and count.is_integer()):
        raise unlike(column, value, expected)
    return int(count)


def number(value: Any) -> float:
    """Return a number from text or JSON, NaN for whatever is none."""
    try:
        return float(value) if type(value) in (str, int, float) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def block_ids(column: str, value: object) -> tuple[int, ...]:
    """Return the names of a prompt's blocks. Raises ValueError unless a list of whole numbers."""
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise unlike(column, value, "a list of whole numbers")
    return tuple(value)


# -- ShareGPT ------------------------------------------------------------------------------------

PROMPT, OUTPUT = "input_token_length", "output_token_length"


class ShareGpt:
    """Reads both shapes of entry, as `Table` does lines; text needs `source.count_tokens`."""

    columns, ticks_per_s, block_tokens = (), 1, 0

    def rows(self, source: lines.Source) -> Iterator[Row]:
        """Yield a row an entry. Raises UsageError naming the entry (from 1) that is wrong."""
        for number, entry in enumerate(lines.array_items(source), start=1):
            try:
                row = read_entry(entry, source.count_tokens)
            except ValueError as error:
                source.refuse(str(error), {"entry": number})
                row = Row(None, 0, 0, UNREADABLE)
            yield row


def read_entry(entry: object, count_tokens: lines.CountTokens | None) -> Row:
    """Return the row of one entry; an entry that holds no prompt and reply is marked dropped."""
    if isinstance(entry, Mapping) and PROMPT in entry and OUTPUT in entry:
        return Row(None, whole(PROMPT, entry[PROMPT]), whole(OUTPUT, entry[OUTPUT]))
    turns = entry.get("conversations") if isinstance(entry, Mapping) else None
    if not isinstance(turns, list):
        raise ValueError(f"{lines.shown(entry)}; expected conversations, or {PROMPT} and {OUTPUT}")
    if len(turns) < 2:
        return Row(None, 0, 0, "fewer than two turns")
    if count_tokens is None:
        raise ValueError(
            "text without lengths; give tokenizer: the path of a tokenizer.json, "
            f"or a file with {PROMPT} and {OUTPUT}"
        )
    prompt, reply = (turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(reply, str):
        raise ValueError(f"turns {lines.shown(turns[:2])}; expected objects with a text value")
    return Row(None, count_tokens(prompt), count_tokens(reply), text=prompt)


def encoder(path: str | Path) -> Callable[[str], list[int]]:
    """Return the encoder of text to token ids of a local tokenizer.json (or the folder with one).

    Special tokens are the ones that the tokenizer adds. Needs the extra `tokenizers`.
    """
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text).ids)


# -- tables of requests, and all formats by name -------------------------------------------------

MAX_NEW, PRIORITY = "max_new", "priority"
URGENCY = -MOST_TOKENS, "a whole number, -10^9 to 10^9, lower first"
NANOSECONDS_PER_S = 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)

Ticks = int | float


def elapsed(column: str, value: object) -> float:
    """Return a time counted from some start: a number, 0 or more, in the column's own unit."""
    time = number(value)
    if not 0 <= time < math.inf:
        raise unlike(column, value, "a time, a number of at least 0")
    return time


EPOCHS = ((1e11, "s", 10**9), (1e14, "ms", 10**6), (1e17, "us", 10**3), (math.inf, "ns", 1))
"""The number below which a time is in a unit, the unit and its nanoseconds. So times since 1970 are
recognised for the next thousand years; a smaller number is of seconds."""


def unit_of(time: float) -> tuple[str, int]:
    """Return the unit that the size of a time implies, and its nanoseconds."""
    return next((unit, factor) for most, unit, factor in EPOCHS if time < most)


def moment(column: str, value: object) -> Ticks:
    """Return a time as nanoseconds: a calendar time, or a number in the unit its size implies."""
    if math.isnan(number(value)):
        return timestamp(column, value)
    time = elapsed(column, value)
    whole_time, (_, factor) = int(time), unit_of(time)
    return whole_time * factor + round((time - whole_time) * factor)


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
        whole_seconds = since_1970(second + (zone or "Z"))
    except ValueError:
        example = "2023-11-16 18:15:46.6805900, with or without a zone"
        raise unlike(column, value, f"a time such as {example}") from None
    return whole_seconds * NANOSECONDS_PER_S + int((fraction or "").ljust(9, "0"))


@lru_cache(maxsize=1)
def since_1970(second: str) -> int:
    """Return the seconds from 1970 to a whole second; ValueError for none. Rows come in order."""
    since = datetime.fromisoformat(second) - EPOCH
    return since.days * 86400 + since.seconds


def kind_of_time(value: object, unit: str) -> str:
    """Return of what kind the time of a row is, in words: times of a file are of one kind."""
    if value is None:
        return "no time"
    if unit in UNITS and unit != "iso":
        return f"a time in {unit}"
    if unit != "iso" and not math.isnan(time := number(value)):
        return f"{unit_of(time)[0]} since 1970 by its size, as time_unit is not given"
    after_the_date = str(value)[11:]
    zoned = "Z" in after_the_date or "+" in after_the_date or "-" in after_the_date
    return f"a calendar time {'with' if zoned else 'without'} a zone"


class TraceTable(NamedTuple):
    """A format with one request a row, in named columns, or at paths of keys (`usage.tokens`).

    All of `columns` must be in the file: `time`, the lengths, and the `mark` by which the format is
    recognised. `time` is the column of arrival times ("": the format has none). Its `unit` is one
    of UNITS (any other: seen from each value). `no_output` says why a row without output tokens is
    dropped. `blocks`, if any, is the column that names the content of each `block_tokens` tokens of
    the prompt. A file of any of these formats may have the columns `max_new`, the output that the
    client allows, and `priority`.
    """

    prompt: str
    output: str
    time: str = ""
    unit: str = ""
    time_required: bool = True
    no_output: str = "no output tokens"
    blocks: str = ""
    block_tokens: int = 0
    mark: str = ""

    @property
    def columns(self) -> Sequence[str]:
        time = self.time if self.time_required else ""
        return [name for name in (self.mark, time, self.prompt, self.output) if name]

    @property
    def ticks_per_s(self) -> int:
        return UNITS.get(self.unit, AUTO)[0]

    def rows(self, source: lines.Source) -> Iterator[Row]:
        """Yield the file's rows. Raises UsageError naming the line and the column that is wrong."""
        optional = [name for name in (self.time, self.blocks, MAX_NEW, PRIORITY) if name]
        kind = ""
        names = (self.time, self.prompt, self.output, self.blocks, MAX_NEW, PRIORITY)
        values = lines.reader_of(names)
        for place, record in lines.records_of(source, self.columns, optional):
            try:
                if isinstance(record, str):
                    raise ValueError(record)
                if not self.time and (late := usual(record, "arrival")):
                    raise ValueError(f"{late} is there, and the first record has no time")
                cells = tuple(values(record))
                row = self._row(cells)
                kind = self._kind(cells[0], kind)
            except ValueError as error:
                source.refuse(str(error), place)
                row = Row(None, 0, 0, UNREADABLE)
            yield row if row.output_tokens or row.dropped else row._replace(dropped=self.no_output)

    def _row(self, cells: Sequence[object]) -> Row:
        time, prompt, output, blocks, max_new, priority = cells
        row = Row(
            self._time(time),
            whole(self.prompt, prompt),
            whole(self.output, output),
            "",
            None,
            () if blocks is None else block_ids(self.blocks, blocks),
            None if max_new in (None, "") else whole(MAX_NEW, max_new),
            0 if priority in (None, "") else whole(PRIORITY, priority, *URGENCY),
        )
        if row.max_new is not None and row.max_new < row.output_tokens:
            least = f"at least the {row.output_tokens} tokens of {self.output}"
            raise unlike(MAX_NEW, row.max_new, least)
        return row

    def _kind(self, time: object, before: str) -> str:
        """Return of what kind a row's time is, in words; ValueError where `before` is another."""
        kind = kind_of_time(time, self.unit)
        if before not in ("", kind):
            told = f"{kind}, and a row before has {before}; expected one kind"
            raise ValueError(f"{self.time} is {lines.shown(time)}, {told}")
        return kind

    def _time(self, value: object) -> Ticks | None:
        """Return a row's time; None where the file need not have one and does not."""
        if not self.time or (value is None and not self.time_required):
            return None
        return UNITS.get(self.unit, AUTO)[1](self.time, value)


_TABLE = read_rows("formats", TraceTable, Path(__file__).parent)

FORMATS: Mapping[str, TraceTable | ShareGpt] = MappingProxyType(
    {row.pop("name"): TraceTable(**row) for row in _TABLE} | {"sharegpt": ShareGpt()}
)
"""The readers by name. Columns decide which one a file needs: the first whose all are there."""

LOG = "log"
"""The format of a file whose columns are mapped, or have usual names."""

ROLES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "arrival": (
            *("arrival", "request_time", "created", "created_at", "arrival_time"),
            *("timestamp", "start_time", "time"),
        ),
        "prompt": ("prompt_tokens", "usage.prompt_tokens", "input_tokens", "usage.input_tokens"),
        "output": (
            *("completion_tokens", "usage.completion_tokens", "output_tokens"),
            *("usage.output_tokens",),
        ),
    }
)
"""What a log says of a request, and usual names of it; OpenAI's among them. A time's may end in
its unit: `timestamp_ms`."""

UNITS: Mapping[str, tuple[int, Callable[[str, object], Ticks]]] = MappingProxyType(
    {
        "s": (1, elapsed),
        "ms": (1000, elapsed),
        "us": (10**6, elapsed),
        "ns": (NANOSECONDS_PER_S, elapsed),
        "iso": (NANOSECONDS_PER_S, timestamp),
    }
)
"""Units of times: ticks a second, and what reads them."""

AUTO = NANOSECONDS_PER_S, moment


def reader_of(
    source: lines.Source,
    name: str | None = None,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
) -> tuple[str, TraceTable | ShareGpt]:
    """Return the name of a file's format and its reader, in the unit of time that was given.

    The format is seen from the first record unless `name` or a mapping of `columns` is given.
    Leaves the stream at its start. Raises UsageError for an unknown name, an empty file and unknown
    columns.
    """
    if name is not None and name not in (*FORMATS, LOG):
        raise UsageError(f'trace format "{name}" is unknown; {instead_of(name, (*FORMATS, LOG))}')
    if columns and name not in (None, LOG):
        raise source.error(f'format "{name}" has columns of its own; give columns, or format')
    if not source.head().strip():
        raise source.error("the file is empty; expected a header or JSON")
    if name in FORMATS:
        found, reader = str(name), FORMATS[str(name)]
    else:
        found, reader = _seen(source, columns or {}, mapped=bool(columns) or name == LOG)
    if time_unit is None:
        return found, reader
    if not isinstance(reader, TraceTable) or not reader.time:
        raise source.error(f"time_unit: {found} has no times")
    return found, reader._replace(unit=time_unit)


def _seen(
    source: lines.Source, columns: Mapping[str, str], *, mapped: bool
) -> tuple[str, TraceTable | ShareGpt]:
    """Return the format that has the first record's columns: a known one, or a log's."""
    record = lines.columns_of(source)
    if not mapped:
        for name, reader in FORMATS.items():
            if isinstance(reader, TraceTable) and all(
                lines.has(record, each) for each in reader.columns
            ):
                return name, reader
    log = log_table(record, columns)
    if log is not None:
        return LOG, log
    if mapped:
        lack = next(r for r in ("prompt", "output") if r not in columns and not usual(record, r))
        told = f"columns needs {lack}: the name of the column with those tokens"
        raise source.error(f"{told}; there are {lines.names_of(record)}")
    if source.head().lstrip().startswith("["):
        return "sharegpt", FORMATS["sharegpt"]
    raise source.error(unknown(record), line=1)


def usual(record: lines.Record, role: str) -> str | None:
    """Return the usual name of a role that a record has; None if it has none."""
    ends = ("", *(f"_{unit}" for unit in UNITS)) if role == "arrival" else ("",)
    names = (name + end for name in ROLES[role] for end in ends)
    return next((name for name in names if lines.has(record, name)), None)


def unread(source: lines.Source, reader: TraceTable | ShareGpt) -> list[str]:
    """Return the columns of the first record that a table does not read."""
    if not isinstance(reader, TraceTable):
        return []
    read = {*reader.columns, reader.time, reader.blocks, MAX_NEW, PRIORITY}
    read |= {name.partition(".")[0] for name in read}
    return [name for name in lines.columns_of(source) if name not in read]


def log_table(record: lines.Record, columns: Mapping[str, str]) -> TraceTable | None:
    """Return the reader of a log: by a mapping of roles to columns, else by usual names.

    A time's unit is what its column's name ends in, else seen from each value. None where lengths
    have neither.
    """
    arrival, prompt, output = (columns.get(role) or usual(record, role) for role in ROLES)
    if prompt is None or output is None:
        return None
    return TraceTable(prompt, output, arrival or "", (arrival or "").rpartition("_")[2])


def unknown(record: lines.Record) -> str:
    """Say that no format has a record's columns, and what the nearest one has besides."""
    tables = {n: each.columns for n, each in FORMATS.items() if isinstance(each, TraceTable)}
    lack = {n: [c for c in columns if not lines.has(record, c)] for n, columns in tables.items()}
    nearest = max(tables, key=lambda n: (len(tables[n]) - len(lack[n]), -len(lack[n])))
    return (
        f"unknown format; the nearest is {nearest}, which also needs {', '.join(lack[nearest])} "
        "(give columns: {arrival: NAME, prompt: NAME, output: NAME}, or format: one of "
        f"{', '.join(FORMATS)})"
    )
