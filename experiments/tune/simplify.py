"""What each of the winner's settings is worth; those that are worth nothing go back to the default.

So that what is left can be explained, and the search's luck is not taken for a finding. Looks at
the data of the search only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from evenflow.schedulers import POOLED, parameters, policy
from experiments.study.trials import Simulator
from experiments.tune.search import Candidate, Rank, Search, Tried, evaluate

SLACK = 0.005
"""A setting stays if without it the objective is worse by more than this share."""

LAYOUT = "layout"
UNSET = object()


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


def simplified(search: Search, simulator: Simulator) -> tuple[Search, tuple[Worth, ...]]:
    """Return the search with its winner simplified, and what each of its settings is worth.

    Each setting is taken back alone; then all those whose loss is within SLACK together, unless
    that loses more.
    """
    winner, tuning = search.winner, search.tuning
    without = _without_each(search, winner.candidate)
    if not without or winner is search.default:
        return search, ()
    rank = Rank.over(search)
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
            _settings(without[name])[name],
            winner.trial.mean(tuning.objective),
            trial.mean(tuning.objective),
            name not in idle,
        )
        for name, trial in zip(without, trials, strict=True)
    )
    return search, worth


def _settings(candidate: Candidate) -> dict[str, str]:
    """Return the layout and all parameters, those that are not set too."""
    params = {**_defaults(candidate.scheduler), **candidate.params}
    named = {name: str(value) for name, value in params.items()}
    return {LAYOUT: candidate.layout.label, **named}


def _defaults(scheduler: str) -> dict[str, Any]:
    if scheduler in POOLED:
        return {}
    return {name: each.default for name, each in parameters(policy(scheduler)).items()}


def _without_each(search: Search, winner: Candidate) -> dict[str, Candidate]:
    """Return the winner with each of its settings that differs from the default taken back."""
    found = {name: _plain(search, winner, {name}) for name in (LAYOUT, *winner.params)}
    values = _settings(winner)
    return {
        name: candidate
        for name, candidate in found.items()
        if _settings(candidate)[name] != values[name]
    }


def _plain(search: Search, winner: Candidate, taken_back: set[str]) -> Candidate:
    """Return the winner without some settings: as the run has them, or as the scheduler does.

    What is set to the scheduler's own default is left out.
    """
    base = search.default.candidate
    own = base.params if base.scheduler == winner.scheduler else {}
    params = {**winner.params, **{name: own[name] for name in taken_back if name in own}}
    defaults = _defaults(winner.scheduler)
    kept = {
        name: value
        for name, value in params.items()
        if (name in own or name not in taken_back) and defaults.get(name, UNSET) != value
    }
    layout = base.layout if LAYOUT in taken_back else winner.layout
    return Candidate(winner.scheduler, kept, layout)
