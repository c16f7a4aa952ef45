"""Simulate several schedulers on the same requests, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from evenflow.errors import UsageError
from experiments.given_policy import GivenPolicy
from experiments.report.tables import write_summaries
from experiments.run_file.build import load_workload, reads_text
from experiments.run_file.run import RunConfig, with_
from experiments.run_file.yaml_file import Loader, Patch
from experiments.runs import (
    Job,
    Save,
    run_job,
    with_bubbles,
    write_details,
    write_page,
    write_results,
)
from experiments.study.executors import processes

if TYPE_CHECKING:
    from ctypes import Array, c_long

    from matplotlib.figure import Figure

    from experiments.report.data import Run

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Contender:
    """A scheduler to compare: its name in tables, and its job."""

    label: str
    job: Job

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", self.label).strip("-")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What schedulers came to, by label: their summaries, and the run of each pipeline."""

    summaries: dict[str, dict[str, Any]]
    runs: dict[str, Run]

    @property
    def table(self) -> pd.DataFrame:
        """A row a scheduler, in the order given; the numbers of its summary."""
        return pd.DataFrame.from_dict(self.summaries, orient="index").rename_axis("scheduler")

    def draw(self) -> Figure:
        """Return a figure, a row a run: tokens of micro-batches in a row, shares of stage time."""
        from experiments.report.draw_comparison import draw_comparison

        return draw_comparison(self.runs)

    def write(self, folder: Path, title: str) -> bool:
        """Write comparison.csv and, where its library is installed, report.html; say if it is."""
        write_summaries(folder / "comparison.csv", "scheduler", self.summaries)
        sources = {name: run.result.provenance for name, run in self.runs.items()}
        return write_page(folder, self.runs, title, sources)


def parse_schedulers(text: str, config: RunConfig) -> dict[str, RunConfig]:
    """Return a configuration for each scheduler in a comma-separated list, by label.

    An entry is a name, `module:Class`, or a mapping such as `{name: sarathi, token_budget: 2048}`.
    A bare name that the configuration has too keeps the parameters given there.
    """
    try:
        entries = yaml.load(f"[{text}]", Loader)
    except yaml.YAMLError:
        raise UsageError(
            f"--schedulers {text}: should be like sarathi,{{name: sarathi, token_budget: 64}}"
        ) from None
    return with_schedulers(entries, config)


def with_schedulers(entries: Sequence[object], config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration with each scheduler, by label: its name and its parameters."""
    configs: dict[str, RunConfig] = {}
    for entry in entries:
        label, patch = _patch(entry, config)
        if label in configs:
            raise UsageError(f"--schedulers: {label} is there twice")
        configs[label] = with_(config, patch)
    if not configs:
        raise UsageError("--schedulers: names no scheduler; give at least one")
    return configs


def _patch(entry: object, config: RunConfig) -> tuple[str, Patch]:
    if isinstance(entry, GivenPolicy):
        return entry.label, {"scheduler": {"name": entry.name}}
    if isinstance(entry, str):
        return entry, {} if entry == config.scheduler.name else {"scheduler": {"name": entry}}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise UsageError(f"--schedulers: {entry!r} should be a name, or a mapping with a name")
    params = {str(key): value for key, value in entry.items() if key != "name"}
    listed = ",".join(f"{key}={value}" for key, value in params.items())
    label = f"{entry['name']}({listed})" if listed else entry["name"]
    return label, {"scheduler": {"name": entry["name"], **params}}


def line_up(
    configs: Mapping[str, RunConfig],
    beside: Path,
    policies: Mapping[str, GivenPolicy] = MappingProxyType({}),
) -> list[Contender]:
    """Make the requests once, and find mistakes in any configuration before the first run.

    `policies` were given as classes or objects, by label.
    """
    texts = any(map(reads_text, configs.values()))
    workload = load_workload(next(iter(configs.values())), beside, keep_text=texts)
    contenders = [
        Contender(label, Job(config, workload, beside, policies.get(label)))
        for label, config in configs.items()
    ]
    for contender in contenders:
        contender.job.built()
    return contenders


def run_all(
    contenders: Sequence[Contender],
    folder: Path | None = None,
    save: Save = "all",
    on_progress: Callable[[Sequence[int]], None] | None = None,
) -> Comparison:
    """Simulate all contenders, each in a process of its own, and write a folder of each.

    A policy that Python gave, which another process may not find, runs in this one. `folder` None:
    nothing is written. `on_progress` is called now and then with the number of requests done by
    each.
    """
    tell = on_progress or (lambda counts: None)
    done = multiprocessing.get_context("spawn").RawArray("l", len(contenders))
    workers = min(len(contenders), os.cpu_count() or 1)
    _Worker.done = done  # for policies that run in this process
    with processes(workers, _count_in, done) as pool:
        futures = {
            index: pool.submit(_run_one, index, contender, folder, save)
            for index, contender in enumerate(contenders)
            if contender.job.policy is None
        }
        try:
            _watch(list(futures.values()), lambda: tell(list(done)))
        except BrokenProcessPool:
            raise UsageError(
                "a scheduler's process died; the machine may be out of memory: try fewer requests"
            ) from None
        outcomes = [
            futures[index].result() if index in futures else _run_one(index, one, folder, save)
            for index, one in enumerate(contenders)
        ]
    labels = [contender.label for contender in contenders]
    return Comparison(
        {label: summary for label, (summary, _) in zip(labels, outcomes, strict=True)},
        {name: run for _, runs in outcomes for name, run in runs.items()},
    )


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


def _run_one(
    index: int, contender: Contender, folder: Path | None, save: Save
) -> tuple[dict[str, Any], dict[str, Run]]:
    def on_done(count: int) -> None:
        _Worker.done[index] = count

    outcome = run_job(contender.job, on_done)
    runs = with_bubbles(outcome, contender.label)
    if folder is not None:
        write_results(folder / contender.folder, outcome, save)
        if save == "all":
            write_details(folder / contender.folder, list(runs.values()))
    return outcome.summary, runs
