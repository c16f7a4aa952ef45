"""The command `evenflow sweep`: it parses and prints; the modules it imports do the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow.errors import UsageError
from experiments.cli.options import Executor, Force, Out

if TYPE_CHECKING:
    from experiments.study.findings import Findings


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
    from experiments.cli.terminal import progress
    from experiments.study.sweep import sweep, sweep_part
    from experiments.study.sweep_file import load_sweep
    from experiments.study.trials import STORE, How

    part = None if shard is None else _part(shard)
    asked = load_sweep(file, set_ or ())
    folder = out or Path("out") / f"{file.stem}-sweep"
    how = How(
        out=folder,
        force=force,
        reads=[file],
        executor=executor,
        workers=workers,
        resume=resume,
        retry_failed=retry_failed,
        watch=progress,
    )
    try:
        if part is not None:
            sweep_part(asked, *part, **how)
            store = folder / STORE
            typer.echo(f"shard {shard} is done: put {store} together with the others' stores")
            return
        findings = sweep(asked, **how)
    except KeyboardInterrupt:
        typer.echo(
            "interrupted: what is done is kept, the same command goes on from there", err=True
        )
        raise
    _tell(findings)
    typer.echo(folder / "report.html")
    if all(trial.errors for trial in findings.trials):
        raise typer.Exit(1)


def _part(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard {text}: should be I/N, from 1/N to N/N")


def _tell(findings: Findings) -> None:
    """Print the best points; on stderr, how many failed."""
    from experiments.report.tables import print_table
    from experiments.study.sweep import best_table, failures, headline

    print_table(*best_table(findings))
    typer.echo(headline(findings))
    if lost := failures(findings):
        typer.echo(
            f"{len(lost)} of {len(findings.trials)} points failed, the first of them point "
            f"{lost[0][0]}: {lost[0][-1]}",
            err=True,
        )
