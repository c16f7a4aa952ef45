"""Trace files: their text and fingerprint, and their records, whatever the layout.

A layout is a csv with a header, a JSON object a line, a JSON array of objects, or Parquet. Each may
be gzipped. Records come one at a time, so that the head of a huge trace is cheap. Whatever goes
wrong between the disk and the text becomes a UsageError that names the place. Knows no columns.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from evenflow.errors import UsageError, once, require_package
from evenflow.files import require_file

WHOLE_FILE_HASH_BYTES = 256 * 2**20
PREFIX_HASH_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"

MOST_UNPACKED = 100
FREE_BYTES = 64 * 2**20
"""A gzip may unpack to MOST_UNPACKED times its size, or to FREE_BYTES; a trace's takes 3 to 20."""

PARQUET_MAGIC = b"PAR1"
HEAD_CHARACTERS = 65536
CHUNK_CHARACTERS = 2**20
DELIMITERS = ",;\t|"
NAMED_BAD_ROWS = 5
"""Unreadable rows that are named, where they are skipped."""

MOST_DIGITS = 300
JSON = json.JSONDecoder(
    object_pairs_hook=once,
    parse_int=lambda text: int(text) if len(text) <= MOST_DIGITS else float(text),
)
"""JSON decoder that refuses duplicate keys and reads numbers of too many digits as infinite."""

CountTokens = Callable[[str], int]
Record = Mapping[str, object]
Place = Mapping[str, int]
Records = Iterator[tuple[Place, Record | str]]
"""Where each record is, and the record, or what is wrong with it."""
Values = Callable[[Record], Iterable[object]]


class Source(NamedTuple):
    """An open trace file, and the tokenizer its reader may need (None: no tokenizer was given).

    `bad_rows`: the first rows that cannot be read, where they are skipped; None: they are refused.
    """

    path: Path
    stream: TextIO
    count_tokens: CountTokens | None = None
    bad_rows: list[str] | None = None

    def head(self) -> str:
        """Return the first characters; the file is at its start again then."""
        text = self.stream.read(HEAD_CHARACTERS)
        self.stream.seek(0)
        return text

    def refuse(self, message: str, place: Place) -> None:
        """Raise the error of a row that cannot be read, or remember it where rows are skipped."""
        if self.bad_rows is None:
            raise self.error(message, **place)
        if len(self.bad_rows) < NAMED_BAD_ROWS:
            (kind, number), *_ = place.items()
            self.bad_rows.append(f"{kind} {number}: {message}")

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
            magic = raw.read(4)
            raw.seek(0)
            if magic == PARQUET_MAGIC:
                with _unrolled(path) as text:
                    yield text
                return
            packed = magic.startswith(GZIP_MAGIC)
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


@contextmanager
def _unrolled(path: Path) -> Iterator[TextIO]:
    """Open a Parquet file as JSON lines. Needs the extra `parquet`."""
    require_package("pyarrow", f"trace {path}: Parquet")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with TemporaryFile("w+", encoding="utf-8") as text:
        try:
            for batch in ParquetFile(path).iter_batches():
                text.writelines(f"{json.dumps(row, default=str)}\n" for row in batch.to_pylist())
        except (ArrowException, ValueError) as error:
            raise UsageError(f"trace {path}: damaged or truncated Parquet ({error})") from None
        text.seek(0)
        yield text


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

    A file over 256 MiB is hashed by its size (in decimal) and its first 64 MiB. So a few rows of a
    huge trace are read at once. The result then starts with "size+64MiB:".
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if size <= WHOLE_FILE_HASH_BYTES:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        digest.update(raw.read(PREFIX_HASH_BYTES))
    return "size+64MiB:" + digest.hexdigest()


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, whatever was in the file."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- records ----------------------------------------------------------------------------------


