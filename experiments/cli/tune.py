"""The command `evenflow tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import Executor, Force, MedianQueue, Out, RunFile, Set, Slo

if TYPE_CHECKING:
    from experiments.study.tune_search import Tuned


def tune_command(
    run: RunFile,
    *,
    slo: Slo = None,
    max_median_queue_s: MedianQueue = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", metavar="METRIC", help="Default: goodput, or else E2EL."),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Settings to try.")] = 64,
    schedulers: Annotated[
        str | None, typer.Option("--schedulers", metavar="A,B,...", help="Which to try.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Try all stages x tensor parallel of so many.")
    ] = None,
    replications: Annotated[int, typer.Option("--replications", help="Seeds of each trial.")] = 2,
    checks: Annotated[int, typer.Option("--checks", help="Unseen parts of each kind.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of the search.")] = 0,
    set_: Set = None,
    executor: Executor = "process",
    out: Out = None,
    force: Force = False,
) -> None:
    """Find the best scheduler, parameters and layout, and check them on unseen data."""
    from experiments.cli.terminal import progress
    from experiments.run_file.yaml_file import override, read
    from experiments.study.slo import parse_slo
    from experiments.study.trials import How
    from experiments.study.tune import tune
    from experiments.study.tuning import Wish

    document = read(run)
    for assignment in set_ or ():
        document = override(document, assignment)
    names = None if schedulers is None else [n.strip() for n in schedulers.split(",") if n.strip()]
    conditions = tuple(parse_slo(slo or (), max_median_queue_s))
    wish = Wish(conditions, objective, names, gpus, trials, replications, checks, seed)
    folder = out or Path("out") / f"{run.stem}-tune"
    how = How(out=folder, force=force, reads=[run], executor=executor, watch=progress)
    tuned = tune(document, run.parent, wish, **how)
    _tell(tuned)
    typer.echo(folder / "tuned.yaml")


def _tell(tuned: Tuned) -> None:
    from experiments.report.tables import print_table
    from experiments.study.tune import bubble_rows, check_rows, sentences, worth_rows
    from experiments.study.tune_search import TUNED

    tuning = tuned.search.tuning
    left_out = [each for each in tuning.layouts if each.reason]
    if left_out:
        print_table(("layout left out", "why"), [(each.label, each.reason) for each in left_out])
    if tuned.worth:
        heads = ("setting", "value", "without it", f"{tuning.objective} without it", "kept")
        print_table(heads, worth_rows(tuned))
    print_table(
        ("unseen data", "metric", "against", "its mean", "tuned", "difference, 95 %"),
        check_rows(tuned),
    )
    print_table(("GPU time (s)", tuning.default, TUNED, "difference"), bubble_rows(tuned))
    for line in sentences(tuned):
        typer.echo(line)
