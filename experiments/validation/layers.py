"""The layers of a validation, each a pure function of what was measured and what was simulated.

Structure: the simulator with a run's own times, against that run. Costs: seconds of a micro-batch
on a stage. End to end: what a user sees. Runs nothing in real time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError
from evenflow.pools import PooledWorld
from evenflow.replay import Entry, replay
from evenflow.results.bubbles import CAUSES, attribute
from evenflow.results.metrics import request_metrics, summarize
from evenflow.results.run import Floats, Ints, RunResult
from evenflow.types import MicroBatch
from experiments.validation.measured_times import Recorded, Times, as_admitted, recorded_link
from sim import World
from sim.timed import simulate_timed

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


@dataclass(frozen=True, slots=True)
class Structure:
    """A run again, from its own times. `parted_at`: the first micro-batch with another decision, of
    a pool's own.
    """

    again: RunResult
    parted_at: int | None


def summary_of(result: RunResult) -> dict[str, Any]:
    """Return the summary of a run, with the share of its stages' time that is idle."""
    summary = summarize(result)
    return summary | {"bubble_share": 1 - summary["busy_share"]}


# -- structure ------------------------------------------------------------------------------------


def structure_of(world: World, result: RunResult, times: Times) -> Structure:
    """Simulate a run again from what it measured; latencies count from the requests' own times."""
    return _simulated_again(
        as_admitted(world, times), result, [Recorded(result, times, world.costs)]
    )


def structure_of_pools(
    world: PooledWorld, result: RunResult, times: Mapping[str, Times]
) -> Structure:
    """Simulate a run of pools again, each from its own times, and the link from what it took."""
    assert result.transfers is not None
    recorded = [
        Recorded(result.pools[name], own, getattr(world, name).costs) for name, own in times.items()
    ]
    first, link = next(iter(times.values())), recorded_link(world.link, result.transfers)
    return _simulated_again(replace(as_admitted(world, first), link=link), result, recorded)


def _simulated_again(
    world: World | PooledWorld, result: RunResult, recorded: Sequence[Recorded]
) -> Structure:
    again = simulate_timed(world, *recorded)
    if world.concurrency is None:
        again = replace(again, arrival_s=result.arrival_s)
    parted = (each.parted_at for each in recorded)
    return Structure(again, min((at for at in parted if at is not None), default=None))


def structure_errors(result: RunResult, structure: Structure) -> dict[str, Any]:
    """Return how far a run simulated from its own times is from it.

    `metrics` has relative errors, `requests` the distribution over requests of the absolute
    relative errors of each latency. `same_micro_batches` is the share of micro-batches that hold as
    many tokens at the same position in both.
    """
    return {
        "metrics": metric_errors(result, structure.again),
        "requests": request_errors(result, structure.again),
        "same_micro_batches": same_batches(result, structure.again),
        "parted_at": structure.parted_at,
        "micro_batches": len(result.scheduled_s),
    }


def metric_errors(real: RunResult, simulated: RunResult) -> dict[str, float]:
    """Return the relative error of each of METRICS that is not 0 in the real run."""
    ours, theirs = summary_of(real), summary_of(simulated)
    return {key: theirs[key] / ours[key] - 1 for key in METRICS if ours[key]}


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


# -- costs ----------------------------------------------------------------------------------------


class Priced(NamedTuple):
    """What the costs say of each micro-batch of a run, [m, depth] in seconds, and how many tokens
    it computes, padding included, [m]."""

    expected_s: Floats
    num_tokens: Ints


class KeepingBatcher(Batcher):
    """A Batcher that keeps what it sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[MicroBatch] = []

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self.sent += [] if batch is None else [batch]
        return batch


def priced(
    world: World, journals: Iterable[Iterable[Entry]], *, keeps_pages: bool = False
) -> Priced:
    """Return what the costs say of a recorded run, of the journals of its engines.

    `keeps_pages` as of a Batcher. Raises PolicyError when one, replayed, does not give what
    it records.
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
    return Priced(np.array(expected_s).reshape(-1, world.depth), num_tokens)


def cost_errors(
    results: Sequence[RunResult], expected_s: Sequence[Floats]
) -> list[dict[str, float]]:
    """Return for each stage how far the costs are from what micro-batches took.

    Absolute relative errors (`median`, `p95`) and the relative error of the sum (`bias`), over all
    runs; beside them the machine's own spread (`median_repeat`, `p95_repeat`): how far the times of
    micro-batches of as many prefill and decode tokens are from the median of their like.
    """
    measured_s = np.concatenate([result.end_s - result.start_s for result in results])
    expected = np.concatenate(expected_s)
    tokens = np.concatenate(
        [np.column_stack([each.prefill_tokens, each.decode_tokens]) for each in results]
    )
    lines = []
    for stage in range(measured_s.shape[1]):
        repeats = repeat_errors(tokens, measured_s[:, stage])
        none = {"median": 0.0, "p95": 0.0}
        own = none | spread_of(repeats)
        apart = none | spread_of(np.abs(expected[:, stage] / measured_s[:, stage] - 1))
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
    """Return |measured / median of its shape - 1| of whatever has at least one like it."""
    by_shape = pd.Series(measured_s).groupby(list(shapes.T))
    apart = (measured_s / by_shape.transform("median") - 1).abs()
    return np.asarray(apart[by_shape.transform("size") > 1])


# -- end to end -----------------------------------------------------------------------------------


def compared(
    key: str,
    measured: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any],
    calibrated: Sequence[Mapping[str, Any]] = (),
) -> dict[str, float | None]:
    """Return one metric: the runs' mean, least and most, the simulator's, and its error.

    `error` is relative to the mean of the runs, and so is `spread`, from least to most; None where
    the mean is 0. `calibrated` is the mean of several simulations, `calibrated_spread` theirs.
    """
    values = np.array([summary[key] for summary in measured], dtype=float)
    mean = float(values.mean())

    def over_mean(value: float, less: int = 0) -> float | None:
        return float(value) / mean - less if mean else None

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
