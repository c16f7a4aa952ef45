"""The layers of a validation, each a pure function of what was measured and what was simulated.

Structure: the simulator with a run's own times, against that run. Costs: seconds of a micro-batch
on a stage. End to end: what a user sees. Before them come the times of a real run, as what each
micro-batch of a simulation takes. `Recorded` gives a run's own back, `drawn` draws what another run
measured around the stages. Runs nothing in real time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.core.replay import Entry, replay
from evenflow.costs import StageCost
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.errors import PolicyError
from evenflow.results.bubbles import CAUSES, attribute
from evenflow.results.metrics import request_metrics, summarize
from evenflow.results.run import Floats, Ints, RunResult, Transfers, around_stages
from evenflow.runtime.serve import ServedRun
from evenflow.sim import World
from evenflow.sim.timed import GRID_PER_S, TimedLink, Timing, simulate_timed
from evenflow.sums import plain_sum
from evenflow.types import MicroBatch

NAMES = ("ttft", "tpot", "itl", "e2el")
METRICS = (
    *(f"{value}_{name}_ms" for name in NAMES for value in ("mean", "p50", "p90", "p99")),
    "output_throughput",
    "total_token_throughput",
    "duration",
    "busy_share",
    "bubble_share",
)
"""What is compared, by its key in summary.json; `bubble_share` is what is not busy."""

PARTS = ("ttft", "tpot", "e2el")
"""What a single request has one of."""


AROUND = tuple(name for name in Timing._fields if name != "stages_s")
"""The columns of Times that are not the stages' own."""

STALL_PERCENTILE = 99


@dataclass(frozen=True, slots=True)
class Times:
    """Measured times of a run, in seconds, a row a micro-batch; the columns are those of Timing.

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
        return Timing(*(getattr(self, name)[index].tolist() for name in Timing._fields))

    def at_once(self) -> Times:
        """Return the same for stages that take no time before they start."""
        return replace(self, prepare_s=0 * self.prepare_s)


def measured_times(served: ServedRun, world: World, num_tokens: Ints) -> Times:
    """Return the times of a real run of a world, on the grid of `evenflow.sim.timed`.

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
    position. Once they part, `parted_at` says where. From then on stages take what they took for
    the run's next one with as many tokens of each kind. After the last of them comes the first
    again. Where the run had none it is what `costs` says, scaled by what the run measured over that
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
        index, key = next(self._positions), (batch.prefill_tokens, batch.decode_tokens)
        by_costs_s = self._costs.times(batch.charged or batch)
        same = self._batches[index : index + 1] == [(*key, batch.free_pages)]
        if self.parted_at is None and not same:
            self.parted_at = index
        timing = self._times.timing(index % len(self._batches))
        if self.parted_at is not None:
            timing = timing._replace(stages_s=self._alike_s(key, by_costs_s))
        self._used[key] += 1
        self._sums_s[0] += plain_sum(timing.stages_s)
        self._sums_s[1] += plain_sum(by_costs_s)
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
    at most its P99. What takes longer is a machine that stands still for a while. That holds up
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
    """Return the seconds that transfers kept the link busy, and then took to arrive: [n, 2].

    When it saw the link free is known where the next transfer waited for that. It then set out, or
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
    """Return a link whose transfers take longer, as a run's did: drawn at random, up to the P99."""
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


class Structure(NamedTuple):
    """A run, the same simulated from its times, and its first micro-batch with another decision."""

    measured: RunResult
    again: RunResult
    parted_at: int | None


def summary_of(result: RunResult) -> dict[str, Any]:
    """Return the summary of a run, and the share of its stages' time that is idle; NaN for None."""
    summary = {key: math.nan if v is None else v for key, v in summarize(result).items()}
    return summary | {"bubble_share": 1 - summary["busy_share"]}


