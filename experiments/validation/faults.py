"""Processes of a run on real workers: the same `stop`, `start` and `fail` as in a simulation.

The processes run by the driver's clock. What they do becomes signals to the workers' processes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from evenflow.core.decodes import Sequence as Served
from evenflow.runtime.mortal import MortalDriver
from evenflow.sim.clock import CheckedEnvironment
from evenflow.sim.processes import Processes, UserProcess
from evenflow.sim.replica import KILLED


class SignalledWorker:
    """A worker process as the stage that a process of the user's sees."""

    def __init__(self, driver: MortalDriver, stage: int) -> None:
        self._driver, self._stage = driver, stage
        self.is_stopped = False

    def slow(self, factor: float) -> None:
        raise ValueError(f"slow({factor:g}): a worker's speed is its own; workers.faults slows one")

    def stop(self, *, finish: bool = False) -> None:
        if not finish:
            raise ValueError("stop(): emulated workers complete what they compute; finish=True")
        self.is_stopped = True
        self._driver.signal(self._stage, signal.SIGSTOP)

    def start(self) -> None:
        self.is_stopped = False
        self._driver.signal(self._stage, signal.SIGCONT)


class SignalledPipeline:
    """The served pipeline as the replica that processes act on."""

    def __init__(self, driver: MortalDriver, depth: int) -> None:
        self._driver = driver
        stages = [SignalledWorker(driver, stage) for stage in range(depth)]
        self.pipeline = SimpleNamespace(stages=stages, links=())
        self.take, self.give_up = driver.take, partial(driver.give_up, reason=KILLED)

    @property
    def outstanding(self) -> int:
        return self._driver.outstanding

    @property
    def running(self) -> int:
        return sum(len(engine.queues.admitted) for engine in self._driver.engines)

    @property
    def waiting(self) -> int:
        return self.outstanding - self.running

    @property
    def num_sent(self) -> int:
        return self._driver.num_sent

    def fail(self, restart_s: float) -> list[Served]:
        for worker in self.pipeline.stages:
            worker.is_stopped = False
        return self._driver.fail(restart_s)


class JoinedProcesses:
    """Processes that act on the workers of a driver, at their times of the run."""

    def __init__(
        self, driver: MortalDriver, *, depth: int, made: Sequence[UserProcess], seed: int
    ) -> None:
        pipeline: Any = SignalledPipeline(driver, depth)
        nowhere: Any = None
        self._env = CheckedEnvironment(0.0)
        self._processes = Processes(self._env, nowhere, [pipeline], _start, made=made, seed=seed)

    @property
    def next_s(self) -> float:
        return float(self._env.peek())

    def run_due(self, now_s: float) -> None:
        while self._env.peek() <= now_s:
            self._processes.step()


def _start() -> Any:
    raise ValueError("replicas.add(): a served run has the workers that it began with")
