"""A trace file before its format: its text, its fingerprint, and the row a reader makes of it.

Whatever goes wrong between the disk and the text becomes a UsageError that names the place.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO, cast

from evenflow.errors import UsageError
from evenflow.files import require_file

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


def token_count(column: str, value: object) -> int:
    """Return a number of tokens from text or JSON. Raises ValueError unless whole and 0 to 10^9."""
    count = number(value)
    if not (0 <= count <= MOST_TOKENS and count.is_integer()):
        expected = "a whole number of tokens, 0 to 10^9"
        raise ValueError(f"{column} is {shown(value)}; expected {expected}")
    return int(count)


def number(value: object) -> float:
    """Return a number from text or JSON, NaN for whatever is none."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def priority_of(column: str, value: object) -> int:
    """Return a priority, 0 where nothing is said. Raises ValueError unless a whole number."""
    if value in (None, ""):
        return 0
    priority = number(value)
    if not (abs(priority) <= MOST_TOKENS and priority.is_integer()):
        raise ValueError(
            f"{column} is {shown(value)}; expected a whole number, -10^9 to 10^9, lower first"
        )
    return int(priority)


def block_ids(column: str, value: object) -> tuple[int, ...]:
    """Return the names of a prompt's blocks. Raises ValueError unless a list of whole numbers."""
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise ValueError(f"{column} is {shown(value)}; expected a list of whole numbers")
    return tuple(value)
