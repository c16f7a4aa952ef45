"""The command `evenflow profile import`: it parses and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="What another tool measured.")]


def import_command(
    files: Files,
    *,
    model: Annotated[str, typer.Option("--model", help="A model's name, or its config.json.")],
    device: Annotated[str, typer.Option("--device", help="The device measured, e.g. A40.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The profile to write.")],
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16, float32.")] = "bfloat16",
    tile_tokens: Annotated[
        int, typer.Option("--tile-tokens", help="Tokens that linear operators pad to.")
    ] = 128,
) -> None:
    """Make a profile of Vidur's CSVs (mlp, attention, all_reduce, send_recv) or total lengths."""
    from evenflow.costs.profile.cost import missing_operators
    from evenflow.costs.profile.file import write_profile
    from evenflow.specs.model import model as model_named
    from profiler import import_files

    imported = import_files(files, model_named(model), device, dtype, tile_tokens)
    write_profile(out, imported.profile)
    typer.echo(out)
    if imported.zeros:
        typer.echo(f"left out: {imported.zeros} times of 0 ms", err=True)
    missing = missing_operators(imported.profile)
    if missing:
        typer.echo(f"not in it: {', '.join(missing)}; costs need fill: roofline", err=True)
