"""Prefill and decode on separate pools: `evenflow.engines.pools`, on SimPy's clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simpy.events import EventPriority

from evenflow.core.decodes import Sequence
from evenflow.core.world import World
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld, Pools
from evenflow.results.run import RunResult
from evenflow.sim.arrivals import serve
from evenflow.sim.clock import LAST, SimClock
from evenflow.sim.driver import SimDriver, Stages


class SimPool(SimDriver):
    """The driver of one pool: reports finished sequences and possible room to the system.

    At one instant pools are asked in the order in which they are made, as in a real run.
    """

    def __init__(
        self,
        system: Disaggregated,
        world: World,
        stages: Stages,
        batcher: Callable[..., PoolBatcher],
    ) -> None:
        super().__init__(world, stages, None, batcher, system.clock)
        (engine,) = self.engines
        assert isinstance(engine, PoolBatcher)
        self.engine = engine
        self._system = system
        self._queues_ahead = False  # others may be due
        self._turn = EventPriority(LAST + len(system.made))
        system.made.append(self)

    def record(self, seq: Sequence) -> None:
        """Count a request as served by this pool."""
        self._recorder.finish([seq])

    def adopt(self, request_id: int, now_s: float) -> None:
        """Continue a request after its KV has arrived."""
        self.engine.adopt(request_id)

    def changed(self, now_s: float) -> None:
        """Handle a change at this instant: transfers may have room; then ask the policy."""
        self._system.transfers.poke(now_s)
        super().changed(now_s)

    def _settle(self, now_s: float) -> None:
        super()._settle(now_s)
        self._system.transfers.poke(now_s)  # what waited here, and went first, may be admitted

    def finished(self, sequences: list[Sequence], now_s: float) -> None:
        """Report finished sequences to the system."""
        self._system.finished(self, sequences, now_s)


class Disaggregated(Pools):
    """Simulates a pooled world. `on_done` is called with the number of requests done."""

    def __init__(
        self,
        world: PooledWorld,
        stages: Stages,
        on_done: Callable[[int], None] | None = None,
        batcher: Callable[..., PoolBatcher] = PoolBatcher,
    ) -> None:
        self.clock = SimClock()
        self.made: list[SimPool] = []

        def pool_of(name: str) -> SimPool:
            kind = partial(batcher, keeps_pages=name != "decode")
            return SimPool(self, getattr(world, name), stages, kind)

        super().__init__(world, self.clock, pool_of, on_done)

    def run(self) -> RunResult:
        """Simulate until every request is done; return what happened, pool by pool and merged."""
        serve(self.clock, self._world, [self], self._world.prefill.overheads)
        assert not self.outstanding, f"{self.outstanding} requests never ended"
        return self.result()
