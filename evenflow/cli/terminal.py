"""Output of commands in a terminal: tables, and a bar while something takes time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from evenflow.report.echo import echo, visible
from evenflow.report.shown import Aside, Table
from evenflow.report.tables import markdown_table, print_numbers, print_table

FIRST_LINE_S = 10.0
LINE_EVERY_S = 60.0
"""Without a terminal, as in a log, lines tell the progress: the first after FIRST_LINE_S, then each
after twice the time, at most LINE_EVERY_S."""


def show(parts: Iterable[str | Table]) -> None:
    """Print sentences and tables, what is beside them on stderr."""
    for part in parts:
        if isinstance(part, Table) and part.markdown:
            echo(markdown_table(part.heads, part.rows, right=True))
        elif isinstance(part, Table) and part.of_words:
            print_table(part.heads, part.rows)
        elif isinstance(part, Table):
            print_numbers(part.heads, part.rows, part.title)
        else:
            echo(part, err=isinstance(part, Aside))


class Progress:
    """Progress of one or more tasks: the share that is done, and the number of failed points.

    Call it with the counts done, one a task, or `done` with the count of the only task. This is
    cheap.
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
        """Take the count done, and the `total` once it is known."""
        self.total = total or self.total
        self([count])

    def failed(self, _record: object = None) -> None:
        self.failures += 1
        self._show()

    def _show(self) -> None:
        if time.monotonic() - self._told_s >= min(self._wait_s, LINE_EVERY_S):
            self._told_s = time.monotonic()
            self._wait_s *= 2
            echo("; ".join(self.lines()), err=True)

    def lines(self) -> list[str]:
        """Return the progress of each task in words."""
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
    """Show how far some tasks are: a bar for each on a terminal, else a line now and then.

    `total` None: the number is not known yet.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield Progress(labels, total)
        return
    shown = _Bars(labels, total)
    with shown.bars:
        yield shown
