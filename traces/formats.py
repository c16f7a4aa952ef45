"""Trace files: their text and fingerprint, the formats, and the rows that a reader makes of one.

A reader turns an open file into rows, one at a time, so that the head of a huge trace is cheap; of
each format is known which columns hold what, in which unit, and how to tell it from the others. It
knows nothing of filters, limits or arrival processes. A new format of the usual kind is one line in
FORMATS. Whatever goes wrong between the disk and the text becomes a UsageError that names the
place.

ShareGPT is a JSON array of conversations, as text to be tokenized or as lengths, in two shapes of
entry: `conversations: [{from, value}, ...]`, of which the first turn is the prompt and the second
the reply whatever their roles (as vLLM's benchmark takes them), and `input_token_length` with
`output_token_length` (as TD-Pipe's predictor writes them). The array is never in memory as a whole.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Literal, NamedTuple, TextIO, cast

from evenflow.errors import UsageError, instead_of, once
from evenflow.files import load_tokenizer, require_file

WHOLE_FILE_HASH_BYTES = 256 * 2**20
PREFIX_HASH_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
MOST_TOKENS = 10**9

MOST_UNPACKED = 100
FREE_BYTES = 64 * 2**20
"""A gzip may unpack to so many times its size, and to so much whatever its size; a trace's is 3 to
20 times."""

CountTokens = Callable[[str], int]


class Source(NamedTuple):
    """An open trace file, and the tokenizer its reader may need (None: no tokenizer was given)."""

    path: Path
    stream: TextIO
    count_tokens: CountTokens | None = None

    def error(self, message: str, *, line: int = 0, entry: int = 0) -> UsageError:
        """Return the error for what is wrong at a line or an entry (both from 1; 0: no place)."""
        place = f", line {line}" if line else f", entry {entry}" if entry else ""
        return UsageError(f"trace {self.path}{place}: {message}")


@contextmanager
def open_trace(path: Path) -> Iterator[TextIO]:
    """Open a trace as UTF-8 text, unpacking gzip whatever the file is called.

    Raises UsageError if the file cannot be opened, and if it turns out unreadable inside the
    `with`.
    """
    require_file(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            binary = cast(BinaryIO, _Unpacked(raw)) if packed else raw
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
                yield text
    except UnicodeDecodeError as error:
        raise UsageError(f"trace {path}: not UTF-8 text ({error.reason})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"trace {path}: damaged or truncated gzip ({error})") from error
    except IsADirectoryError as error:
        raise UsageError(f"trace {path}: a directory; give one trace file") from error
    except OSError as error:
        raise UsageError(f"trace {path}: cannot be read ({error.strerror or error})") from error


class _Unpacked(gzip.GzipFile):
    """A gzip that raises BadGzipFile when it turns out to unpack to far more than any trace."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed

    def read1(self, size: int = -1) -> bytes:
        data = super().read1(size)
        if self.tell() > max(FREE_BYTES, MOST_UNPACKED * self._packed.tell()):
            raise gzip.BadGzipFile(f"it unpacks to more than {MOST_UNPACKED} times its size")
        return data


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as they lie on disk, in hexadecimal.

    A file over 256 MiB is hashed by its size (in decimal) and its first 64 MiB, so that a few rows
    of a huge trace are read at once; the result then starts with "size+64MiB:".
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if size <= WHOLE_FILE_HASH_BYTES:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        digest.update(raw.read(PREFIX_HASH_BYTES))
    return "size+64MiB:" + digest.hexdigest()


class Row(NamedTuple):
    """A request as the file has it. `time` is in the format's ticks (None: no arrival times).

    `dropped` says why the format itself does not count the row as a request; "" keeps it. `text` is
    the prompt, where the file holds it; `blocks` name the content of its blocks of tokens, () where
    the file does not. `max_new` is the output that the client allows, where the file says so;
    `priority` what its client says of its urgency.
    """

    time: int | float | None
    prompt_tokens: int
    output_tokens: int
    dropped: str = ""
    text: str | None = None
    blocks: tuple[int, ...] = ()
    max_new: int | None = None
    priority: int = 0


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, whatever was in the file."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unlike(column: str, value: object, expected: str) -> ValueError:
    """Return the error of a column's value that is not what is expected."""
    return ValueError(f"{column} is {shown(value)}; expected {expected}")


def token_count(column: str, value: object) -> int:
    """Return a number of tokens from text or JSON. Raises ValueError unless whole and 0 to 10^9."""
    return whole(column, value, 0, "a whole number of tokens, 0 to 10^9")


def whole(column: str, value: object, least: int, expected: str) -> int:
    """Return a whole number from text or JSON, `least` to 10^9. Raises ValueError otherwise."""
    count = number(value)
    if not (least <= count <= MOST_TOKENS and count.is_integer()):
        raise unlike(column, value, expected)
    return int(count)


def number(value: object) -> float:
    """Return a number from text or JSON, NaN for whatever is none."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def block_ids(column: str, value: object) -> tuple[int, ...]:
    """Return the names of a prompt's blocks. Raises ValueError unless a list of whole numbers."""
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise unlike(column, value, "a list of whole numbers")
    return tuple(value)


