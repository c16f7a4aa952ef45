"""The command `evenflow sweep`: it parses and prints; the modules it imports do the work."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow.errors import UsageError
from experiments.cli.options import Executor, Force, Out

if TYPE_CHECKING:
    from experiments.study.sweep import Findings, Sweep

STORE = "store"
"""The folder of records, below that of the results."""


def sweep_command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="What to vary, in which run.")],
    *,
    executor: Executor = "process",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Use what is in DIR already, or remove it.")
    ] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Simulate points again that failed before.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Default: the number of cores.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Only the I-th part of N.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, or run.KEY."),
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Simulate a grid or a search over any keys of a run, several times each, and compare."""
    from experiments.report.folder import check_folder
    from experiments.run_file.policy_folders import make_importable
    from experiments.study.sweep import check, load_sweep

    started = time.perf_counter()
    part = None if shard is None else _part(shard)
    sweep = load_sweep(file, set_ or ())
    make_importable([sweep.document.data, sweep.run.data], Path.cwd(), sweep.beside)
    check(sweep)
    if part is not None and sweep.config.method.kind == "optuna":
        raise UsageError("--shard: the points of a search follow from its results: run it whole")
    folder = out or Path("out") / f"{file.stem}-sweep"
    check_folder(folder, force=force, reads=[file])
    findings = _simulate(sweep, folder, part, (executor, workers), (resume, retry_failed))
    if findings is None:
        typer.echo(f"shard {shard} is done: put {folder / STORE} together with the others' stores")
        return
    _write(folder, findings, file.name, {"executor": executor}, started)
    _tell(findings)
    typer.echo(folder / "report.html" if (folder / "report.html").exists() else folder)
    if all(trial.errors for trial in findings.trials):
        raise typer.Exit(1)


def _part(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard {text}: should be I/N, from 1/N to N/N")


def _simulate(
    sweep: Sweep,
    folder: Path,
    part: tuple[int, int] | None,
    executor: tuple[str, int | None],
    reuse: tuple[bool, bool],
) -> Findings | None:
    """Simulate all points, or of a part only what the store lacks."""
    from experiments.cli.terminal import points_progress
    from experiments.study.executors import executor_of
    from experiments.study.points import HEADER, Store
    from experiments.study.sweep import expected_points, run_shard, run_sweep
    from experiments.study.trials import Simulator

    resume, retry = reuse
    if not resume and (folder / STORE / HEADER).exists():
        shutil.rmtree(folder / STORE)
    store = Store(folder / STORE)
    total = expected_points(sweep)
    if part is not None:
        total = len(range(part[0], total, part[1]))
    try:
        with executor_of(*executor) as pool, points_progress("points", total) as (done, failed):
            simulator = Simulator(store, pool, done, failed, retry=retry)
            if part is None:
                return run_sweep(sweep, simulator)
            run_shard(sweep, simulator, *part)
            return None
    except KeyboardInterrupt:
        typer.echo(
            "interrupted: what is done is kept, the same command goes on from there", err=True
        )
        raise


def _write(
    folder: Path, findings: Findings, title: str, told: dict[str, str], started: float
) -> None:
    from experiments.cli.terminal import print_no_report
    from experiments.provenance import wall_clock
    from experiments.report.folder import staged
    from experiments.report.outputs import write_json
    from experiments.runs import can_report
    from experiments.sweep.figures import write_figures
    from experiments.sweep.tables import facts, write_tables

    with staged(folder, force=True) as scratch:
        write_tables(scratch, findings)
        write_figures(scratch, findings)
        source = facts(findings)
        if can_report():
            from experiments.sweep.report import write_report

            write_report(scratch / "report.html", findings, title, source)
        else:
            print_no_report()
        write_json(scratch / "sweep.json", source)
        clock = wall_clock(time.perf_counter() - started)
        write_json(scratch / "wall_clock.json", clock | told)


def _tell(findings: Findings) -> None:
    """Print the best points; on stderr, how many failed."""
    from experiments.report.tables import print_table
    from experiments.sweep.words import best_table, failures, headline

    print_table(*best_table(findings))
    typer.echo(headline(findings))
    lost = failures(findings)
    if lost:
        typer.echo(
            f"{len(lost)} of {len(findings.trials)} points failed, the first of them point "
            f"{lost[0][0]}: {lost[0][-1]}",
            err=True,
        )
