"""What travels through the stages together: chunks of prompts and a group of decodes.

Knows the numbers of a micro-batch, also of one that is padded, as in classic static batching, where
every sequence costs as much as the longest; not what they cost.
"""

from __future__ import annotations

from collections import abc

from evenflow.core.decodes import DecodeGroup, Rectangle, Sequence
from evenflow.costs.base import ChunkShape, Span, Work


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


class MicroBatch:
    """What travels through the stages together.

    `decodes` is the group of sequences that decode (None: no decode). They compute `decode_tokens`
    tokens: one each, or with speculative decoding the proposals too. `decode_context` is the number
    of tokens they attend to, before this step, summed. `sampled_rows` tokens need logits: every
    decode token and every last chunk. `output_tokens` come out when the micro-batch returns: as
    many, or with speculative decoding those that are accepted. `free_pages` counts the pages left
    when the micro-batch was scheduled, and `kv_tokens` the token slots that are filled in the
    others, its own tokens included. `charged` is the work that costs time where it is not just that
    of the sequences: padding, or pages copied to and from the host. Of decodes that were preempted
    on the way, `preempted` says which, and how many tokens each is still to get. Where decodes run
    ahead, `ahead` has those that get a token, by request id, and how many they then have. Its
    decodes go on in the slot that sent it. `parts` are those of engines that step together; of
    their numbers it has the sums, and of their sequences none.

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
        slot: int = 0,
        parts: abc.Sequence[MicroBatch] = (),
    ) -> None:
        self.batch_id = batch_id
        self.scheduled_s = scheduled_s
        self.chunks = chunks
        self.decodes = decodes
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.decode_context = decode_context
        self.sampled_rows = sampled_rows
        self.free_pages = free_pages
        self.output_tokens = output_tokens
        self.kv_tokens = kv_tokens
        self.slot = slot
        self.charged: Work | None = None
        self.preempted: abc.Sequence[tuple[Sequence, int]] = ()
        self.ahead: dict[int, tuple[Sequence, int]] | None = None
        self.parts = parts

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        charged = self.charged or self
        return charged.prefill_tokens + charged.decode_tokens

    def sequences(self) -> list[Sequence]:
        """The sequences of the micro-batch, prefill chunks first."""
        decoding = list(self.decodes.sequences()) if self.decodes is not None else []
        return [chunk.sequence for chunk in self.chunks] + decoding


def joined(parts: abc.Sequence[MicroBatch], batch_id: int) -> MicroBatch:
    """Return what engines that step together send as one micro-batch."""
    (scheduled_s,) = {part.scheduled_s for part in parts}
    return MicroBatch(
        batch_id,
        scheduled_s,
        chunks=(),
        decodes=None,
        prefill_tokens=sum(part.prefill_tokens for part in parts),
        decode_tokens=sum(part.decode_tokens for part in parts),
        decode_context=sum(part.decode_context for part in parts),
        sampled_rows=sum(part.sampled_rows for part in parts),
        free_pages=sum(part.free_pages for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        kv_tokens=sum(part.kv_tokens for part in parts),
        parts=parts,
    )


def rectangle(chunks: abc.Sequence[ChunkShape]) -> Rectangle:
    """Return the rectangle around the prompts that end with these chunks."""
    return Rectangle(len(chunks), max(chunk.stop for chunk in chunks))


def padded_work(
    chunks: abc.Sequence[ChunkShape], group: DecodeGroup | None, row_tokens: int = 1
) -> Work:
    """Return what a micro-batch has to compute when it is padded.

    Each chunk has as many tokens as the longest and ends where the last one ends. Decodes are those
    of all rows of the group's rectangle, also where the sequence has ended, each attending to the
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
