"""Padded batches: every row costs as much as the longest one, as in classic static batching.

Knows the numbers of a micro-batch; neither what they cost nor which requests they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from evenflow.costs.base import ChunkShape, Span, Work

if TYPE_CHECKING:
    from evenflow.groups import DecodeGroup


class Rectangle(NamedTuple):
    """What the rows of a batch are padded to: `rows` prompts of `prompt_tokens` tokens."""

    rows: int
    prompt_tokens: int


def rectangle(chunks: Sequence[ChunkShape]) -> Rectangle:
    """Return the rectangle around the prompts that end with these chunks."""
    return Rectangle(len(chunks), max(chunk.stop for chunk in chunks))


def padded_work(
    chunks: Sequence[ChunkShape], group: DecodeGroup | None, row_tokens: int = 1
) -> Work:
    """Return what a micro-batch has to compute when it is padded.

    Each chunk has as many tokens as the longest and ends where the last one ends. Decodes are those
    of all rows that the group's rectangle has, also of rows that have ended, each attending to the
    longest prompt and the tokens decoded since, and computing `row_tokens` tokens.
    """
    rows = context = longest = stop = 0
    if group is not None:
        rows, context = len(group), group.context
        if group.rectangle is not None:
            rows = group.rectangle.rows
            context = rows * (group.rectangle.prompt_tokens + group.tick)
    if chunks:
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        stop = max(chunk.stop for chunk in chunks)
    spans = (Span(stop - longest, stop),) * len(chunks)
    decode_tokens = rows * row_tokens
    sampled_rows = len(chunks) + decode_tokens
    return Work(spans, longest * len(chunks), decode_tokens, context, sampled_rows)
