"""Micro-batches: chunks of prompts and a group of decodes that pass through the stages together."""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.decodes import DecodeGroup, Sequence


class Span(NamedTuple):
    """Prompt tokens [start, stop)."""

    start: int
    stop: int


class Work(NamedTuple):
    """A micro-batch reduced to the numbers that cost time.

    Before it, `swapped_pages` KV pages of `swapped_rows` rows are copied to or from the host.
    """

    chunks: tuple[Span, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_context: int = 0
    sampled_rows: int = 0
    swapped_rows: int = 0
    swapped_pages: int = 0


class Chunk:
    """Tokens [start, stop) of a sequence's prompt, computed in one micro-batch.

    `last`: the prompt ends here, so the chunk yields a token. `epoch` is the sequence's when the
    chunk was scheduled: a result of another epoch is stale and never applied.
    """

    __slots__ = ("epoch", "last", "sequence", "start", "stop")

    def __init__(self, sequence: Sequence, start: int, stop: int, last: bool, epoch: int) -> None:
        self.sequence = sequence
        self.start = start
        self.stop = stop
        self.last = last
        self.epoch = epoch


@mypyc_attr(allow_interpreted_subclasses=True)
class Notes:
    """Notes that the queues of an engine keep of a micro-batch until it returns."""


@mypyc_attr(allow_interpreted_subclasses=True)
class MicroBatch:
    """Work that travels through the stages together.

    `decodes` is a group (None: no decode) that computes `decode_tokens` and attends to
    `decode_context` tokens before this step, summed. `sampled_rows` tokens need logits: decode
    tokens and last chunks. `output_tokens` come out at the end. `free_pages` are left when it was
    scheduled, `kv_tokens` slots filled in the others, its own included, and `num_active` requests
    admitted. No other micro-batch in flight has its `slot`. The host may work on it from `chosen_s`
    on, before it is sent. `charged` is the work that costs time where that differs from the above.

    NOTE: no dataclass, whose constructor mypyc does not compile.
    """

    def __init__(  # noqa: PLR0917
        self,
        batch_id: int,
        scheduled_s: float,
        chunks: abc.Sequence[Chunk],
        decodes: DecodeGroup | None,
        prefill_tokens: int,
        decode_tokens: int,
        decode_context: int,
        sampled_rows: int,
        free_pages: int,
        output_tokens: int,
        kv_tokens: int = 0,
    ) -> None:
        self.batch_id = batch_id
        self.scheduled_s = self.chosen_s = scheduled_s
        self.chunks = chunks
        self.decodes = decodes
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.decode_context = decode_context
        self.sampled_rows = sampled_rows
        self.free_pages = free_pages
        self.output_tokens = output_tokens
        self.kv_tokens = kv_tokens
        self.num_active = 0
        self.slot = 0
        self.charged: Work | None = None
        self.notes: Notes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        charged = self.charged or self
        return charged.prefill_tokens + charged.decode_tokens

    @property
    def crossing_tokens(self) -> int:
        """Tokens that one GPU sends to the next stage, padding included."""
        return self.num_tokens
