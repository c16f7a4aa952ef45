"""The simulated world as a SimPy model, a Batcher in the middle.

Read in this order: clock, arrivals, driver, stages (with their links, as processes), tandem (the
stages as a recurrence). Then replica, processes and faults: what joins a run. Pools, given times
and processes, which few runs need, are loaded when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from evenflow import later
from evenflow.answers import answers_in
from evenflow.core.batch import MicroBatch
from evenflow.core.routing import Router
from evenflow.core.world import Link, World
from evenflow.errors import UsageError
from evenflow.results.run import RunResult
from evenflow.runtimes import RuntimeOverheads, runtimes
from evenflow.sim.arrivals import ArrivalSource, serve
from evenflow.sim.clock import SimClock
from evenflow.sim.driver import SimDriver, Stages, Watch
from evenflow.sim.stages import StageProcesses
from evenflow.sim.tandem import Tandem

if TYPE_CHECKING:
    from evenflow.engines.pools import PooledWorld
    from evenflow.sim.processes import UserProcess
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


def pipeline_of(
    world: World | PooledWorld, asked: Pipeline | None = None, joining: Sequence[object] = ()
) -> Pipeline:
    """Return which pipeline runs: the one asked for, else the faster one that can.

    UsageError for the recurrence where what happens later changes the times of what was sent. That
    is where hops share a link, or processes of the user's are `joining`.
    """
    needs = "hops share a link" if world.shares_link else "processes join in" if joining else ""
    if asked == "recurrence" and needs:
        raise UsageError(
            f"pipeline: recurrence: {needs}, so what was sent may be held up later; processes is "
            "right"
        )
    return asked or ("processes" if needs else "recurrence")


def simulate(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    pipeline: Pipeline | None = None,
    processes: Sequence[UserProcess] = (),
    seed: int = 0,
) -> RunResult:
    """Simulate one pipeline of a world, or a system of pools; return what happened.

    The same world always gives the same result. `on_done` is called with the number of requests
    done. `pipeline`: as `pipeline_of` says, and `processes` as for `simulate_replicas`. Raises
    PolicyError when the policy breaks its promise or takes longer than `ANSWER_LIMIT_S` for an
    answer. Raises StallError when it would never send.
    """
    if isinstance(world, World):
        world = replace(world, replicas=1)
    given: Any = {"pipeline": pipeline, "processes": processes, "seed": seed}
    (result,) = simulate_replicas(world, on_done, **given)
    return result


@answers_in()
def simulate_replicas(
    world: World | PooledWorld,
    on_done: Callable[[int], None] | None = None,
    *,
    pipeline: Pipeline | None = None,
    processes: Sequence[UserProcess] = (),
    seed: int = 0,
    timing: Callable[[MicroBatch], Timing] | None = None,
    whole: bool = True,
    watch: Watch | None = None,
) -> list[RunResult]:
    """Simulate `world.replicas` pipelines on one clock; return what happened on each.

    Options and errors are those of `simulate`, `on_done` counts the requests of all together. A
    system of pools is one. Of what was served `before` the requests only the caches are left.
    `timing` says what each micro-batch takes, as in `simulate_timed`. If not `whole`, micro-batches
    leave the tally that a summary needs, which takes a sixth of the memory. Pools keep them.
    `watch` sees what finishes, and may end the run by an error; of pools and `processes` it is not
    called.
    `processes` of the user's join in, with random streams from `seed`. UserProcessError for one
    that breaks its promise, UsageError for a system of pools.
    """
    recurrence = pipeline_of(world, pipeline, processes) == "recurrence"
    stages: Stages = Tandem if recurrence else StageProcesses
    if not isinstance(world, World):
        if processes:
            raise UsageError("processes: not with a system of pools; leave them out")
        from evenflow.sim.disaggregated import Disaggregated

        return [Disaggregated(world, stages, on_done).run()]
    if timing is not None:
        from evenflow.sim.timed import TimedPipeline

        stages = partial(TimedPipeline, timing=timing)
    drivers: Sequence[SimDriver | None] = [None] * world.replicas
    for requests in world.before:
        earlier = replace(world, requests=requests)
        drivers = _serve(earlier, stages, None, drivers, whole=False)
    if processes:
        return _serve_with(processes, seed, world, on_done, drivers, whole=whole)
    drivers = _serve(world, stages, on_done, drivers, whole=whole, watch=watch)
    return [driver.result() for driver in drivers]


def _serve(
    world: World,
    stages: Stages,
    on_done: Callable[[int], None] | None,
    after: Sequence[SimDriver | None],
    **options: Any,
) -> list[SimDriver]:
    """Serve the requests of a world with pipelines that go on where those of `after` ended."""
    clock = SimClock()
    drivers: list[SimDriver] = []
    told = on_done if len(after) == 1 else _of_all(on_done, drivers)
    for earlier in after:
        drivers.append(SimDriver(world, stages, told, clock=clock, after=earlier, **options))
    serve(clock, world, drivers, world.overheads, world.router)
    return drivers


def _of_all(
    on_done: Callable[[int], None] | None, drivers: Sequence[SimDriver]
) -> Callable[[int], None] | None:
    """Return a function that calls `on_done` with what all of the drivers have done."""
    return on_done and (lambda _: on_done(sum(driver.num_done for driver in drivers)))


def _serve_with(
    processes: Sequence[UserProcess],
    seed: int,
    world: World,
    on_done: Callable[[int], None] | None,
    after: Sequence[SimDriver | None],
    *,
    whole: bool,
) -> list[RunResult]:
    """Serve the requests of a world while processes of the user's do what they do."""
    from evenflow.sim.processes import Processes
    from evenflow.sim.replica import Replica

    clock = SimClock()
    replicas: list[Replica] = []
    told = _of_all(on_done, replicas)

    def start(earlier: SimDriver | None = None) -> Replica:
        replicas.append(Replica(world, clock, on_done=told, after=earlier, whole=whole))
        return replicas[-1]

    for earlier in after:
        start(earlier)
    source = ArrivalSource(clock, world, replicas, world.overheads, world.router)
    joined = Processes(clock.env, source, replicas, start, made=processes, seed=seed)
    joined.run()
    marks = tuple(joined.marks)
    return [replace(replica.result(), marks=marks) for replica in replicas]
