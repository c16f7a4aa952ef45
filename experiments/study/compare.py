"""Simulate several schedulers on the same requests, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evenflow.errors import UsageError
from experiments.report.outputs import Save
from experiments.run_file.build import build, load_workload, reads_text
from experiments.run_file.run import RunConfig, SchedulerConfig
from experiments.run_file.yaml_file import Loader
from experiments.runs import Job, run_job, with_bubbles, write_details, write_results

if TYPE_CHECKING:
    from ctypes import Array, c_long

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
class Contest:
    """What a contender came to: its summary, and the run of each of its pipelines by name."""

    summary: dict[str, Any]
    runs: dict[str, Run]


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
    found: dict[str, RunConfig] = {}
    for entry in entries:
        label, scheduler = _scheduler(entry, config)
        if label in found:
            raise UsageError(f"--schedulers {text}: {label} is there twice")
        found[label] = config.model_copy(update={"scheduler": scheduler})
    if not found:
        raise UsageError("--schedulers: names no scheduler; give at least one")
    return found


def _scheduler(entry: object, config: RunConfig) -> tuple[str, SchedulerConfig]:
    if isinstance(entry, str):
        if entry == config.scheduler.name:
            return entry, config.scheduler
        return entry, SchedulerConfig(name=entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise UsageError(f"--schedulers: {entry!r} should be a name, or a mapping with a name")
    params = {str(key): value for key, value in entry.items() if key != "name"}
    listed = ",".join(f"{key}={value}" for key, value in params.items())
    label = f"{entry['name']}({listed})" if listed else entry["name"]
    return label, SchedulerConfig(name=entry["name"], params=params)


def line_up(configs: Mapping[str, RunConfig], beside: Path) -> list[Contender]:
    """Make the requests once, and find mistakes in any configuration before the first run."""
    texts = any(map(reads_text, configs.values()))
    workload = load_workload(next(iter(configs.values())), beside, keep_text=texts)
    contenders = []
    for label, config in configs.items():
        build(config, workload.requests, beside, workload.texts)
        contenders.append(Contender(label, Job(config, workload, beside)))
    return contenders


def run_all(
    contenders: Sequence[Contender],
    folder: Path,
    save: Save,
    on_progress: Callable[[Sequence[int]], None] | None = None,
) -> dict[str, Contest]:
    """Simulate all contenders, each in a process of its own, and write their folders.

    `on_progress` is called now and then with the number of requests done by each.
    """
    context = multiprocessing.get_context("spawn")
    done: Array[c_long] = context.RawArray("l", len(contenders))
    workers = min(len(contenders), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, _start_worker, (done,)) as pool:
        try:
            futures = [
                pool.submit(
                    _run_one,
                    index,
                    contender.label,
                    contender.job,
                    folder / contender.folder,
                    save,
                )
                for index, contender in enumerate(contenders)
            ]
            _watch(futures, lambda: None if on_progress is None else on_progress(list(done)))
            done_all = [future.result() for future in futures]
        except BrokenProcessPool:
            raise UsageError(
                "a scheduler's process died; the machine may be out of memory: try fewer requests"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    labels = [contender.label for contender in contenders]
    return dict(zip(labels, done_all, strict=True))


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


def _start_worker(done: Array[c_long]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent tells the user; a worker just ends
    _Worker.done = done


def _run_one(index: int, label: str, job: Job, folder: Path, save: Save) -> Contest:
    def on_done(count: int) -> None:
        _Worker.done[index] = count

    outcome = run_job(job, on_done)
    write_results(folder, outcome, save)
    runs = with_bubbles(outcome, label)
    if save == "all":
        write_details(folder, list(runs.values()))
    return Contest(outcome.summary, runs)


def report(path: Path, runs: Mapping[str, Run], title: str) -> None:
    """Write one page about all runs."""
    from experiments.report.run_page import write_report

    write_report(path, runs, title, {name: run.result.provenance for name, run in runs.items()})
