"""The commands of real runs: they parse and print, and `validate` writes what it finds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow import completions
from evenflow.errors import MOST_RUNS, UsageError, require_package
from evenflow.options import Engine, Force, OutPath, RunPath, SetTexts
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from evenflow.results.outcome import Outcome
    from evenflow.runtime.serve import ServedRun


def run_command(
    run: RunPath,
    set_: SetTexts = None,
    out: OutPath = None,
    *,
    engine: Engine = None,
    force: Force = False,
) -> None:
    """Serve one configuration in real time, a process a stage, and write what happened."""
    from evenflow.cli.terminal import progress
    from evenflow.config.files import inputs_of
    from evenflow.report.folder import staged
    from evenflow.runtime.real import job_of, serve_into
    from evenflow.runtime.serve import saving

    job = job_of(run, set_ or (), engine=engine, say=partial(echo, err=True))
    folder = out or Path("out") / f"{run.stem}-run"
    total = len(job.workload.requests)
    _say_killed(folder)
    reads = inputs_of(job.config, run)
    with (
        saving(),
        staged(folder, force=force, reads=reads) as scratch,
        progress([f"{job.label}, {job.config.workers.kind}"], total) as show,
    ):
        served, outcome, lost = serve_into(scratch, job, run.name, show.done)
    _tell(outcome, folder)
    done = f"{total - served.unfinished} of {total} requests are done and saved"
    _end(served, done, lost)


def serve_command(
    run: RunPath,
    set_: SetTexts = None,
    *,
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", help="A name or address by which clients call it; repeatable."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")
    ] = 8000,
    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", min=1, help="How many requests may wait for a first token."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json; default: the model folder's."),
    ] = None,
    engine: Engine = None,
    out: OutPath = None,
    force: Force = False,
) -> None:
    """Serve OpenAI's completions until Ctrl-C; then write what happened, as `run` does."""
    from evenflow.report.folder import staged
    from evenflow.runtime.real import job_of, live_server, serve_into
    from evenflow.runtime.serve import saving

    say = partial(echo, err=True)
    job = job_of(run, set_ or (), clients=True, engine=engine, say=say)
    for module in ("starlette", "prometheus_client", "uvicorn"):
        require_package(module, "a server", "starlette prometheus-client uvicorn")
    from evenflow.web import listening

    folder = out or Path("out") / f"{run.stem}-serve"
    _say_killed(folder)
    with (
        listening(host, port) as bound,
        saving(),
        staged(folder, force=force, reads=[run]) as scratch,
    ):
        live = live_server(
            job.config,
            job.beside,
            bound,
            tokenizer=tokenizer,
            max_queue=max_queue,
            allowed_hosts=[host, *(allowed_host or ())],
        )
        words = job.config.workers.words
        live.on_open = lambda: echo(f"serving {live.serving.model} on {live.url}/v1: {words}")
        try:
            served, outcome, lost = serve_into(scratch, job, run.name, live=live)
        finally:
            live.close()
    _tell(outcome, folder)
    status = outcome.result.status
    _end(served, f"{status.count('completed')} of {len(status)} requests are done", lost)


def recover_command(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="The --out of a run or a server that was killed.")
    ],
) -> None:
    """Make the results of what a killed run had served; exit 1 if something does not fit."""
    from evenflow.report.folder import unfinished_runs
    from evenflow.runtime.records import recover

    runs = unfinished_runs(path)
    if not runs:
        raise UsageError(f"{path}: holds no records of a run that was killed")
    status = 0
    for run in runs:
        folder, outcome, facts, lost = recover(run)
        _tell(outcome, folder)
        echo(f"{facts['failure']}; {facts['unfinished']} requests had not ended", err=True)
        for line in lost:
            echo(line, err=True)
        status = status or bool(lost)
    if status:
        raise typer.Exit(status)


def _say_killed(folder: Path) -> None:
    """Say that killed runs in a folder can still be recovered."""
    from evenflow.report.folder import killed_runs

    for run in killed_runs(folder):
        echo(f"{run}: what a killed run had served; evenflow recover {folder}", err=True)


def _tell(outcome: Outcome, folder: Path) -> None:
    from evenflow.cli.terminal import show
    from evenflow.study.fair import runs_told

    show(runs_told([outcome]))
    echo(folder)


def _end(served: ServedRun, done: str, lost: Sequence[str]) -> None:
    """Print why a run ended early, and what could not be written; exit with the matching status.

    First print what makes the run unlike the costs that it is compared with.
    """
    from evenflow.runtime.kinds import notes_of

    for line in notes_of(served.result.provenance):
        echo(f"note: {line}", err=True)
    if served.failure is not None:
        echo(f"ended early: {served.failure}; {done}", err=True)
    for line in lost:
        echo(line, err=True)
    if served.failure is not None or lost:
        raise typer.Exit(130 if served.interrupted else 1)


