"""Replicas that follow the requests, by the rule of Kubernetes' HorizontalPodAutoscaler.

Source: Kubernetes documentation, "Horizontal Pod Autoscaling", the algorithm and the default
behaviour of autoscaling/v2. The metric is one of the whole fleet with an average as its target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from math import ceil
from typing import Annotated, Any

from pydantic import Field
from simpy import Event

from evenflow.errors import UsageError
from evenflow.keys import NonNegative, Positive
from evenflow.sim.processes import ProcessWorld

Count = Annotated[int, Field(ge=1)]
"""How many replicas."""


def desired(current: int, metric: float, target: float, tolerance: float = 0.1) -> int:
    """Return how many replicas the rule asks for: ceil(current x metric / target).

    `metric` is the mean of the `current` replicas. Within `tolerance` of its target nothing
    changes.
    """
    ratio = metric / target
    return current if abs(ratio - 1) <= tolerance else ceil(current * ratio - 1e-9)


def autoscaler(
    world: ProcessWorld,
    *,
    target: Positive,
    max_replicas: Count,
    start_s: NonNegative,
    min_replicas: Count = 1,
    sync_s: Positive = 15.0,
    stabilization_s: NonNegative = 300.0,
    tolerance: NonNegative = 0.1,
) -> Generator[Event, Any, None]:
    """Let replicas follow the requests in the system, `target` of them a replica.

    Looked at every `sync_s`. Up at once, by at most four or to twice as many. Down to the highest
    wish of the last `stabilization_s`, first by replicas still starting. A replica takes requests
    `start_s` after it is asked for. Its hours count from then on until it is drained.
    """
    if min_replicas > max_replicas:
        raise UsageError(
            f"process autoscaler: min_replicas {min_replicas} is more than max_replicas "
            f"{max_replicas}"
        )
    wishes: deque[int] = deque(maxlen=max(ceil(stabilization_s / sync_s), 1))
    starting: list[Event] = []
    hours = 0.0

    def start() -> Generator[Event, Any, None]:
        starting.append(ready := world.env.timeout(start_s))
        yield ready
        if ready in starting:
            starting.remove(ready)
            world.replicas.add()

    while True:
        yield world.env.timeout(sync_s)
        serving = world.replicas.open
        current = len(serving) + len(starting)
        hours += current * sync_s / 3600
        load = world.queue.waiting + world.queue.running
        wish = desired(current, load / current, target, tolerance)
        wish = min(max(wish, min_replicas), max_replicas, max(2 * current, current + 4))
        wishes.append(wish)
        if wish != current:
            words = f"{load} requests ask for {wish} replicas of {current}"
            world.log("scale", f"{words}; {hours:.2f} replica-hours so far")
        for _ in range(wish - current):
            world.env.process(start())
        del starting[max(max(wishes) - len(serving), 0) :]
        for number in serving[max(wishes) :]:
            world.replicas.drain(number)
