"""A pipeline with given times for each micro-batch, the driver's and the messages' included.

So the rules of the pipeline can be checked alone. Its times are a real run's, or drawn at random.
Knows no measurement and no distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

from evenflow.core.batch import MicroBatch
from evenflow.core.world import Link, World
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.results.recorder import Recorder
from evenflow.results.run import RunResult
from evenflow.runtimes import RuntimeOverheads
from evenflow.sim.clock import SimClock
from evenflow.sim.disaggregated import Disaggregated
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem

GRID_PER_S = 2.0**30


class Timing(NamedTuple):
    """The times of a micro-batch, in seconds.

    `schedule_s`: from the decision, or when stage 0 has the one before, until stage 0 has it.
    `prepare_s`: on each stage, until it computes what is there and could start. `stages_s`: on each
    stage. `hops_s`: each hop, beyond what the world's link is busy for its bytes. `freed_s`,
    `returned_s`: from the end of stage 0, and of the last one, until the driver knows of it.
    """

    schedule_s: float
    prepare_s: Sequence[float]
    stages_s: Sequence[float]
    hops_s: Sequence[float]
    freed_s: float
    returned_s: float


def on_grid(time_s: float) -> float:
    """Return the nearest multiple of 2^-30 s, in seconds.

    Sums and differences of such times are exact. What the driver got at one time stays at one time,
    however it is computed.
    """
    return round(time_s * GRID_PER_S) / GRID_PER_S


class TimedPipeline(Tandem):
    """The recurrence with the times that `timing` gives, in place of the world's."""

    def __init__(
        self,
        clock: SimClock,
        world: World,
        recorder: Recorder,
        *,
        timing: Callable[[MicroBatch], Timing],
    ) -> None:
        super().__init__(clock, world, recorder)
        self._timing = timing
        self._hosts = True
        self._busy_s = [hop.per_token_s for hop in world.hops] or [0.0] * (world.depth - 1)
        self._heard_free_s = 0.0
        self._heard_back_s = 0.0

    def is_free(self, now_s: float) -> bool:
        """Say whether stage 0 could start a micro-batch now, by the driver's messages."""
        return self._heard_free_s <= now_s

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch to stage 0."""
        timing = self._timing(batch)
        self._overheads = RuntimeOverheads(schedule_s=timing.schedule_s)
        self._hops = tuple(map(Link, self._busy_s, timing.hops_s))
        self._cross(batch, list(map(add, timing.prepare_s, timing.stages_s)))
        for stage, prepare_s in zip(self._stages, timing.prepare_s, strict=True):
            stage.start_s += prepare_s
        self._recorder.passed(batch, self._stages)
        # Messages do not overtake each other.
        ended_s = self._stages[-1].end_s
        self._heard_back_s = max(self._heard_back_s, on_grid(ended_s + timing.returned_s))
        self._heard_free_s = self._heard_back_s
        if len(timing.stages_s) > 1:  # whoever is back says so too
            free_s = self._stages[0].end_s
            self._heard_free_s = min(on_grid(free_s + timing.freed_s), self._heard_back_s)
        self._clock.at(self._heard_back_s, self._returned)

    def call_when_free(self) -> None:
        """Call `on_free` when the driver knows that stage 0 is free, on a single stage never."""
        if not self._call_queued and self._last:
            self._call_queued = True
            self._clock.at(self._heard_free_s, self.freed)


@dataclass(frozen=True, slots=True)
class TimedLink(TransferLink):
    """A link between pools with the times that `takes` returns for KV of a number of tokens.

    They are how long the link is busy, and how long after that the KV arrives, in seconds.
    """

    takes: Callable[[int], tuple[float, float]] = field(kw_only=True)

    def crossing(self, tokens: int) -> tuple[float, float]:
        return self.takes(tokens)


def simulate_timed(
    world: World | PooledWorld, *timings: Callable[[MicroBatch], Timing]
) -> RunResult:
    """Simulate a world with given times of its micro-batches; see Timing.

    A system of pools has a timing for each: prefill, mixed, decode. It is called once for each
    micro-batch, in the order in which they are sent. Raises as `simulate` does, and ValueError for
    a shared link.
    """
    left = iter(timings)

    def stages(*made: Any) -> TimedPipeline:
        return TimedPipeline(*made, timing=next(left))

    if isinstance(world, PooledWorld):
        return Disaggregated(world, stages).run()
    return SimDriver(world, stages).run()
