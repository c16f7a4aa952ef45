"""A pipeline whose engine may die, start again and hand its requests to others.

What a process of the user's does to it, `evenflow.sim.processes` offers. Knows no process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.engines.recovery import restarted
from evenflow.results.run import Disturbed, RunResult
from evenflow.sim.clock import SimClock
from evenflow.sim.driver import SimDriver
from evenflow.sim.stages import StageProcesses

KILLED = "its pipeline died"


class Replica(SimDriver):
    """The driver of a pipeline of processes, which `fail` stops for a while.

    A request that an engine lost is served from the start. Its output so far is behind its prompt,
    as after a preemption.
    """

    def __init__(self, world: Any, clock: SimClock, **options: Any) -> None:
        super().__init__(world, self._made, clock=clock, **options)
        self._down_until_s = 0.0
        self._outages: list[tuple[float, float]] = []

    def _made(self, *given: Any) -> StageProcesses:
        self.pipeline = StageProcesses(*given)
        self.stages, self.links = self.pipeline.stages, self.pipeline.links
        return self.pipeline

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def num_sent(self) -> int:
        """Micro-batches that came back, and requests that ended: what shows that it goes on."""
        return self.pipeline.num_returned + self.num_done

    def fail(self, restart_s: float) -> list[Sequence]:
        """Lose what is in flight and all KV, and serve again after `restart_s`; return the lost."""
        now_s = self._clock.now
        lost = self.lose()
        begun_s = min((b.scheduled_s for b in self.pipeline.lose()), default=now_s)
        self._outages.append((begun_s, now_s + restart_s))
        self._down_until_s = max(self._down_until_s, now_s + restart_s)
        self._clock.at(now_s + restart_s, self.changed)
        return lost

    def lose(self) -> list[Sequence]:
        """Return all requests, in the order in which they came, and make the engines anew."""

        def make() -> list[Batcher]:
            return [self._world.batcher() for _ in self.engines]

        self.engines, lost = restarted(self.engines, self._loop, make)
        self._loop = self._world.start(self.engines, self.pipeline, self, self._recorder)
        self.pipeline.connect(self._loop.freed, self._loop.returned)
        return lost

    def give_up(self, lost: list[Sequence]) -> None:
        """End requests that were lost."""
        for seq in lost:
            self._recorder.abort(seq, KILLED)
        for call in self._on_done:
            call(len(lost))

    def _settle(self, now_s: float) -> None:
        if now_s >= self._down_until_s:
            super()._settle(now_s)

    def result(self) -> RunResult:
        """Return what happened so far, and what delayed it."""
        result, shape = super().result(), (self.pipeline.num_returned, self._world.depth)
        stopped_s, slowed_s = np.zeros(shape), np.zeros(shape)
        for batch, stage, stopped, slowed in self.pipeline.delays:
            stopped_s[batch, stage], slowed_s[batch, stage] = stopped, max(slowed, 0.0)
        disturbed = Disturbed(stopped_s, slowed_s, tuple(self._outages))
        return replace(result, disturbed=disturbed)
