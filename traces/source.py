"""Trace files as text: opening (plain or gzip), fingerprints, and errors that name the place.

Knows nothing of formats. Whatever goes wrong between the disk and the text becomes a UsageError.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from evenflow.errors import UsageError

WHOLE_FILE_HASH_BYTES = 256 * 2**20
PREFIX_HASH_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Source:
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
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            binary = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
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
