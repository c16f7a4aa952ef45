"""The simulated world: SimPy moves the clock, a Batcher sits in the middle."""

from __future__ import annotations

from collections.abc import Callable

from evenflow.results.run import RunResult
from evenflow.world import RUNTIMES, Link, Router, RuntimeOverheads, World
from sim.arrivals import Arrivals
from sim.clock import Clock
from sim.disaggregated import Disaggregated, PooledWorld
from sim.driver import Driver
from sim.stages import StageProcesses
from sim.tandem import Tandem
from sim.timed import Timing, simulate_timed
from sim.transfers import TransferLink

__all__ = [
    "RUNTIMES",
    "Link",
    "PooledWorld",
    "Router",
    "RuntimeOverheads",
    "Timing",
    "TransferLink",
    "World",
    "simulate",
    "simulate_replicas",
    "simulate_timed",
]


def simulate(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    as_processes: bool = False,
) -> RunResult:
    """Simulate one pipeline of a world, or a system of pools; return what happened.

    The same world always gives the same result.
    `on_done` is called with the number of requests done. `as_processes` runs the specification (a
    SimPy process a stage) where the faster recurrence would do; a shared link always runs it.
    Raises PolicyError when the policy breaks its promise, StallError when it would never send.
    """
    pipeline = _pipeline(world, as_processes)
    if isinstance(world, PooledWorld):
        return Disaggregated(world, pipeline, on_done).run()
    return Driver(world, pipeline, on_done).run()


def simulate_replicas(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    as_processes: bool = False,
) -> list[RunResult]:
    """Simulate `world.replicas` pipelines on one clock; return what happened on each.

    Options and errors are those of `simulate`, `on_done` counts the requests of all together. A
    system of pools is one.
    """
    if isinstance(world, PooledWorld):
        return [simulate(world, on_done, as_processes=as_processes)]
    clock = Clock()
    drivers: list[Driver] = []

    def tell(_: int) -> None:
        if on_done is not None:
            on_done(sum(driver.num_done for driver in drivers))

    for _ in range(world.replicas):
        drivers.append(Driver(world, _pipeline(world, as_processes), tell, clock=clock))
    Arrivals(clock, world.requests, world.concurrency, drivers, world.router)
    clock.run()
    return [driver.result() for driver in drivers]


def _pipeline(
    world: World | PooledWorld, as_processes: bool
) -> type[StageProcesses] | type[Tandem]:
    return StageProcesses if as_processes or world.shares_link else Tandem
