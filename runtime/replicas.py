"""Replicas in real time: several pipelines of one kind behind the router of the simulator.

Each has a driver, engines and workers of its own; one thread turns all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from evenflow.errors import UsageError, WorkerError
from evenflow.results.combine import merged
from evenflow.routing import Router, router_of
from evenflow.world import World
from runtime.driver import Driver, take_turns
from runtime.front import TraceReplay
from runtime.pipeline import Pipeline
from runtime.serve import (
    BlocksOf,
    Journals,
    Served,
    Workers,
    driven,
    engines_of,
    names_of,
    served_by,
)


class Replicas:
    """The drivers of several pipelines, and the `front` that they share, whose requests go where
    the router says.
    """

    def __init__(self, drivers: Sequence[Driver], front: TraceReplay, router: Router) -> None:
        self.drivers = drivers
        self.stops = False
        self._front = front
        self._choose = router_of(router, drivers)
        for driver in drivers:
            driver.origin_s = drivers[0].origin_s

    def run(self) -> None:
        """Serve until every request is done, or, after `stop`, until the pipelines are empty."""
        take_turns(self, self.drivers)

    def stop(self) -> None:
        """Send nothing more; what is in the pipelines still comes back."""
        self.stops = True

    @property
    def goes_on(self) -> bool:
        """Whether there is more to do."""
        if self.stops:
            return any(driver.busy for driver in self.drivers)
        return any(driver.goes_on for driver in self.drivers)

    @property
    def now_s(self) -> float:
        return self.drivers[0].now_s

    @property
    def next_s(self) -> float:
        """Nothing is due beside what each driver knows."""
        return float("inf")

    @property
    def num_done(self) -> int:
        """Requests that need nothing more: finished or rejected."""
        return sum(driver.num_done for driver in self.drivers)

    def let_in(self, now_s: float) -> None:
        """Give who is due to the drivers that the router chooses."""
        while (request := self._front.due(now_s)) is not None:
            self._choose(request).admit(request, now_s)

    def flush(self) -> None:
        """Put what is recorded where it is kept."""
        for driver in self.drivers:
            driver.flush()


def serve_replicas(
    world: World,
    workers: Sequence[Workers],
    on_done: Callable[[int], None] | None = None,
    *,
    record: Journals | None = None,
    on_token: Callable[[int, int], None] | None = None,
    blocks: BlocksOf = lambda _: None,
) -> Served:
    """Serve a world by the workers of each of its replicas, as `runtime.serve` does one.

    `blocks` gives what takes what happens in each of them.
    """
    front = TraceReplay(world.requests, world.concurrency)

    def tell(_: int) -> None:
        if on_done is not None:
            on_done(system.num_done)

    def driver_of(each: Workers, pipeline: Pipeline, name: str) -> Driver:
        return Driver(
            world,
            engines_of(world, record, name),
            pipeline,
            front=front,
            text_of=each.text_of,
            patience_s=each.patience_s,
            on_done=tell,
            on_token=on_token,
            blocks=blocks(name),
        )

    try:
        with ExitStack() as stack:
            named = [
                replace(each, name=name)
                for each, name in zip(workers, names_of(world), strict=True)
            ]
            pipelines = [stack.enter_context(each.start(world)) for each in named]
            drivers = list(map(driver_of, workers, pipelines, names_of(world)))
            system = Replicas(drivers, front, world.router)
            started_s = time.perf_counter()
            ends = driven(system.run, system.stop)
            wall_s = time.perf_counter() - started_s
    except WorkerError as error:  # before anything was served
        raise UsageError(f"the workers do not start: {error}") from None
    parts = [served_by([driver], driver.result(), wall_s, ends, 0) for driver in drivers]
    unfinished = len(world.requests) - system.num_done
    result = merged([part.result for part in parts])
    return served_by(drivers, result, wall_s, ends, unfinished, pipelines=parts)
