"""The command `evenflow tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import Executor, Force, MedianQueue, Out, RunFile, Set, Slo

if TYPE_CHECKING:
    from experiments.tune.check import Check
    from experiments.tune.prepare import Wish
    from experiments.tune.report import Bubbles
    from experiments.tune.search import Search, Tuning
    from experiments.tune.simplify import Worth


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
    from experiments.report.folder import check_folder
    from experiments.run_file.policy_folders import make_importable
    from experiments.run_file.yaml_file import override, read
    from experiments.study.slo import parse_slo
    from experiments.tune.prepare import Wish, prepare

    document = read(run)
    for assignment in set_ or ():
        document = override(document, assignment)
    make_importable([document.data, schedulers], Path.cwd(), run.parent)
    names = None if schedulers is None else [n.strip() for n in schedulers.split(",") if n.strip()]
    conditions = tuple(parse_slo(slo or (), max_median_queue_s))
    wish = Wish(conditions, objective, names, gpus, trials, replications, checks, seed)
    tuning = prepare(document, run.parent, wish)
    folder = out or Path("out") / f"{run.stem}-tune"
    check_folder(folder, force=force, reads=[run])
    _tell(*_work(tuning, wish, folder, executor))
    typer.echo(folder / "tuned.yaml")


def _work(
    tuning: Tuning, wish: Wish, folder: Path, executor: str
) -> tuple[Search, Sequence[Worth], Sequence[Check], Bubbles]:
    """Search, check and write the folder."""
    from experiments.cli.terminal import points_progress
    from experiments.report.folder import staged
    from experiments.study.executors import executor_of
    from experiments.study.points import Store
    from experiments.study.trials import STORE, Simulator
    from experiments.tune.check import run_bubbles, run_checks
    from experiments.tune.figure import draw_tuning
    from experiments.tune.report import write_tuning, write_winner
    from experiments.tune.search import run_search
    from experiments.tune.simplify import simplified

    searched = (len(tuning.baselines) + wish.trials) * wish.replications
    most = max(map(len, tuning.spaces.values())) + 2
    total = searched + most * wish.replications + 2 * 3 * wish.checks + 2
    with staged(folder, force=True) as scratch, executor_of(executor) as pool:
        with points_progress("simulations", total) as (done, failed):
            simulator = Simulator(Store(folder / STORE), pool, done, failed)
            search, worth = simplified(run_search(tuning, simulator), simulator)
            checks = run_checks(search, wish.checks, simulator)
            bubbles = run_bubbles(search, checks, simulator)
        write_tuning(scratch, search, worth, checks, bubbles)
        write_winner(scratch, search, folder)
        draw_tuning(search, checks, bubbles, scratch)
    return search, worth, checks, bubbles


def _tell(
    search: Search, worth: Sequence[Worth], checks: Sequence[Check], bubbles: Bubbles
) -> None:
    from experiments.report.tables import print_table
    from experiments.tune.check import TUNED
    from experiments.tune.report import bubble_rows, check_rows, sentences, worth_rows

    default = search.tuning.default
    left_out = [each for each in search.tuning.layouts if each.reason]
    if left_out:
        print_table(("layout left out", "why"), [(each.label, each.reason) for each in left_out])
    if worth:
        heads = ("setting", "value", "without it", f"{search.tuning.objective} without it", "kept")
        print_table(heads, worth_rows(worth))
    print_table(
        ("unseen data", "metric", "against", "its mean", "tuned", "difference, 95 %"),
        check_rows(search, checks),
    )
    print_table(("GPU time (s)", default, TUNED, "difference"), bubble_rows(search, bubbles))
    for line in sentences(search, checks, bubbles):
        typer.echo(line)