def replay_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="What evenflow run wrote, or a journal of an engine, or a folder."
        ),
    ],
    scheduler: Annotated[
        str | None, typer.Option(help="The policy for an engine's journal, not the engine's own.")
    ] = None,
    assume_version: Annotated[
        str | None,
        typer.Option(
            "--assume-version",
            metavar="VERSION",
            help="The version that an engine's journal is taken to be of, whatever it says.",
        ),
    ] = None,
) -> None:
    """Feed recorded inputs to a fresh scheduler; exit 1 if a decision differs."""
    from evenflow.experiments import recordings

    journals = recordings.of_engines(path)
    if not journals:
        if assume_version is not None:
            raise UsageError(f"--assume-version: {path} is of evenflow, and not of an engine")
        difference, missing = recordings.replay_run(path, scheduler)
        if difference is not None:
            echo(f"different: {difference}")
            raise typer.Exit(1)
        echo("identical: every decision is as recorded")
        if missing is not None:
            echo(missing, err=True)
        return
    status = 0
    for file, outcome in recordings.replay_engines(journals, scheduler, assume_version):
        if warning := getattr(outcome, "warning", ""):
            echo(f"warning: {warning}", err=True)
        if isinstance(outcome, UsageError):
            echo(f"error: {outcome}", err=True)
            status = status or 2
        elif outcome.difference is not None:
            echo(f"{file.name}: different: {outcome.difference}")
            status = 1
        else:
            timed = f", {outcome.timed} requests to 1 ns" if outcome.timed else ""
            echo(f"{file.name}: identical: {outcome.steps} steps{timed}")
    if status:
        raise typer.Exit(status)


OneAfterTheOther = Annotated[
    str | None,
    typer.Option(
        "--schedulers",
        metavar="A,B,...",
        help="One after the other; as compare.",
        autocompletion=completions.schedulers,
    ),
]


def validate_command(
    run: RunPath,
    set_: SetTexts = None,
    out: OutPath = None,
    *,
    engine: Engine = None,
    schedulers: OneAfterTheOther = None,
    runs: Annotated[
        int, typer.Option("--runs", min=1, max=MOST_RUNS, help="How often it is served.")
    ] = 3,
    calibrate: Annotated[
        int,
        typer.Option(
            "--calibrate",
            min=0,
            max=MOST_RUNS,
            metavar="REQUESTS",
            help="Serve so many others first, for the driver's and the messages' times; 0: none.",
        ),
    ] = 60,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Costs; measured first if it is missing."),
    ] = None,
    force: Force = False,
) -> None:
    """Serve one configuration several times, simulate it, and print how far they are apart."""
    require_package("zmq", "a real run", "pyzmq")
    from evenflow.cli.terminal import show
    from evenflow.config.files import inputs_of
    from evenflow.experiments.validation import validate
    from evenflow.experiments.validation.write import markdown, told, write_validation
    from evenflow.report.folder import claimed, staged
    from evenflow.runtime.real import job_of
    from evenflow.study.compare import line_up, parse_schedulers

    if profile is not None:
        set_ = [*(set_ or ()), *_profiled(run, set_ or [], profile)]
    job = job_of(run, set_ or (), engine=engine, joined=True, say=partial(echo, err=True))
    folder = out or Path("out") / f"{run.stem}-validate"
    contenders = {folder: job}
    if schedulers is not None:
        jobs = line_up(parse_schedulers(schedulers), job.config, job.beside)
        contenders = {folder / each.folder: each for each in jobs}
    found = []
    with claimed(folder, force=force, reads=inputs_of(job.config, run)):
        for into, each in contenders.items():
            with staged(into, force=True) as scratch:
                validation = validate(each, runs, calibrate, _watched)
                found.append(validation.found)
                write_validation(scratch, validation, run.name)
                if into == folder:
                    (scratch / "validation.md").write_text(markdown(found), encoding="utf-8")
            echo(each.config.real_setup())
            show(told(validation.found))
        if schedulers is not None:
            with staged(folder, force=True) as scratch:
                (scratch / "validation.md").write_text(markdown(found), encoding="utf-8")
    echo(folder / "validation.md")


def _profiled(run: Path, set_: list[str], profile: Path) -> list[str]:
    """Return the overrides that take costs from a profile; measure it if there is none."""
    from evenflow.cli.profile import measured
    from evenflow.config.run import load_config
    from evenflow.config.workers import TorchWorkers
    from evenflow.config.yaml_file import find
    from evenflow.profiler.machine import most_beside
    from evenflow.profiler.profile import ProfileSettings

    override = f"costs={{kind: profile, path: {json.dumps(str(profile))}}}"
    config = load_config(run, [*set_, override])
    if not isinstance(config.workers, TorchWorkers) or config.model is None:
        raise UsageError("--profile: measures what torch workers compute; workers: torch is right")
    if not profile.exists():
        workers, most = config.workers, config.max_model_len
        settings = ProfileSettings(
            workers.device,
            threads=workers.threads,
            tensor_parallel=config.tensor_parallel,
            max_tokens=most,
            max_context=most,
            beside=min(config.num_stages - 1, most_beside(workers.device, workers.threads)),
        )
        measured(find(config.model, run.parent), profile, settings)
    return [override]


@contextmanager
def _watched(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while a run is served, and say how long it took."""
    from evenflow.cli.terminal import progress

    started_s = time.perf_counter()
    with progress([name], total) as show:
        yield show.done
    echo(f"{name}: {time.perf_counter() - started_s:.1f} s", err=True)
