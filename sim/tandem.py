"""The pipeline as a recurrence: the times of a micro-batch on all stages, computed when it is sent.

Stages serve first come first served. With a separate link for each hop, nothing that is sent later
can change them. So start[k][i] = max(end[k][i-1], arrival from stage k-1). Two events a micro-batch
are left: stage 0 is free, and the last stage is done. `evenflow.sim.stages` is the specification;
both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch
from evenflow.core.world import World
from evenflow.costs.modifiers import begun
from evenflow.results.recorder import Recorder, StageTimes
from evenflow.sim.clock import SimClock


@mypyc_attr(allow_interpreted_subclasses=True)
class Tandem:
    """Sends micro-batches down the stages.

    Raises ValueError for a shared link, whose queue depends on what is sent later.
    """

    queues_ahead = True
    """Whether every later event of an instant is in the queue before the first one fires."""

    def __init__(self, clock: SimClock, world: World, recorder: Recorder) -> None:
        if world.shares_link:
            raise ValueError("a shared link needs sim.stages")
        self._clock = clock
        self._times = begun(world.costs).times
        self._overheads = world.overheads
        self._prepares = world.overheads.prepares
        self._hosts = world.overheads.hosts
        self._recorder = recorder
        self._stages = [StageTimes(0.0, 0.0, 0.0) for _ in range(world.depth)]  # last used
        self._link_free_s = [0.0] * world.depth
        self._hops = world.hops
        self._prepared_s = [0.0] * world.depth
        self._last = world.depth - 1
        self._host_free_s = 0.0
        self._started_s = 0.0  # when stage 0 began what it was sent last
        self._call_queued = False

    def connect(self, on_free: Callable[[float], None], on_return: Callable[[float], None]) -> None:
        """Have `on_free` called when stage 0 is done, if asked to, and `on_return` when all are."""
        self._on_free = on_free
        self._returned = on_return

    @property
    def free_s(self) -> float:
        """From when on stage 0 could start a micro-batch."""
        return self._stages[0].end_s

    def is_free(self, now_s: float) -> bool:
        """Say whether stage 0 could start a micro-batch now."""
        return self._stages[0].end_s <= now_s

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch to stage 0."""
        self._clock.at(self.send(batch), self._returned)

    def send(self, batch: MicroBatch) -> float:
        """Send a micro-batch to stage 0; return when it leaves the last one."""
        work = batch if batch.charged is None else batch.charged
        self._cross(batch, self._times(work))
        self._recorder.passed(batch, self._stages)
        return self._stages[self._last].end_s

    def call_when_free(self) -> None:
        """Call `on_free` when stage 0 is free. On a single stage the return says so."""
        if not self._call_queued and self._last:
            self._call_queued = True
            self._clock.at(self._stages[0].end_s, self.freed)

    def freed(self, now_s: float) -> None:
        """Say that stage 0 is free."""
        self._call_queued = False
        self._on_free(now_s)

    def _cross(self, batch: MicroBatch, stage_seconds: list[float]) -> None:
        """Give the stages their times with a micro-batch, one after the other."""
        overheads, hops, prepares = self._overheads, self._hops, self._prepares
        stages = self._stages
        scheduled_s = batch.scheduled_s
        at_s = scheduled_s
        if self._hosts:
            at_s, stages[0].end_s = self._by_host(batch, overheads.host_s(batch))
        inputs_s = overheads.inputs_s(batch) if prepares else 0.0
        for stage, seconds in enumerate(stage_seconds):
            times = stages[stage]
            free_at_s = times.end_s
            start_s = at_s if at_s > free_at_s else free_at_s
            if prepares:
                prepare_s = inputs_s + overheads.prepare_share * seconds
                if not overheads.overlapped:
                    start_s += prepare_s
                elif stage:
                    prepared_s = max(self._prepared_s[stage], scheduled_s) + prepare_s
                    self._prepared_s[stage] = prepared_s
                    start_s = max(start_s, prepared_s)
            end_s = start_s + seconds
            times.available_s = at_s
            times.start_s = start_s
            times.end_s = at_s = end_s
            if hops and stage < self._last:
                link = hops[stage]
                departed_s = max(end_s, self._link_free_s[stage])
                departed_s += link.per_token_s * batch.crossing_tokens
                self._link_free_s[stage] = departed_s
                at_s = departed_s + link.latency_s
        self._started_s = stages[0].start_s

    def _by_host(self, batch: MicroBatch, spent_s: float) -> tuple[float, float]:
        """Return when stage 0 has a micro-batch, and from when on it may compute it."""
        free_s, holds = self._stages[0].end_s, self._overheads.holds
        scheduled_s = batch.scheduled_s
        if holds == "stage0":
            return scheduled_s, max(scheduled_s, free_s) + spent_s
        begin_s = scheduled_s
        if holds == "nothing":
            begin_s = self._started_s if scheduled_s <= free_s else batch.chosen_s
        self._host_free_s = max(self._host_free_s, begin_s) + spent_s
        if holds == "nothing":
            return scheduled_s, max(free_s, self._host_free_s)
        return self._host_free_s, free_s
