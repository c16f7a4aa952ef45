"""Simulate one configuration and write its folder: for `simulate`, and for each in `compare`.

Knows the steps and their order; no command line and no other run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenflow.results.combine import merged
from evenflow.results.metrics import summarize
from evenflow.results.run import Columns, RunResult
from experiments.given_policy import GivenPolicy
from experiments.provenance import provenance, wall_clock
from experiments.report.tables import write_json, write_table
from experiments.run_file.build import Built, Workload, build
from experiments.run_file.run import RunConfig
from sim import simulate_replicas
from sim.counterfactual import counterfactuals

if TYPE_CHECKING:
    from experiments.report.data import Run

Save = Literal["summary", "requests", "all"]
"""How much is written of a run."""

STEADY_WINDOW = ("steady_start_s", "steady_stop_s")


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration to simulate on requests already made; `beside` is its file's folder.

    `policy` stands in for the one that the configuration names.
    """

    config: RunConfig
    workload: Workload
    beside: Path
    policy: GivenPolicy | None = None

    def built(self) -> Built:
        """Return what is simulated; UsageError for what cannot be."""
        requests, texts = self.workload.requests, self.workload.texts
        make = None if self.policy is None else self.policy.make
        return build(self.config, requests, self.beside, texts, make)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to: the result, its summary, and the wall seconds it took.

    `replicas` are the results of each pipeline; `result` is the only one, or all of them merged.
    """

    result: RunResult
    summary: dict[str, Any]
    wall_s: float
    replicas: tuple[RunResult, ...]


def run_job(job: Job, on_done: Callable[[int], None] | None = None) -> Outcome:
    """Simulate a job. `on_done` is called with the number of requests done."""
    started = time.perf_counter()
    built = job.built()
    results = simulate_replicas(built.world, on_done)
    source = {
        **provenance(job.config, job.workload.trace, built.cost_source),
        "deployment": built.deployment,
        **({} if job.policy is None else {"policy": job.policy.source()}),
    }
    replicas = tuple(replace(result, provenance=source) for result in results)
    result = replace(merged(replicas), provenance=source)
    summary = summarize(result, job.config.goodput)
    return Outcome(result, summary, time.perf_counter() - started, replicas)


def without_causes(job: Job, outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Simulate the job again without each cause of bubbles; return the summaries by cause."""
    worlds = counterfactuals(job.built().world, outcome.result)
    return {
        cause: summarize(merged(simulate_replicas(changed))) for cause, changed in worlds.items()
    }


def write_run(folder: Path, outcome: Outcome, label: str, save: Save, title: str) -> bool:
    """Write all that `save` asks for of a run; say whether there is a report.

    There is one with `all`, where the library is installed that draws it.
    """
    write_results(folder, outcome, save)
    if save != "all":
        return False
    runs = with_bubbles(outcome, label)
    write_details(folder, list(runs.values()))
    return write_page(folder, runs, title, outcome.result.provenance)


def write_page(
    folder: Path, runs: Mapping[str, Run], title: str, provenance: Mapping[str, Any]
) -> bool:
    """Write one report about all runs, where the library is installed that draws it; say so."""
    if not can_report():
        return False
    from experiments.report.run_page import write_report

    write_report(folder / "report.html", runs, title, provenance)
    return True


def write_results(
    folder: Path, outcome: Outcome, save: Save, more: Mapping[str, Any] | None = None
) -> None:
    """Write summary.json, with `more` in it; and unless only that is asked for, the requests and
    the wall clock."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        **outcome.summary,
        "request_goodput": outcome.summary.get("request_goodput"),  # null where nothing is limited
        **(more or {}),
        "provenance": outcome.result.provenance,
    }
    write_json(folder / "summary.json", summary)
    if save != "summary":
        _write_tables(folder, outcome.result.tables(), "requests", "transfers")
        write_json(folder / "wall_clock.json", wall_clock(outcome.wall_s))


def with_bubbles(outcome: Outcome, label: str) -> dict[str, Run]:
    """Return the run of each pipeline with its idle time by cause, as the report wants it.

    One pipeline is called `label`; replicas have a number besides.
    """
    from evenflow.results.bubbles import attribute
    from experiments.report.data import Run

    result, summary = outcome.result, outcome.summary
    if len(outcome.replicas) == 1:
        steady = {key: value for key, value in summary.items() if key in STEADY_WINDOW}
        pools = {name: Run(pool, steady, attribute(pool)) for name, pool in result.pools.items()}
        return {label: Run(result, summary, attribute(result), pools)}
    return {
        f"{label}, replica {index}": Run(replica, summarize(replica), attribute(replica))
        for index, replica in enumerate(outcome.replicas)
    }


def write_details(folder: Path, runs: Sequence[Run]) -> None:
    """Write the tables of micro-batches, stages and bubbles, and the timeline.

    Replicas have a folder each, and so have the pools of a system, with the requests as the pool
    saw them.
    """
    from experiments.report.timeline import write_timeline

    for index, run in enumerate(runs):
        part = folder if len(runs) == 1 else folder / f"replica-{index}"
        pools = {part / name: pool for name, pool in run.pools.items()}
        for place, pipeline in (pools or {part: run}).items():
            place.mkdir(parents=True, exist_ok=True)
            names = ["batches", "stages", "bubbles", *(["requests"] if pools else [])]
            _write_tables(place, pipeline.tables(), *names)
            write_timeline(place / "timeline.json.gz", pipeline.result, pipeline.bubbles)


def _write_tables(folder: Path, tables: Mapping[str, Columns], *names: str) -> None:
    """Write those of the tables that there are, each as a file of its name."""
    for name in names:
        if name in tables:
            write_table(folder / f"{name}.csv", tables[name])


def can_report() -> bool:
    """Say whether the report's plotting library is installed."""
    return find_spec("plotly") is not None
