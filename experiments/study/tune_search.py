"""Find the best scheduler, parameters and layout of a run, and check them on unseen data.

The search sees the first part of the trace only, and its proposals depend on the seed and on
results only. What is worth nothing goes back to the default, so that what is left can be explained
and the search's luck is not taken for a finding. Then the winner and the baselines run on the same
unseen requests in pairs, so that what those do to both drops out of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from evenflow.errors import UsageError
from experiments.outcome import Outcome
from experiments.report.tables import columns_of
from experiments.run_file.pools import defaults
from experiments.run_file.run import configured, with_
from experiments.study.intervals import Interval
from experiments.study.searches import Optuna, Score, optuna, proposed
from experiments.study.slo import larger_is_better, missed
from experiments.study.trials import Case, Part, Simulator, Trial, run, seed_matters
from experiments.study.tuning import GLLM, Candidate, Tuning

BATCH = 8
"""Proposals at a time. They follow from it, so that it is not the number of workers."""


SLACK = 0.005
"""A setting stays if without it the objective is worse by more than this share."""

LAYOUT = "layout"
UNSET = object()


TUNED = "tuned"
FRESH, LATER = "fresh seeds", "later parts"


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

    @property
    def rank(self) -> Rank:
        """The rank that the search went by."""
        return Rank(self.tuning, _failed(self.default.trial))

    @property
    def rivals(self) -> list[Tried]:
        """The baselines that the winner is held against: the run as it is, gLLM's defaults."""
        return [each for each in self.tried if each.name in (self.tuning.default, GLLM)]


@dataclass(frozen=True, slots=True)
class Rank:
    """What makes one trial better than another: first the SLO, then the objective.

    A trial may not refuse more requests than the run as it is does (`failed`): the others would be
    served the better for it.
    """

    tuning: Tuning
    failed: float

    def is_as_good(self, trial: Trial, other: Trial, slack: float) -> bool:
        """Say whether a trial is no worse than another, or by no more than a share of it."""
        (unknown, off, cost), (_, other_off, other_cost) = self.of(trial), self.of(other)
        allowed = other_cost + slack * abs(other_cost)
        return not unknown and off <= other_off and cost <= allowed

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
        return (
            unknown,
            missed(excess.values()),
            -value if larger_is_better(self.tuning.objective) else value,
        )

    def score(self, trial: Trial) -> Score:
        """Return what Optuna is told of a trial."""
        return [trial.mean(self.tuning.objective)], self.excess(trial)


@dataclass(frozen=True, slots=True)
class Worth:
    """One setting that was found, what it is without it, and the objective with and without it.

    Both are means over the parts of the search, with all other settings as they were found.
    """

    setting: str
    value: str
    default: str
    objective: float
    objective_without: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Check:
    """The winner (as TUNED) and baselines on the same parts, by name; `parts` the search knew not.

    The part at `parts[i]` is `trials[name].records[i]`.
    """

    name: str
    parts: tuple[Part, ...]
    trials: Mapping[str, Trial]

    def gain(self, metric: str, rival: str) -> Interval:
        """Return by how much the winner's metric is above a baseline's, pair by pair."""
        return self.trials[TUNED].above(self.trials[rival], metric)

    def mean(self, metric: str, name: str) -> Interval:
        """Return a contender's metric over the parts."""
        return self.trials[name].interval(metric)

    def survives(self, metric: str, rival: str) -> bool:
        """Say whether the winner is better than a baseline beyond the interval."""
        gain = self.gain(metric, rival)
        return gain.is_above_zero if larger_is_better(metric) else gain.is_below_zero


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning came to: the search, what each setting is worth, the checks on unseen data.

    `bubbles` are GPU seconds by cause of the run as it is and of the winner.
    """

    search: Search
    worth: tuple[Worth, ...]
    checks: tuple[Check, ...]
    bubbles: Mapping[str, Mapping[str, Any]]

    @property
    def points(self) -> pd.DataFrame:
        """A row for each of the settings that were tried, as trials.csv has them."""
        cells = pd.DataFrame(trial_columns(self.search))
        return cells.mask(cells == "").infer_objects()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each check, part and contender, as checks.csv has them."""
        return pd.DataFrame(check_columns(self.search.tuning, self.checks))


def trial_columns(search: Search) -> dict[str, list[Any]]:
    """Return a row for each of the settings that were tried: what they are, the means, the error.

    A cell is "" where a scheduler has no such parameter.
    """
    trials = [each.trial for each in search.tried]
    return {
        "name": [each.name for each in search.tried],
        **columns_of([each.candidate.labels for each in search.tried]),
        **{m: [trial.mean(m) for trial in trials] for m in (*search.tuning.metrics, "failed")},
        "error": [" ".join(trial.errors[:1]) for trial in trials],
    }


def check_columns(tuning: Tuning, checks: Sequence[Check]) -> dict[str, list[Any]]:
    """Return a row for each check, part and contender: the metrics that decide."""
    rows = [
        (check.name, *part, name, *(trial.values(metric)[index] for metric in tuning.metrics))
        for check in checks
        for index, part in enumerate(check.parts)
        for name, trial in check.trials.items()
    ]
    names = ("check", "seed", "skip", "settings", *tuning.metrics)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))


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