def structure_of(world: World | PooledWorld, result: RunResult, *times: Times) -> Structure:
    """Simulate a run again from its measured times, and the link from what it took.

    Pools have each their own times, in their order; latencies count from the requests' own.
    """
    if isinstance(world, PooledWorld):
        assert result.transfers is not None
        recorded = [
            Recorded(of_pool, own, getattr(world, name).costs)
            for (name, of_pool), own in zip(result.pools.items(), times, strict=True)
        ]
        world = replace(world, link=recorded_link(world.link, result.transfers))
    else:
        recorded = [Recorded(result, times[0], world.costs)]
    if world.concurrency is None:
        pairs = zip(world.requests, times[0].arrivals_s.tolist(), strict=True)
        world = replace(world, requests=[replace(r, arrival_s=at_s) for r, at_s in pairs])
    again = simulate_timed(world, *recorded)
    if world.concurrency is None:
        again = replace(again, arrival_s=result.arrival_s)
    parted = (each.parted_at for each in recorded)
    return Structure(result, again, min((at for at in parted if at is not None), default=None))


def structure_errors(structure: Structure) -> dict[str, Any]:
    """Return the errors of a run simulated from its own times.

    `metrics` has relative errors, `requests` the distribution over requests of the absolute
    relative errors of each latency. `same_micro_batches` is the share of micro-batches that hold as
    many tokens at the same position in both.
    """
    result, again, parted_at = structure
    return {
        "metrics": metric_errors(result, again),
        "requests": request_errors(result, again),
        "same_micro_batches": same_batches(result, again),
        "parted_at": parted_at,
        "micro_batches": len(result.scheduled_s),
    }


def metric_errors(real: RunResult, simulated: RunResult) -> dict[str, float]:
    """Return the relative error of each of METRICS that both have and is not 0 in the real run."""
    ours, theirs = summary_of(real), summary_of(simulated)
    errors = {key: theirs[key] / ours[key] - 1 for key in METRICS if ours[key]}
    return {key: error for key, error in errors.items() if not math.isnan(error)}


def request_errors(one: RunResult, other: RunResult) -> dict[str, dict[str, float]]:
    """Return the distribution of |other / one - 1| over requests, for each latency."""
    ours, theirs = request_metrics(one), request_metrics(other)
    spreads = {}
    for name in PARTS:
        first_s, second_s = getattr(ours, f"{name}_s"), getattr(theirs, f"{name}_s")
        defined = np.isfinite(first_s) & np.isfinite(second_s) & (first_s > 0)
        spreads[name] = spread_of(np.abs(second_s[defined] / first_s[defined] - 1))
    return spreads


def spread_of(errors: Floats) -> dict[str, float]:
    """Return the median, P95 and most of absolute errors; nothing of none."""
    if not len(errors):
        return {}
    median, p95 = np.percentile(errors, [50, 95])
    return {"median": float(median), "p95": float(p95), "most": float(errors.max())}


def same_batches(one: RunResult, other: RunResult) -> float:
    """Return the share of micro-batches that hold the same numbers of tokens in both; 1 of none."""
    ours, theirs = (
        np.column_stack([result.prefill_tokens, result.decode_tokens]) for result in (one, other)
    )
    count = min(len(ours), len(theirs))
    same = (ours[:count] == theirs[:count]).all(axis=1)
    most = max(len(ours), len(theirs))
    return float(same.sum()) / most if most else 1.0


