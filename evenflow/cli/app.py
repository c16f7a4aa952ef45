"""All commands: they parse and print; the modules that each command imports do the work.

Those imports are inside the commands, so that `--help` and errors come at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import evenflow
from evenflow.cli import figures, lists, measured, profile, real, studies
from evenflow.cli.options import AllowRefused, Force, Intervals, Out, RunFile, Set
from evenflow.errors import MOST_LETTERS, UsageError, shortened
from evenflow.report.echo import echo, visible

if TYPE_CHECKING:
    from evenflow.report.page import Addition
    from evenflow.results.outcome import Outcome
    from evenflow.study.runs import Job

MisusedError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's error for words that a command does not take; newer versions of typer have their own."""


class OneLineErrors(TyperGroup):
    """All commands: a user's mistake is one line and exit status 2, Ctrl-C is status 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            status = super().main(
                *args, **kwargs | {"prog_name": "evenflow", "standalone_mode": False}
            )
        except UsageError as error:
            status = _refused(str(error), error.status)
        except MisusedError as error:
            status = _misused(error)
        except OSError as error:  # of a name that cannot be one, or of a disk
            status = _refused(f"{error.filename or 'the system'}: {error.strerror or error}")
        except MemoryError as error:
            status = _refused(f"the memory does not suffice: {error or 'give fewer requests'}")
        except KeyboardInterrupt:
            status = 130
        sys.exit(status)


def _refused(message: str, status: int = 2) -> int:
    line = f"error: {' '.join(visible(message).split())}"
    several = re.match(r"error: \d+ mistakes\b", line)  # of which each is short
    echo(shortened(line, (4 if several else 1) * MOST_LETTERS), err=True)
    return status


def _misused(error: Any) -> int:
    """Say what is wrong with the words after `evenflow`, and where to read what is right."""
    message = error.format_message()
    if not message:  # no word at all: typer has shown the help
        return 2
    command = "evenflow" if error.ctx is None else error.ctx.command_path
    return _refused(f"{message} ({command} --help)")


app = typer.Typer(
    name="evenflow",
    cls=OneLineErrors,
    help="Simulate pipeline-parallel LLM inference, swap the scheduler, see the bubbles.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Save(StrEnum):
    """Which files a run writes."""

    summary = "summary"
    requests = "requests"
    all = "all"


SaveOption = Annotated[
    Save, typer.Option("--save", help="summary.json only; with the requests; or everything.")
]


class Format(StrEnum):
    """How a run's tables are written."""

    csv = "csv"
    parquet = "parquet"


def _can_be_written(asked: Format) -> Format:
    from evenflow.report.tables import check_format

    check_format(asked.value)
    return asked


FormatOption = Annotated[
    Format,
    typer.Option(
        "--format", callback=_can_be_written, help="Of a run's tables; parquet needs pyarrow."
    ),
]


def _window(text: str | None) -> tuple[float, float] | None:
    """Return the seconds of a run that `A..B` names."""
    if text is None:
        return None
    try:
        first, last = map(float, text.split(".."))
    except ValueError:
        first, last = 1.0, 0.0
    if not 0 <= first <= last:
        raise UsageError(f"--window: give the seconds A..B, such as 10..12.5 or 0..inf: not {text}")
    return first, last


def _version(asked: bool) -> None:
    if asked:
        echo(f"evenflow {evenflow.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options before a command; `--version` has done its work by now."""


@app.command("simulate")
def simulate(
    run: RunFile,
    set_: Set = None,
    *,
    save: SaveOption = Save.all,
    format_: FormatOption = Format.csv,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="A..B", help="The seconds that the timeline shows."),
    ] = None,
    out: Out = None,
    force: Force = False,
    advise: Annotated[
        bool, typer.Option("--advise", help="Also: what would help, and what bubbles cost.")
    ] = False,
    intervals: Intervals = False,
) -> None:
    """Simulate one configuration and write what happened."""
    from evenflow.cli.terminal import (
        print_addition,
        print_folder,
        print_left_out,
        print_outcomes,
        progress,
    )
    from evenflow.config.build import load_workload
    from evenflow.config.files import inputs_of
    from evenflow.config.run import load_config
    from evenflow.report.folder import staged
    from evenflow.study.runs import Job, run_job, write_run

    shown = _window(window)
    config = load_config(run, set_ or ())
    folder = out or Path("out") / run.stem
    with staged(folder, force=force, reads=inputs_of(config, run)) as scratch:
        job = Job(config, load_workload(config, run.parent), run.parent)
        with progress([job.label], len(job.workload.requests)) as show:
            outcome = run_job(job, show.done, whole=advise or save.value == "all")
        asked = {"intervals": intervals, "advise": advise}
        additions = list(_additions(job, outcome, scratch, **asked))
        more = [each.html for each in additions]
        write_run(scratch, outcome, save.value, run.name, shown, more=more, form=format_.value)
    print_outcomes([outcome])
    print_left_out(outcome.result.provenance)
    for addition in additions:
        print_addition(addition)
    print_folder(folder)


