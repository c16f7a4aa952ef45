"""The simulated world: SimPy moves the clock, a Batcher sits in the middle."""

from __future__ import annotations

from collections.abc import Callable

from evenflow.result import RunResult
from sim.driver import Driver
from sim.stages import StageProcesses
from sim.tandem import Tandem
from sim.world import RUNTIMES, Link, RuntimeOverheads, World

__all__ = ["RUNTIMES", "Link", "RuntimeOverheads", "World", "simulate"]


def simulate(
    world: World, on_done: Callable[[int], None] | None = None, *, as_processes: bool = False
) -> RunResult:
    """Simulate a world; return what happened. The same world always gives the same result.

    `on_done` is called with the number of requests done. `as_processes` runs the specification (a
    SimPy process a stage) where the faster recurrence would do; a shared link always runs it.
    Raises PolicyError when the policy breaks its promise, StallError when it would never send.
    """
    shared = world.link is not None and world.link.shared
    pipeline = StageProcesses if as_processes or shared else Tandem
    return Driver(world, pipeline, on_done).run()
