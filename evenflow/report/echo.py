"""The one place that prints lines to a terminal, with control characters shown as escapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import typer

Watch: TypeAlias = Callable[[list[str], int | None], AbstractContextManager[Any]]
"""Shows the progress of tasks with these names, of a number of points (None: unknown): it gives an
object whose `done` takes the number done, and `failed` the record of each point that fails."""

STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but the ends of lines and tabs, what turns the direction of writing, and
halves of characters, which cannot be written.
"""


def visible(text: object) -> str:
    """Return a text with control characters of terminals replaced by their escapes: \\x1b."""
    return STEERS.sub(_escape, str(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def echo(text: object = "", *, err: bool = False) -> None:
    """Print a text and end its line, on stdout or on stderr."""
    typer.echo(visible(text), err=err)