def _additions(
    job: Job, outcome: Outcome, folder: Path, *, intervals: bool, advise: bool
) -> Iterator[Addition]:
    """Yield what else is asked of a run, from more simulations; each has a table in `folder`."""
    if not (intervals or advise):
        return
    from evenflow.cli.terminal import progress
    from evenflow.report.tables import write_summaries, write_table
    from evenflow.study import advice as study_advice
    from evenflow.study import uncertainty
    from evenflow.study.trials import How

    how = How(watch=progress)
    if intervals:
        prediction = uncertainty.predict(job.config.document(job.label), job.beside, how)
        write_table(folder / "intervals.csv", prediction.table)
        yield uncertainty.told(prediction)
    if advise:
        found = study_advice.advise(job, outcome, how)
        every = {"as it is": found.base, **found.changed, **found.bounds}
        write_summaries(folder / "advice.csv", "change", every)
        yield study_advice.told(found)


@app.command("compare")
def compare(
    run: RunFile,
    schedulers: Annotated[
        str,
        typer.Option("--schedulers", metavar="A,B,...", help="Policies, or FILE.py:Class."),
    ] = "",
    set_: Set = None,
    *,
    systems: Annotated[
        str,
        typer.Option("--systems", metavar="A,B,...", help="Names of evenflow systems."),
    ] = "",
    save: SaveOption = Save.all,
    format_: FormatOption = Format.csv,
    allow_refused: AllowRefused = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Simulate several schedulers, or published systems, on the same requests, side by side."""
    from evenflow.cli.terminal import print_folder, print_left_out, print_outcomes, progress
    from evenflow.config.files import inputs_of
    from evenflow.config.run import load_config
    from evenflow.config.systems import parse_systems
    from evenflow.report.folder import staged
    from evenflow.study.compare import line_up, parse_schedulers, run_all

    config = load_config(run, set_ or ())
    folder = out or Path("out") / f"{run.stem}-compare"
    with staged(folder, force=force, reads=inputs_of(config, run)) as scratch:
        entries = [*parse_schedulers(schedulers), *(published := parse_systems(systems))]
        jobs = line_up(entries, config, run.parent)
        total = len(jobs[0].workload.requests)
        with progress([job.label for job in jobs], total) as show:
            comparison = run_all(jobs, scratch, save.value, show, format_.value)
        comparison.require_served(allowed=allow_refused)
        comparison.write(scratch, run.name)
    for system in published:
        echo(f"{system.name}: {system.keys}")
    print_outcomes(comparison.outcomes)
    print_left_out(comparison.outcomes[0].result.provenance)
    print_folder(folder)


COMMANDS: dict[str, Callable[..., None]] = {
    "schedulers": lists.schedulers_command,
    "models": lists.models_command,
    "gpus": lists.gpus_command,
    "links": lists.links_command,
    "machines": lists.machines_command,
    "systems": lists.systems_command,
    "metrics": lists.metrics_command,
    "init": lists.init_command,
    "diff": studies.diff_command,
    "schema": lists.schema_command,
    "capacity": studies.capacity_command,
    "plan": studies.plan_command,
    "run": real.run_command,
    "serve": real.serve_command,
    "recover": real.recover_command,
    "replay": real.replay_command,
    "validate": measured.validate_command,
    "figures": figures.figures_command,
    "calibrate": measured.calibrate_command,
    "reproduce": measured.reproduce_command,
    "sweep": studies.sweep_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(lists.traces_app, name="traces")
app.add_typer(profile.profile_app, name="profile")
