"""Simulate the points of a sweep, each of them several times on requests that all points share.

Knows no files but the store, and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from evenflow.config import RunConfig
from evenflow.errors import UsageError
from experiments.points import Point, Record, Store, run_points
from experiments.sweep.config import Assignment, Optuna, Sweep
from experiments.sweep.space import assignments, default_assignment, distinct, identity


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
class Findings:
    """All points of a sweep; `default` is the position of the run as it is, if there is one.

    `default_is_extra`: it is no point of the grid or the draws, and was simulated besides.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    default: int | None
    default_is_extra: bool = False

    @property
    def metrics(self) -> list[str]:
        """All metrics of all points, in the order of their first appearance."""
        names: dict[str, None] = {}
        for trial in self.trials:
            for record in trial.records:
                names |= dict.fromkeys(record.values)
        return list(names)


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


def known_assignments(sweep: Sweep) -> list[Assignment]:
    """Return the points that are known beforehand; the run as it is comes first if not among them.

    Those of a search follow from its results: of them only that first one is known.
    """
    default = default_assignment(sweep)
    chosen = _chosen(sweep, default)
    return distinct(chosen if default is None or _is_in(default, chosen) else [default, *chosen])


def _chosen(sweep: Sweep, default: Assignment | None) -> list[Assignment]:
    search = isinstance(sweep.config.method, Optuna)
    return [] if search else assignments(sweep.config, default)


def _is_in(assignment: Assignment, others: Sequence[Assignment]) -> bool:
    return identity(assignment) in map(identity, others)


def expected_points(sweep: Sweep) -> int:
    """Return how many simulations a sweep has; of a search, the most there may be."""
    method = sweep.config.method
    trials = method.trials if isinstance(method, Optuna) else 0
    return (len(known_assignments(sweep)) + trials) * sweep.config.replications


def run_sweep(sweep: Sweep, simulator: Simulator) -> Findings:
    """Simulate all points of a sweep that the store does not have.

    The findings depend on the sweep only, not on who simulates nor on what was there before.
    """
    default = default_assignment(sweep)
    chosen = _chosen(sweep, default)
    known = known_assignments(sweep)
    trials = simulator.trials(sweep, known) if known else []
    if isinstance(sweep.config.method, Optuna):
        from experiments.sweep.search import search

        found = search(sweep, sweep.config.method, simulator, len(known))
        chosen = [trial.assignment for trial in found]
        trials = list({identity(trial.assignment): trial for trial in [*trials, *found]}.values())
    if default is None:
        return Findings(sweep, trials, None)
    where = [identity(trial.assignment) for trial in trials].index(identity(default))
    return Findings(sweep, trials, where, not _is_in(default, chosen))


def run_shard(sweep: Sweep, simulator: Simulator, index: int, count: int) -> list[Record]:
    """Simulate every `count`-th point from the one at `index` on, counting from 0."""
    return simulator.records(points_of(sweep, known_assignments(sweep))[index::count])
