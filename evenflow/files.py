"""User files: read only if they are regular files, written whole or not at all.

Knows no format but that of a tokenizer, which only its own package reads.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from evenflow.errors import UsageError, require_package


def require_file(path: Path) -> None:
    """Raise a UsageError for a pipe or a device, which may have no end, or never begin."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UsageError(f"{path}: is a pipe or a device; a file is right")


def require_new(path: Path) -> None:
    """Raise a UsageError where `write_new` would, before the time is taken for what to write."""
    if os.path.lexists(path):
        raise _is_there(path)
    require_writable(path)


def require_writable(path: Path) -> None:
    """Raise a UsageError where `write_whole` would, before the time is taken for what to write."""
    with _beside(path) as scratch:
        scratch.touch()


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file under another name beside its place, then move it there.

    UsageError when it cannot be written; what was there before then stays.
    """
    with _beside(path) as scratch:
        _fill(scratch, data)
        os.replace(scratch, path)


def write_new(path: Path, data: str | bytes) -> None:
    """Write a file as `write_whole` does, where none is.

    UsageError when anything is at the path, even if it came while the data were made: it stays.
    """
    with _beside(path) as scratch:
        _fill(scratch, data)
        try:
            _move_to_new(scratch, path)
        except FileExistsError:
            raise _is_there(path) from None


def _fill(scratch: Path, data: str | bytes) -> None:
    scratch.write_bytes(data.encode() if isinstance(data, str) else data)


def _move_to_new(scratch: Path, path: Path) -> None:
    """Give a file a name that nothing has; FileExistsError otherwise, where os.replace replaces."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        path.touch(exist_ok=False)
        try:
            os.replace(scratch, path)
        except OSError:
            path.unlink()
            raise


def _is_there(path: Path) -> UsageError:
    return UsageError(f"{path}: is there already; name another file")


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Return another name beside a path, of which nothing stays; UsageError for an OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield scratch
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def is_begun(path: Path) -> bool:
    """Say whether a path is a file with the name of an unfinished `write_whole`."""
    named = re.fullmatch(r"\..+\.\d+\.partial", path.name)
    return named is not None and path.is_file() and not path.is_symlink()


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a local tokenizer.json, or of the folder with one.

    Needs the extra `tokenizers`.
    """
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UsageError(f"tokenizer {path}: no such file; give a local tokenizer.json")
    require_package("tokenizers", f"tokenizer {path}: reading text")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception for a bad file
        raise UsageError(f"tokenizer {file}: not a tokenizer.json ({error})") from None


MOST_PIPED = 256 * 2**20
"""The most bytes that a pipe may give."""

OPENED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Where what a process has open is to be found."""


def local_file(path: Path) -> Path:
    """Return a file with what stdin (`-`, `/dev/stdin`) or a pipe of the shell (`/dev/fd/N`) gives.

    Any other file is returned as it is.

    It is read once, and gone with the process. UsageError for another pipe, a device, and in a
    process of several that share the work.
    """
    name = str(path)
    if name == "-" or (name.startswith(OPENED) and path.is_fifo()):
        return _read_once("/dev/stdin" if name == "-" else name)
    require_file(path)
    return path


@cache
def _read_once(name: str) -> Path:
    from multiprocessing import parent_process

    if parent_process() is not None:
        raise UsageError(f"{name}: several processes cannot read it; a file is right")
    if name == "/dev/stdin":
        data = sys.stdin.buffer.read(MOST_PIPED + 1)
    else:
        with open(name, "rb") as stream:
            data = stream.read(MOST_PIPED + 1)
    if len(data) > MOST_PIPED:
        raise UsageError(f"{name}: gives more than {MOST_PIPED} bytes; a file is right")
    with NamedTemporaryFile(prefix="evenflow-", delete=False) as file:
        atexit.register(Path(file.name).unlink, missing_ok=True)
        file.write(data)
    return Path(file.name)
