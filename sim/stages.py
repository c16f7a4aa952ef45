"""The pipeline as processes: a SimPy process for the driver's CPU, each stage and each link.

This is the specification of `evenflow.sim.tandem`, and what runs where hops share a link.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from simpy import Event, Store

from evenflow.core.batch import MicroBatch
from evenflow.core.world import World
from evenflow.results.recorder import Recorder
from evenflow.sim.clock import Instant, SimClock

Process = Generator[Event, "_Travel", None]


@dataclass(slots=True, eq=False)
class _Travel:
    """A micro-batch on its way: its cost and its (available, start, end) on each stage so far."""

    batch: MicroBatch
    seconds: list[float]
    prepared_s: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class StageProcesses:
    """Sends micro-batches down the stages."""

    queues_ahead = False
    """Whether every later event of an instant is in the queue before the first one fires."""

    def __init__(self, clock: SimClock, world: World, recorder: Recorder) -> None:
        self._clock = clock
        self._world = world
        self._recorder = recorder
        self._at_stage0 = 0
        self._host_free_s = 0.0
        self._last_s = (0.0, 0.0)  # when stage 0 began and ended the last one
        self._prepared_s = [0.0] * world.depth
        self._driver: Store = Store(clock.env)
        self._inboxes = [Store(clock.env) for _ in range(world.depth)]
        clock.env.process(self._drive())
        for stage in range(world.depth):
            clock.env.process(self._serve(stage))
        shared = Store(clock.env) if world.shares_link else None
        self._links = [shared or Store(clock.env) for _ in world.hops]
        for store in dict.fromkeys(self._links):
            clock.env.process(self._carry(store))

    def connect(self, on_free: Callable[[float], None], on_return: Callable[[float], None]) -> None:
        """Have `on_free` called whenever stage 0 is done, `on_return` when the last stage is."""
        self._on_free, self._on_return = on_free, on_return

    def is_free(self, now_s: float) -> bool:
        """Say whether stage 0 could start a micro-batch now."""
        return self._at_stage0 == 0

    def call_when_free(self) -> None:
        """Nothing to do: `on_free` is called in any case."""

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch to stage 0."""
        travel = _Travel(batch, list(self._world.costs.times(batch.charged or batch)))
        overheads = self._world.overheads
        for stage, seconds in enumerate(travel.seconds):
            prepare_s = overheads.prepare_s + overheads.prepare_share * seconds
            self._prepared_s[stage] = max(self._prepared_s[stage], self._clock.now) + prepare_s
        travel.prepared_s = list(self._prepared_s)
        self._at_stage0 += 1
        self._driver.put(travel)

    def _drive(self) -> Process:
        overheads = self._world.overheads
        while True:
            travel = yield self._driver.get()
            if overheads.hosts and overheads.holds == "engine":
                yield self._clock.env.timeout(overheads.host_s(travel.batch))
            self._arrive(0, travel)

    def _arrive(self, stage: int, travel: _Travel) -> None:
        travel.times.append(self._clock.now)
        self._inboxes[stage].put(travel)

    def _serve(self, stage: int) -> Process:
        clock, overheads = self._clock, self._world.overheads
        while True:
            travel = yield self._inboxes[stage].get()
            seconds = travel.seconds[stage]
            if overheads.hosts and not stage:
                yield Instant(clock.env, self._host_done_s(travel.batch))
            if overheads.prepares and not overheads.overlapped:
                yield clock.env.timeout(overheads.prepare_s + overheads.prepare_share * seconds)
            elif overheads.prepares and stage and travel.prepared_s[stage] > clock.now:
                yield Instant(clock.env, travel.prepared_s[stage])
            start_s = clock.now
            yield clock.env.timeout(seconds)
            travel.times += (start_s, clock.now)
            if not stage:
                self._last_s = (start_s, clock.now)
            self._leave(stage, travel)

    def _host_done_s(self, batch: MicroBatch) -> float:
        """Return when stage 0, which could begin now, may do so for all that the host has to do."""
        overheads, now_s = self._world.overheads, self._clock.now
        if overheads.holds == "stage0":
            return now_s + overheads.host_s(batch)
        if overheads.holds == "nothing":
            began_s, ended_s = self._last_s
            begin_s = batch.scheduled_s if batch.scheduled_s > ended_s else began_s
            self._host_free_s = max(self._host_free_s, begin_s) + overheads.host_s(batch)
            return max(now_s, self._host_free_s)
        return now_s

    def _leave(self, stage: int, travel: _Travel) -> None:
        if stage == 0:
            self._at_stage0 -= 1
            self._on_free(self._clock.now)
        if stage == self._world.depth - 1:
            self._recorder.batch(travel.batch, travel.times)
            self._on_return(self._clock.now)
        elif self._links:
            self._links[stage].put((stage, travel))
        else:
            self._arrive(stage + 1, travel)

    def _carry(self, store: Store) -> Generator[Event, tuple[int, _Travel], None]:
        while True:
            stage, travel = yield store.get()
            link = self._world.hops[stage]
            yield self._clock.env.timeout(link.per_token_s * travel.batch.num_tokens)
            self._clock.env.process(self._deliver(stage + 1, travel, link.latency_s))

    def _deliver(
        self, stage: int, travel: _Travel, latency_s: float
    ) -> Generator[Event, None, None]:
        yield self._clock.env.timeout(latency_s)
        self._arrive(stage, travel)
