"""The command `figures`: which ones, and what to say while and after they are made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow import completions
from evenflow.errors import UsageError
from evenflow.options import AllowRefused, Executor, Force
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from concurrent import futures

    from evenflow.experiments.figures.claims import Answer
    from evenflow.experiments.figures.schema import FigurePlan
    from evenflow.experiments.figures.study import Drawing
    from evenflow.study.points import Store

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME ...]",
        help="E.g. gllm-12, gllm, MY.yaml; default: all.",
        autocompletion=completions.figures,
    ),
]


def figures_command(
    names: Names = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write.")] = Path(
        "out/figures"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A coarse pass: fewer points.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A key of the run, study.KEY or systems.LABEL."
        ),
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Also: 90 % intervals, ten times the runs.")
    ] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="KIND,...", help="png, svg and pdf: some of these.")
    ] = "png,svg",
    width: Annotated[
        float | None, typer.Option("--width", metavar="INCHES", help="Of the whole figure.")
    ] = None,
    style: Annotated[
        str | None, typer.Option("--style", metavar="NAME", help="Of matplotlib, or a file.")
    ] = None,
    allow_refused: AllowRefused = False,
    executor: Executor = "process",
    force: Force = False,
    list_: Annotated[bool, typer.Option("--list", help="Only list the figures.")] = False,
) -> None:
    """Make the papers' figures, and the table that compares their claims with ours."""
    from evenflow.experiments.figures.make import chosen, write_claims
    from evenflow.experiments.figures.schema import Look
    from evenflow.report.folder import claimed
    from evenflow.study.points import executor_of

    look = Look(width, style, tuple(format_.split(",")))
    sets = tuple(set_ or ())
    plans = chosen(names or (), sets, quick=quick, allow_refused=allow_refused, look=look)
    if list_:
        for plan in plans:
            echo(f"{plan.name:12} {plan.keys.title}  [{plan.keys.source}]")
        return
    with claimed(out, force=force), executor_of(executor) as pool:
        failures = _make_all(plans, out, pool, intervals=intervals, tables=bool(names))
        answering = (plan for plan in plans if plan.of_a_paper or plan.keys.claims)
        if any(plan.name not in failures for plan in answering):
            _print_claims(write_claims(out))
            if other := [plan.name for plan in plans if not plan.published]:
                echo(f"not compared, as set by hand: {', '.join(other)}")
            echo(out / "claims.md")
    if failures:
        raise UsageError(_reasons(failures, len(plans)))


def _make_all(
    plans: Sequence[FigurePlan], out: Path, pool: futures.Executor, *, intervals: bool, tables: bool
) -> dict[str, str]:
    """Make figures, and print their `tables`; return why some could not be made, by name."""
    from evenflow.study.points import Store

    store, failures = Store(out / "points"), {}
    for plan in plans:
        try:
            drawing = _made(plan, out, store, pool, intervals=intervals)
        except UsageError as error:
            failures[plan.name] = str(error)
            if len(plans) > 1:
                echo(f"{plan.name}: not made")
            continue
        if tables:
            echo(table_of(drawing))
    return failures


def _made(
    plan: FigurePlan, out: Path, store: Store, pool: futures.Executor, *, intervals: bool
) -> Drawing:
    """Make a figure with the intervals of its claims; print its path and what is unfair in it."""
    from evenflow.cli.terminal import progress
    from evenflow.experiments.figures.make import add_intervals, make
    from evenflow.study.fair import marked

    started = time.perf_counter()
    with progress([plan.name]) as show:
        drawing = make(plan, out, store, pool, show.done)
    seconds = time.perf_counter() - started
    echo(f"{out / plan.name}.{plan.look.formats[0]}  {seconds:.1f} s")
    for line in marked(drawing.doubts):
        echo(f"{plan.name}: {line}", err=True)
    if intervals:
        try:
            with progress([plan.name]) as show:
                add_intervals(plan, out, store, pool, show.done)
        except UsageError as error:
            echo(f"{plan.name}: no intervals: {error}")
    return drawing


def _reasons(failures: Mapping[str, str], asked: int) -> str:
    """Return in one line which figures failed and why, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failures.items():
        by_reason.setdefault(reason, []).append(name)
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return told if asked == 1 else f"{len(failures)} of {asked} figures failed: {told}"


def table_of(drawing: Drawing) -> str:
    """Return the numbers of a figure as text, long words cut, no row twice."""
    table = drawing.table if drawing.shown is None else drawing.table[list(drawing.shown)]
    table = table.drop_duplicates()
    return str(
        table.to_string(
            index=False, na_rep="-", max_colwidth=40, float_format="{:.5g}".format, max_rows=200
        )
    )


def _print_claims(found: Sequence[Answer]) -> None:
    """Print the claims that have an answer, and the number of claims by verdict."""
    from evenflow.experiments.figures.claims import by_claim, with_interval, worst
    from evenflow.report.tables import print_table

    groups = [group for group in by_claim(found) if worst(group) != "not run"]
    rows = [
        (
            group[0].claim.id,
            "\n".join(f"{answer.part} {answer.paper}".strip() for answer in group),
            "\n".join(with_interval(answer) for answer in group),
            worst(group),
        )
        for group in groups
    ]
    if rows:
        print_table(("claim", "paper", "ours", "verdict"), rows)
    counts = Counter(worst(group) for group in groups)
    echo("; ".join(f"{count} {verdict}" for verdict, count in counts.items()))
