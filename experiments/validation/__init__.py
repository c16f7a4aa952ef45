"""Errors of the simulator: the same workload served for real, several times, and simulated.

A calibration run may come first: other requests, much fewer, served for real. A second prediction
takes its driver and message times. Knows no command line; what is compared is in
`evenflow.experiments.validation.layers`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from evenflow.config.run import with_
from evenflow.core.batcher import Batcher
from evenflow.core.replay import Entry, replay
from evenflow.engines.pools import PooledWorld
from evenflow.engines.recovery import Lives
from evenflow.errors import PolicyError, UsageError
from evenflow.experiments.validation import layers
from evenflow.experiments.validation.faults import MortalDriver
from evenflow.results.run import Floats, RunResult, merged
from evenflow.runtime.kinds import servable
from evenflow.runtime.real import check_comparable, real_workload, recorded, serve_job
from evenflow.runtime.serve import LAST, ServedRun, ServeOptions, engine_names, engines_of, names_of
from evenflow.runtimes import RuntimeOverheads
from evenflow.sim import Link, World, simulate_replicas
from evenflow.sim.timed import simulate_timed
from evenflow.study.runs import Job
from evenflow.sums import plain_sum

NO_TIMES = "vLLM tells no times of its stages: no structure, costs and bubbles"
DISTURBED = "processes act on its stages: no structure, costs and bubbles"

DRAWS = 5
"""The simulations, with different seeds, that make one calibrated prediction."""

AROUND_MS = {
    "freed_ms": "freed_s",
    "returned_ms": "returned_s",
    "schedule_ms": "schedule_s",
    "prepare_ms": "prepare_s",
    "hop_ms": "hops_s",
}
"""What the mean of each column of Times around the stages is called."""

Load = tuple[float, float]
"""The load of the machine before a run and after it."""

_Journals = defaultdict[str | None, list[Entry]]
"""What was recorded, by pool; of one pipeline under None."""

Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]
"""Given the name of a run and how many requests it has, watches it: takes the counts done."""


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The outcome of one pipeline of a real run, its times, and the predicted costs.

    `world` has the requests that were its own (that of a pool has none).
    """

    world: World
    served: ServedRun
    expected_s: Floats
    times: layers.Times

    @property
    def result(self) -> RunResult:
        return self.served.result


@dataclass(frozen=True, slots=True)
class RealRun:
    """One real run, that of each of its pipelines, and the load before and after."""

    served: ServedRun
    parts: list[PipelineRun]
    load: Load

    def again(self, system: World | PooledWorld, *, late: bool = True) -> list[layers.Structure]:
        """Simulate replicas or pools from measured times; unless `late`, stages start at once."""
        times = [part.times if late else part.times.at_once() for part in self.parts]
        if isinstance(system, PooledWorld):
            return [layers.structure_of(system, self.served.result, *times)]
        pairs = zip(self.parts, times, strict=True)
        return [layers.structure_of(part.world, part.result, own) for part, own in pairs]


@dataclass(frozen=True, slots=True)
class Validation:
    """The results of a validation. `found` is ready for JSON.

    `measured` is the first real run. `again` is that run simulated from its own times (None where a
    run has none of its stages). `predicted` is the prediction of it, calibrated if there was a
    calibration.
    """

    found: dict[str, Any]
    measured: RunResult
    again: RunResult | None
    predicted: RunResult


