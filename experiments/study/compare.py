"""Simulate several schedulers on the same requests, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from evenflow.errors import UsageError
from evenflow.schedulers import POLICIES, POOLED
from experiments.outcome import Outcome
from experiments.report.tables import Format, write_summaries
from experiments.run_file.build import load_workload, reads_text
from experiments.run_file.run import RunConfig, with_
from experiments.run_file.yaml_file import Patch, value_of
from experiments.runs import GivenPolicy, Job, Save, run_job, write_page, write_run
from experiments.study.points import processes
from experiments.systems import System, systems

if TYPE_CHECKING:
    from ctypes import Array, c_long

    from matplotlib.figure import Figure

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """What schedulers came to, in the order given."""

    outcomes: Sequence[Outcome]

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """The summary of each scheduler by label."""
        return {outcome.label: outcome.summary for outcome in self.outcomes}

    @property
    def runs(self) -> dict[str, Outcome]:
        """The run of each pipeline by name."""
        return {name: run for outcome in self.outcomes for name, run in outcome.parts.items()}

    @property
    def table(self) -> pd.DataFrame:
        """A row a scheduler, in the order given; the numbers of its summary."""
        return pd.DataFrame.from_dict(self.summaries, orient="index").rename_axis("scheduler")

    def draw(self) -> Figure:
        """Return a figure, a row a run: tokens of micro-batches in a row, shares of stage time."""
        from experiments.report.plots import draw_comparison

        return draw_comparison(self.runs)

    def write(self, folder: Path, title: str) -> None:
        """Write comparison.csv and report.html."""
        write_summaries(folder / "comparison.csv", "scheduler", self.summaries)
        sources = {name: run.result.provenance for name, run in self.runs.items()}
        write_page(folder, self.runs, title, sources)


def parse_schedulers(text: str) -> list[object]:
    """Return the entries of a comma-separated list of schedulers.

    An entry is a name, `module:Class`, or a mapping such as `{name: sarathi, token_budget: 2048}`.
    """
    try:
        return list(value_of(f"[{text}]", "--schedulers"))
    except UsageError:
        raise UsageError(
            f"--schedulers {text}: should be like sarathi,{{name: sarathi, token_budget: 64}}"
        ) from None


def line_up(entries: Sequence[object], config: RunConfig, beside: Path) -> list[Job]:
    """Return a job for each scheduler or system on the same requests; UsageError for any mistake.

    A bare name that the configuration has too keeps the parameters given there.
    """
    patches = [_patch(entry, config) for entry in entries]
    labels = [label for label, _ in patches]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"--schedulers, --systems: {label} is there twice")
    if not entries:
        raise UsageError(
            "--schedulers, --systems: nothing is named; give at least one, like "
            "--schedulers sarathi,token_throttling"
        )
    configs = [with_(config, patch) for _, patch in patches]
    workload = load_workload(configs[0], beside, keep_text=any(map(reads_text, configs)))
    jobs = [
        Job(own, workload, beside, entry if isinstance(entry, GivenPolicy) else None, label)
        for entry, own, label in zip(entries, configs, labels, strict=True)
    ]
    for job in jobs:
        job.built()
    return jobs


def _patch(entry: object, config: RunConfig) -> tuple[str, Patch]:
    if isinstance(entry, GivenPolicy):
        return entry.label, {"scheduler": {"name": entry.name}}
    if isinstance(entry, System):
        return entry.name, entry.patch()
    if isinstance(entry, str):
        _refuse_system(entry)
        return entry, {} if entry == config.scheduler.name else {"scheduler": {"name": entry}}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise UsageError(f"--schedulers: {entry!r} should be a name, or a mapping with a name")
    params = {str(key): value for key, value in entry.items() if key != "name"}
    listed = ",".join(f"{key}={value}" for key, value in params.items())
    label = f"{entry['name']}({listed})" if listed else entry["name"]
    return label, {"scheduler": {"name": entry["name"], **params}}


def _refuse_system(name: str) -> None:
    """UsageError for the name or title of a published system that is no policy's name."""
    for system in systems():
        own = (system.name, system.title.casefold())
        if name not in (*POLICIES, *POOLED) and name.casefold() in own:
            raise UsageError(f"--schedulers {name}: is a system; --systems {system.name} is right")


def run_all(
    jobs: Sequence[Job],
    folder: Path | None = None,
    save: Save = "all",
    on_progress: Callable[[Sequence[int]], None] | None = None,
    form: Format = "csv",
) -> Comparison:
    """Simulate all jobs, each in a process of its own, and write a folder of each.

    A policy that Python gave, which another process may not find, runs in this one. `folder` None:
    nothing is written. `on_progress` is called now and then with the number of requests done by
    each. `form`: the format of the tables of each.
    """
    tell = on_progress or (lambda counts: None)
    done = multiprocessing.get_context("spawn").RawArray("l", len(jobs))
    workers = min(len(jobs), os.cpu_count() or 1)
    _Worker.done = done  # for policies that run in this process
    with processes(workers, _count_in, done) as pool:
        futures = {
            index: pool.submit(_run_one, index, job, folder, save, form)
            for index, job in enumerate(jobs)
            if job.policy is None
        }
        try:
            _watch(list(futures.values()), lambda: tell(list(done)))
        except BrokenProcessPool:
            raise UsageError(
                "a scheduler's process died; the machine may be out of memory: try fewer requests"
            ) from None
        outcomes = [
            futures[index].result()
            if index in futures
            else _run_one(index, job, folder, save, form)
            for index, job in enumerate(jobs)
        ]
    return Comparison(outcomes)


def _watch(futures: Sequence[Future[Any]], tell: Callable[[], None]) -> None:
    """Wait until all are done, or until one has failed."""
    pending: set[Future[Any]] = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=POLL_S, return_when="FIRST_COMPLETED")
        for future in finished:
            future.result()
        tell()


class _Worker:
    """Where a worker process says how far it is; shared memory cannot be sent with a task."""

    done: Array[c_long]


def _count_in(done: Array[c_long]) -> None:
    _Worker.done = done


def _run_one(index: int, job: Job, folder: Path | None, save: Save, form: Format) -> Outcome:
    def on_done(count: int) -> None:
        _Worker.done[index] = count

    outcome = run_job(job, on_done)
    for run in outcome.parts.values():
        _ = run.idle  # found here, where it keeps nobody waiting
    if folder is not None:
        write_run(folder / job.folder, outcome, save, form=form)
    return outcome