class KeepingBatcher(PoolBatcher):
    """A Batcher, of a pool or not, that keeps the micro-batches it sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[MicroBatch] = []

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self.sent += [] if batch is None else [batch]
        return batch


def priced(
    world: World, journals: Iterable[Iterable[Entry]], *, keeps_pages: bool = False
) -> tuple[Floats, Ints]:
    """Return the predicted seconds of a recorded run, [m, depth], and tokens with padding, [m].

    `journals` are those of its engines, `keeps_pages` as of a PoolBatcher. Raises PolicyError when
    one, replayed, does not give what it records.
    """
    sent: list[MicroBatch] = []
    for journal in journals:
        batcher = world.batcher(partial(KeepingBatcher, keeps_pages=keeps_pages))
        assert isinstance(batcher, KeepingBatcher)
        difference = replay(journal, batcher)
        if difference is not None:
            raise PolicyError(f"a recorded run does not replay: {difference}")
        sent += batcher.sent
    sent.sort(key=lambda batch: batch.scheduled_s)
    expected_s = [world.costs.times(batch.charged or batch) for batch in sent]
    num_tokens = np.array([batch.num_tokens for batch in sent], dtype=np.int64)
    return np.array(expected_s).reshape(-1, world.depth), num_tokens


def cost_errors(
    results: Sequence[RunResult], expected_s: Sequence[Floats]
) -> list[dict[str, float]]:
    """Return for each stage how far the costs are from what micro-batches took.

    Absolute relative errors (`median`, `p95`) and the relative error of the sum (`bias`), over all
    runs. Beside them stands the machine's own spread (`median_repeat`, `p95_repeat`). Micro-batches
    of as many prefill and decode tokens are so far from the median of their times.
    """
    measured_s = np.concatenate([result.end_s - result.start_s for result in results])
    expected = np.concatenate(expected_s)
    tokens = np.concatenate(
        [np.column_stack([each.prefill_tokens, each.decode_tokens]) for each in results]
    )
    lines = []
    for stage in range(measured_s.shape[1]):
        repeats = repeat_errors(tokens, measured_s[:, stage])
        off = np.abs(expected[:, stage] / measured_s[:, stage] - 1)
        apart, own = ({"median": 0.0, "p95": 0.0} | spread_of(each) for each in (off, repeats))
        lines.append(
            {
                "median": apart["median"],
                "p95": apart["p95"],
                "bias": float(expected[:, stage].sum() / measured_s[:, stage].sum() - 1),
                "median_repeat": own["median"],
                "p95_repeat": own["p95"],
                "repeated": len(repeats),
            }
        )
    return lines


def repeat_errors(shapes: np.ndarray, measured_s: Floats) -> Floats:
    """Return |measured / median of its shape - 1| of all with at least one of the same shape."""
    by_shape = pd.Series(measured_s).groupby(list(shapes.T))
    apart = (measured_s / by_shape.transform("median") - 1).abs()
    return np.asarray(apart[by_shape.transform("size") > 1])


def compared(
    key: str,
    measured: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any],
    calibrated: Sequence[Mapping[str, Any]] = (),
) -> dict[str, float | None]:
    """Return one metric: the runs' mean, least and most, the simulator's, and its error.

    `error` is relative to the mean of the runs, and so is `spread`, from least to most. None where
    there is no mean, or it is 0. `calibrated` is the mean of several simulations,
    `calibrated_spread` theirs.
    """
    values = np.array([summary[key] for summary in measured], dtype=float)
    mean = float(values.mean())

    def over_mean(value: float, less: int = 0) -> float | None:
        return float(value) / mean - less if abs(mean) > 0 else None

    line = {
        "measured": mean,
        "least": float(values.min()),
        "most": float(values.max()),
        "spread": over_mean(np.ptp(values)),
        "simulated": float(predicted[key]),
        "error": over_mean(predicted[key], 1),
    }
    if calibrated:
        drawn = np.array([summary[key] for summary in calibrated], dtype=float)
        line["calibrated"] = float(drawn.mean())
        line["calibrated_error"] = over_mean(drawn.mean(), 1)
        line["calibrated_spread"] = over_mean(np.ptp(drawn))
    return line


def bubble_shares(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the mean share of all stages' time that is idle for each cause."""
    shares = [list(attribute(result).shares().values()) for result in results]
    return dict(zip(CAUSES, np.mean(shares, axis=0).tolist(), strict=True))
