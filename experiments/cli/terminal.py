"""What the commands show in a terminal: tables, and a bar while something takes time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from evenflow.results.run import RunResult

ROWS = (
    ("completed", "requests completed", "{:.0f}"),
    ("failed", "requests rejected or aborted", "{:.0f}"),
    ("duration", "duration (s)", "{:.1f}"),
    ("output_throughput", "output tokens/s", "{:.1f}"),
    ("total_token_throughput", "all tokens/s", "{:.1f}"),
    ("steady_total_token_throughput", "all tokens/s, steady", "{:.1f}"),
    ("request_goodput", "requests/s within limits", "{:.2f}"),
    ("median_queue_ms", "scheduling delay median (ms)", "{:.1f}"),
    ("mean_ttft_ms", "TTFT mean (ms)", "{:.1f}"),
    ("p99_ttft_ms", "TTFT P99 (ms)", "{:.1f}"),
    ("mean_tpot_ms", "TPOT mean (ms)", "{:.1f}"),
    ("p99_tpot_ms", "TPOT P99 (ms)", "{:.1f}"),
    ("p99_itl_ms", "ITL P99 (ms)", "{:.1f}"),
    ("mean_e2el_ms", "E2EL mean (ms)", "{:.1f}"),
    ("busy_share", "stages busy", "{:.1%}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("mean_transfer_wait_ms", "KV transfer wait mean (ms)", "{:.1f}"),
    ("backpressure_s", "KV back-pressure (s)", "{:.1f}"),
)

TOLD_SHARE = 0.1
"""A run says so when more of its predicted time was extrapolated or filled in."""


def metric_words(key: str) -> str:
    """Return the words for a key of the summary; the key itself where there are none."""
    return next((words for known, words, _ in ROWS if known == key), key)


def print_no_report() -> None:
    """Say that a folder is complete but for the report, and why."""
    typer.echo("no report.html: it needs plotly; pip install 'evenflow[report]'", err=True)


def print_summaries(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print runs side by side, a column each."""
    table = Table()
    table.add_column("")
    for label in summaries:
        table.add_column(label, justify="right", overflow="fold")
    for key, words, form in ROWS:
        values = [summary.get(key) for summary in summaries.values()]
        if any(value is not None for value in values):
            table.add_row(words, *("-" if v is None else form.format(v) for v in values))
    Console().print(table)


def print_counterfactuals(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for the run as it is and for each cause of bubbles that is taken away."""
    keys = ("duration", "total_token_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    shown = [(key, words, form) for key, words, form in ROWS if key in keys]
    rows = [
        [name.replace("_", " "), *(form.format(each[key]) for key, _, form in shown)]
        for name, each in summaries.items()
    ]
    print_table(["without", *(words for _, words, _ in shown)], rows)


def print_left_out(dropped: Mapping[str, int], result: RunResult) -> None:
    """Say what the run left out: rows of the trace, requests, measurements."""
    for reason, count in dropped.items():
        typer.echo(f"dropped {count} rows of the trace: {reason}", err=True)
    rejected = [index for index, status in enumerate(result.status) if status == "rejected"]
    if rejected:
        first = rejected[0]
        typer.echo(
            f"rejected {len(rejected)} requests, the first of them request "
            f"{result.request_id[first]}: {result.reason[first]}",
            err=True,
        )
    aborted = result.status.count("aborted")
    if aborted:
        typer.echo(f"aborted {aborted} requests, whose clients left", err=True)
    share = result.provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
    if share > TOLD_SHARE:
        typer.echo(
            f"costs: {100 * share:.0f} % of the predicted time rests on no measurement", err=True
        )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under column heads."""
    table = Table(*columns, show_lines=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextmanager
def progress(
    labels: Sequence[str], total: int | None
) -> Iterator[Callable[[Sequence[int]], None] | None]:
    """Show a bar for each label on a terminal; gives a function that takes the counts done.

    `total` None: nobody knows how many there will be.
    Gives None where nobody watches, so that a run need not count.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = [bars.add_task(label, total=total) for label in labels]

        def show(counts: Sequence[int]) -> None:
            for task, count in zip(tasks, counts, strict=True):
                bars.update(task, completed=count)

        yield show


@contextmanager
def points_progress(
    label: str, total: int
) -> Iterator[tuple[Callable[[int], None], Callable[[object], None]]]:
    """Show a bar of points done, failures and the time left, on a terminal.

    Gives what `run_points` calls: one function takes the number done, one each failure.
    """
    if not sys.stderr.isatty():
        yield lambda count: None, lambda record: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, speed_estimate_period=300) as bars:
        task = bars.add_task(label, total=total, failed=0)

        def failed(_record: object) -> None:
            bars.update(task, failed=bars.tasks[0].fields["failed"] + 1)

        yield lambda count: bars.update(task, completed=count), failed
