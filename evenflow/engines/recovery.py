"""An engine that dies: what it had, a fresh one in its place, and its requests served again.

Knows no clock: when it dies and is back is the owner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.loop import Loop
from evenflow.core.replay import Call
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.handover import Handover
from evenflow.engines.loop import EngineLoop


def restarted(
    engines: Collection[Batcher], loop: Loop, make: Callable[[], Collection[Batcher]]
) -> tuple[list[Batcher], list[Sequence]]:
    """Return fresh engines in the place of dead ones, and all requests in the order they came."""
    lost = [seq for engine in engines for seq in _lost_by(engine)]
    for engine in engines:
        _record(engine, Call("restart", None))
    fresh = [*make()]
    for before, engine in zip(engines, fresh, strict=True):
        engine.queues.gap_s, engine.queues.gap_count = before.queues.gap_s, before.queues.gap_count
    unseen = loop.unseen if isinstance(loop, EngineLoop) else []
    return fresh, lost + [Sequence(request, request.prompt_tokens) for request in unseen]


def _lost_by(engine: Batcher) -> Iterator[Sequence]:
    """Yield the requests of an engine that is lost, with what they have got, preempted."""
    queues = engine.queues
    for group in queues.decode_groups():
        if isinstance(group, AheadGroup):
            continue  # whose sequences know their own times
        for seq in group.sequences():
            seq.last_token_s = group.last_token_of(seq)
    for request_id in list(queues.live):
        begun = request_id in queues.admitted
        seq = engine.abort(request_id)
        seq.epoch += begun
        yield seq


def take_again(engines: Collection[Batcher], lost: Sequence) -> None:
    """Queue a request that an engine lost, at the one with the fewest, as after a preemption.

    It is served from the start, with its output so far behind its prompt.
    """
    engine = min(engines, key=lambda each: len(each.queues.live))
    handover = Handover.of(lost, lost.request)
    _take(engine, handover, lost.cached_tokens)
    _record(engine, Call("take", handover))


def _take(engine: Batcher, lost: Handover, cached_tokens: int = 0) -> None:
    seq = lost.sequence(lost.request.prompt_tokens + lost.generated)
    seq.cached_tokens = cached_tokens
    engine.queues.enter(seq)
    engine.queues.wait(seq, last=True)


def _record(engine: Batcher, call: Call) -> None:
    if (record := getattr(engine, "record", None)) is not None:
        record(call)


class Lives:
    """A Batcher for the replay of a journal in which it dies: `make` makes the next one."""

    def __init__(self, make: Callable[[], Batcher]) -> None:
        self._make = make
        self.restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def restart(self, _: None = None) -> None:
        """Begin anew, without requests."""
        self._engine = self._make()

    def take(self, lost: Handover) -> None:
        """Queue a request that the one before lost."""
        _take(self._engine, lost)
