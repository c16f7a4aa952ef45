"""The command `evenflow calibrate`: what to compare with which run, and what to print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import RunFile, Set, Workers

if TYPE_CHECKING:
    from experiments.reproduce.calibrate import Calibrated


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
    from experiments.cli.terminal import progress
    from experiments.reproduce.calibrate import calibrate
    from experiments.reproduce.measured import read_results
    from experiments.run_file.yaml_file import overridden, read
    from experiments.study.trials import How

    document = overridden(read(run), set_ or ())
    runs = [each for path in results for each in read_results(path)]
    _tell(calibrate(document, run.parent, runs, How(workers=workers, watch=progress)))


def _tell(found: Calibrated) -> None:
    from experiments.report.tables import number, percent, print_numbers
    from experiments.study.fair import marked

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
        typer.echo(f"{label}: {marked([doubt])[0]}", err=True)
    keys = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in found.runtime.items()}
    typer.echo(f"runtime: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}")
