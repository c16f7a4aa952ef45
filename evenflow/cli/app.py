"""All commands: they parse and print; the modules that each command imports do the work.

Those imports are inside the commands, so that `--help` and errors come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import evenflow
from evenflow import api
from evenflow.cli import explore, lists, profile, real
from evenflow.cli.command import Commands, Instead, command
from evenflow.compiled import is_compiled
from evenflow.errors import UsageError, told_in_a_line
from evenflow.report.echo import echo, visible

MisusedError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's error for words that a command does not take; newer versions of typer have their own."""


class OneLineErrors(Commands):
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
            status = _refused(f"the memory does not suffice: {str(error) or 'give fewer requests'}")
        except KeyboardInterrupt:
            status = 130
        sys.exit(status)


def _refused(message: str, status: int = 2) -> int:
    echo(told_in_a_line(visible(message), "error: "), err=True)
    return status


def _misused(error: Any) -> int:
    """Print what is wrong with the command line, and which help says what is right."""
    message = error.format_message()
    if error.ctx is not None and message == error.ctx.get_help():  # no word at all
        echo(message)
        return 2
    command = "evenflow" if error.ctx is None else error.ctx.command_path
    message = message.replace(": Value error, ", ": ")  # pydantic's, which newer typers ask
    if command == "evenflow compare" and "extra argument" in message:
        message += ": one run is right, with --schedulers A,B; evenflow diff compares two results"
    return _refused(f"{message} ({command} --help)")


app = typer.Typer(
    name="evenflow",
    cls=OneLineErrors,
    help="Simulate pipeline-parallel LLM inference, swap the scheduler, see the bubbles.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        from evenflow.core import batcher

        build = "compiled" if is_compiled(batcher.__name__) else "plain Python"
        echo(f"evenflow {evenflow.__version__}, {build}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options before a command; `--version` has done its work by now."""


def _points(file: Path, set: list[str] | None, **how: Any) -> list[str]:
    """Return how many points a sweep has, and which fit."""
    from evenflow.study.sweep import dry_run
    from evenflow.study.trials import How

    keeps = How(how["out"], resume=how["resume"])
    return dry_run(api.sweep_asked(file, set), keeps, on_unseen=how["check"])


def _entries(names: list[str] | None, **_: object) -> list[str]:
    """Return the entries of the catalogue, with their sources."""
    from evenflow.experiments.reproduce import chosen

    keys = {entry.name: entry.keys for entry in chosen(names or ())}
    return [f"{name}: {each.title}; {each.source.words()}" for name, each in keys.items()]


def _titles(names: list[str] | None, set: list[str] | None, quick: bool, **_: object) -> list[str]:
    """Return the figures with their titles and sources."""
    from evenflow.experiments.figures.make import chosen

    plans = chosen(names or (), tuple(set or ()), quick=quick)
    return [f"{plan.name:12} {plan.keys.title}  [{plan.keys.source}]" for plan in plans]


DRY_RUN = Instead("--dry-run", "Only say how many points there are, and which fit.", _points)
LIST = Instead("--list", "Only list them, with sources.", _entries)
TITLES = Instead("--list", "Only list the figures.", _titles)

COMMANDS: dict[str, Callable[..., None]] = {
    "simulate": command(api.simulate, folder="{}", lean=True),
    "compare": command(api.compare, folder="{}-compare"),
    "explore": explore.explore_command,
    "schedulers": lists.schedulers_command,
    "models": lists.models_command,
    "gpus": lists.gpus_command,
    "links": lists.links_command,
    "machines": lists.machines_command,
    "systems": lists.systems_command,
    "metrics": lists.metrics_command,
    "init": lists.init_command,
    "diff": command(api.diff),
    "check": command(api.check),
    "schema": lists.schema_command,
    "capacity": command(api.capacity, folder="{}-capacity"),
    "plan": command(api.plan, folder="{}-plan"),
    "run": real.run_command,
    "serve": real.serve_command,
    "recover": real.recover_command,
    "replay": real.replay_command,
    "validate": real.validate_command,
    "figures": command(api.figures, folder="figures", page="claims.md", instead=TITLES),
    "calibrate": command(api.calibrate),
    "reproduce": command(api.reproduce, page="reality.md", instead=LIST),
    "sweep": command(api.sweep, folder="{}-sweep", instead=DRY_RUN),
}
for name, made in COMMANDS.items():
    app.command(name)(made)
app.add_typer(lists.traces_app, name="traces")
app.add_typer(profile.profile_app, name="profile")