def validate(
    job: Job, runs: int, calibration: int = 0, watch: Watch = lambda *_: nullcontext()
) -> Validation:
    """Serve a job `runs` times, simulate it, and return the three layers.

    `calibration`: before that, this many requests of the same kind, drawn with another seed, are
    served for real. They give the times of the driver and of messages. Raises KeyboardInterrupt
    when a run is interrupted, UsageError when one does not finish.
    """
    check_comparable(job)
    if job.config.workers.kind == "vllm":
        return _without_stages(job, runs, watch, NO_TIMES)
    around = None
    if calibration:
        around = _measure(calibration_job(job, calibration), "calibration", watch)
    if job.config.processes:
        return _without_stages(job, runs, watch, DISTURBED, around)
    measured = [_measure(job, f"run {number + 1} of {runs}", watch) for number in range(runs)]
    world = _system(job)
    parts = [part for run in measured for part in run.parts]
    again = [run.again(world) for run in measured]
    at_once = [run.again(world, late=False) for run in measured]
    results = {
        "measured": [[each.measured for each in of] for of in again],
        "simulated": [simulate_replicas(world)],
    }
    if around is not None:
        results["calibrated"] = [_calibrated(world, around, seed) for seed in range(DRAWS)]
    summaries = {
        name: [layers.summary_of(merged(of)) for of in some] for name, some in results.items()
    }
    lines = summaries["measured"], summaries["simulated"][0], summaries.get("calibrated", ())
    found = {
        "requests": len(world.requests),
        "failed": lines[1]["failed"],
        "end_to_end": {key: layers.compared(key, *lines) for key in layers.METRICS},
        "structure": [
            layers.structure_errors(each)
            | {"at_once": layers.metric_errors(other.measured, other.again)}
            for each, other in zip(chain(*again), chain(*at_once), strict=True)
        ],
        "costs": [
            line
            for alike in _alike(world, measured)
            for line in layers.cost_errors([p.result for p in alike], [p.expected_s for p in alike])
        ],
        "bubbles": {name: layers.bubble_shares([*chain(*some)]) for name, some in results.items()},
        "overheads": _overheads(parts),
        "calibration": None if around is None else _calibration(around),
    }
    first = merged([each.again for each in again[0]])
    prediction = merged(results.get("calibrated", results["simulated"])[0])
    served = [(run.served, run.load) for run in measured]
    return _validation(job, served, found, first, prediction)


def _without_stages(
    job: Job, runs: int, watch: Watch, why: str, around: RealRun | None = None
) -> Validation:
    """Return the layers of runs whose stage times say nothing, and `why`: decisions, end to end.

    Raises PolicyError when a run's decisions, replayed, differ from the recorded ones.
    """
    built, served = job.built(), []
    for number in range(runs):
        journals = _Journals(list)
        served.append(_serve(job, f"run {number + 1} of {runs}", watch, journals))
        for pool, journal in journals.items():
            engine = cast("Batcher", Lives(partial(recorded, built, pool)))
            if (difference := replay(journal, engine)) is not None:
                raise PolicyError(f"a recorded run does not replay: {difference}")
    predicted = merged(job.simulate(built.world))
    lines: list[Any] = [
        [layers.summary_of(each.result) for each, _ in served],
        layers.summary_of(predicted),
    ]
    if around is not None:
        predicted = merged(job.simulate(_held_up(servable(built), around)))
        lines.append([layers.summary_of(predicted)])
    names = [key for key in layers.METRICS if key not in ("busy_share", "bubble_share")]
    found = {
        "requests": len(built.world.requests),
        "failed": lines[1]["failed"],
        "decisions": [len(each.result.scheduled_s) for each, _ in served],
        "end_to_end": {key: layers.compared(key, *lines) for key in names},
        "calibration": None if around is None else _calibration(around),
        "left_out": why,
    }
    return _validation(job, served, found, None, predicted)


def _validation(
    job: Job,
    served: Sequence[tuple[ServedRun, Load]],
    found: Mapping[str, Any],
    again: RunResult | None,
    predicted: RunResult,
) -> Validation:
    first = served[0][0].result
    facts = {
        "scheduler": job.config.scheduler.name,
        "runs": len(served),
        **found,
        "seconds": plain_sum(each.wall_s for each, _ in served),
        "load": [load for _, load in served],
        "provenance": first.provenance,
    }
    return Validation(facts, first, again, predicted)


def calibration_job(job: Job, requests: int) -> Job:
    """Return a short job of the same kind: as many requests, drawn with the next seed."""
    fewer = min(requests, len(job.workload.requests))
    seed = job.config.workload.seed + 1
    changes = {"workload.requests": fewer, "workload.seed": seed, "processes": None}
    config = with_(job.config, changes)
    return job._replace(config=config, workload=real_workload(config, job.beside))


def _measure(job: Job, name: str, watch: Watch) -> RealRun:
    journals = _Journals(list)
    served, load = _serve(job, name, watch, journals)
    world = _system(job)
    if isinstance(world, PooledWorld):
        parts = [
            _part(getattr(world, name), each, [journals[name]], keeps_pages=name != LAST)
            for name, each in zip(served.result.pools, served.pipelines, strict=True)
        ]
    elif served.pipelines:
        parts = [
            _part(_alone(world, each), each, [journals[key] for key in engine_names(world, name)])
            for each, name in zip(served.pipelines, names_of(world), strict=True)
        ]
    else:
        parts = [_part(world, served, [*journals.values()])]
    return RealRun(served, parts, load)


