"""The command `validate`: it parses, prints, and writes what was found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from evenflow import completions
from evenflow.errors import MOST_RUNS, UsageError, require_package
from evenflow.options import Engine, Force, OutPath, RunPath, SetTexts
from evenflow.report.echo import echo

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
