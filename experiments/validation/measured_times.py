"""The times of a real run, as what each micro-batch of a simulation takes.

`Recorded` gives a run's own times back, to check the pipeline's rules; `Drawn` draws what another
run measured around the stages. Knows no metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, cycle
from typing import Any, TypeVar

import numpy as np

from evenflow.costs import StageCost
from evenflow.pools import PooledWorld, TransferLink
from evenflow.results.around import around_stages
from evenflow.results.run import Floats, Ints, RunResult, Transfers
from evenflow.types import MicroBatch
from runtime import Served
from sim import World
from sim.timed import GRID_PER_S, TimedLink, Timing

AROUND = tuple(name for name in Timing._fields if name != "stages_s")
"""The columns of Times that are not the stages' own."""

STALL_PERCENTILE = 99

Whole = TypeVar("Whole", World, PooledWorld)
"""What is simulated by itself."""


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
        return Timing(*(getattr(self, name)[index].tolist() for name in Timing._fields))

    def at_once(self) -> Times:
        """Return the same for stages that take no time before they start."""
        return replace(self, prepare_s=0 * self.prepare_s)


def measured_times(served: Served, world: World, num_tokens: Ints) -> Times:
    """Return the times of a real run of a world, on the grid of `sim.timed`.

    `num_tokens` of each micro-batch, padding included, keep the world's links busy.
    """
    result = served.result
    columns = "available_s", "start_s", "end_s", "scheduled_s"
    gridded: dict[str, Any] = {name: _on_grid(getattr(result, name)) for name in columns}
    result = replace(result, **gridded)
    heard = _on_grid(served.heard.freed_s), _on_grid(served.heard.returned_s)
    around = around_stages(result, *heard)
    sent_s = _departed_s(result.end_s, world, num_tokens) - result.end_s[:, :-1]
    return Times(
        **around._asdict() | {"hops_s": around.hops_s - sent_s},
        stages_s=result.end_s - result.start_s,
        arrivals_s=_on_grid(served.heard.admitted_s),
    )


def joined_times(parts: Sequence[Times]) -> Times:
    """Return the times of several pipelines of a run as those of one."""
    columns = (field.name for field in fields(Times))
    return Times(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _on_grid(times_s: object) -> Floats:
    grid: Floats = np.round(np.asarray(times_s, dtype=float) * GRID_PER_S) / GRID_PER_S
    return grid


def _departed_s(end_s: Floats, world: World, num_tokens: Ints) -> Floats:
    """Return when the configuration's links have sent each micro-batch, [m, depth - 1]."""
    departed_s = end_s[:, :-1].copy()
    for hop, link in enumerate(world.hops):
        busy_s = link.per_token_s * num_tokens
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
        self._positions = count()
        self._times = times
        self._costs = costs
        numbers = result.prefill_tokens, result.decode_tokens, result.free_pages
        self._batches = list(zip(*(column.tolist() for column in numbers), strict=True))
        self._alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (prefill_tokens, decode_tokens, _) in enumerate(self._batches):
            self._alike[prefill_tokens, decode_tokens].append(index)
        self._used: dict[tuple[int, int], int] = defaultdict(int)
        self._sums_s = [0.0, 0.0]  # measured, and by the costs, of the same micro-batches

    def __call__(self, batch: MicroBatch) -> Timing:
        """Return what the next micro-batch takes."""
        index, key = next(self._positions), (batch.prefill_tokens, batch.decode_tokens)
        by_costs_s = self._costs.times(batch.charged or batch)
        same = self._batches[index : index + 1] == [(*key, batch.free_pages)]
        if self.parted_at is None and not same:
            self.parted_at = index
        timing = self._times.timing(index % len(self._batches))
        if self.parted_at is not None:
            timing = timing._replace(stages_s=self._alike_s(key, by_costs_s))
        self._used[key] += 1
        self._sums_s[0] += sum(timing.stages_s)
        self._sums_s[1] += sum(by_costs_s)
        return timing

    def _alike_s(self, key: tuple[int, int], by_costs_s: list[float]) -> Sequence[float]:
        alike = self._alike.get(key)
        if alike is not None:
            return self._times.timing(alike[self._used[key] % len(alike)]).stages_s
        measured_s, expected_s = self._sums_s
        scale = measured_s / expected_s if expected_s else 1.0
        return [scale * seconds for seconds in by_costs_s]


def drawn(times: Times, costs: StageCost, seed: int) -> Callable[[MicroBatch], Timing]:
    """Return a timing: stages take what `costs` says, and all around them is drawn from `times`.

    Each micro-batch gets the driver's and the messages' times of one micro-batch of that run, each
    at most its P99: what takes longer is a machine that stands still for a while. That holds up
    everything together; drawn for one message alone, it would merge micro-batches that never met.
    """
    columns = {name: column for name in AROUND if (column := getattr(times, name)).size}
    most = {name: np.percentile(c, STALL_PERCENTILE, axis=0) for name, c in columns.items()}
    usual = replace(times, **{name: np.minimum(c, most[name]) for name, c in columns.items()})
    rng = np.random.default_rng(seed)
    known = len(times.schedule_s)

    def timing(batch: MicroBatch) -> Timing:
        around = usual.timing(int(rng.integers(known)))
        return around._replace(stages_s=costs.times(batch.charged or batch))

    return timing


def measured_crossings(transfers: Transfers) -> Floats:
    """Return how long each transfer kept the link busy, and how long after that its KV was there,
    [n, 2] in seconds, as the driver saw it.

    When it saw the link free is known where the next transfer waited for that: it then set out, or
    was blocked.
    """
    start_s, end_s = _on_grid(transfers.start_s), _on_grid(transfers.end_s)
    free_s = _on_grid(transfers.start_s + transfers.link_busy_s)
    tried_s = _on_grid(transfers.start_s - transfers.blocked_s)
    waited = _on_grid(transfers.ready_s)[1:] <= free_s[:-1]
    free_s[:-1] = np.where(waited, tried_s[1:], free_s[:-1])
    return np.column_stack([free_s - start_s, end_s - free_s])


def recorded_link(link: TransferLink, transfers: Transfers) -> TimedLink:
    """Return a link on which each transfer takes what it took in a run, one after the other."""
    took = cycle(measured_crossings(transfers).tolist() or [link.crossing(0)])
    return TimedLink(bytes_per_token=link.bytes_per_token, takes=lambda _: next(took))


def drawn_link(link: TransferLink, transfers: Transfers, seed: int) -> TimedLink:
    """Return a link with what transfers of a run took beyond the configuration's, drawn at random,
    each at most its P99.
    """
    by_link = np.array([link.crossing(tokens) for tokens in transfers.tokens.tolist()])
    more_s = measured_crossings(transfers) - by_link.reshape(-1, 2)
    if not len(more_s):
        more_s = np.zeros((1, 2))
    more_s = np.minimum(more_s, np.percentile(more_s, STALL_PERCENTILE, axis=0))
    rng = np.random.default_rng(seed)

    def takes(tokens: int) -> tuple[float, float]:
        busy_s, latency_s = np.maximum(rng.choice(more_s) + link.crossing(tokens), 0.0).tolist()
        return busy_s, latency_s

    return TimedLink(bytes_per_token=link.bytes_per_token, takes=takes)


def as_admitted(world: Whole, times: Times) -> Whole:
    """Return the world with the arrivals that a run's driver saw; a closed loop has its own."""
    if world.concurrency is not None:
        return world
    pairs = zip(world.requests, times.arrivals_s.tolist(), strict=True)
    return replace(world, requests=[replace(r, arrival_s=at_s) for r, at_s in pairs])
