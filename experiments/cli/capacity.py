"""The command `evenflow capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import Executor, Force, MedianQueue, Out, RunFile, Set, Slo

if TYPE_CHECKING:
    from experiments.capacity.find import Proof, Question


def capacity_command(
    run: RunFile,
    *,
    slo: Slo = None,
    max_median_queue_s: MedianQueue = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How exactly, as a share of the rate.")
    ] = 0.02,
    replications: Annotated[
        int, typer.Option("--replications", help="Seeds, each with a search of its own.")
    ] = 1,
    per_dollar: Annotated[
        Path | None,
        typer.Option("--per-dollar", metavar="PRICES.yaml", help="GPU name: dollars per hour."),
    ] = None,
    set_: Set = None,
    executor: Executor = "process",
    out: Out = None,
    force: Force = False,
) -> None:
    """Find the largest request rate that keeps limits on latency."""
    from experiments.capacity.find import Question, prove
    from experiments.capacity.prices import dollars_per_hour, load_prices
    from experiments.report.folder import check_folder
    from experiments.run_file.run import load_config
    from experiments.study.points import inputs_of
    from experiments.study.slo import parse_slo

    config = load_config(run, set_ or ())
    conditions = tuple(parse_slo(slo or (), max_median_queue_s))
    question = Question(config, conditions, run.parent, tolerance, replications)
    per_hour = None
    if per_dollar is not None:
        per_hour = dollars_per_hour(config, load_prices(per_dollar))
    folder = out or Path("out") / f"{run.stem}-capacity"
    check_folder(folder, force=force, reads=inputs_of(config, run))
    _answer(question, prove(question), per_hour, folder, executor)
    typer.echo(folder / "capacity.json")


def _answer(
    question: Question, proof: Proof, per_hour: float | None, folder: Path, executor: str
) -> None:
    """Search, write the folder, and say what was found."""
    from experiments.capacity.figure import draw_capacity
    from experiments.capacity.find import capacity_of
    from experiments.capacity.report import (
        facts,
        knee_rows,
        refuse_short,
        sentences,
        write_capacity,
    )
    from experiments.cli.terminal import progress
    from experiments.report.folder import staged
    from experiments.report.tables import print_table
    from experiments.study.executors import executor_of
    from experiments.study.points import Store
    from experiments.study.trials import STORE

    with staged(folder, force=True) as scratch, executor_of(executor) as pool:
        with progress(["rates simulated"], None) as show:
            store = Store(folder / STORE)
            capacity = capacity_of(question, store, pool, proof=proof, on_done=show.done)
        refuse_short(capacity)
        told = facts(capacity, per_hour)
        write_capacity(scratch, capacity, told | {"provenance": proof.provenance})
        draw_capacity(capacity, scratch)
    if capacity.rate is not None:
        print_table(("metric", "limit", "at capacity", "just above"), knee_rows(capacity))
    for line in sentences(capacity, told):
        typer.echo(line)