def _system(job: Job) -> World | PooledWorld:
    world = job.built().world
    return world if isinstance(world, PooledWorld) else servable(job.built())


def _part(
    world: World,
    served: ServedRun,
    journals: Sequence[Sequence[Entry]],
    *,
    keeps_pages: bool = False,
) -> PipelineRun:
    expected_s, num_tokens = layers.priced(world, journals, keeps_pages=keeps_pages)
    return PipelineRun(world, served, expected_s, layers.measured_times(served, world, num_tokens))


def _alone(world: World, served: ServedRun) -> World:
    """Return the world of one replica, with the requests that it got when it got them."""
    own = {*served.result.request_id.tolist()}
    requests = [request for request in world.requests if request.request_id in own]
    return replace(world, requests=requests, replicas=1, concurrency=None)


def _serve(job: Job, name: str, watch: Watch, journals: _Journals) -> tuple[ServedRun, Load]:
    """Serve a job, and return beside it the load of the machine before and after."""
    before = os.getloadavg()[0]
    options = ServeOptions(record=lambda pool: journals[pool].append)
    if made := job.joining():
        engines = partial(engines_of, servable(job.built()), options.record)
        seed = job.config.workload.seed
        mortal = partial(MortalDriver, made=made, seed=seed, make_engines=engines)
        options = replace(options, mortal=mortal)
    with watch(name, len(job.workload.requests)) as on_done:
        served = serve_job(job, on_done, options)
        if served.interrupted:
            raise KeyboardInterrupt
        if served.failure is not None:
            raise UsageError(f"{name} did not finish: {served.failure}")
    return served, (before, os.getloadavg()[0])


def _calibrated(world: World | PooledWorld, around: RealRun, seed: int) -> list[RunResult]:
    """Simulate a job with times around the stages, and of the link, drawn from those of a run."""
    if isinstance(world, PooledWorld):
        transfers = around.served.result.transfers
        assert transfers is not None
        timings = [
            layers.drawn(part.times, part.world.costs, seed + DRAWS * index)
            for index, part in enumerate(around.parts)
        ]
        linked = replace(world, link=layers.drawn_link(world.link, transfers, seed))
        return [simulate_timed(linked, *timings)]
    times = layers.joined_times([part.times for part in around.parts])
    return simulate_replicas(world, timing=layers.drawn(times, world.costs, seed))


def _held_up(world: World, around: RealRun) -> World:
    """Return the world where every micro-batch takes the mean times around the stages of a run.

    The driver's go into `schedule_s`, what messages take into the latency of the links.
    """
    mean_s = {key: 1e-3 * around_ms for key, around_ms in _overheads(around.parts).items()}
    hops = max(world.depth - 1, 1)
    late_s = mean_s["hop_ms"] + (world.depth * mean_s["prepare_ms"] + mean_s["returned_ms"]) / hops
    overheads = RuntimeOverheads(schedule_s=mean_s["schedule_ms"])
    return replace(
        world, overheads=overheads, link=(world.link or Link(0.0, 0.0))._replace(latency_s=late_s)
    )


def _alike(world: World | PooledWorld, runs: Sequence[RealRun]) -> Sequence[Sequence[PipelineRun]]:
    """Return the pipelines that have the same stages: of each pool those of all runs, or all."""
    if isinstance(world, PooledWorld):
        return [*zip(*(run.parts for run in runs), strict=True)]
    return [[part for run in runs for part in run.parts]]


def _overheads(measured: Sequence[PipelineRun]) -> dict[str, float]:
    """Return the mean times around the stages, in ms; `driver_ms` of them the driver computes."""
    parts = {
        name: [getattr(run.times, column).ravel() for run in measured]
        for name, column in AROUND_MS.items()
    }
    parts["driver_ms"] = [np.asarray(run.served.heard.driver_s) for run in measured]
    columns = {name: np.concatenate(each) for name, each in parts.items()}
    return {name: 1e3 * float(c.mean()) if len(c) else 0.0 for name, c in columns.items()}


def _calibration(around: RealRun) -> dict[str, Any]:
    result = around.served.result
    return {
        "requests": len(result.request_id),
        "micro_batches": len(result.scheduled_s),
        "seed": result.provenance["config"]["workload"]["seed"],
        "seconds": around.served.wall_s,
        **_overheads(around.parts),
    }