def records_of(
    source: Source, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Records:
    """Return the records of a file, which all need the columns `required`; none is there twice."""
    head = source.head().lstrip()[:1]
    if head in ("{", "["):
        return (jsonl_records if head == "{" else array_records)(source, required)
    return csv_records(source, required, (*required, *optional))


def columns_of(source: Source) -> Record:
    """Return the first record of a file, or its header; it is at its start again then."""
    head = source.head().lstrip()
    if head[:1] not in ("{", "["):
        return dict.fromkeys(csv_header(source, head))
    first: Record = {}
    for place, record in records_of(source):
        if isinstance(record, Mapping):
            first = record
        elif head[0] == "{" and source.bad_rows is None:
            raise source.error(record, **place)
        if first or head[0] == "[":
            break
    source.stream.seek(0)
    return first


def csv_header(source: Source, head: str) -> list[str]:
    first = next(iter(head.splitlines()), "")
    try:
        header = next(csv.reader([first], delimiter=delimiter_of(first)), [])
    except csv.Error as error:
        raise source.error(f"not readable as csv ({error})", line=1) from error
    return [name.strip() for name in header]


def delimiter_of(header: str) -> str:
    return max(DELIMITERS, key=header.count)


def csv_records(source: Source, required: Sequence[str], wanted: Sequence[str]) -> Records:
    """Yield the records of a csv file, of which no column in `wanted` is there twice."""
    first, line = next(iter(source.head().lstrip().splitlines()), ""), 1
    reader = csv.reader(source.stream, delimiter=delimiter_of(first), strict=True)
    try:
        header = [name.strip() for name in next((row for row in reader if row), [])]
        if (lack := missing(required, header)) is not None:
            raise source.error(lack, line=reader.line_num)
        twice = next((name for name in wanted if header.count(name) > 1), None)
        if twice is not None:
            raise source.error(f'the column "{twice}" is there twice', line=reader.line_num)
        line = reader.line_num + 1
        for values in reader:
            line = reader.line_num + 1  # where a row begins that may stay open
            if values and len(values) != len(header):
                wrong = f"{len(values)} fields; expected {len(header)}, as in the header"
                yield {"line": reader.line_num}, wrong
            elif values:
                yield {"line": reader.line_num}, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise source.error(f"not readable as csv ({error})", line=line) from error


def jsonl_records(source: Source, required: Sequence[str] = ()) -> Records:
    """Yield the records of a file with a JSON object on each line."""
    for line, text in enumerate(source.stream, start=1):
        if text.strip():
            try:
                record = JSON.decode(text)
            except (ValueError, RecursionError) as error:
                message = f"not a JSON object on one line, perhaps truncated ({error})"
                yield {"line": line}, message
                continue
            yield {"line": line}, _checked(record, required)


def array_records(source: Source, required: Sequence[str] = ()) -> Records:
    for entry, item in enumerate(array_items(source), start=1):
        yield {"entry": entry}, _checked(item, required)


def _checked(record: object, required: Sequence[str]) -> Record | str:
    if not isinstance(record, dict):
        return f"{shown(record)}; expected a JSON object"
    return missing(required, record) or record


def missing(required: Sequence[str], found: Sequence[str] | Record) -> str | None:
    """Say which column is missing, which are there and which are needed; None if none is."""
    there = found if isinstance(found, Mapping) else dict.fromkeys(found)
    name = next((name for name in required if not has(there, name)), None)
    if name is None:
        return None
    return f'no column "{name}" among {names_of(there)}; needed: {", ".join(required)}'


MOST_NAMES = 12


def names_of(record: Record) -> str:
    """Return the columns of a record in words."""
    names = [" ".join(str(name).split())[:40] for name in record]
    more = ["..."] if len(names) > MOST_NAMES else []
    return ", ".join(names[:MOST_NAMES] + more) or "none"


def has(record: Record, name: str) -> bool:
    """Say whether a record has a column, or the keys of a path: `usage.prompt_tokens`."""
    head, _, rest = name.partition(".")
    if name in record or not rest:
        return name in record
    inner = record.get(head)
    return isinstance(inner, Mapping) and has(inner, rest)


def value_of(record: object, name: str) -> Any:
    """Return what a record has in a column, or at the path of that name; None where nothing is."""
    if not isinstance(record, Mapping):
        return None
    if name in record:
        return record[name]
    head, _, rest = name.partition(".")
    return value_of(record.get(head), rest) if rest else None


def reader_of(names: Sequence[str]) -> Values:
    """Return what reads the `value_of` each of these columns from a record."""
    if any("." in name for name in names):
        return lambda record: (value_of(record, name) for name in names)
    known: list[Any] = [name or None for name in names]  # None is no column of any record
    return lambda record: map(record.get, known)


def array_items(source: Source) -> Iterator[object]:
    """Yield the items of the JSON array in a file, reading no further than the item asked for."""
    stream = source.stream
    text = stream.read(CHUNK_CHARACTERS).lstrip()
    if not text.startswith("["):
        raise source.error(f"starts with {shown(text[:20])}; expected a JSON array")
    number, place = 0, 1
    text, place = text_to_come(source, text, place)
    while text[place] != "]":
        number += 1
        item, text, place = next_item(source, text, place, number)
        yield item
        text, place = text_to_come(source, text, place)
        if text[place] == ",":
            text, place = text_to_come(source, text, place + 1)
            if text[place] == "]":
                raise source.error('"]" after a comma; expected one more', entry=number + 1)
        elif text[place] != "]":
            told = f'{shown(text[place : place + 20])} follows; expected "," or "]"'
            raise source.error(told, entry=number)
    if more := (text[place + 1 :] + stream.read(CHUNK_CHARACTERS)).strip():
        raise source.error(f"goes on after its JSON array: {shown(more[:20])}")


def next_item(source: Source, text: str, place: int, number: int) -> tuple[object, str, int]:
    """Return the item at `place`, the `number`th, with the text read by then and its end there."""
    while True:
        try:
            item, end = JSON.raw_decode(text, place)
            return item, text, end
        except (json.JSONDecodeError, RecursionError) as error:
            # Doubling what is read keeps one very long entry from costing quadratic time.
            more = source.stream.read(max(CHUNK_CHARACTERS, len(text)))
            if not more:
                message = f"not valid JSON, or truncated ({error})"
                raise source.error(message, entry=number) from None
            text, place = text[place:] + more, 0
        except ValueError as error:
            raise source.error(str(error), entry=number) from None


def text_to_come(source: Source, text: str, place: int) -> tuple[str, int]:
    """Skip blanks from `place`, reading on; raise UsageError if nothing comes."""
    while True:
        while place < len(text) and text[place] in " \t\r\n":
            place += 1
        if place < len(text):
            return text, place
        text, place = source.stream.read(CHUNK_CHARACTERS), 0
        if not text:
            raise source.error('truncated JSON; expected "]" at the end')
