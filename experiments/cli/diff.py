"""The command `evenflow diff`: two saved runs, and what to print of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Saved = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run.")]


def diff_command(out_a: Saved, out_b: Saved) -> None:
    """Compare two saved runs: what differs in how they were made, and in what they came to."""
    from experiments.cli.terminal import print_doubts
    from experiments.report.tables import print_numbers
    from experiments.study.diff import config_rows, diff, metric_rows

    found = diff(out_a, out_b)
    setups = (run.provenance.get("setup", "") for run in (found.a, found.b))
    typer.echo("\n".join(dict.fromkeys(setups)))
    for (heads, rows), none in (
        (config_rows(found), "the configurations are equal"),
        (metric_rows(found), "all numbers are equal"),
    ):
        if rows:
            print_numbers(heads, rows)
        else:
            typer.echo(none)
    print_doubts(found.warnings)
