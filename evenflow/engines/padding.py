"""Padded micro-batches, as in static batching: every sequence costs as much as the longest."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import Chunk, MicroBatch, Span, Work
from evenflow.core.decodes import DecodeGroup, Decoding, Sequence
from evenflow.core.kv import KvCache
from evenflow.core.queues import Queues
from evenflow.core.rules import Rules


class Rectangle(NamedTuple):
    """The padding of a batch: `rows` prompts of `prompt_tokens`."""

    rows: int
    prompt_tokens: int


class PaddedRules(Rules):
    """Rules of padding: requests of a micro-batch compute as much as the longest, until all end."""

    def queues(self, kv: KvCache, decoding: Decoding, **deployment: Any) -> Queues:
        """Return empty queues of padded micro-batches."""
        plain = super().queues(kv, decoding, **deployment)
        return PaddedQueues(kv, decoding, self.pipelined_chunks, plain.num_slots)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(eq=False)
class PaddedQueues(Queues):
    """Queues that charge micro-batches with their padding.

    `rectangles`: the padding of groups of decodes, from the prompts that they began with.
    """

    rectangles: dict[DecodeGroup, Rectangle] = field(default_factory=dict)

    def sent(self, batch: MicroBatch) -> None:
        """Charge a micro-batch with its padding, and put it in flight."""
        group, rectangle = batch.decodes, None
        if group is not None:
            rectangle = self.rectangles.get(group)
        batch.charged = padded_work(batch.chunks, group, rectangle, self.decoding.row_tokens)
        super().sent(batch)

    def take_back(self, batch: MicroBatch, stopped: abc.Collection[int]) -> list[Sequence]:
        """Complete a micro-batch, in which requests `stopped` early; return finished sequences."""
        finished = super().take_back(batch, stopped)
        if batch.decodes is not None and not batch.decodes.members:
            self.rectangles.pop(batch.decodes, None)
        return finished

    def take_chunks(
        self, batch: MicroBatch, group: DecodeGroup | None, finished: list[Sequence]
    ) -> DecodeGroup | None:
        """Complete chunks; a group that begins with them is padded to the longest."""
        joined = super().take_chunks(batch, group, finished)
        if joined is not None and joined is not group:
            longest = max(chunk.stop for chunk in batch.chunks)
            self.rectangles[joined] = Rectangle(len(batch.chunks), longest)
        return joined


def padded_work(
    chunks: abc.Sequence[Chunk | Span],
    group: DecodeGroup | None,
    rectangle: Rectangle | None = None,
    row_tokens: int = 1,
) -> Work:
    """Return the work of a padded micro-batch.

    Each chunk has as many tokens as the longest and ends where the last one ends. Decodes are those
    of all rows of the group's rectangle, also where the sequence has ended. Each attends to the
    longest prompt and the tokens decoded since, and computes `row_tokens` tokens.
    """
    rows = context = longest = stop = 0
    if group is not None:
        rows, context = len(group), group.context
        if rectangle is not None:
            rows = rectangle.rows
            context = rows * (rectangle.prompt_tokens + group.tick)
    if chunks:
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        stop = max(chunk.stop for chunk in chunks)
    spans = (Span(stop - longest, stop),) * len(chunks)
    decode_tokens = rows * row_tokens
    sampled_rows = len(chunks) + decode_tokens
    return Work(spans, longest * len(chunks), decode_tokens, context, sampled_rows)
