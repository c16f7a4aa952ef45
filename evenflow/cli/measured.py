"""The commands that hold predictions against measured runs: validate, reproduce, calibrate.

They parse, print, and write what was found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow.cli.options import Engine, Force, Intervals, Out, RunFile, Set, Workers
from evenflow.errors import MOST_RUNS, UsageError
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from evenflow.experiments.reproduce.calibrate import Calibrated


def validate_command(
    run: RunFile,
    set_: Set = None,
    out: Out = None,
    *,
    engine: Engine = None,
    schedulers: Annotated[
        str | None,
        typer.Option("--schedulers", metavar="A,B,...", help="One after the other; as compare."),
    ] = None,
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
    from evenflow.config.files import inputs_of
    from evenflow.experiments.validation import validate
    from evenflow.experiments.validation.write import markdown, print_validation, write_validation
    from evenflow.report.folder import claimed, staged
    from evenflow.runtime.real import job_of
    from evenflow.study.compare import line_up, parse_schedulers

    if profile is not None:
        set_ = [*(set_ or ()), *_profiled(run, set_ or [], profile)]
    job = job_of(run, set_ or (), engine=engine, say=partial(echo, err=True))
    folder = out or Path("out") / f"{run.stem}-validate"
    contenders = {job.config.scheduler.name: job}
    if schedulers is not None:
        jobs = line_up(parse_schedulers(schedulers), job.config, job.beside)
        contenders = {each.folder: each for each in jobs}
    found = []
    with claimed(folder, force=force, reads=inputs_of(job.config, run)):
        for name, each in contenders.items():
            with staged(folder if schedulers is None else folder / name, force=True) as scratch:
                validation = validate(each, runs, calibrate, _watched)
                found.append(validation.found)
                write_validation(scratch, validation, run.name)
                if schedulers is None:
                    (scratch / "validation.md").write_text(markdown(found), encoding="utf-8")
            echo(each.config.real_setup())
            print_validation(validation.found)
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
    from evenflow.profiler import Settings, most_beside

    override = f"costs={{kind: profile, path: {json.dumps(str(profile))}}}"
    config = load_config(run, [*set_, override])
    if not isinstance(config.workers, TorchWorkers) or config.model is None:
        raise UsageError("--profile: measures what torch workers compute; workers: torch is right")
    if not profile.exists():
        workers, most = config.workers, config.max_model_len
        settings = Settings(
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


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME ...]", help="E.g. vllm083, closed-vllm, MY.yaml; or all."),
    ] = None,
    *,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Holds the runs; default: EVENFLOW_SHARED."),
    ] = None,
    set_: Set = None,
    intervals: Intervals = False,
    workers: Workers = None,
    out: Out = None,
    force: Force = False,
    list_: Annotated[bool, typer.Option("--list", help="Only list them, with sources.")] = False,
) -> None:
    """Simulate runs that others measured on real GPUs, and print how far off that is."""
    from evenflow.cli.terminal import progress
    from evenflow.experiments.reproduce import chosen, data_folder

    entries = chosen(names or ())
    if list_:
        for entry in entries:
            echo(f"{entry.name}: {entry.keys.title}; {entry.keys.source.words()}")
        return
    folder = data_folder(data)

    from evenflow.experiments.reproduce import reproduce
    from evenflow.experiments.reproduce.write import print_reproduced, write
    from evenflow.report.folder import claimed, staged
    from evenflow.study.fair import marked
    from evenflow.study.trials import How

    how = How(workers=workers, watch=progress)
    with nullcontext() if out is None else claimed(out, force=force):
        found = reproduce(entries, folder, how, set_ or (), intervals=intervals)
        if out is not None:
            with staged(out, force=force) as scratch:
                write(scratch, found)
    print_reproduced(found)
    for entry in entries:
        if not entry.files(folder):
            echo(f"{entry.name}: no data in {folder}; {entry.where_from()}", err=True)
        for path in entry.others(folder):
            echo(f"{entry.name}: {path} is not what the catalogue was made with", err=True)
    for name, doubt in found.doubts:
        echo(f"{name}: {marked([doubt])[0]}", err=True)
    for label, reason in found.failures.items():
        echo(f"not simulated: {label}: {reason}", err=True)
    if out is not None:
        echo(out / "reality.md")


def calibrate_command(
    run: RunFile,
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT...", help="Results of a benchmark of this run.")
    ],
    set_: Set = None,
    *,
    workers: Workers = None,
) -> None:
    """Find the CPU time of an engine from a benchmark's results: a `runtime` to paste."""
    from evenflow.cli.terminal import progress
    from evenflow.config.yaml_file import overridden, read
    from evenflow.experiments.reproduce.calibrate import calibrate
    from evenflow.experiments.reproduce.forms import read_results
    from evenflow.study.trials import How

    document = overridden(read(run), set_ or ())
    runs = [each for path in results for each in read_results(path)]
    _tell(calibrate(document, run.parent, runs, How(workers=workers, watch=progress)))


def _tell(found: Calibrated) -> None:
    from evenflow.report.tables import number, percent, print_numbers
    from evenflow.study.fair import marked

    rows = []
    for constant in found.constants:
        ends = constant.ends
        told = [f"{number(1e6 * value)}" for value in (constant.value, *(ends or ()))]
        rows.append([constant.name, *(told if ends else ["the results", "cannot", "tell"])])
    print_numbers(("microseconds", "", "at least", "at most"), rows)
    offs = [
        [
            name.upper().replace("_", " ").removesuffix(" MS"),
            *(percent(v, 1, sign=False) for v in off),
        ]
        for name, off in found.off.items()
    ]
    print_numbers(("median off", "no CPU time", "with these"), offs)
    for label, doubt in found.doubts:
        echo(f"{label}: {marked([doubt])[0]}", err=True)
    if not found.runtime:
        echo(
            "no runtime: the results tell none; give requests one by one, at several loads",
            err=True,
        )
        return
    keys = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in found.runtime.items()}
    echo(f"runtime: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}")
