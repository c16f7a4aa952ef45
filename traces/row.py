"""One row of a trace as a reader yields it, and the reading of a token count. Knows no format."""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_TOKENS = 10**9


class Row(NamedTuple):
    """A request as the file has it. `time` is in the format's ticks (None: no arrival times).

    `dropped` says why the format itself does not count the row as a request; "" keeps it. `text` is
    the prompt, where the file holds it; `blocks` name the content of its blocks of tokens, () where
    the file does not.
    """

    time: int | float | None
    prompt_tokens: int
    output_tokens: int
    dropped: str = ""
    text: str | None = None
    blocks: tuple[int, ...] = ()


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


def block_ids(column: str, value: object) -> tuple[int, ...]:
    """Return the names of a prompt's blocks. Raises ValueError unless a list of whole numbers."""
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise ValueError(f"{column} is {shown(value)}; expected a list of whole numbers")
    return tuple(value)
