"""The command `evenflow capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import Executor, Force, MedianQueue, Out, RunFile, Set, Slo


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
    from experiments.cli.terminal import progress
    from experiments.report.tables import print_table
    from experiments.run_file.run import load_config
    from experiments.study.capacity import capacity, knee_rows, sentences
    from experiments.study.capacity_search import Question, dollars_per_hour, load_prices
    from experiments.study.points import inputs_of
    from experiments.study.slo import parse_slo
    from experiments.study.trials import How

    config = load_config(run, set_ or ())
    conditions = tuple(parse_slo(slo or (), max_median_queue_s))
    per_hour = None if per_dollar is None else dollars_per_hour(config, load_prices(per_dollar))
    question = Question(config, conditions, run.parent, tolerance, replications, per_hour)
    folder = out or Path("out") / f"{run.stem}-capacity"
    reads = inputs_of(config, run)
    how = How(out=folder, force=force, reads=reads, executor=executor, watch=progress)
    answer = capacity(question, **how)
    if answer.rate is not None:
        print_table(("metric", "limit", "at capacity", "just above"), knee_rows(answer))
    for line in sentences(answer):
        typer.echo(line)
    typer.echo(folder / "capacity.json")
