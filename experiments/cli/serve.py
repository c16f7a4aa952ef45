"""The command `serve`: an OpenAI-compatible server on the real runtime; it parses and prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import Force, Out, RunFile, Set
from experiments.cli.real import serve_into

if TYPE_CHECKING:
    from experiments.runs import Job

WORKLOAD = "clients"
"""What stands for the trace in the provenance of a served run."""


def serve_command(
    run: RunFile,
    set_: Set = None,
    *,
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")
    ] = 8000,
    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", min=1, help="How many requests may wait for a first token."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json; default: the model folder's."),
    ] = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Serve OpenAI's completions until Ctrl-C; then write what happened, as `run` does."""
    from experiments.cli.terminal import print_left_out, print_summaries
    from experiments.real import live_server
    from experiments.report.folder import staged

    job = _job(run, set_)
    from runtime.http.live import listening  # only now is it certain that there is ZeroMQ

    folder = out or Path("out") / f"{run.stem}-serve"
    lost: list[str] = []
    with listening(host, port) as bound, staged(folder, force=force, reads=[run]) as scratch:
        live = live_server(job.config, job.beside, bound, tokenizer=tokenizer, max_queue=max_queue)
        live.on_open = lambda: typer.echo(f"serving {live.model} on {live.url}/v1")
        try:
            served, outcome = serve_into(scratch, job, run.name, lost.append, live)
        finally:
            live.close()
    result = outcome.result
    print_summaries({f"{job.config.scheduler.name}, served": outcome.summary})
    print_left_out({}, result)
    typer.echo(folder)
    if served.failure is not None:
        done = f"{result.status.count('completed')} of {len(result.status)} requests are done"
        typer.echo(f"ended early: {served.failure}; {done}", err=True)
    for line in lost:
        typer.echo(line, err=True)
    if served.failure is not None or lost:
        raise typer.Exit(130 if served.interrupted else 1)


def _job(run: Path, set_: list[str] | None) -> Job:
    """Return a job without requests: the clients have them, so a workload is not read."""
    from experiments.real import check_servable
    from experiments.run_file.build import Workload
    from experiments.run_file.run import load_config
    from experiments.runs import Job

    config = load_config(run, [*(set_ or ()), f"workload={{trace: {WORKLOAD}}}"])
    check_servable(config)
    return Job(config, Workload([], {"name": WORKLOAD, "dropped": {}}), run.parent)
