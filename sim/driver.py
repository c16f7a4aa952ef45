"""The simulated driver: arrivals go in, micro-batches go round, and the policy is asked in between.

One rule orders what happens at one instant: finish the instant, then ask. All arrivals and returns
of an instant are applied before any policy is asked at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.decodes import Sequence
from evenflow.errors import PolicyError
from evenflow.request import Request
from evenflow.results.run import WAIT_REASONS, Recorder, RunResult
from evenflow.world import World
from sim.arrivals import Arrivals
from sim.clock import LAST, Clock, Signal
from sim.stages import StageProcesses
from sim.tandem import Tandem


class Driver:
    """Runs one world through a pipeline. `on_done` is called with the number of requests done.

    With a `clock` of several pipelines, `run` is not called: requests come through `admit`.
    """

    def __init__(
        self,
        world: World,
        pipeline: Callable[..., Tandem | StageProcesses],
        on_done: Callable[[int], None] | None = None,
        batcher: Callable[..., Batcher] = Batcher,
        clock: Clock | None = None,
    ) -> None:
        self._world = world
        self._clock = clock or Clock()
        self._recorder = Recorder(world.depth)
        self._on_done: list[Callable[[int], None]] = []
        if on_done is not None:
            self.when_done(lambda _: on_done(self.num_done))
        self.engines = tuple(world.batcher(batcher) for _ in range(world.virtual_engines))
        self._turns = deque(self.engines)
        self._travelling: deque[tuple[Batcher, MicroBatch]] = deque()  # first sent, first back
        self._pipeline = pipeline(self._clock, world, self._recorder, self.changed, self._returned)
        self._queues_ahead = self._pipeline.queues_ahead
        self._ask = Signal(self._clock, self._settle_later)
        self._ask_queued = False
        self._last_wait = ""

    def run(self) -> RunResult:
        """Simulate until every request is done; return what happened."""
        Arrivals(self._clock, self._world.requests, self._world.concurrency, [self])
        self._clock.run()
        return self.result()

    def result(self) -> RunResult:
        """Return what happened so far."""
        return self._recorder.result(
            max_in_flight=self._world.max_in_flight,
            total_pages=sum(engine.pool.total_pages for engine in self.engines),
            page_tokens=self._world.page_tokens,
            gap_s=[gap for engine in self.engines for gap in engine.queues.gap_s],
            gap_count=[count for engine in self.engines for count in engine.queues.gap_count],
            engines=len(self.engines),
            prefix_cache=self._world.prefix_cache,
        )

    @property
    def num_done(self) -> int:
        """Requests that need nothing more: finished or rejected."""
        return self._recorder.num_done

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not finished."""
        return sum(len(engine.queues.live) for engine in self.engines)

    def when_done(self, call: Callable[[int], None]) -> None:
        """Have `call` called with how many requests are done, whenever some are."""
        self._on_done.insert(0, call)

    def _settle(self, now_s: float) -> None:
        """Send micro-batches while the pipeline can take one and a policy has one."""
        pipeline = self._pipeline
        while pipeline.can_take(now_s):
            batch = self._next(now_s)
            if batch is None:
                return self._record_wait(now_s)
            pipeline.submit(batch)
        for engine in self.engines:
            if engine.can_send:
                return pipeline.call_when_free()
        return self._record_wait(now_s)

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask the engines in turn; the one that was served longest ago goes first."""
        turns = self._turns
        for engine in turns:
            batch = engine.next(now_s)
            if batch is not None:
                if len(turns) > 1:
                    turns.remove(engine)
                    turns.append(engine)
                self._travelling.append((engine, batch))
                self._last_wait = ""
                return batch
            if engine.wake_at_s is not None:
                self._wake(engine.wake_at_s, now_s)
        return None

    def _record_wait(self, now_s: float) -> None:
        """Record why there is nothing to send; of several engines, the most urgent reason."""
        reason = self.engines[0].wait_reason
        for engine in self.engines[1:]:
            reason = min(reason, engine.wait_reason, key=WAIT_REASONS.index)
        if reason != self._last_wait:
            self._recorder.wait(now_s, reason)
            self._last_wait = reason

    def changed(self, now_s: float) -> None:
        """Something happened at this instant: ask when the instant is over."""
        if self._queues_ahead and not self._clock.more_now():
            self._settle(now_s)
        elif not self._ask_queued:
            self._ask_queued = True
            self._clock.at(now_s, self._ask, LAST)

    def _settle_later(self, now_s: float) -> None:
        self._ask_queued = False
        self._settle(now_s)

    def _wake(self, at_s: float, now_s: float) -> None:
        if not at_s > now_s:
            raise PolicyError(f"a policy asks at {now_s} s to be woken at {at_s} s")
        self._clock.at(at_s, Signal(self._clock, self.changed))

    def _returned(self, now_s: float) -> None:
        engine, batch = self._travelling.popleft()
        finished = engine.complete(batch, now_s)
        if finished:
            self._finished(finished, now_s)
        self.changed(now_s)

    def _finished(self, sequences: list[Sequence], now_s: float) -> None:
        self._recorder.finish(sequences)
        for call in self._on_done:
            call(len(sequences))

    def admit(self, request: Request) -> bool:
        """Give an arrival to the engine with the fewest live requests; say whether it is served."""
        engine = min(self.engines, key=lambda engine: len(engine.queues.live))
        reason = engine.add(request)
        if reason is not None:
            self._recorder.reject(request, reason)
        return reason is None
