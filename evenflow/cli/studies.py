"""The commands that make many runs, or compare them: they parse and print; others do the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenflow.cli.options import (
    AllowRefused,
    Executor,
    Force,
    Gpus,
    Intervals,
    MedianQueue,
    Out,
    RunFile,
    Schedulers,
    Set,
    Slo,
    Workers,
)
from evenflow.errors import MOST_RUNS, UsageError
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from evenflow.study.plan import Planned
    from evenflow.study.sweep_findings import Findings
    from evenflow.study.trials import How


def _how(command: str, file: Path, out: Path | None, **more: Any) -> tuple[Path, How]:
    """Return the folder of a study, `out` or one named after its file, and who simulates it."""
    from evenflow.cli.terminal import progress
    from evenflow.study.trials import How

    folder = out or Path("out") / f"{file.stem}-{command}"
    return folder, How(folder, **{"reads": [file], "watch": progress, **more})


def sweep_command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="What to vary, in which run.")],
    *,
    executor: Executor = "process",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Use what is in DIR already, or remove it.")
    ] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Simulate points again that failed before.")
    ] = False,
    workers: Workers = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, or run.KEY."),
    ] = None,
    on_unseen: Annotated[
        bool, typer.Option("--check", help="Also: does the gain hold on unseen requests?")
    ] = False,
    allow_refused: AllowRefused = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only say how many points there are, and which fit.")
    ] = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Simulate a grid or a search over any keys of a run, several times each, and compare."""
    from evenflow.study.sweep import dry_run, sweep
    from evenflow.study.sweep_file import load_sweep

    asked = load_sweep(file, set_ or ())
    more = {"workers": workers, "resume": resume, "retry_failed": retry_failed}
    folder, how = _how("sweep", file, out, executor=executor, force=force, **more)
    if dry:
        echo("\n".join(dry_run(asked, how, on_unseen=on_unseen)))
        return
    try:
        findings = sweep(asked, how, on_unseen=on_unseen, allow_refused=allow_refused)
    except KeyboardInterrupt:
        echo("interrupted: what is done is kept, the same command goes on from there", err=True)
        raise
    _tell_findings(findings)
    echo(folder / "report.html")
    if all(trial.errors for trial in findings.trials):
        raise typer.Exit(1)


def _tell_findings(findings: Findings) -> None:
    """Print the best points; on stderr, how many failed."""
    from evenflow.report.tables import print_table
    from evenflow.study.sweep_words import best_table, failures, told

    point = findings.trials[(findings.ranked or [0])[0]]
    echo(findings.sweep.study.config(point.labels).setup())
    print_table(*best_table(findings))
    echo("\n".join(told(findings)))
    if lost := failures(findings):
        echo(
            f"{len(lost)} of {len(findings.trials)} points failed, the first of them point "
            f"{lost[0][0]}: {lost[0][-1]}",
            err=True,
        )


