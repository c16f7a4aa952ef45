"""The simulated driver: runs a loop on the clock, with its arrivals and micro-batches.

An instant is over when the clock has no more events for it: then the loop asks.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from evenflow.compiled import mypyc_attr
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.loop import Loop
from evenflow.core.queues import Queues
from evenflow.core.request import Request
from evenflow.core.world import World
from evenflow.results.recorder import Recorder
from evenflow.results.run import RunResult
from evenflow.schedulers.limits import Policy
from evenflow.sim.arrivals import serve
from evenflow.sim.clock import LAST, SimClock
from evenflow.sim.coast import Coast
from evenflow.sim.stages import StageProcesses
from evenflow.sim.tandem import Tandem

Stages = Callable[[SimClock, World, Recorder], Tandem | StageProcesses]
"""Makes the stages of a pipeline."""

Watch = Callable[[list[Sequence], "SimDriver", float], None]
"""Sees the sequences that finish, where and when; it may end the run by raising an error.

What finishes at one instant in several pipelines it sees in any order."""

BLOCK_BYTES = 1 << 23
"""How much is recorded of micro-batches until it becomes columns, with the requests that ended."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SimDriver:
    """Runs one world through a pipeline. `on_done` is called with the number of requests done.

    With a `clock` of several pipelines, `run` is not called: requests come through `admit`.
    `after`: a driver that is done; this one continues with its pages and prefix caches. If not
    `whole`, the result has a tally in place of the micro-batches. `watch` sees what finishes.
    """

    def __init__(
        self,
        world: World,
        stages: Stages,
        on_done: Callable[[int], None] | None = None,
        batcher: Callable[..., Batcher] = Batcher,
        clock: SimClock | None = None,
        *,
        after: SimDriver | None = None,
        whole: bool = True,
        watch: Watch | None = None,
    ) -> None:
        self._world = world
        self._clock = clock or SimClock()
        self._recorder = Recorder(world.depth, whole=whole)
        self._watch = watch
        self._on_done: list[Callable[[int], None]] = []
        if on_done is not None:
            self.when_done(lambda _: on_done(self.num_done))
        pools: abc.Sequence[PagePool | None] = [None] * world.virtual_engines
        if after is not None:
            pools = after.pools
        self.engines = [world.batcher(batcher, pages) for pages in pools]
        pipeline = stages(self._clock, world, self._recorder)
        self._loop = world.start(self.engines, pipeline, self, self._recorder)
        returned = self._loop.returned
        pipeline.connect(self._loop.freed, returned)
        self._coast = (
            None if whole else coast_of(self._clock, world, self._loop, pipeline, returned)
        )
        self._queues_ahead = pipeline.queues_ahead
        self._over_queued = False
        self._turn = LAST
        if self._coast is not None and world.concurrency is None:  # else an end lets another in
            self._clock.inner |= {*self._coast.calls, self._settle_later}

    def run(self) -> RunResult:
        """Simulate until every request is done; return what happened."""
        serve(self._clock, self._world, [self], self._world.overheads)
        return self.result()

    def result(self) -> RunResult:
        """Return what happened so far."""
        return self._loop.result(**self._world.facts)

    @property
    def pools(self) -> list[PagePool]:
        """The pages of each engine."""
        return [engine.pool for engine in self.engines]

    @property
    def num_done(self) -> int:
        """Requests that need nothing more: finished or rejected."""
        return self._recorder.num_done

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not finished."""
        return self._loop.outstanding

    def admit(self, request: Request) -> bool:
        """Take an arrival; say whether it is served."""
        return self._loop.admit(request) is None

    def when_done(self, call: Callable[[int], None]) -> None:
        """Have `call` called with how many requests are done, whenever some are."""
        self._on_done.insert(0, call)

    def finished(self, sequences: list[Sequence], now_s: float) -> None:
        """Record finished sequences, and call the functions of `when_done`."""
        self._recorder.finish(sequences)
        if self._watch is not None:
            self._watch(sequences, self, now_s)
        if self._recorder.num_bytes > BLOCK_BYTES:
            self._loop.flush({})
        for call in self._on_done:
            call(len(sequences))

    def changed(self, now_s: float) -> None:
        """Handle a change at this instant: ask the policy when the instant is over."""
        if self._queues_ahead and not self._clock.more_now():
            self._settle(now_s)
        elif not self._over_queued:
            self._over_queued = True
            self._clock.at(now_s, self._settle_later, self._turn)

    def wake(self, at_s: float) -> None:
        """Ask the policy again at that time."""
        self._clock.at(at_s, self.changed)

    def _settle_later(self, now_s: float) -> None:
        self._over_queued = False
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        self._loop.settle(now_s)
        if self._coast is not None:
            self._coast.go()


def coast_of(
    clock: SimClock,
    world: World,
    loop: Loop,
    pipeline: object,
    returned: Callable[[float], None],
) -> Coast | None:
    """Return the Coast of a loop; None where its policy or cache could decide otherwise."""
    engine = loop.engines[0]
    queues, policy = engine.queues, engine.scheduler
    if (
        len(loop.engines) > 1
        or type(engine) is not Batcher
        or type(queues.kv) is not KvCache
        or (queues.kv.keeps and type(queues) is not Queues)  # an engine's decodes change its cache
        or type(pipeline) is not Tandem
        or not isinstance(policy, Policy)
        or "sends_whole" not in vars(type(policy))
    ):
        return None
    if type(loop) is Loop:
        eager = world.dispatch == "eager"
        return Coast(clock, loop, policy, pipeline, returned, eager=eager)
    from evenflow.sim.engine_coast import engine_coast  # what serves plainly needs no engines

    return engine_coast(clock, loop, policy, pipeline, returned)
