"""Simulate a sweep: the run as it is, and the points that its method lists or proposes.

Knows no files, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.study.points import Record
from experiments.sweep.config import Assignment, Optuna, Sweep
from experiments.sweep.search import search
from experiments.sweep.space import assignments, default_assignment, distinct, identity
from experiments.sweep.trials import Simulator, Trial, points_of


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
