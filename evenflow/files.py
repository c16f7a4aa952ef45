"""Files of the user's: read only where they are files, written whole or not at all.

Knows no format but that of a tokenizer, which only its own package reads.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, require_package


def require_file(path: Path) -> None:
    """Raise a UsageError for a pipe or a device, which may have no end, or never begin."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UsageError(f"{path}: is a pipe or a device; a file is right")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file under another name beside its place, then move it there.

    UsageError when it cannot be written; what was there before then stays.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(scratch, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def is_begun(path: Path) -> bool:
    """Say whether a path has the name of what `write_whole` begins, and is a file."""
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
