"""The one place that prints lines to a terminal, with control characters shown as escapes."""

from __future__ import annotations

import re

import typer

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
