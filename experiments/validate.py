"""How far the simulator is off: the same workload served for real, several times, and simulated.

Two layers apart. Structure: the simulator with the times that a real run measured, against that
run. End to end: the simulator as it is, against all runs. Knows no command line.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenflow.costs import BatchShape, StageCost
from evenflow.errors import UsageError
from evenflow.metrics import request_metrics, summarize
from evenflow.result import RunResult
from experiments.build import build
from experiments.real import Served, servable, serve
from experiments.runs import Job
from sim import simulate
from sim.world import Link, RuntimeOverheads, World

METRICS = (
    *(
        f"{value}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for value in ("mean", "p50", "p90", "p99")
    ),
    "output_throughput",
    "total_token_throughput",
    "busy_share",
    "duration",
)
"""What is compared, by its key in summary.json."""


class RecordedCost:
    """The times that a run measured, for micro-batches of as many tokens.

    A micro-batch gets the times of the run's next one with as many prefill and decode tokens, after
    the last of them the first again. Where the run had none, it gets what `otherwise` says, scaled
    by how much longer than that the measured ones took so far.
    """

    def __init__(self, recorded: RunResult, otherwise: StageCost) -> None:
        self.depth = recorded.depth
        self._otherwise = otherwise
        self._measured: dict[tuple[int, int], deque[list[float]]] = defaultdict(deque)
        self._sums_s = [0.0, 0.0]  # measured, and otherwise, of the same micro-batches
        tokens = zip(recorded.prefill_tokens.tolist(), recorded.decode_tokens.tolist(), strict=True)
        seconds = (recorded.end_s - recorded.start_s).tolist()
        for key, times in zip(tokens, seconds, strict=True):
            self._measured[key].append(times)

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage of the next micro-batch."""
        otherwise = self._otherwise.times(batch)
        alike = self._measured.get((batch.prefill_tokens, batch.decode_tokens))
        measured_s, otherwise_s = self._sums_s
        if alike is None:
            scale = measured_s / otherwise_s if otherwise_s else 1.0
            return [scale * seconds for seconds in otherwise]
        alike.rotate(-1)
        self._sums_s = [measured_s + sum(alike[-1]), otherwise_s + sum(otherwise)]
        return alike[-1]

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage of the next micro-batch."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self._otherwise.transfer_bytes(batch)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a real run adds to the work, in seconds, on average.

    `schedule_s`: from what made the driver ask (stage 0 free, a micro-batch back, an arrival) until
    stage 0 has the micro-batch. `hops_s`: from the end of a stage until the next has its input,
    without what the configuration's link takes for the bytes.
    """

    schedule_s: float
    hops_s: tuple[float, ...]


def measured_overheads(result: RunResult, world: World) -> Overheads:
    """Return what a run's times say of its overheads."""
    if not len(result.scheduled_s):
        return Overheads(0.0, (0.0,) * (result.depth - 1))
    causes_s = np.sort(np.concatenate([result.arrival_s, result.end_s[:, 0], result.returned_s]))
    latest = np.searchsorted(causes_s, result.scheduled_s, side="right") - 1
    caused_s = np.where(latest >= 0, causes_s[latest], result.scheduled_s)
    per_token_s = np.array([hop.per_token_s for hop in world.hops] or [0.0] * (result.depth - 1))
    tokens = result.prefill_tokens + result.decode_tokens
    hops_s = result.available_s[:, 1:] - result.end_s[:, :-1] - tokens[:, None] * per_token_s
    schedule_s = float(np.mean(result.available_s[:, 0] - caused_s))
    return Overheads(schedule_s, tuple(np.maximum(hops_s.mean(axis=0), 0.0).tolist()))


