"""Simulate one configuration and write its folder: for `simulate`, and for each in `compare`.

Knows the steps and their order; no command line and no other run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow.config import RunConfig
from evenflow.metrics import summarize
from evenflow.result import RunResult
from experiments import outputs
from experiments.build import Workload, build
from experiments.provenance import provenance, wall_clock
from sim import simulate
from sim.counterfactual import counterfactuals

if TYPE_CHECKING:
    from experiments.report_data import Run


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration to simulate on requests already made; `beside` is its file's folder."""

    config: RunConfig
    workload: Workload
    beside: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to: the result, its summary, and the wall seconds it took."""

    result: RunResult
    summary: dict[str, Any]
    wall_s: float


def run_job(job: Job, on_done: Callable[[int], None] | None = None) -> Outcome:
    """Simulate a job. `on_done` is called with the number of requests done."""
    started = time.perf_counter()
    built = build(job.config, job.workload.requests, job.beside)
    result = simulate(built.world, on_done)
    source = {
        **provenance(job.config, job.workload.trace, built.cost_source),
        "deployment": built.deployment,
    }
    summary = summarize(result)
    return Outcome(replace(result, provenance=source), summary, time.perf_counter() - started)


def without_causes(job: Job, outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Simulate the job again without each cause of bubbles; return the summaries by cause."""
    world = build(job.config, job.workload.requests, job.beside).world
    worlds = counterfactuals(world, outcome.result)
    return {cause: summarize(simulate(changed)) for cause, changed in worlds.items()}


def write_results(folder: Path, outcome: Outcome, save: outputs.Save) -> None:
    """Write summary.json, and requests.csv unless only the summary is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        **outcome.summary,
        "provenance": outcome.result.provenance,
        "wall_clock": wall_clock(outcome.wall_s),
    }
    outputs.write_json(folder / "summary.json", summary)
    if save != "summary":
        outputs.write_requests(folder / "requests.csv", outcome.result)


def with_bubbles(outcome: Outcome) -> Run:
    """Return the run with its idle time by cause, as the report and the tables want it."""
    from evenflow.bubbles import attribute
    from experiments.report_data import Run

    return Run(outcome.result, outcome.summary, attribute(outcome.result))


def write_details(folder: Path, run: Run) -> None:
    """Write the tables of micro-batches, stages and bubbles, and the timeline."""
    from experiments.timeline import write_timeline

    outputs.write_batches(folder / "batches.csv", run.result)
    outputs.write_stages(folder / "stages.csv", run.result)
    outputs.write_bubbles(folder / "bubbles.csv", run.bubbles)
    write_timeline(folder / "timeline.json.gz", run.result, run.bubbles)


def can_report() -> bool:
    """Say whether the report's plotting library is installed."""
    return find_spec("plotly") is not None
