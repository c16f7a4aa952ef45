"""What the commands show in a terminal: tables, and a bar while something takes time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow.report.echo import echo, visible
from evenflow.report.tables import print_numbers
from evenflow.report.words import metrics, overload, refusals, rows_left_out, too_short
from evenflow.results.outcome import Outcome
from evenflow.study.fair import TOLD_SHARE, Side, doubts, marked

if TYPE_CHECKING:
    from evenflow.report.page import Addition

FIRST_LINE_S = 10.0
LINE_EVERY_S = 60.0
"""Where nobody watches a bar, such as in a log, a line says how far it is: the first after so long,
then after twice as long each time, up to so long."""


def print_folder(folder: Path) -> None:
    """Say where the results are: the page, where there is one."""
    page = folder / "report.html"
    echo(page if page.exists() else folder)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print what was refused, what runs on what, then the runs side by side."""
    for line in refusals({run.label: run.served for run in outcomes}):
        echo(line)
    echo("\n".join(dict.fromkeys(run.result.provenance["setup"] for run in outcomes)))
    print_summaries({run.label: run.summary for run in outcomes})
    sides = {run.label: Side(run.summary, run.result.provenance) for run in outcomes}
    print_doubts(doubts(sides))


def print_doubts(lines: Sequence[str]) -> None:
    """Print what makes a comparison unfair, a line each."""
    for line in marked(lines):
        echo(line)


def print_summaries(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print runs side by side, a column each."""
    rows = []
    for metric in metrics():
        if any(metric.key in summary for summary in summaries.values()):
            values = (summary.get(metric.key) for summary in summaries.values())
            rows.append([metric.words, *map(metric.cell, values)])
    print_numbers(["", *summaries], rows)
    for name, summary in summaries.items():
        if told := overload(summary):
            echo(f"OVERLOADED, {name}: {told}")
        if told := too_short(summary):
            echo(f"{name}: {told}")


def print_addition(addition: Addition) -> None:
    """Print what is said of a run beside its numbers."""
    print_numbers(addition.heads, addition.rows)
    echo(addition.sentence)


def print_left_out(provenance: Mapping[str, Any]) -> None:
    """Say what a run left out, by its provenance: rows of the trace, measurements."""
    for line in rows_left_out(provenance.get("trace", {})):
        echo(line, err=True)
    share = provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
    if share > TOLD_SHARE:
        echo(f"costs: {100 * share:.0f} % of the predicted time rests on no measurement", err=True)


class Progress:
    """How much is done of one or more tasks, and how many points failed.

    Call it with the counts done, one a task, or `done` with that of the only task; that is cheap.
    """

    def __init__(self, labels: Sequence[str], total: int | None) -> None:
        self.labels, self.total = list(map(visible, labels)), total
        self.counts: Sequence[int] = [0] * len(labels)
        self.failures = 0
        self._told_s = time.monotonic()
        self._wait_s = FIRST_LINE_S

    def __call__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._show()

    def done(self, count: int, total: int | None = None) -> None:
        """Take the count done; `total`, where it has become known how many there will be."""
        self.total = total or self.total
        self([count])

    def failed(self, _record: object = None) -> None:
        """Count a failure."""
        self.failures += 1
        self._show()

    def _show(self) -> None:
        if time.monotonic() - self._told_s >= min(self._wait_s, LINE_EVERY_S):
            self._told_s = time.monotonic()
            self._wait_s *= 2
            echo("; ".join(self.lines()), err=True)

    def lines(self) -> list[str]:
        """Return in words how far each task is."""
        of = "" if self.total is None else f" of {self.total}"
        lost = f", {self.failures} failed" if self.failures else ""
        pairs = zip(self.labels, self.counts, strict=True)
        return [f"{label}: {count}{of}{lost}" for label, count in pairs]


class _Bars(Progress):
    """The same as bars, on a terminal."""

    def __init__(self, labels: Sequence[str], total: int | None) -> None:
        from rich import progress as rich
        from rich.console import Console

        super().__init__(labels, total)
        columns = (
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[lost]}"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self.bars = rich.Progress(
            *columns, console=console, transient=True, speed_estimate_period=300
        )
        self.tasks = [self.bars.add_task(label, total=total, lost="") for label in self.labels]

    def _show(self) -> None:
        lost = f"{self.failures} failed" if self.failures else ""
        for task, count in zip(self.tasks, self.counts, strict=True):
            self.bars.update(task, completed=count, total=self.total, lost=lost)


@contextmanager
def progress(labels: Sequence[str], total: int | None = None) -> Iterator[Progress]:
    """Show how far some tasks are: a bar each on a terminal, else a line now and then.

    `total` None: nobody knows yet how many there will be.
    """
    if not sys.stderr.isatty():
        yield Progress(labels, total)
        return
    shown = _Bars(labels, total)
    with shown.bars:
        yield shown
