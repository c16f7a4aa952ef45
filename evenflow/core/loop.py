"""The serving loop of both worlds: apply all events of an instant, then ask the policies.

What happens at one instant (requests come, micro-batches return, stage 0 is free again) is applied
first. When it is over, the owner calls `settle`, and the policies are asked while the dispatch rule
allows it and one of them sends something. The owner, a driver, has the clock and the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.results.recorder import Block, Recorder
from evenflow.results.run import WAIT_REASONS, RunResult


class Pipeline(Protocol):
    """The stages, from which micro-batches come back in the order in which they were sent.

    `is_free`: stage 0 could start one now. `call_when_free`: have `Loop.freed` called when stage 0,
    which is not free now, will be.
    """

    def is_free(self, now_s: float) -> bool: ...
    def submit(self, batch: MicroBatch) -> None: ...
    def call_when_free(self) -> None: ...


class Owner(Protocol):
    """The driver of a loop. `changed` asks for a call of `settle` once all events of this instant
    are applied; `wake`, for one at a given time. `finished` takes finished sequences.
    """

    def changed(self, now_s: float) -> None: ...
    def wake(self, at_s: float) -> None: ...
    def finished(self, sequences: list[Sequence], now_s: float) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Loop:
    """Serve requests with the engines of one pipeline.

    The owner calls `admit` for an arrival, `returned` for each micro-batch that has left the last
    stage, and `freed` when stage 0 has computed one. `eager`: stage 0 need not be free for a
    micro-batch to be sent. `recorder` gets rejected requests and waits.
    """

    asks_again: ClassVar[bool] = True
    """Whether a policy that only preempted is asked again at once."""
    steps_together: ClassVar[bool] = False
    """Whether several engines send one micro-batch together."""

    def __init__(
        self,
        engines: Collection[Batcher],
        pipeline: Pipeline,
        owner: Owner,
        recorder: Recorder,
        *,
        eager: bool = False,
    ) -> None:
        self.engines = tuple(engines)
        self._pipeline = pipeline
        self._recorder = recorder
        self._changed, self._wake, self._finished = owner.changed, owner.wake, owner.finished
        self._turns = deque(self.engines)
        self._others = self.engines[1:]
        self.travelling: deque[list[tuple[Batcher, MicroBatch]]] = deque()  # in order of return
        self._last_wait = ""
        self._is_free = None if eager else pipeline.is_free
        self.freed: Callable[[float], None] = _ignore if eager else self._changed

    # -- what happens at an instant -------------------------------------------------------------

    def admit(self, request: Request) -> str | None:
        """Add an arrival to the engine with the fewest requests; return why not, or None."""
        reason = self._add(request)
        if reason is not None:
            self._recorder.reject(request, reason)
        return reason

    def _add(self, request: Request) -> str | None:
        return min(self.engines, key=num_live).add(request)

    def returned(self, now_s: float, stopped: Collection[int] = ()) -> None:
        """Take back the micro-batch that was sent first, in which requests `stopped` early."""
        self._complete(now_s, stopped)
        self._changed(now_s)

    def _complete(self, now_s: float, stopped: Collection[int]) -> None:
        finished: list[Sequence] = []
        for engine, batch in self.travelling.popleft():
            finished += engine.complete(batch, now_s, stopped)
        if finished:
            self._finished(finished, now_s)

    # -- and when it is over --------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Send micro-batches while the dispatch rule allows it and a policy has one."""
        pipeline, is_free = self._pipeline, self._is_free
        while is_free is None or is_free(now_s):
            batch = self._next(now_s)
            if batch is None:
                return self._record_wait(now_s)
            pipeline.submit(batch)
        for engine in self.engines:
            if engine.can_send():
                return pipeline.call_when_free()
        return self._record_wait(now_s)

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask the engines in turn; the one that was served longest ago goes first."""
        turns = self._turns
        for engine in turns:
            batch = self._ask(engine, now_s)
            if batch is not None:
                if self._others:
                    turns.remove(engine)
                    turns.append(engine)
                self.travelling.append([(engine, batch)])
                return batch
        return None

    def _ask(self, engine: Batcher, now_s: float) -> MicroBatch | None:
        batch = engine.next(now_s)
        if engine.given_up:
            self._finished(engine.given_up, now_s)
            engine.given_up = []
        if batch is not None:
            self._last_wait = ""
        elif (wake_at_s := engine.wake_at_s) is not None:
            self._wake(wake_at_s)
        return batch

    def _record_wait(self, now_s: float) -> None:
        """Record why there is nothing to send; of several engines, the most urgent reason."""
        if not self._recorder.whole:
            return
        reason = self.engines[0].wait_reason
        for engine in self._others:
            reason = min(reason, engine.wait_reason, key=WAIT_REASONS.index)
        if reason != self._last_wait:
            self._recorder.wait(now_s, reason)
            self._last_wait = reason

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return sum(map(num_live, self.engines))

    def flush(self, more: Block) -> None:
        """Flush the columns of the recorder, and `more`, to where it keeps them."""
        self._recorder.flush(**self._gaps(), more=more)
        for engine in self.engines:
            engine.queues.gap_s.clear()
            engine.queues.gap_count.clear()

    def result(self, **facts: Any) -> RunResult:
        """Return the result so far; `facts` as in `World.facts`."""
        total_pages = sum(engine.pool.total_pages for engine in self.engines)
        return self._recorder.result(total_pages=total_pages, **self._gaps(), **facts)

    def _gaps(self) -> dict[str, Any]:
        gap_s, gap_count = self.engines[0].queues.gap_s, self.engines[0].queues.gap_count
        for engine in self._others:
            gap_s, gap_count = gap_s + engine.queues.gap_s, gap_count + engine.queues.gap_count
        return {"gap_s": gap_s, "gap_count": gap_count}


def num_live(engine: Batcher) -> int:
    """Return how many requests of an engine have not ended."""
    return len(engine.queues.live)


def _ignore(_: float) -> None:
    """Ignore that stage 0 is free: all that could be sent was sent before."""
