"""The pipeline as SimPy processes: one for the driver's CPU, each stage and each link.

This is the specification of `evenflow.sim.tandem`. It runs where hops share a link, and where
processes of the user may slow or stop it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy
from simpy import Environment, Event, Interrupt, Store

from evenflow.core.batch import MicroBatch
from evenflow.core.world import World
from evenflow.costs.modifiers import begun
from evenflow.results.recorder import Recorder
from evenflow.sim.clock import Instant, SimClock

Process = Generator[Event, Any, None]


class Delay(NamedTuple):
    """Seconds that a micro-batch, the `batch`-th of its pipeline, took longer on a stage."""

    batch: int
    stage: int
    stopped_s: float
    slowed_s: float


class Machine:
    """A stage or a link, as a server.

    Its work waits while it is stopped, and takes `factor` times as long while it is slow. Both may
    change while it works.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.factor = 1.0
        self._started: Event | None = None  # what work waits for
        self._worker: simpy.Process | None = None  # to be told of a change
        self._finishes = False

    @property
    def is_stopped(self) -> bool:
        return self._started is not None

    def slow(self, factor: float) -> None:
        """Take `factor` times as long from now on."""
        self.factor = factor
        self._tell()

    def stop(self, *, finish: bool = False) -> None:
        """Let work wait until `start`; `finish`: what is under way goes on, and waits when done."""
        if self._started is None:
            self._started, self._finishes = self._env.event(), finish
            self._tell()

    def start(self) -> None:
        """Resume work after `stop`."""
        if self._started is not None:
            started, self._started = self._started, None
            started.succeed()

    def abandon(self) -> None:
        """Drop the work under way."""
        self._tell(_ABANDON)

    def _tell(self, what: object = None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.interrupt(what)

    def work(self, seconds: float) -> Generator[Event, Any, tuple[float, float] | None]:
        """Work for so long; return the seconds that it was stopped and slowed for, if it was."""
        env, left_s, stopped_s = self._env, seconds, 0.0
        began_s, as_planned, has_begun = env.now, True, False
        while True:
            since_s, factor, gate = env.now, self.factor, self._started
            as_planned = as_planned and factor == 1.0 and gate is None
            self._worker = env.active_process
            try:
                yield env.timeout(left_s * factor) if gate is None else gate
                self._worker = None
                if gate is None:
                    spent_s = env.now - began_s
                    return None if as_planned else (stopped_s, spent_s - stopped_s - seconds)
            except Interrupt as told:
                if told.cause is _ABANDON:
                    return None
                as_planned = False
            passed_s, has_begun = env.now - since_s, has_begun or gate is None
            done_s = 0.0
            if gate is None or (self._finishes and has_begun):
                done_s = min(passed_s / factor, left_s)
                left_s -= done_s
            if gate is not None:
                stopped_s += passed_s - done_s * factor


_ABANDON = object()


@dataclass(slots=True, eq=False)
class _Travel:
    """A micro-batch on its way: its cost and its (available, start, end) on each stage so far."""

    batch: MicroBatch
    seconds: list[float]
    start: int  # of the pipeline, which may be started again
    prepared_s: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    delays: list[tuple[int, float, float]] = field(default_factory=list)


class StageProcesses:
    """Sends micro-batches down the stages: each waits in a Store, first come first served.

    `stages` and `links` do the work; `delays` are what their changes cost the micro-batches that
    came back.
    """

    queues_ahead = False
    """Whether every later event of an instant is in the queue before the first one fires."""

    def __init__(self, clock: SimClock, world: World, recorder: Recorder) -> None:
        self._clock = clock
        self._world = world
        self._costs = begun(world.costs)
        self._recorder = recorder
        self._starts = 0
        self._at_stage0 = 0
        self._host_free_s = 0.0
        self._last_s = (0.0, 0.0)  # when stage 0 began and ended the last one
        self._prepared_s = [0.0] * world.depth
        env = clock.env
        self.stages = [Machine(env) for _ in range(world.depth)]
        common = Machine(env)
        self.links = [common if world.shares_link else Machine(env) for _ in world.hops]
        self.delays: list[Delay] = []
        self.num_returned = 0
        self._under_way: deque[MicroBatch] = deque()
        self._driver = Store(env)
        self._inboxes = [Store(env) for _ in range(world.depth)]
        shared = Store(env) if world.shares_link else None
        self._hops = [shared or Store(env) for _ in world.hops]
        env.process(self._drive())
        for stage in range(world.depth):
            env.process(self._serve(stage))
        for hop in dict.fromkeys(self._hops):
            env.process(self._carry(hop))

    def connect(self, on_free: Callable[[float], None], on_return: Callable[[float], None]) -> None:
        """Have `on_free` called whenever stage 0 is done, `on_return` when the last stage is."""
        self._on_free, self._on_return = on_free, on_return

    def is_free(self, now_s: float) -> bool:
        """Say whether stage 0 could start a micro-batch now."""
        return self._at_stage0 == 0

    def call_when_free(self) -> None:
        """Do nothing: `on_free` is called in any case."""

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch to stage 0."""
        travel = _Travel(batch, list(self._costs.times(batch.charged or batch)), self._starts)
        overheads = self._world.overheads
        inputs_s = overheads.inputs_s(batch)
        for stage, seconds in enumerate(travel.seconds):
            prepare_s = inputs_s + overheads.prepare_share * seconds
            self._prepared_s[stage] = max(self._prepared_s[stage], self._clock.now) + prepare_s
        travel.prepared_s = list(self._prepared_s)
        self._at_stage0 += 1
        self._under_way.append(batch)
        self._driver.put(travel)

    def lose(self) -> list[MicroBatch]:
        """Lose all that is under way, as when a stage's process dies; return it."""
        lost = list(self._under_way)
        self._under_way.clear()
        self._starts += 1
        self._at_stage0 = 0
        self._prepared_s = [self._clock.now] * self._world.depth
        for store in (self._driver, *self._inboxes, *self._hops):
            store.items.clear()
        for machine in (*self.stages, *self.links):
            machine.abandon()
        return lost

    # -- the processes --------------------------------------------------------------------------

    def _drive(self) -> Process:
        """Spend the host's time on each micro-batch, where that holds up the micro-batch."""
        overheads = self._world.overheads
        while True:
            travel = yield self._driver.get()
            if overheads.hosts and overheads.holds == "engine":
                yield self._clock.env.timeout(overheads.host_s(travel.batch))
            self._arrive(0, travel)

    def _serve(self, stage: int) -> Process:
        """Compute the micro-batches that arrive at a stage."""
        clock = self._clock
        while True:
            travel = yield self._inboxes[stage].get()
            yield from self._prepare(stage, travel)
            start_s, delay = clock.now, None
            if travel.start == self._starts:
                delay = yield from self.stages[stage].work(travel.seconds[stage])
            travel.times += (start_s, clock.now)
            if delay is not None:
                travel.delays.append((stage, *delay))
            if travel.start == self._starts:
                self._leave(stage, start_s, travel)

    def _prepare(self, stage: int, travel: _Travel) -> Process:
        """Wait until the CPU is ready for a micro-batch that its stage could start."""
        env, overheads = self._clock.env, self._world.overheads
        if overheads.hosts and not stage:
            yield Instant(env, self._host_done_s(travel.batch))
        if overheads.prepares and not overheads.overlapped:
            share_s = overheads.prepare_share * travel.seconds[stage]
            yield env.timeout(overheads.inputs_s(travel.batch) + share_s)
        elif overheads.prepares and stage and travel.prepared_s[stage] > env.now:
            yield Instant(env, travel.prepared_s[stage])

    def _carry(self, hop: Store) -> Process:
        """Carry what leaves the stages before a link, one micro-batch after the other."""
        env = self._clock.env
        while True:
            stage, travel = yield hop.get()
            link, batch = self._world.hops[stage], travel.batch
            tokens = batch.num_tokens if link.shared else batch.crossing_tokens
            yield from self.links[stage].work(link.per_token_s * tokens)
            if travel.start == self._starts:
                env.process(self._deliver(stage + 1, travel, link.latency_s))

    def _deliver(self, stage: int, travel: _Travel, latency_s: float) -> Process:
        """Let a micro-batch arrive, while the link carries the next one."""
        yield self._clock.env.timeout(latency_s)
        self._arrive(stage, travel)

    # -- from one to the next -------------------------------------------------------------------

    def _arrive(self, stage: int, travel: _Travel) -> None:
        if travel.start == self._starts:
            travel.times.append(self._clock.now)
            self._inboxes[stage].put(travel)

    def _leave(self, stage: int, start_s: float, travel: _Travel) -> None:
        if stage == 0:
            self._last_s = (start_s, self._clock.now)
            self._at_stage0 -= 1
            self._on_free(self._clock.now)
        if stage == self._world.depth - 1:
            self._recorder.batch(travel.batch, travel.times)
            self.delays += (Delay(self.num_returned, *delay) for delay in travel.delays)
            self.num_returned += 1
            self._under_way.popleft()
            self._on_return(self._clock.now)
        elif self._hops:
            self._hops[stage].put((stage, travel))
        else:
            self._arrive(stage + 1, travel)

    def _host_done_s(self, batch: MicroBatch) -> float:
        """Return when stage 0, which could begin now, may do so for all that the host has to do."""
        overheads, now_s = self._world.overheads, self._clock.now
        if overheads.holds == "stage0":
            return now_s + overheads.host_s(batch)
        if overheads.holds == "nothing":
            began_s, ended_s = self._last_s
            begin_s = batch.chosen_s if batch.scheduled_s > ended_s else began_s
            self._host_free_s = max(self._host_free_s, begin_s) + overheads.host_s(batch)
            return max(now_s, self._host_free_s)
        return now_s
