"""What a real run needs to know beside its Batcher and its workers: requests, times, limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from evenflow.types import MicroBatch, Request
from runtime.tokens import TextOf


@dataclass(frozen=True, slots=True)
class StepCost:
    """What emulated workers are told of a micro-batch: seconds by stage and by hop, bytes a hop."""

    work_s: list[float]
    hops_s: list[float]
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One real run. Arrivals must be in order of time.

    `cost` says how long emulated workers take, `text_of` what others compute with.
    `max_in_flight` None: no cap; `dispatch` and `concurrency` as in a simulation. The run fails
    when nothing is heard of a micro-batch for `patience_s` seconds longer than all those in flight
    take.
    """

    requests: Sequence[Request]
    cost: Callable[[MicroBatch], StepCost]
    depth: int
    max_in_flight: int | None = None
    dispatch: Literal["stage0", "eager"] = "stage0"
    concurrency: int | None = None
    patience_s: float = 30.0
    text_of: TextOf | None = None
