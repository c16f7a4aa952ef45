"""The simulated world: SimPy moves the clock, a Batcher sits in the middle.

Pools and given times, which few runs need, are loaded when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from evenflow import later
from evenflow.answers import answers_in
from evenflow.core.batch import MicroBatch
from evenflow.core.routing import Router
from evenflow.core.world import Link, World
from evenflow.results.run import RunResult
from evenflow.runtimes import RuntimeOverheads, runtimes
from evenflow.sim.arrivals import serve
from evenflow.sim.clock import SimClock
from evenflow.sim.driver import SimDriver, Stages
from evenflow.sim.stages import StageProcesses
from evenflow.sim.tandem import Tandem

if TYPE_CHECKING:
    from evenflow.engines.pools import PooledWorld
    from evenflow.sim.timed import Timing

__all__ = [
    "Link",
    "Router",
    "RuntimeOverheads",
    "World",
    "runtimes",
    "simulate",
    "simulate_replicas",
]

__getattr__ = later(
    __name__,
    {
        "PooledWorld": "evenflow.engines.pools",
        "Timing": "evenflow.sim.timed",
        "TransferLink": "evenflow.engines.pools",
        "simulate_timed": "evenflow.sim.timed",
    },
)


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
    Raises PolicyError when the policy breaks its promise or takes longer than `ANSWER_LIMIT_S` for
    an answer, StallError when it would never send.
    """
    if isinstance(world, World):
        world = replace(world, replicas=1)
    (result,) = simulate_replicas(world, on_done, as_processes=as_processes)
    return result


@answers_in()
def simulate_replicas(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    as_processes: bool = False,
    timing: Callable[[MicroBatch], Timing] | None = None,
    whole: bool = True,
) -> list[RunResult]:
    """Simulate `world.replicas` pipelines on one clock; return what happened on each.

    Options and errors are those of `simulate`, `on_done` counts the requests of all together. A
    system of pools is one. Of what was served `before` the requests only the caches are left.
    `timing` says what each micro-batch takes, as in `simulate_timed`. If not `whole`, micro-batches
    leave the tally that a summary needs, which takes a sixth of the memory; pools keep them.
    """
    pipeline: Stages = StageProcesses if as_processes or world.shares_link else Tandem
    if not isinstance(world, World):
        from evenflow.sim.disaggregated import Disaggregated

        return [Disaggregated(world, pipeline, on_done).run()]
    if timing is not None:
        from evenflow.sim.timed import TimedPipeline

        pipeline = partial(TimedPipeline, timing=timing)
    drivers: Sequence[SimDriver | None] = [None] * world.replicas
    for requests in world.before:
        earlier = replace(world, requests=requests)
        drivers = _serve(earlier, pipeline, None, drivers, whole=False)
    drivers = _serve(world, pipeline, on_done, drivers, whole=whole)
    return [driver.result() for driver in drivers]


def _serve(
    world: World,
    pipeline: Stages,
    on_done: Callable[[int], None] | None,
    after: Sequence[SimDriver | None],
    *,
    whole: bool,
) -> list[SimDriver]:
    """Serve the requests of a world with pipelines that go on where those of `after` ended."""
    clock = SimClock()
    drivers: list[SimDriver] = []

    def tell(_: int) -> None:
        if on_done is not None:
            on_done(sum(driver.num_done for driver in drivers))

    told = on_done if len(after) == 1 else tell
    for earlier in after:
        made = SimDriver(world, pipeline, told, clock=clock, after=earlier, whole=whole)
        drivers.append(made)
    serve(clock, world, drivers, world.overheads, world.router)
    return drivers
