"""What a real run needs to know: requests, policy and deployment, all of them resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from evenflow.costs import BatchShape
from evenflow.types import Request, Scheduler


@dataclass(frozen=True, slots=True)
class StepCost:
    """What emulated workers are told of a micro-batch: seconds by stage and by hop, bytes a hop."""

    work_s: list[float]
    hops_s: list[float]
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One real run. Arrivals must be in order of time.

    `cost` says how long emulated workers take. `max_in_flight` None: no cap; `dispatch` and
    `concurrency` as in a simulation. The run fails when nothing is heard of a micro-batch for
    `patience_s` seconds longer than all those in flight take.
    """

    requests: Sequence[Request]
    make_scheduler: Callable[[], Scheduler]
    cost: Callable[[BatchShape], StepCost]
    depth: int
    total_pages: int
    max_model_len: int
    page_tokens: int = 16
    max_in_flight: int | None = None
    dispatch: Literal["stage0", "eager"] = "stage0"
    pipelined_chunks: bool | None = None
    concurrency: int | None = None
    patience_s: float = 30.0