def with_measured_times(world: World, result: RunResult) -> World:
    """Return the world in which stages, links and driver take the times that a run measured."""
    overheads = measured_overheads(result, world)
    per_token_s = [hop.per_token_s for hop in world.hops] or [0.0] * (world.depth - 1)
    pairs = zip(per_token_s, overheads.hops_s, strict=True)
    return replace(
        world,
        costs=RecordedCost(result, world.costs),
        link=None,
        hop_links=tuple(Link(*pair) for pair in pairs),
        overheads=RuntimeOverheads(schedule_s=overheads.schedule_s),
    )


def validate(
    job: Job, runs: int, on_run: Callable[[int, Served], None] | None = None
) -> dict[str, Any]:
    """Serve a job `runs` times, simulate it, and return both layers, ready for JSON.

    `on_run` is called with the number of each run and what it came to. Raises KeyboardInterrupt
    when a run is interrupted, UsageError when one does not finish.
    """
    measured = []
    for number in range(runs):
        served = serve(job)
        if served.interrupted:
            raise KeyboardInterrupt
        if served.failure is not None:
            raise UsageError(f"run {number + 1} of {runs} did not finish: {served.failure}")
        if on_run is not None:
            on_run(number, served)
        measured.append(served)
    world = servable(build(job.config, job.workload.requests, job.beside, job.workload.texts))
    predicted = summarize(simulate(world))
    summaries = [served.outcome.summary for served in measured]
    layers = [structure_of(world, served.outcome.result) for served in measured]
    return {
        "runs": runs,
        "requests": len(world.requests),
        "end_to_end": {key: compared(key, summaries, predicted) for key in METRICS},
        "structure": {key: _mean(layer[key] for layer in layers) for key in layers[0]},
        "overheads": _overheads(world, measured),
        "provenance": measured[0].outcome.result.provenance,
    }


def compared(
    key: str, measured: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return one metric: the runs' mean, least and most, the simulator's, and its error.

    `error` is relative to the mean of the runs, and so is `spread`, from least to most; None where
    the mean is 0.
    """
    values = np.array([summary[key] for summary in measured], dtype=float)
    mean = float(values.mean())
    return {
        "measured": mean,
        "least": float(values.min()),
        "most": float(values.max()),
        "spread": float(np.ptp(values)) / mean if mean else None,
        "simulated": float(predicted[key]),
        "error": float(predicted[key]) / mean - 1 if mean else None,
    }


def structure_of(world: World, result: RunResult) -> dict[str, float]:
    """Return how far the simulator, given a run's own times, is from that run: relative errors."""
    again = simulate(with_measured_times(world, result))
    real, simulated = summarize(result), summarize(again)
    errors = {key: simulated[key] / real[key] - 1 for key in METRICS if real.get(key)}
    done = np.isfinite(result.completion_s)
    e2el_s = request_metrics(result).e2el_s[done]
    apart = np.abs(request_metrics(again).e2el_s[done] / e2el_s - 1)
    same = _same_batches(result, again)
    return errors | {
        "median_request_e2el": float(np.median(apart)),
        "p99_request_e2el": float(np.percentile(apart, 99)),
        "same_micro_batches": same,
    }


def _same_batches(one: RunResult, other: RunResult) -> float:
    """Return the share of micro-batches that hold the same numbers of tokens in both."""
    count = min(len(one.scheduled_s), len(other.scheduled_s))
    same = (one.prefill_tokens[:count] == other.prefill_tokens[:count]) & (
        one.decode_tokens[:count] == other.decode_tokens[:count]
    )
    return float(same.sum()) / max(len(one.scheduled_s), len(other.scheduled_s), 1)


def _overheads(world: World, measured: Sequence[Served]) -> dict[str, float]:
    found = [measured_overheads(served.outcome.result, world) for served in measured]
    return {
        "schedule_ms": 1e3 * _mean(each.schedule_s for each in found),
        "hop_ms": 1e3 * _mean(hop_s for each in found for hop_s in each.hops_s),
        "driver_ms": _mean(served.facts()["mean_driver_ms"] for served in measured),
    }


def _mean(values: Any) -> float:
    return float(np.mean(list(values) or [0.0]))
