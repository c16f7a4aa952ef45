"""Workers that go wrong, for tests; a worker process imports this and little else."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from runtime.emulated import EmulatedSettings, EmulatedWorker, Prepared
from runtime.wire import Activation, Step
from runtime.worker import Executed, Place

PREPARE_S = 0.03


@dataclass(frozen=True, slots=True)
class NeverMade:
    """Settings of a worker that cannot be made."""

    def make(self, place: Place) -> Any:
        raise ValueError(f"no weights for stage {place.stage}")


@dataclass(frozen=True, slots=True)
class Failing:
    """Settings of a worker that fails to `prepare` or to `execute`."""

    where: str

    def make(self, place: Place) -> Failing:
        return self

    def prepare(self, step: Step) -> int:
        if self.where == "prepare":
            raise ValueError("cannot prepare")
        return step.batch_id

    def fetch(self, activation: Activation) -> None: ...

    def execute(self, prepared: int, activation: Activation | None, received_s: float) -> Executed:
        raise ValueError("cannot execute")


@dataclass(frozen=True, slots=True)
class Stuck:
    """Settings of a worker that never comes back from making itself."""

    def make(self, place: Place) -> Any:
        time.sleep(3600)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Settings of a worker whose process ends, as if all were well, at its first micro-batch."""

    def make(self, place: Place) -> Leaving:
        return self

    def prepare(self, step: Step) -> int:
        os._exit(0)

    def fetch(self, activation: Activation) -> None: ...

    def execute(self, prepared: int, activation: Activation | None, received_s: float) -> Executed:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SlowToPrepare:
    """Settings of an emulated worker that takes PREPARE_S to prepare the inputs of a step."""

    def make(self, place: Place) -> EmulatedWorker:
        return _Preparing(place, EmulatedSettings())


class _Preparing(EmulatedWorker):
    def prepare(self, step: Step) -> Prepared:
        time.sleep(PREPARE_S)
        return super().prepare(step)
