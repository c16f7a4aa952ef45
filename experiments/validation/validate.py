"""How far the simulator is off: the same workload served for real, several times, and simulated.

A calibration run may come first: other requests, much fewer, served for real, whose driver and
message times a second prediction then uses. Knows no command line; the layers are in
`experiments.validation.layers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenflow.errors import UsageError
from evenflow.replay import Entry
from evenflow.results.run import RunResult
from experiments.real import servable, serve_job
from experiments.run_file.build import build, load_workload
from experiments.runs import Job
from experiments.validation.layers import (
    METRICS,
    bubble_shares,
    compared,
    cost_errors,
    expected_seconds,
    metric_errors,
    structure_errors,
    structure_of,
    summary_of,
)
from experiments.validation.measured_times import Times, drawn, measured_times
from runtime import Served
from sim import World, simulate, simulate_timed

DRAWS = 5
"""So many simulations, each with a seed of its own, share a calibrated prediction."""

Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]
"""Given the name of a run and how many requests it has, watches it: takes the counts done."""


def unwatched(name: str, total: int) -> AbstractContextManager[None]:
    """Watch nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Measured:
    """One real run: what it came to, its journal and times, the load average before and after."""

    served: Served
    journal: list[Entry]
    times: Times
    load: tuple[float, float]

    @property
    def result(self) -> RunResult:
        return self.served.result


@dataclass(frozen=True, slots=True)
class Validation:
    """What a validation came to. `found` is ready for JSON.

    `measured` is the first real run, `again` that run simulated from its own times, `predicted` the
    prediction of it: calibrated, if there was a calibration.
    """

    found: dict[str, Any]
    measured: RunResult
    again: RunResult
    predicted: RunResult


def validate(job: Job, runs: int, calibration: int = 0, watch: Watch = unwatched) -> Validation:
    """Serve a job `runs` times, simulate it, and return the three layers.

    `calibration`: before that, so many requests of the same kind, drawn with another seed, are
    served for real, for the times of the driver and of messages. Raises KeyboardInterrupt when a
    run is interrupted, UsageError when one does not finish.
    """
    around = None
    if calibration:
        around = _measure(calibration_job(job, calibration), "calibration", watch)
    measured = [_measure(job, f"run {number + 1} of {runs}", watch) for number in range(runs)]
    world = _world(job)
    plain = simulate(world)
    calibrated = []
    if around is not None:
        timings = (drawn(around.times, world.costs, seed) for seed in range(DRAWS))
        calibrated = [simulate_timed(world, timing) for timing in timings]
    structures = [structure_of(world, each.result, each.times) for each in measured]
    results = [each.result for each in measured]
    summaries = [summary_of(result) for result in results]
    drawn_summaries = [summary_of(result) for result in calibrated]
    predicted = summary_of(plain)
    shares = {"measured": results, "simulated": [plain], "calibrated": calibrated}
    found = {
        "scheduler": job.config.scheduler.name,
        "runs": runs,
        "requests": len(world.requests),
        "end_to_end": {
            key: compared(key, summaries, predicted, drawn_summaries) for key in METRICS
        },
        "structure": [
            structure_errors(each.result, structure) | {"at_once": _at_once(world, each)}
            for each, structure in zip(measured, structures, strict=True)
        ],
        "costs": cost_errors(results, [expected_seconds(world, each.journal) for each in measured]),
        "bubbles": {name: bubble_shares(some) for name, some in shares.items() if some},
        "overheads": _overheads(measured),
        "calibration": None if around is None else _calibration(around),
        "seconds": sum(each.served.wall_s for each in measured),
        "load": [each.load for each in measured],
        "provenance": results[0].provenance,
    }
    prediction = calibrated[0] if calibrated else plain
    return Validation(found, results[0], structures[0].again, prediction)


def calibration_job(job: Job, requests: int) -> Job:
    """Return a short job of the same kind: as many requests, drawn with the next seed."""
    seed = job.config.workload.seed + 1
    available = min(requests, len(job.workload.requests))
    workload = job.config.workload.model_copy(update={"requests": available, "seed": seed})
    config = job.config.model_copy(update={"workload": workload})
    return replace(job, config=config, workload=load_workload(config, job.beside))


def _measure(job: Job, name: str, watch: Watch) -> Measured:
    journal: list[Entry] = []
    before = os.getloadavg()[0]
    with watch(name, len(job.workload.requests)) as on_done:
        served = serve_job(job, on_done, journal.append)
        if served.interrupted:
            raise KeyboardInterrupt
        if served.failure is not None:
            raise UsageError(f"{name} did not finish: {served.failure}")
    times = measured_times(served, _world(job))
    return Measured(served, journal, times, (before, os.getloadavg()[0]))


def _at_once(world: World, each: Measured) -> dict[str, float]:
    """Return the errors of structure if stages took no time before they start."""
    at_once = replace(each.times, prepare_s=0 * each.times.prepare_s)
    return metric_errors(each.result, structure_of(world, each.result, at_once).again)


def _world(job: Job) -> World:
    return servable(build(job.config, job.workload.requests, job.beside, job.workload.texts))


def _overheads(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the mean times around the stages, in ms; `driver_ms` of them the driver computes."""
    found = [each.times for each in measured]
    return {
        "freed_ms": 1e3 * _mean([times.freed_s for times in found]),
        "returned_ms": 1e3 * _mean([times.returned_s for times in found]),
        "schedule_ms": 1e3 * _mean([times.schedule_s for times in found]),
        "prepare_ms": 1e3 * _mean([times.prepare_s.ravel() for times in found]),
        "hop_ms": 1e3 * _mean([times.hops_s.ravel() for times in found]),
        "driver_ms": 1e3 * _mean([np.asarray(each.served.driver_s) for each in measured]),
    }


def _calibration(around: Measured) -> dict[str, Any]:
    return {
        "requests": len(around.result.request_id),
        "micro_batches": len(around.result.scheduled_s),
        "seed": around.result.provenance["config"]["workload"]["seed"],
        "seconds": around.served.wall_s,
        **_overheads([around]),
    }


def _mean(columns: Sequence[np.ndarray]) -> float:
    values = np.concatenate(columns)
    return float(values.mean()) if len(values) else 0.0
