"""Replay a recorded run's inputs through a fresh Batcher, which must decide the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request


class Decision(NamedTuple):
    """The content of a micro-batch: (request, start, stop) of its chunks, and its decodes."""

    chunks: tuple[tuple[int, int, int], ...]
    decodes: tuple[int, ...]


class Added(NamedTuple):
    request: Request
    refusal: str | None


class Asked(NamedTuple):
    now_s: float
    decision: Decision | None


class Completed(NamedTuple):
    now_s: float
    batch_id: int
    stopped: tuple[int, ...]
    finished: tuple[int, ...]


class Call(NamedTuple):
    """A call of a Batcher's method `verb` that has no answer: a client leaves, or KV comes."""

    verb: str
    argument: Any


Entry = Added | Asked | Completed | Call


class RecordingBatcher(Batcher):
    """A Batcher that keeps a journal of its inputs and decisions, or has `record` keep it."""

    def __init__(
        self, *args: Any, record: Callable[[Entry], None] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.journal: list[Entry] = []
        self.record = self.journal.append if record is None else record

    def add(self, request: Request) -> str | None:
        refusal = super().add(request)
        self.record(Added(request, refusal))
        return refusal

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self.record(Asked(now_s, decision_of(batch)))
        return batch

    def complete(
        self, batch: MicroBatch, now_s: float, stopped: Collection[int] = ()
    ) -> list[Sequence]:
        finished = super().complete(batch, now_s, stopped)
        ids = tuple(seq.request.request_id for seq in finished)
        self.record(Completed(now_s, batch.batch_id, tuple(stopped), ids))
        return finished

    def abort(self, request_id: int) -> Sequence:
        seq = super().abort(request_id)
        self.record(Call("abort", request_id))
        return seq


def decision_of(batch: MicroBatch | None) -> Decision | None:
    """Return the content of a micro-batch; read it before the micro-batch completes."""
    if batch is None:
        return None
    chunks = tuple((c.sequence.request.request_id, c.start, c.stop) for c in batch.chunks)
    decoding = batch.decodes.sequences() if batch.decodes is not None else ()
    return Decision(chunks, tuple(seq.request.request_id for seq in decoding))


def replay(journal: Iterable[Entry], batcher: Batcher) -> str | None:
    """Feed recorded inputs to a fresh Batcher; return the first difference, or None.

    ValueError for an input that cannot follow those before it: no run recorded that.
    """
    for position, entry in enumerate(journal):
        place = f"entry {position} ({getattr(entry, 'verb', type(entry).__name__)})"
        try:
            outcome, expected = _again(entry, batcher)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{place}: cannot follow those before it: {error}") from None
        if outcome != expected:
            return f"{place}: {outcome!r}, recorded {expected!r}"
    return None


def _again(entry: Entry, batcher: Batcher) -> tuple[object, object]:
    """Repeat one input; return its outcome, and the recorded one."""
    match entry:
        case Added(request, refusal):
            return batcher.add(request), refusal
        case Asked(now_s, decision):
            return decision_of(batcher.next(now_s)), decision
        case Completed(now_s, batch_id, stopped, finished):
            batch = batcher.queues.in_flight.get(batch_id)
            if batch is None:
                raise ValueError(f"micro-batch {batch_id} is not in flight")
            sequences = batcher.complete(batch, now_s, stopped)
            return tuple(seq.request.request_id for seq in sequences), finished
        case Call(verb, argument):
            getattr(batcher, verb)(argument)
            return None, None
