"""Replay: a recorded run's inputs through a fresh Batcher must give the same decisions.

This is how a run of either world is checked against the rules, whatever the noise of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.request import Handover, Request


class Decision(NamedTuple):
    """What a micro-batch held: (request, start, stop) of its chunks, and its decoding requests."""

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


class Aborted(NamedTuple):
    request_id: int


class Released(NamedTuple):
    request_id: int


class Reserved(NamedTuple):
    handover: Handover


class Adopted(NamedTuple):
    request_id: int


Entry = Added | Asked | Completed | Aborted | Released | Reserved | Adopted

VERBS = {Aborted: "abort", Released: "release", Reserved: "reserve", Adopted: "adopt"}
"""What a Batcher is told and does not answer: a client leaves, or pages come and go with KV."""


class RecordingBatcher(Batcher):
    """A Batcher that keeps a journal of its inputs and decisions, or has `record` keep it."""

    def __init__(
        self, *args: Any, record: Callable[[Entry], None] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.journal: list[Entry] = []
        self._record = self.journal.append if record is None else record

    def add(self, request: Request) -> str | None:
        refusal = super().add(request)
        self._record(Added(request, refusal))
        return refusal

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self._record(Asked(now_s, decision_of(batch)))
        return batch

    def complete(
        self, batch: MicroBatch, now_s: float, stopped: Collection[int] = ()
    ) -> list[Sequence]:
        finished = super().complete(batch, now_s, stopped)
        ids = tuple(seq.request.request_id for seq in finished)
        self._record(Completed(now_s, batch.batch_id, tuple(stopped), ids))
        return finished

    def abort(self, request_id: int) -> Sequence:
        seq = super().abort(request_id)
        self._record(Aborted(request_id))
        return seq

    def release(self, request_id: int) -> None:
        super().release(request_id)
        self._record(Released(request_id))

    def reserve(self, handover: Handover) -> None:
        super().reserve(handover)
        self._record(Reserved(handover))

    def adopt(self, request_id: int) -> None:
        super().adopt(request_id)
        self._record(Adopted(request_id))


def decision_of(batch: MicroBatch | None) -> Decision | None:
    """Return what a micro-batch holds; read it before the micro-batch completes."""
    if batch is None:
        return None
    chunks = tuple((c.sequence.request.request_id, c.start, c.stop) for c in batch.chunks)
    decoding = batch.decodes.sequences() if batch.decodes is not None else ()
    return Decision(chunks, tuple(seq.request.request_id for seq in decoding))


def replay(journal: Iterable[Entry], batcher: Batcher) -> str | None:
    """Feed recorded inputs to a fresh Batcher; return the first difference, or None.

    ValueError for an input that cannot follow those before it: no run recorded that.
    """
    in_flight: dict[int, MicroBatch] = {}
    for position, entry in enumerate(journal):
        place = f"entry {position} ({type(entry).__name__})"
        try:
            outcome, expected = _again(entry, batcher, in_flight)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{place}: cannot follow those before it: {error}") from None
        if outcome != expected:
            return f"{place}: {outcome!r}, recorded {expected!r}"
    return None


def _again(
    entry: Entry, batcher: Batcher, in_flight: dict[int, MicroBatch]
) -> tuple[object, object]:
    """Hand on one input; return what came of it, and what did when it was recorded."""
    if isinstance(entry, Added):
        return batcher.add(entry.request), entry.refusal
    if isinstance(entry, Asked):
        batch = batcher.next(entry.now_s)
        if batch is not None:
            in_flight[batch.batch_id] = batch
        return decision_of(batch), entry.decision
    if isinstance(entry, Completed):
        if entry.batch_id not in in_flight:
            raise ValueError(f"micro-batch {entry.batch_id} is not in flight")
        sequences = batcher.complete(in_flight.pop(entry.batch_id), entry.now_s, entry.stopped)
        return tuple(seq.request.request_id for seq in sequences), entry.finished
    getattr(batcher, VERBS[type(entry)])(*entry)
    return None, None
