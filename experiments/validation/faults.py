"""Processes of a run on real workers: the same `stop`, `start` and `fail` as in a simulation.

The processes run by the driver's clock. What they do becomes signals to the workers' processes.
Nothing notices a death but what made it: a worker that dies by itself ends the run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence as Served
from evenflow.core.world import World
from evenflow.engines.recovery import restarted
from evenflow.errors import WorkerError
from evenflow.runtime.driver import Driver
from evenflow.runtime.page_tables import StepWriter
from evenflow.runtime.wire import Returned
from evenflow.sim.clock import CheckedEnvironment
from evenflow.sim.processes import Processes, UserProcess
from evenflow.sim.replica import KILLED


class SignalledWorker:
    """A worker process as the stage that a process of the user's sees."""

    def __init__(self, driver: MortalDriver, stage: int) -> None:
        self._driver, self._stage = driver, stage
        self.is_stopped = False

    def slow(self, factor: float) -> None:
        raise ValueError(f"slow({factor:g}): a worker computes for as long as costs says")

    def stop(self, *, finish: bool = False) -> None:
        if not finish:
            raise ValueError("stop(): emulated workers complete what they compute; finish=True")
        self.is_stopped = True
        self._signal(signal.SIGSTOP)

    def start(self) -> None:
        self.is_stopped = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self._driver.pipeline.process_ids[self._stage], number)


class MortalDriver(Driver):
    """A driver whose pipeline is the replica that the processes `made` act on, while it serves.

    `make_engines` makes its engines anew. Random streams of the processes are from `seed`.
    """

    def __init__(
        self,
        world: World,
        engines: Sequence[Batcher],
        pipeline: Any,
        *,
        made: Sequence[UserProcess],
        seed: int,
        make_engines: Callable[[], list[Batcher]],
        **options: Any,
    ) -> None:
        super().__init__(world, engines, pipeline, **options)
        self._world = world
        self._make_engines = make_engines
        self._down_until_s = 0.0
        self.num_sent = 0
        """Micro-batches that came back."""
        self.stages = [SignalledWorker(self, stage) for stage in range(world.depth)]
        self.links = ()
        replicas: Any = [self]
        nowhere: Any = None
        self._env = CheckedEnvironment(0.0)
        self._processes = Processes(self._env, nowhere, replicas, _start, made=made, seed=seed)

    @property
    def next_s(self) -> float:
        back_s = self._down_until_s if self._is_down(self.now_s) else float("inf")
        return min(super().next_s, self._env.peek(), back_s)

    def _is_down(self, now_s: float) -> bool:
        return now_s < self._down_until_s

    def let_in(self, now_s: float) -> None:
        while self._env.peek() <= now_s:
            self._processes.step()
        super().let_in(now_s)

    def is_due(self, now_s: float) -> bool:
        """Say whether the policy is due; a dead engine's is once it is back."""
        return super().is_due(now_s) and not self._is_down(now_s)

    def _take_back(self, message: Returned, now_s: float) -> None:
        self.num_sent += 1
        super()._take_back(message, now_s)

    def fail(self, restart_s: float) -> list[Served]:
        """Kill the workers, lose what is in flight and all KV, and serve again after `restart_s`.

        Return what the engines had. WorkerError where new workers, which start at once, take longer
        to be there.
        """
        died_s = self.now_s
        for worker in self.stages:
            worker.is_stopped = False
        self.engines, lost = restarted(self.engines, self._loop, self._make_engines)
        self._writer = StepWriter(self.engines, self._book)
        self._steps.lose(self._writer)
        self._loop = self._world.start(self.engines, self._steps, self, self._recorder)
        self.pipeline.restart()
        if (took_s := self.now_s - died_s) > restart_s:
            raise WorkerError(f"its workers were back after {took_s:.1f} s, not {restart_s:g} s")
        self._down_until_s = max(self._down_until_s, died_s + restart_s)
        self._changed = True
        return lost

    def give_up(self, lost: Sequence[Served]) -> None:
        """End requests that were lost."""
        for seq in lost:
            self._recorder.abort(seq, KILLED)
        self._left(len(lost))


def _start() -> Any:
    raise ValueError("replicas.add(): a served run has the workers that it began with")
