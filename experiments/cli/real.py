"""The commands of real runs, `run` and `replay`: they parse and print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenflow.errors import UsageError
from experiments.cli.options import Force, Out, RunFile, Set

if TYPE_CHECKING:
    from experiments.runs import Job, Outcome
    from runtime import Served
    from runtime.http.live import LiveServer


def run_command(run: RunFile, set_: Set = None, out: Out = None, force: Force = False) -> None:
    """Serve one configuration in real time, a process a stage, and write what happened."""
    from experiments.cli.terminal import print_left_out, print_summaries
    from experiments.report.folder import staged
    from experiments.study.points import inputs_of

    job = job_of(run, set_)
    folder = out or Path("out") / f"{run.stem}-run"
    lost: list[str] = []
    with staged(folder, force=force, reads=inputs_of(job.config, run)) as scratch:
        served, outcome = serve_into(scratch, job, run.name, lost.append)
    print_summaries({f"{job.config.scheduler.name}, real": outcome.summary})
    print_left_out(job.workload.trace["dropped"], outcome.result)
    typer.echo(folder)
    if served.failure is not None:
        total = len(job.workload.requests)
        done = f"{total - served.unfinished} of {total} requests are done and saved"
        typer.echo(f"ended early: {served.failure}; {done}", err=True)
    for line in lost:
        typer.echo(line, err=True)
    if served.failure is not None or lost:
        raise typer.Exit(130 if served.interrupted else 1)


def replay_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What evenflow run wrote.")],
) -> None:
    """Feed a recorded run's inputs to a fresh scheduler; exit 1 if a decision differs."""
    from experiments.validation.journal import replay_folder

    difference = replay_folder(folder)
    if difference is not None:
        typer.echo(f"different: {difference}")
        raise typer.Exit(1)
    typer.echo("identical: every decision is as recorded")


def job_of(run: Path, set_: list[str] | None) -> Job:
    """Return the job that a file and its overrides describe; UsageError if it cannot be served."""
    from experiments.real import check_servable
    from experiments.run_file.build import load_workload
    from experiments.run_file.run import load_config
    from experiments.runs import Job

    config = load_config(run, set_ or ())
    check_servable(config)
    return Job(config, load_workload(config, run.parent), run.parent)


def serve_into(
    folder: Path,
    job: Job,
    title: str,
    on_loss: Callable[[str], None],
    live: LiveServer | None = None,
) -> tuple[Served, Outcome]:
    """Serve a job and write its files as `simulate` does, with the journal beside them.

    How many requests the clients of `live` send is not known, so there is no bar of progress.
    `on_loss` hears of files that could not be written. UsageError when the results cannot be.
    """
    from experiments.cli.terminal import progress
    from experiments.real import outcome_of, serve_job
    from experiments.report.outputs import write_tokens
    from experiments.runs import write_results
    from experiments.validation.journal import NAME, journal_written

    label = f"{job.config.scheduler.name}, real"
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    is_made_up = job.config.workers.kind == "emulated"
    bar = progress([label], len(job.workload.requests)) if live is None else nullcontext()
    with journal_written(folder / NAME, job.config, job.beside, on_loss) as record, bar as show:
        served = serve_job(
            job,
            None if show is None else lambda count: show([count]),
            record,
            None if is_made_up else lambda request_id, token: tokens[request_id].append(token),
            live,
        )
    outcome = outcome_of(job, served)
    try:
        write_results(folder, outcome, "all", {"real_run": served.facts()})
        if not is_made_up:
            write_tokens(folder / "tokens.jsonl.gz", tokens)
    except OSError as error:
        count = outcome.summary["completed"]
        what = f"cannot write: {error.strerror}; the results of {count} finished requests are lost"
        raise UsageError(f"{title}: {what}") from None
    _write_rest(folder, outcome, label, title, on_loss)
    return served, outcome


def _write_rest(
    folder: Path, outcome: Outcome, label: str, title: str, on_loss: Callable[[str], None]
) -> None:
    """Write the tables and the report of a run."""
    from experiments.cli.terminal import print_no_report
    from experiments.runs import can_report, with_bubbles, write_details

    details = with_bubbles(outcome, label)
    with _left_out_if_full(folder, on_loss):
        write_details(folder, list(details.values()))
    if not can_report():
        print_no_report()
        return
    from experiments.report.run_page import write_report

    with _left_out_if_full(folder, on_loss):
        write_report(folder / "report.html", details, title, outcome.result.provenance)


@contextmanager
def _left_out_if_full(folder: Path, on_loss: Callable[[str], None]) -> Iterator[None]:
    """Remove the files that a `with` block has begun when it cannot write one; say which."""
    before = set(folder.iterdir())
    try:
        yield
    except OSError as error:
        begun = sorted(set(folder.iterdir()) - before)
        for path in begun:
            path.unlink()
        names = ", ".join(path.name for path in begun)
        on_loss(f"{names} and the like are left out: cannot write: {error.strerror}")