def simplified(search: Search, simulator: Simulator) -> tuple[Search, tuple[Worth, ...]]:
    """Return the search with its winner simplified, and what each of its settings is worth.

    Each setting is taken back alone; then all those whose loss is within SLACK together, unless
    that loses more.
    """
    winner, tuning = search.winner, search.tuning
    without = _without_each(search, winner.candidate)
    if not without or winner is search.default:
        return search, ()
    rank = search.rank
    trials = evaluate(tuning, list(without.values()), tuning.train, simulator)
    idle = {
        name
        for name, trial in zip(without, trials, strict=True)
        if rank.is_as_good(trial, winner.trial, SLACK)
    }
    plain = _plain(search, winner.candidate, idle)
    [together] = evaluate(tuning, [plain], tuning.train, simulator)
    if idle and rank.is_as_good(together, winner.trial, SLACK):
        search = replace(search, winner=Tried(f"{winner.name}, simplified", plain, together))
    else:
        idle = set()
    values = _settings(winner.candidate)
    worth = tuple(
        Worth(
            name,
            values[name],
            _settings(without[name]).get(name, "none"),
            winner.trial.mean(tuning.objective),
            trial.mean(tuning.objective),
            name not in idle,
        )
        for name, trial in zip(without, trials, strict=True)
    )
    return search, worth


def _settings(candidate: Candidate) -> dict[str, str]:
    """Return the layout and all parameters, those that are not set too."""
    params = {**defaults(candidate.scheduler), **candidate.params}
    named = {name: str(value) for name, value in params.items()}
    return {LAYOUT: candidate.layout.label, **named}


def _without_each(search: Search, winner: Candidate) -> dict[str, Candidate]:
    """Return the winner with each of its settings that differs from the default taken back."""
    found = {name: _plain(search, winner, {name}) for name in (LAYOUT, *winner.params)}
    values = _settings(winner)
    return {
        name: candidate
        for name, candidate in found.items()
        if _settings(candidate).get(name) != values[name]
    }


def _plain(search: Search, winner: Candidate, taken_back: set[str]) -> Candidate:
    """Return the winner without some settings: as the run has them, or as the scheduler does.

    What is set to the scheduler's own default is left out.
    """
    base = search.default.candidate
    own = base.params if base.scheduler == winner.scheduler else {}
    params = {**winner.params, **{name: own[name] for name in taken_back if name in own}}
    by_default = defaults(winner.scheduler)
    kept = {
        name: value
        for name, value in params.items()
        if (name in own or name not in taken_back) and by_default.get(name, UNSET) != value
    }
    layout = base.layout if LAYOUT in taken_back else winner.layout
    return Candidate(winner.scheduler, kept, layout)


def unseen_parts(tuning: Tuning, checks: int) -> dict[str, tuple[Part, ...]]:
    """Return the parts to check on, by name: fresh seeds, and later requests of the trace.

    A later part has as many requests as one of the search and begins after it; each is another one
    as far as the trace reaches, then they come again with other seeds. Where a seed draws nothing
    (a file, with its own times) there are no fresh seeds, and each later part is there once. Where
    the trace is too short there are no later parts.
    """
    config = configured(tuning.document)
    seeds = range(tuning.train[-1].seed + 1, tuning.train[-1].seed + 1 + checks)
    skip = config.workload.skip
    drawn = seed_matters(config)
    wanted = tuning.requests * (1 + checks)
    rows = wanted
    if not config.workload.is_drawn:
        rows = len(config.workload.rows(tuning.beside, wanted))
    later = [skip + tuning.requests * (1 + i) for i in range(rows // tuning.requests - 1)]
    found = {}
    if drawn:
        found[FRESH] = tuple(Part(seed, skip) for seed in seeds)
    if later:
        count = checks if drawn else min(checks, len(later))
        found[LATER] = tuple(
            Part(seed, later[index % len(later)])
            for index, seed in enumerate(seeds)
            if index < count
        )
    return found


def run_checks(search: Search, checks: int, simulator: Simulator) -> list[Check]:
    """Simulate the winner, the run as it is and gLLM's defaults on data the search did not see."""
    contenders = _contenders(search)
    found = []
    for name, parts in unseen_parts(search.tuning, checks).items():
        trials = evaluate(search.tuning, list(contenders.values()), parts, simulator)
        found.append(Check(name, parts, dict(zip(contenders, trials, strict=True))))
    return found


def _contenders(search: Search) -> dict[str, Candidate]:
    return {TUNED: search.winner.candidate} | {each.name: each.candidate for each in search.rivals}


def idle_by_cause(outcome: Outcome, *, ranks: int) -> dict[str, Any]:
    """Return the seconds that all GPUs together stand idle by cause, and those they compute.

    A stage is `ranks` GPUs; in a system of pools they are taken for as many in each.
    """
    idle = [part.idle for part in outcome.parts.values()]
    totals = [{"computing": each.busy_s, **each.totals()} for each in idle]
    return {cause: ranks * sum(each[cause] for each in totals) for cause in totals[0]}


def run_bubbles(
    search: Search, checks: Sequence[Check], simulator: Simulator
) -> dict[str, Mapping[str, Any]]:
    """Return GPU seconds by cause of the run as it is and of the winner, on one unseen part."""
    tuning = search.tuning
    part = checks[-1].parts[0] if checks else tuning.train[0]
    contenders = {tuning.default: search.default.candidate, TUNED: search.winner.candidate}
    ranks = [with_(tuning.document, each.patch).tensor_parallel for each in contenders.values()]
    points = [
        replace(point, measure=idle_by_cause, more=(("ranks", count),))
        for each, count in zip(contenders.values(), ranks, strict=True)
        for point in tuning.study([part]).points_of(each.patch)
    ]
    records = simulator.records(points)
    return {name: record.values for name, record in zip(contenders, records, strict=True)}
