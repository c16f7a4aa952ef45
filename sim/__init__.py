"""The simulated world as a SimPy model, a Batcher in the middle.

Read in this order: clock, arrivals (a process), driver, stages (a process each, and each link),
tandem (the stages as a recurrence). Pools and given times, which few runs need, are loaded when
they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from evenflow import later
from evenflow.answers import answers_in
from evenflow.core.batch import MicroBatch
from evenflow.core.routing import Router
from evenflow.core.world import Link, World
from evenflow.errors import UsageError
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

Pipeline = Literal["recurrence", "processes"]
"""How micro-batches cross the stages: times computed when they are sent, or a SimPy process for
each stage and link. Both give the same bytes."""


def pipeline_of(world: World | PooledWorld, asked: Pipeline | None = None) -> Pipeline:
    """Return which pipeline runs: the one asked for, else the faster one that can.

    UsageError for the recurrence where a link is shared: its queue depends on what is sent later.
    """
    if asked == "recurrence" and world.shares_link:
        raise UsageError(
            "pipeline: recurrence: hops share a link, so what is sent later changes who waits for "
            "it; processes is right"
        )
    return asked or ("processes" if world.shares_link else "recurrence")


def simulate(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    pipeline: Pipeline | None = None,
) -> RunResult:
    """Simulate one pipeline of a world, or a system of pools; return what happened.

    The same world always gives the same result.
    `on_done` is called with the number of requests done. `pipeline`: as `pipeline_of` says. Raises
    PolicyError when the policy breaks its promise or takes longer than `ANSWER_LIMIT_S` for
    an answer, StallError when it would never send.
    """
    if isinstance(world, World):
        world = replace(world, replicas=1)
    (result,) = simulate_replicas(world, on_done, pipeline=pipeline)
    return result


@answers_in()
def simulate_replicas(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    pipeline: Pipeline | None = None,
    timing: Callable[[MicroBatch], Timing] | None = None,
    whole: bool = True,
) -> list[RunResult]:
    """Simulate `world.replicas` pipelines on one clock; return what happened on each.

    Options and errors are those of `simulate`, `on_done` counts the requests of all together. A
    system of pools is one. Of what was served `before` the requests only the caches are left.
    `timing` says what each micro-batch takes, as in `simulate_timed`. If not `whole`, micro-batches
    leave the tally that a summary needs, which takes a sixth of the memory; pools keep them.
    """
    recurrence = pipeline_of(world, pipeline) == "recurrence"
    stages: Stages = Tandem if recurrence else StageProcesses
    if not isinstance(world, World):
        from evenflow.sim.disaggregated import Disaggregated

        return [Disaggregated(world, stages, on_done).run()]
    if timing is not None:
        from evenflow.sim.timed import TimedPipeline

        stages = partial(TimedPipeline, timing=timing)
    drivers: Sequence[SimDriver | None] = [None] * world.replicas
    for requests in world.before:
        earlier = replace(world, requests=requests)
        drivers = _serve(earlier, stages, None, drivers, whole=False)
    drivers = _serve(world, stages, on_done, drivers, whole=whole)
    return [driver.result() for driver in drivers]


def _serve(
    world: World,
    stages: Stages,
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
        made = SimDriver(world, stages, told, clock=clock, after=earlier, whole=whole)
        drivers.append(made)
    serve(clock, world, drivers, world.overheads, world.router)
    return drivers
