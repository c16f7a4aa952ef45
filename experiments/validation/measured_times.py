"""The times of a real run, as what each micro-batch of a simulation takes.

`Recorded` gives a run's own times back, to check the pipeline's rules; `Drawn` draws what another
run measured around the stages. Knows no metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenflow.costs import StageCost
from evenflow.results.run import Floats, RunResult
from evenflow.types import MicroBatch
from runtime import Served
from sim import Timing, World
from sim.timed import GRID_PER_S

AROUND = ("schedule_s", "prepare_s", "hops_s", "freed_s", "returned_s")
"""The columns of Times that are not the stages' own."""

STALL_PERCENTILE = 99


@dataclass(frozen=True, slots=True)
class Times:
    """What a run measured, in seconds, a row a micro-batch; the columns are those of Timing.

    `arrivals_s`: when the driver saw each request, in the order of the world's.
    """

    schedule_s: Floats
    prepare_s: Floats
    stages_s: Floats
    hops_s: Floats
    freed_s: Floats
    returned_s: Floats
    arrivals_s: Floats

    def timing(self, index: int) -> Timing:
        """Return the row of one micro-batch."""
        return Timing(
            float(self.schedule_s[index]),
            self.prepare_s[index].tolist(),
            self.stages_s[index].tolist(),
            self.hops_s[index].tolist(),
            float(self.freed_s[index]),
            float(self.returned_s[index]),
        )


def measured_times(served: Served, world: World) -> Times:
    """Return the times of a real run of a world, on the grid of `sim.timed`."""
    result = served.result
    available_s, start_s = _on_grid(result.available_s), _on_grid(result.start_s)
    end_s, scheduled_s = _on_grid(result.end_s), _on_grid(result.scheduled_s)
    decided_s = scheduled_s.copy()
    decided_s[1:] = np.maximum(scheduled_s[1:], available_s[:-1, 0])
    free_s = np.zeros_like(end_s)
    free_s[1:] = end_s[:-1]
    back_s = _on_grid(served.heard.returned_s)
    freed_s = _on_grid(served.heard.freed_s) if result.depth > 1 else back_s
    return Times(
        schedule_s=available_s[:, 0] - decided_s,
        prepare_s=start_s - np.maximum(available_s, free_s),
        stages_s=end_s - start_s,
        hops_s=available_s[:, 1:] - _departed_s(result, end_s, world),
        freed_s=freed_s[: len(back_s)] - end_s[:, 0],
        returned_s=back_s - end_s[:, -1],
        arrivals_s=_on_grid(served.heard.admitted_s),
    )


def _on_grid(times_s: object) -> Floats:
    grid: Floats = np.round(np.asarray(times_s, dtype=float) * GRID_PER_S) / GRID_PER_S
    return grid


def _departed_s(result: RunResult, end_s: Floats, world: World) -> Floats:
    """Return when the configuration's links have sent each micro-batch, [m, depth - 1]."""
    departed_s = end_s[:, :-1].copy()
    tokens = result.prefill_tokens + result.decode_tokens
    for hop, link in enumerate(world.hops):
        busy_s = link.per_token_s * tokens
        if not busy_s.any():
            continue
        free_s = 0.0
        for index, end in enumerate(end_s[:, hop].tolist()):
            departed_s[index, hop] = free_s = max(free_s, end) + busy_s[index]
    return departed_s


class Recorded:
    """Gives each micro-batch what a run measured for it.

    As long as the decisions are those of the run, that is the run's micro-batch at the same
    position. Once they part, `parted_at` says where; from then on a micro-batch takes on the stages
    what the run's next one with as many prefill and decode tokens took, after the last of them the
    first again, or where it had none what `costs` says, scaled by what the run measured over that
    so far. Messages take what they took at the same position.
    """

    def __init__(self, result: RunResult, times: Times, costs: StageCost) -> None:
        self.parted_at: int | None = None
        self._times = times
        self._costs = costs
        self._keys = list(
            zip(result.prefill_tokens.tolist(), result.decode_tokens.tolist(), strict=True)
        )
        self._free_pages = result.free_pages.tolist()
        self._alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, key in enumerate(self._keys):
            self._alike[key].append(index)
        self._used: dict[tuple[int, int], int] = defaultdict(int)
        self._sums_s = [0.0, 0.0]  # measured, and by the costs, of the same micro-batches

    def __call__(self, batch: MicroBatch) -> Timing:
        """Return what the next micro-batch takes."""
        index, key = batch.batch_id, (batch.prefill_tokens, batch.decode_tokens)
        by_costs_s = self._costs.times(batch.charged or batch)
        if self.parted_at is None and not self._agrees(index, batch):
            self.parted_at = index
        timing = self._times.timing(index % len(self._keys))
        if self.parted_at is not None:
            timing = timing._replace(stages_s=self._alike_s(key, by_costs_s))
        self._used[key] += 1
        self._sums_s[0] += sum(timing.stages_s)
        self._sums_s[1] += sum(by_costs_s)
        return timing

    def _agrees(self, index: int, batch: MicroBatch) -> bool:
        if index >= len(self._keys):
            return False
        key = batch.prefill_tokens, batch.decode_tokens
        return key == self._keys[index] and batch.free_pages == self._free_pages[index]

    def _alike_s(self, key: tuple[int, int], by_costs_s: list[float]) -> list[float]:
        alike = self._alike.get(key)
        if alike is None:
            measured_s, expected_s = self._sums_s
            scale = measured_s / expected_s if expected_s else 1.0
            return [scale * seconds for seconds in by_costs_s]
        stages_s: list[float] = self._times.stages_s[alike[self._used[key] % len(alike)]].tolist()
        return stages_s


def drawn(times: Times, costs: StageCost, seed: int) -> Callable[[MicroBatch], Timing]:
    """Return a timing: stages take what `costs` says, and all around them is drawn from `times`.

    Each micro-batch gets the driver's and the messages' times of one micro-batch of that run, each
    at most its P99: what takes longer is a machine that stands still for a while. That holds up
    everything together; drawn for one message alone, it would merge micro-batches that never met.
    """
    times = _without_stalls(times)
    rng = np.random.default_rng(seed)
    count = len(times.schedule_s)

    def timing(batch: MicroBatch) -> Timing:
        around = times.timing(int(rng.integers(count)))
        return around._replace(stages_s=costs.times(batch.charged or batch))

    return timing


def _without_stalls(times: Times) -> Times:
    around = {name: getattr(times, name) for name in AROUND}
    return replace(
        times,
        **{
            name: np.minimum(column, np.percentile(column, STALL_PERCENTILE, axis=0))
            for name, column in around.items()
            if column.size
        },
    )


def as_admitted(world: World, times: Times) -> World:
    """Return the world with the arrivals that a run's driver saw; a closed loop has its own."""
    if world.concurrency is not None:
        return world
    pairs = zip(world.requests, times.arrivals_s.tolist(), strict=True)
    return replace(world, requests=[replace(r, arrival_s=at_s) for r, at_s in pairs])