def capacity_command(
    run: RunFile,
    *,
    slo: Slo = None,
    gpus: Gpus = None,
    max_median_queue_s: MedianQueue = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How exactly, as a share of the rate.")
    ] = 0.02,
    replications: Annotated[
        int,
        typer.Option(
            "--replications",
            max=MOST_RUNS,
            help="Seeds, of a file also its next rows, each with a search.",
        ),
    ] = 1,
    per_dollar: Annotated[
        Path | None,
        typer.Option("--per-dollar", metavar="PRICES.yaml", help="GPU name: dollars per hour."),
    ] = None,
    allow_refused: AllowRefused = False,
    set_: Set = None,
    executor: Executor = "process",
    out: Out = None,
    force: Force = False,
) -> None:
    """Find the largest request rate that keeps limits on latency."""
    from evenflow.cli.terminal import print_left_out
    from evenflow.config.files import inputs_of
    from evenflow.config.run import load_config
    from evenflow.report.tables import print_table
    from evenflow.study.capacity import Question, capacity, knee_rows, sentences
    from evenflow.study.deployments import on_gpus, parse_gpus
    from evenflow.study.slo import dollars_per_hour, load_prices, parse_slo

    config = load_config(run, set_ or ())
    config = config if gpus is None else on_gpus(config, parse_gpus(gpus))
    conditions = tuple(parse_slo(slo or (), max_median_queue_s))
    per_hour = None if per_dollar is None else dollars_per_hour(config, load_prices(per_dollar))
    question = Question(
        config, conditions, run.parent, tolerance, replications, per_hour, allow_refused
    )
    reads = inputs_of(config, run)
    folder, how = _how("capacity", run, out, executor=executor, force=force, reads=reads)
    answer = capacity(question, how)
    for line in sentences(answer):
        echo(line)
    echo(config.setup())
    if answer.rate is not None:
        print_table(("metric", "limit", "at capacity", "just above"), knee_rows(answer))
    print_left_out(answer.provenance)
    echo(folder / "capacity.json")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def plan_command(
    run: RunFile,
    *,
    gpus: Gpus = None,
    slo: Slo = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help="Requests/s, or a multiple of the run's: 2x."),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", metavar="DOLLARS", help="Of one GPU, an hour.")
    ] = None,
    schedulers: Schedulers = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", metavar="N,M,...", help="Tokens of a micro-batch to try."),
    ] = None,
    replications: Annotated[
        int,
        typer.Option(
            "--replications",
            max=MOST_RUNS,
            help="Seeds of each point; of a file also its next rows.",
        ),
    ] = 1,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Simulate every point, on all requests.")
    ] = False,
    max_median_queue_s: MedianQueue = None,
    intervals: Intervals = False,
    allow_refused: AllowRefused = False,
    set_: Set = None,
    executor: Executor = "process",
    workers: Workers = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Find the cheapest deployment that keeps limits on latency, and say how to start it."""
    from evenflow.cli.terminal import print_addition, progress
    from evenflow.config.yaml_file import overridden, read
    from evenflow.study.deployments import parse_gpus
    from evenflow.study.plan import plan
    from evenflow.study.plan_search import Ask, parse_budgets
    from evenflow.study.slo import parse_slo
    from evenflow.study.trials import How
    from evenflow.study.uncertainty import predict, told

    if gpus is None:
        raise UsageError("--gpus: says how many there may be, such as --gpus 4..64")
    document = overridden(read(run), set_ or ())
    ask = Ask(
        slo=tuple(parse_slo(slo or (), max_median_queue_s)),
        gpus=parse_gpus(gpus),
        rate=rate,
        price=price,
        schedulers=None if schedulers is None else _names(schedulers),
        budgets=None if budgets is None else parse_budgets(budgets),
        replications=replications,
        exhaustive=exhaustive,
        allow_refused=allow_refused,
    )
    folder, how = _how("plan", run, out, executor=executor, force=force, workers=workers)
    planned = plan(document, run.parent, ask, how)
    _print_plan(planned)
    if intervals:
        print_addition(told(predict(planned.winner, run.parent, How(watch=progress))))
    echo(folder / "plan.yaml")


def _print_plan(planned: Planned) -> None:
    from evenflow.report.tables import print_numbers
    from evenflow.study.plan import change_rows, launch, rows, sentences

    for line in sentences(planned):
        echo(line)
    print_numbers(*rows(planned))
    if planned.changed:
        print_numbers(*change_rows(planned))
    for line in launch(planned):
        echo(line)
    if lost := [trial for trial in planned.trials if trial.errors]:
        first = f"{lost[0].labels['setting']}: {lost[0].errors[0]}"
        echo(f"{len(lost)} simulations failed, the first of them {first}", err=True)


Saved = Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run.")]


def diff_command(out_a: Saved, out_b: Saved) -> None:
    """Compare two saved runs: what differs in how they were made, and in what they came to."""
    from evenflow.report.tables import print_numbers
    from evenflow.study.compare import config_rows, diff, metric_rows
    from evenflow.study.fair import marked

    found = diff(out_a, out_b)
    for line in dict.fromkeys([*found.refusals, *marked(found.warnings)]):
        echo(line)
    setups = (run.provenance.get("setup", "") for run in (found.a, found.b))
    echo("\n".join(dict.fromkeys(setups)))
    for (heads, rows), none in (
        (config_rows(found), "the configurations are equal"),
        (metric_rows(found), "all numbers are equal"),
    ):
        if rows:
            print_numbers(heads, rows)
        else:
            echo(none)
