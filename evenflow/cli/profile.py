"""The commands `evenflow profile`, `profile check` and `profile import`: they parse and print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow import completions
from evenflow.cli.command import Commands
from evenflow.errors import UsageError
from evenflow.files import require_new
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from evenflow.costs.profile.file import Profile
    from evenflow.profiler.profile import ProfileSettings

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="What another tool measured.")]
Beside = Annotated[
    int | None,
    typer.Option(
        "--beside",
        metavar="STAGES",
        min=0,
        help="Other stages that compute on this CPU meanwhile; default: 1 where there are cores.",
    ),
]
profile_app = typer.Typer(cls=Commands, help="Measure what this machine's operators cost.")
LEGEND = """\
The error is of predictions, against the mean run of each micro-batch; the spread is the machine's,
of single runs against that median; halves: the median of its first runs against that of its last.
"""


@profile_app.callback(invoke_without_command=True)
def measure_command(
    context: typer.Context,
    *,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="A config.json, or a name in the table.",
            autocompletion=completions.models,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The profile to write.")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time to take; picks the grid.")] = 5,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of a stage.")] = 1,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the measured stage.")] = 4,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", help="Measure one shard of so many.")
    ] = 1,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2)] = None,
    max_rows: Annotated[int | None, typer.Option("--max-rows", min=1)] = None,
    max_context: Annotated[int | None, typer.Option("--max-context", min=2)] = None,
    beside: Beside = None,
) -> None:
    """Measure this machine's device for a model's layer shapes and write a profile."""
    if context.invoked_subcommand is not None:
        return
    if model is None or out is None:
        raise UsageError("profile: give --model PATH (a config.json) and --out FILE")
    from evenflow.profiler.profile import ProfileSettings

    bounds = (max_tokens, max_rows, max_context)
    settings = ProfileSettings(
        device, minutes, threads, layers, tensor_parallel, *bounds, beside=beside
    )
    profile = measured(model, out, settings)
    echo(f"{profile.header.device}: {profile.header.grid}; {len(profile.points)} points")
    echo(out)


@profile_app.command("import")
def import_command(
    files: Files,
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="A model's name, or its config.json.", autocompletion=completions.models
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device", help="The device measured, e.g. A40.", autocompletion=completions.gpus
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The profile to write.")],
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16, float32.")] = "bfloat16",
    tile_tokens: Annotated[
        int, typer.Option("--tile-tokens", help="Tokens that linear operators pad to.")
    ] = 128,
) -> None:
    """Make a profile of Vidur's CSVs (mlp, attention, all_reduce, send_recv) or total lengths."""
    from evenflow.costs.profile.cost import missing_operators
    from evenflow.costs.profile.file import write_profile
    from evenflow.profiler.importers import import_files
    from evenflow.specs.model import model as model_named

    require_new(out)
    spec = model_named(model)
    imported = import_files(files, spec, device, dtype, tile_tokens)
    write_profile(out, imported.profile)
    echo(out)
    if imported.zeros:
        echo(f"left out: {imported.zeros} times of 0 ms", err=True)
    missing = missing_operators(imported.profile, spec)
    if missing:
        echo(f"not in it: {', '.join(missing)}; costs need fill: roofline", err=True)


@profile_app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile of this machine.")],
    *,
    batches: Annotated[int, typer.Option("--batches", min=2, help="Random micro-batches.")] = 100,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Runs of each.")] = 15,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the stage.")] = 4,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1)] = 1,
    beside: Beside = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 1,
) -> None:
    """Measure random micro-batches off the grid; print and record how far predictions are off."""
    from evenflow.costs.profile.file import read_profile
    from evenflow.profiler.check import check_profile, errors_table, record_errors
    from evenflow.profiler.machine import require_device

    require_device(read_profile(file).header.device_kind)
    from evenflow.runtime.profiled import timed_stage

    with measuring() as show:
        rows = check_profile(
            file,
            timed_stage,
            batches=batches,
            repeats=repeats,
            layers=layers,
            tensor_parallel=tensor_parallel,
            beside=beside,
            seed=seed,
            progress=show,
        )
    record_errors(file, rows)
    echo(LEGEND + errors_table(rows))


def measured(model: str, out: Path, settings: ProfileSettings) -> Profile:
    """Measure the profile of a model that the runtime computes; show the progress."""
    from evenflow.profiler.machine import require_device

    require_device(settings.device)  # says so where there is no torch, which the next line needs
    from evenflow.runtime.profiled import profile_model

    with measuring() as show:
        return profile_model(model, out, settings, show)


@contextmanager
def measuring() -> Iterator[Callable[[float, float], None]]:
    """Show progress of a measurement; yield a callback for the share done and the seconds left."""
    from evenflow.cli.terminal import progress

    with progress(["measuring, %"], 100) as show:
        yield lambda done, left_s: show.done(round(100 * done))