# -- ShareGPT ------------------------------------------------------------------------------------

CHUNK_CHARACTERS = 2**20
PROMPT, OUTPUT = "input_token_length", "output_token_length"


class ShareGpt:
    """Reads both shapes of entry, as `Table` does lines; text needs `source.count_tokens`."""

    layout, columns, ticks_per_s, block_tokens = "json", ("conversations",), 1, 0

    def rows(self, source: Source) -> Iterator[Row]:
        """Yield a row an entry. Raises UsageError naming the entry (from 1) that is wrong."""
        for number, entry in enumerate(array_items(source), start=1):
            try:
                yield read_entry(entry, source.count_tokens)
            except ValueError as error:
                raise source.error(str(error), entry=number) from None


def read_entry(entry: object, count_tokens: CountTokens | None) -> Row:
    """Return the row of one entry; an entry that holds no prompt and reply is marked dropped."""
    if isinstance(entry, Mapping) and PROMPT in entry and OUTPUT in entry:
        return Row(None, token_count(PROMPT, entry[PROMPT]), token_count(OUTPUT, entry[OUTPUT]))
    turns = entry.get("conversations") if isinstance(entry, Mapping) else None
    if not isinstance(turns, list):
        raise ValueError(f"{shown(entry)}; expected conversations, or {PROMPT} and {OUTPUT}")
    if len(turns) < 2:
        return Row(None, 0, 0, "fewer than two turns")
    if count_tokens is None:
        raise ValueError(
            "text without lengths; give tokenizer: the path of a tokenizer.json, "
            f"or a file with {PROMPT} and {OUTPUT}"
        )
    prompt, reply = (turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(reply, str):
        raise ValueError(f"turns {shown(turns[:2])}; expected objects with a text value")
    return Row(None, count_tokens(prompt), count_tokens(reply), text=prompt)


def array_items(source: Source) -> Iterator[object]:
    """Yield the items of the JSON array in a file, reading no further than the item asked for."""
    decoder, stream = json.JSONDecoder(object_pairs_hook=once), source.stream
    text = stream.read(CHUNK_CHARACTERS).lstrip()
    if not text.startswith("["):
        raise source.error(f"starts with {shown(text[:20])}; expected a JSON array")
    number, place = 0, 1
    while True:
        text, place = text_to_come(source, text, place)
        if text[place : place + 1] == "]":
            return
        try:
            item, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            # Doubling what is read keeps one very long entry from costing quadratic time.
            more = stream.read(max(CHUNK_CHARACTERS, len(text)))
            if not more:
                message = f"not valid JSON, or truncated ({error})"
                raise source.error(message, entry=number + 1) from None
            text, place = text[place:] + more, 0
            continue
        except ValueError as error:
            raise source.error(str(error), entry=number + 1) from None
        number += 1
        yield item


def text_to_come(source: Source, text: str, place: int) -> tuple[str, int]:
    """Skip blanks and commas from `place`, reading on; raise UsageError if nothing comes."""
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place < len(text):
            return text, place
        text, place = source.stream.read(CHUNK_CHARACTERS), 0
        if not text:
            raise source.error('truncated JSON; expected "]" at the end')


def encoder(path: str | Path) -> Callable[[str], list[int]]:
    """Return what makes token ids of text, by a local tokenizer.json (or the folder with one).

    Special tokens are those that the tokenizer adds. Needs the extra `tokenizers`.
    """
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text).ids)


# -- tables of requests, and all formats by name -------------------------------------------------

MAX_NEW, PRIORITY = "max_new", "priority"
URGENCY = -MOST_TOKENS, "a whole number, -10^9 to 10^9, lower first"
HEAD_CHARACTERS = 65536
NANOSECONDS_PER_S = 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)

Ticks = int | float


def elapsed(column: str, value: object) -> float:
    """Return a time counted from some start: a number, 0 or more, in the column's own unit."""
    time = number(value)
    if not 0 <= time < math.inf:
        raise unlike(column, value, "a time, a number of at least 0")
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
        raise unlike(column, value, f"a time such as {example}") from None
    nanoseconds = int((fraction or "").ljust(9, "0"))
    return (since.days * 86400 + since.seconds) * NANOSECONDS_PER_S + nanoseconds


class Table(NamedTuple):
    """A format with one request a line, in named columns (csv) or keys (jsonl).

    All of `columns` must be in the file. `time` is the column of arrival times (None: the format
    has none) and `ticks_per_s` its unit.
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
                    priority=0 if priority in (None, "") else whole(PRIORITY, priority, *URGENCY),
                )
                if row.max_new is not None and row.max_new < row.output_tokens:
                    least = f"at least the {row.output_tokens} tokens of {self.output}"
                    raise unlike(MAX_NEW, row.max_new, least)
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


FORMATS: Mapping[str, Table | ShareGpt] = MappingProxyType(
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
