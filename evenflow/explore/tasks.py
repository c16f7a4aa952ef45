"""Tasks of a worker process: a task sends plain data, or raises UsageError for a mistake.

To stop it, `tell`, with which it sends them, raises Stopped. Knows no process and no server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from evenflow.config.files import make_importable
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.yaml_file import document_of
from evenflow.explore.controls import controls, scheduler_controls
from evenflow.explore.document import Given, Question, Settled, settled, side_of
from evenflow.explore.pictures import numbers, picture, simulated
from evenflow.study.fair import interval
from evenflow.study.points import loaded
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import check_slo

FIRST = 16
"""Requests of the stretch that is simulated before the whole run, for a first picture."""

MOST_BATCHES = 60_000
"""Micro-batches that a page can zoom to; of a longer run, those in the middle."""

TOLD_S = 0.1
"""How often a worker says how far it is."""

SEEDS = 3
"""Seeds of a slider's sweep: enough for an interval, few enough to wait for."""

Tell = Callable[[dict[str, Any]], None]


class Stopped(Exception):  # noqa: N818 - it is no error
    """Raised in a task whose answer the page no longer wants."""


def look(given: Given, question: Question, tell: Tell) -> None:
    """Send the page's document with the new values in it, and its controls."""
    found = settled(given, question)
    start = configured(document_of(given.text, given.file.name))
    for each in found.configs:
        make_importable(each.scheduler.name, given.file.parent)
    told = {
        "text": found.text,
        "others": found.others,
        "command": found.command(given),
        "controls": list(controls(found.configs[0], start)),
        "schedulers": [
            scheduler_controls(config, f"others.{side - 1}" if side else "scheduler")
            for side, config in enumerate(found.configs)
        ],
    }
    tell({"document": told})


def simulate(given: Given, question: Question, tell: Tell, side: int) -> None:
    """Simulate one of the schedulers: send a first stretch, progress, and the whole."""
    job = job_of(given, settled(given, question), side)
    count, config = len(job.workload.requests), job.config
    about = {"side": side, "of": count}
    parts = [(_stretch(job), lambda _: tell({}))] if count > 2 * FIRST else []
    for part, on_done in [*parts, (job, _watch(tell, about))]:
        outcome, prompts = simulated(part, on_done)
        tell({"run": picture(outcome, prompts, config, given.slo, MOST_BATCHES) | about})


def try_value(given: Given, question: Question, tell: Tell, key: str, value: Any) -> None:
    """Simulate one value of a key for SEEDS seeds: tell the mean and half-width of each number."""
    found = settled(given, question.model_copy(update={"set": {key: value}}))
    config = found.configs[side_of(key, len(found.others))]
    runs = []
    for seed in range(config.workload.seed, config.workload.seed + SEEDS):
        own = with_(config, {"workload.seed": seed})
        job = Job(own, loaded(own, given.file.parent), given.file.parent)
        runs.append(numbers(run_job(job, lambda _: tell({}), whole=False), own, given.slo))
    told = {}
    for metric in runs[0]:
        if all(metric in run for run in runs):
            each = interval([run[metric] for run in runs])
            told[metric] = [each.mean, each.half_width]
    tell({"point": {"value": value, "metrics": told}})


def check(given: Given) -> None:
    """Raise UsageError for what could not be simulated, or limited, before any page is open."""
    found = settled(given, given.question)
    for side, config in enumerate(found.configs):
        job = job_of(given, found, side)
        job.built()
        if not side:
            check_slo(given.slo, run_job(_stretch(job), whole=False), config)


def _stretch(job: Job) -> Job:
    few = job.workload._replace(requests=job.workload.requests[:FIRST])
    return job._replace(workload=few)


def job_of(given: Given, found: Settled, side: int) -> Job:
    config = found.configs[side]
    name = labels(found.configs)[side]
    return Job(config, loaded(config, given.file.parent), given.file.parent, name=name)


def labels(configs: Sequence[RunConfig]) -> list[str]:
    """Return a name for each side: its scheduler, with a number where several are alike."""
    names = [config.scheduler.name for config in configs]
    return [
        name if names.count(name) == 1 else f"{name} {names[: at + 1].count(name)}"
        for at, name in enumerate(names)
    ]


def _watch(tell: Tell, about: dict[str, Any]) -> Callable[[int], None]:
    """Return a callback that sends the number of requests done, every TOLD_S at most."""
    last_s = time.monotonic()

    def on_done(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > TOLD_S:
            last_s = time.monotonic()
            tell({"progress": about | {"done": done}})

    return on_done
