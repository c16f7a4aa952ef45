"""Workers that go wrong, for tests; a worker process imports this and little else."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal

from evenflow.runtime.emulated import EmulatedSettings, EmulatedWorker, Prepared
from evenflow.runtime.wire import Activation, Step
from evenflow.runtime.worker import Executed, Place

PREPARE_S = 0.03


@dataclass(frozen=True, slots=True)
class Failing:
    """Settings of a worker, and the worker, that goes wrong `where` it says.

    It cannot be made, is made for an hour, or is stopped meanwhile; it cannot prepare or execute;
    or its process ends at its first micro-batch, as if all were well.
    """

    where: Literal["make", "make for an hour", "stop", "prepare", "execute", "leave"]

    def make(self, place: Place) -> Failing:
        if self.where == "make":
            raise ValueError(f"no weights for stage {place.stage}")
        if self.where == "make for an hour":
            time.sleep(3600)
        if self.where == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return self

    def prepare(self, step: Step) -> int:
        if self.where == "leave":
            os._exit(0)
        if self.where == "prepare":
            raise ValueError("cannot prepare")
        return step.batch_id

    def fetch(self, activation: Activation) -> None: ...

    def execute(self, prepared: int, activation: Activation | None, received_s: float) -> Executed:
        raise ValueError("cannot execute")


@dataclass(frozen=True, slots=True)
class SlowToPrepare:
    """Settings of an emulated worker that takes PREPARE_S to prepare the inputs of a step."""

    def make(self, place: Place) -> EmulatedWorker:
        return _Preparing(place, EmulatedSettings())


class _Preparing(EmulatedWorker):
    def prepare(self, step: Step) -> Prepared:
        time.sleep(PREPARE_S)
        return super().prepare(step)


@dataclass(frozen=True, slots=True)
class Slow:
    """Settings of an emulated worker that computes a micro-batch for `work_s` seconds."""

    work_s: float

    def make(self, place: Place) -> EmulatedWorker:
        return _Slow(place, self.work_s)


class _Slow(EmulatedWorker):
    def __init__(self, place: Place, work_s: float) -> None:
        super().__init__(place, EmulatedSettings())
        self._work_s = work_s

    def prepare(self, step: Step) -> Prepared:
        return super().prepare(step)._replace(work_s=self._work_s)


class OneDies(EmulatedSettings):
    """Settings of emulated workers of which stage 1 is killed before its 21st micro-batch."""

    def make(self, place: Place) -> EmulatedWorker:
        return _Dying(place, self) if place.stage == 1 else super().make(place)


class _Dying(EmulatedWorker):
    executed = 0

    def execute(
        self, prepared: Prepared, activation: Activation | None, received_s: float
    ) -> Executed:
        if self.executed == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        self.executed += 1
        return super().execute(prepared, activation, received_s)
