"""Search for the best scheduler, parameters and layout of a run, on the first part of its trace.

The proposals depend on the seed and on results only: not on who simulates, nor on what was there
before. Knows no files, and does not look at the data that the winner is checked on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.errors import UsageError
from experiments.run_file.run import RunConfig, configured
from experiments.run_file.yaml_file import Document, assign
from experiments.study.points import Point
from experiments.study.slo import Condition, larger_is_better, request_limits, service_levels
from experiments.sweep.config import Optuna, Parameter
from experiments.sweep.search import proposed, study_of
from experiments.sweep.trials import Simulator, Trial
from experiments.tune.layouts import Layout

BATCH = 8
"""Proposals at a time. They follow from it, so that it is not the number of workers."""


class Part(NamedTuple):
    """The requests of one replication: a seed, and how many of the trace are skipped before."""

    seed: int
    skip: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: a scheduler, those of its parameters that are set, a layout."""

    scheduler: str
    params: Mapping[str, Any]
    layout: Layout

    def over(self, document: Document) -> Document:
        """Return the document with these settings in it."""
        document = self.layout.over(document)
        mapping = {"name": self.scheduler, **self.params}
        return assign(document, ["scheduler"], mapping, f"scheduler {self.scheduler}")

    def assignment(self) -> dict[str, Any]:
        """Return the settings as a row of a table."""
        told = {f"{self.scheduler}.{name}": value for name, value in self.params.items()}
        return {"scheduler": self.scheduler, "layout": self.layout.label, **told}


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

    def config_of(self, candidate: Candidate, part: Part) -> RunConfig:
        """Return the run of a candidate on a part of the trace."""
        config = configured(candidate.over(self.document))
        changed = {"seed": part.seed, "skip": part.skip, "requests": self.requests}
        workload = config.workload.model_copy(update=changed)
        return config.model_copy(update={"workload": workload})

    def point(self, candidate: Candidate, part: Part) -> Point:
        """Return the point whose values are the run's summary and what its SLO needs."""
        config = self.config_of(candidate, part)
        metrics = tuple(dict.fromkeys([*(each.metric for each in self.slo), self.objective]))
        more = (("metrics", metrics), ("limits", request_limits(self.slo, config.goodput)))
        return Point(config, self.beside, service_levels, more)


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
        found = {}
        for condition in self.tuning.slo:
            share = trial.mean(condition.metric) / condition.limit - 1
            found[condition.metric] = -share if condition.at_least else share
        found["failed"] = _failed(trial) - self.failed
        return found

    def of(self, trial: Trial) -> tuple[bool, float, float]:
        """Return what is the smaller, the better the trial is."""
        value = trial.mean(self.tuning.objective)
        excess = self.excess(trial)
        unknown = bool(trial.errors) or any(map(math.isnan, [value, *excess.values()]))
        missed = sum(max(amount, 0.0) for amount in excess.values())
        return unknown, missed, -value if larger_is_better(self.tuning.objective) else value

    def tell(self, study: Any, asked: Any, trial: Trial) -> None:
        from optuna.trial import TrialState

        unknown, *_ = self.of(trial)
        if unknown:
            study.tell(asked, state=TrialState.FAIL)
            return
        for name, amount in self.excess(trial).items():
            asked.set_constraint(name, amount)
        study.tell(asked, trial.mean(self.tuning.objective))


def evaluate(
    tuning: Tuning,
    candidates: Sequence[Candidate],
    parts: Sequence[Part],
    simulator: Simulator,
    done: int = 0,
) -> list[Trial]:
    """Simulate candidates, each on the same parts; `done` points were simulated before."""
    points = [tuning.point(candidate, part) for part in parts for candidate in candidates]
    records = simulator.records(points, done)
    return [
        Trial(candidate.assignment(), tuple(records[index :: len(candidates)]))
        for index, candidate in enumerate(candidates)
    ]


def run_search(tuning: Tuning, simulator: Simulator) -> Search:
    """Try the baselines, then what Optuna proposes; return all with the best.

    UsageError without the extra `tune`.
    """
    goal = "maximize" if larger_is_better(tuning.objective) else "minimize"
    study = study_of(Optuna(kind="optuna", trials=tuning.trials, seed=tuning.seed), [goal])
    candidates = list(tuning.baselines.values())
    trials = evaluate(tuning, candidates, tuning.train, simulator)
    named = zip(tuning.baselines, candidates, trials, strict=True)
    tried = [Tried(name, candidate, trial) for name, candidate, trial in named]
    for error in tried[0].trial.errors:
        raise UsageError(f"the run as it is fails: {error}")
    first = len(tried)
    rank = Rank(tuning, _failed(tried[0].trial))
    while len(tried) < first + tuning.trials:
        asked = [study.ask() for _ in range(min(BATCH, first + tuning.trials - len(tried)))]
        candidates = [_propose(each, tuning) for each in asked]
        trials = evaluate(
            tuning, candidates, tuning.train, simulator, len(tried) * len(tuning.train)
        )
        for each, candidate, trial in zip(asked, candidates, trials, strict=True):
            rank.tell(study, each, trial)
            tried.append(Tried(f"trial {len(tried) - first}", candidate, trial))
    asked_for = [tried[0], *(each for each in tried if each.candidate.scheduler in tuning.spaces)]
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
