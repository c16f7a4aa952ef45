"""The command `evenflow reproduce`: which measured runs, and what to print and write of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import Force, Intervals, Out, Set, Workers


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
    from experiments.cli.terminal import progress
    from experiments.reproduce.catalogue import chosen, data_folder

    entries = chosen(names or ())
    if list_:
        for entry in entries:
            typer.echo(f"{entry.name}: {entry.keys.title}; {entry.keys.source.words()}")
        return
    folder = data_folder(data)

    from experiments.report.folder import check_folder, staged
    from experiments.reproduce.reproduce import reproduce
    from experiments.reproduce.write import print_reproduced, write
    from experiments.study.fair import marked
    from experiments.study.trials import How

    if out is not None:
        check_folder(out, force=force)
    how = How(workers=workers, watch=progress)
    found = reproduce(entries, folder, how, set_ or (), intervals=intervals)
    if out is not None:
        with staged(out, force=force) as scratch:
            write(scratch, found)
    print_reproduced(found)
    for entry in entries:
        if not entry.files(folder):
            typer.echo(f"{entry.name}: no data in {folder}; {entry.where_from()}", err=True)
        for path in entry.others(folder):
            typer.echo(f"{entry.name}: {path} is not what the catalogue was made with", err=True)
    for name, doubt in found.doubts:
        typer.echo(f"{name}: {marked([doubt])[0]}", err=True)
    for label, reason in found.failures.items():
        typer.echo(f"not simulated: {label}: {reason}", err=True)
    if out is not None:
        typer.echo(out / "reality.md")
