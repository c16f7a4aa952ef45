"""Search for the best scheduler, parameters and layout of a run, on the first part of its trace.

The proposals depend on the seed and on results only: not on who simulates, nor on what was there
before. Knows no files, and does not look at the data that the winner is checked on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError
from experiments.run_file.run import configured
from experiments.run_file.yaml_file import Document, Patch, patched
from experiments.study.searches import Optuna, Parameter, Score, optuna, proposed
from experiments.study.slo import Condition, larger_is_better, request_limits, service_levels
from experiments.study.trials import Case, Part, Simulator, Study, Trial, run
from experiments.tune.layouts import Layout

BATCH = 8
"""Proposals at a time. They follow from it, so that it is not the number of workers."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: a scheduler, those of its parameters that are set, a layout."""

    scheduler: str
    params: Mapping[str, Any]
    layout: Layout

    @property
    def patch(self) -> Patch:
        return {**self.layout.keys, "scheduler": {"name": self.scheduler, **self.params}}

    @property
    def labels(self) -> dict[str, Any]:
        """The settings as a row of a table."""
        told = {f"{self.scheduler}.{name}": value for name, value in self.params.items()}
        return {"scheduler": self.scheduler, "layout": self.layout.label, **told}

    @property
    def case(self) -> Case:
        return Case(self.labels, self.patch)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is asked, checked: the run, what is good, what may be changed, on which requests.

    `spaces` are the parameters to search, by scheduler; `layouts` all that were looked at, feasible
    or not. `baselines` by name, the run's own settings first. `train` are the parts to search on.
    """

    document: Document
    beside: Path
    slo: tuple[Condition, ...]
    objective: str
    spaces: Mapping[str, Mapping[str, Parameter]]
    layouts: tuple[Layout, ...]
    baselines: Mapping[str, Candidate]
    train: tuple[Part, ...]
    requests: int
    trials: int = 64
    seed: int = 0

    @property
    def default(self) -> str:
        """The name of the run's own settings among the baselines."""
        return next(iter(self.baselines))

    @property
    def feasible(self) -> list[Layout]:
        return [layout for layout in self.layouts if not layout.reason]

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, the objective first."""
        return list(dict.fromkeys([self.objective, *(each.metric for each in self.slo)]))

    def study(self, parts: Sequence[Part]) -> Study:
        """Return the study of the run on some parts: its summary and what its SLO needs."""
        run = patched(self.document, {"workload.requests": self.requests})
        limits = request_limits(self.slo, configured(run).goodput)
        more = (("metrics", tuple(self.metrics)), ("limits", limits))
        return Study(run, self.beside, lambda config: parts, service_levels, more)


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and the records of its runs; `name` is what the tables call it."""

    name: str
    candidate: Candidate
    trial: Trial


@dataclass(frozen=True, slots=True)
class Search:
    """All that was tried, the baselines first; `winner` is the best of them."""

    tuning: Tuning
    tried: tuple[Tried, ...]
    winner: Tried

    @property
    def default(self) -> Tried:
        return self.tried[0]


@dataclass(frozen=True, slots=True)
class Rank:
    """What makes one trial better than another: first the SLO, then the objective.

    A trial may not refuse more requests than the run as it is does (`failed`): the others would be
    served the better for it.
    """

    tuning: Tuning
    failed: float

    @classmethod
    def over(cls, search: Search) -> Rank:
        """Return the rank that a search went by."""
        return cls(search.tuning, _failed(search.default.trial))

    def is_as_good(self, trial: Trial, other: Trial, slack: float) -> bool:
        """Say whether a trial is no worse than another, or by no more than a share of it."""
        (unknown, missed, cost), (_, other_missed, other_cost) = self.of(trial), self.of(other)
        allowed = other_cost + slack * abs(other_cost)
        return not unknown and missed <= other_missed and cost <= allowed

    def excess(self, trial: Trial) -> dict[str, float]:
        """Return by how much each limit is missed, as a share of it; 0 or less where it is kept."""
        excess = {
            each.metric: each.excess_share(trial.mean(each.metric)) for each in self.tuning.slo
        }
        return excess | {"failed": _failed(trial) - self.failed}

    def of(self, trial: Trial) -> tuple[bool, float, float]:
        """Return what is the smaller, the better the trial is."""
        value = trial.mean(self.tuning.objective)
        excess = self.excess(trial)
        unknown = bool(trial.errors) or any(map(math.isnan, [value, *excess.values()]))
        missed = sum(max(amount, 0.0) for amount in excess.values())
        return unknown, missed, -value if larger_is_better(self.tuning.objective) else value

    def score(self, trial: Trial) -> Score:
        """Return what Optuna is told of a trial."""
        return [trial.mean(self.tuning.objective)], self.excess(trial)


def evaluate(
    tuning: Tuning, candidates: Sequence[Candidate], parts: Sequence[Part], simulator: Simulator
) -> list[Trial]:
    """Simulate candidates, each on the same parts."""
    return simulator.trials(tuning.study(parts), [candidate.case for candidate in candidates])


def run_search(tuning: Tuning, simulator: Simulator) -> Search:
    """Try the baselines, then what Optuna proposes; return all with the best.

    UsageError without the extra `tune`.
    """
    candidates = list(tuning.baselines.values())

    def propose(asked: Any) -> Case:
        candidates.append(_propose(asked, tuning))
        return candidates[-1].case

    def score(trial: Trial) -> Score:
        return Rank(tuning, _failed(baselines[0])).score(trial)

    method = Optuna(kind="optuna", trials=tuning.trials, seed=tuning.seed, batch=BATCH)
    goal = "maximize" if larger_is_better(tuning.objective) else "minimize"
    search = optuna(method, [goal], propose, score)
    baselines = evaluate(tuning, candidates, tuning.train, simulator)
    for error in baselines[0].errors:
        raise UsageError(f"the run as it is fails: {error}")
    trials = [*baselines, *run(tuning.study(tuning.train), simulator, search)]
    names = [*tuning.baselines, *(f"trial {number}" for number in range(tuning.trials))]
    tried = [Tried(*row) for row in zip(names, candidates, trials, strict=True)]
    asked_for = [tried[0], *(each for each in tried if each.candidate.scheduler in tuning.spaces)]
    rank = Rank(tuning, _failed(baselines[0]))
    return Search(tuning, tuple(tried), min(asked_for, key=lambda each: rank.of(each.trial)))


def _propose(asked: Any, tuning: Tuning) -> Candidate:
    """Ask first for a scheduler and a number of stages, then for what belongs to those."""
    scheduler = proposed(asked, "scheduler", list(tuning.spaces))
    params = {
        name: proposed(asked, f"{scheduler}.{name}", parameter)
        for name, parameter in tuning.spaces[scheduler].items()
    }
    own = next(iter(tuning.baselines.values()))
    if scheduler == own.scheduler:
        params = {**own.params, **params}
    layouts = tuning.feasible
    parallel = proposed(asked, "stages", list(dict.fromkeys(each.parallel for each in layouts)))
    of_those = [each for each in layouts if each.parallel == parallel]
    names = [each.division for each in of_those]
    division = proposed(asked, f"layers of {parallel}", names)
    return Candidate(scheduler, params, of_those[names.index(division)])


def _failed(trial: Trial) -> float:
    return trial.mean("failed")
