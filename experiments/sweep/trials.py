"""Simulate points of a sweep, each of them several times on requests that all points share.

Knows no files but the store; which points there are is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from evenflow.errors import UsageError
from experiments.run_file.run import RunConfig
from experiments.study.points import Point, Record, Store, run_points
from experiments.sweep.config import Assignment, Sweep


@dataclass(frozen=True, slots=True)
class Trial:
    """A point of a sweep, and the record of each of its replications."""

    assignment: Assignment
    records: tuple[Record, ...]

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    def values(self, metric: str) -> list[float]:
        """Return a metric of each replication, NaN where there is none."""
        return [float(record.values.get(metric, math.nan)) for record in self.records]

    def mean(self, metric: str) -> float:
        return math.fsum(self.values(metric)) / len(self.records)


@dataclass(frozen=True, slots=True)
class Simulator:
    """Who simulates and where results are kept; the rest is as for `run_points`."""

    store: Store
    executor: Executor
    on_done: Callable[[int], None] = lambda count: None
    on_failure: Callable[[Record], None] | None = None
    retry: bool = False

    def records(self, points: Sequence[Point], done_before: int = 0) -> list[Record]:
        return run_points(
            points,
            self.store,
            self.executor,
            lambda count: self.on_done(done_before + count),
            on_failure=self.on_failure,
            retry=self.retry,
        )

    def trials(
        self, sweep: Sweep, wanted: Sequence[Assignment], done_before: int = 0
    ) -> list[Trial]:
        """Simulate assignments, each as often as the sweep says."""
        records = self.records(points_of(sweep, wanted), done_before)
        return [
            Trial(assignment, tuple(records[index :: len(wanted)]))
            for index, assignment in enumerate(wanted)
        ]


def points_of(sweep: Sweep, wanted: Sequence[Assignment]) -> list[Point]:
    """Return the points of assignments, replication by replication: they share their requests."""
    configs = [sweep.run_config(assignment) for assignment in wanted]
    return [
        Point(_replicated(sweep, config, replication), sweep.beside)
        for replication in range(sweep.config.replications)
        for config in configs
    ]


def _replicated(sweep: Sweep, config: RunConfig, replication: int) -> RunConfig:
    """Return the run with the requests of one replication: another seed, another window."""
    workload = config.workload
    changed = {"seed": workload.seed + replication}
    if sweep.config.replicate == "windows":
        if workload.requests is None:
            place = sweep.document.place(("replicate",))
            raise UsageError(f'{place}: replicate: windows needs the key "run.workload.requests"')
        changed["skip"] = workload.skip + replication * workload.requests
    workload = workload.model_copy(update=changed)
    return config.model_copy(update={"workload": workload})
