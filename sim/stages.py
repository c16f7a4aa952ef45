"""The pipeline as SimPy processes: one for the driver's CPU, each stage and each link.

This is the specification of `evenflow.sim.tandem`. It runs where hops share a link, and where a
process of the user's may slow or stop what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from simpy import Event, Store

from evenflow.core.batch import MicroBatch
from evenflow.core.world import World
from evenflow.results.recorder import Recorder
from evenflow.sim.clock import Instant, SimClock

Process = Generator[Event, Any, None]


@dataclass(slots=True, eq=False)
class _Travel:
    """A micro-batch on its way: its cost and its (available, start, end) on each stage so far."""

    batch: MicroBatch
    seconds: list[float]
    prepared_s: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class StageProcesses:
    """Sends micro-batches down the stages: each waits in a Store, first come first served."""

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
        env = clock.env
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
            start_s = clock.now
            yield clock.env.timeout(travel.seconds[stage])
            travel.times += (start_s, clock.now)
            if not stage:
                self._last_s = (start_s, clock.now)
            self._leave(stage, travel)

    def _prepare(self, stage: int, travel: _Travel) -> Process:
        """Wait until the CPU is ready for a micro-batch that its stage could start."""
        env, overheads = self._clock.env, self._world.overheads
        if overheads.hosts and not stage:
            yield Instant(env, self._host_done_s(travel.batch))
        if overheads.prepares and not overheads.overlapped:
            share_s = overheads.prepare_share * travel.seconds[stage]
            yield env.timeout(overheads.prepare_s + share_s)
        elif overheads.prepares and stage and travel.prepared_s[stage] > env.now:
            yield Instant(env, travel.prepared_s[stage])

    def _carry(self, hop: Store) -> Process:
        """Carry what leaves the stages before a link, one micro-batch after the other."""
        env = self._clock.env
        while True:
            stage, travel = yield hop.get()
            link = self._world.hops[stage]
            yield env.timeout(link.per_token_s * travel.batch.num_tokens)
            env.process(self._deliver(stage + 1, travel, link.latency_s))

    def _deliver(self, stage: int, travel: _Travel, latency_s: float) -> Process:
        """Let a micro-batch arrive, while the link carries the next one."""
        yield self._clock.env.timeout(latency_s)
        self._arrive(stage, travel)

    # -- from one to the next -------------------------------------------------------------------

    def _arrive(self, stage: int, travel: _Travel) -> None:
        travel.times.append(self._clock.now)
        self._inboxes[stage].put(travel)

    def _leave(self, stage: int, travel: _Travel) -> None:
        if stage == 0:
            self._at_stage0 -= 1
            self._on_free(self._clock.now)
        if stage == self._world.depth - 1:
            self._recorder.batch(travel.batch, travel.times)
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
            begin_s = batch.scheduled_s if batch.scheduled_s > ended_s else began_s
            self._host_free_s = max(self._host_free_s, begin_s) + overheads.host_s(batch)
            return max(now_s, self._host_free_s)
        return now_s
