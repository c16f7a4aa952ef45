"""What each of the winner's settings is worth; those that are worth nothing go back to the default.

So that what is left can be explained, and the search's luck is not taken for a finding. Looks at
the data of the search only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.sweep import Simulator
from experiments.tune import Candidate, Rank, Search, Tried, evaluate

SLACK = 0.005
"""A setting stays if without it the objective is worse by more than this share."""

LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class Worth:
    """One setting of the winner, what it is without it, and the objective then (mean)."""

    setting: str
    value: str
    default: str
    objective_without: float
    kept: bool


def simplified(
    search: Search, simulator: Simulator, done: int = 0
) -> tuple[Search, tuple[Worth, ...]]:
    """Return the search with its winner simplified, and what each of its settings is worth.

    Each setting is taken back alone; then all those whose loss is within SLACK together, unless
    that loses more.
    """
    winner = search.winner
    without = _without_each(search, winner.candidate)
    if not without or winner is search.default:
        return search, ()
    rank = Rank.over(search)
    trials = evaluate(search.tuning, list(without.values()), search.tuning.train, simulator, done)
    idle = {
        name
        for name, trial in zip(without, trials, strict=True)
        if rank.is_as_good(trial, winner.trial, SLACK)
    }
    plain = _plain(search, winner.candidate, idle)
    [trial] = evaluate(
        search.tuning,
        [plain],
        search.tuning.train,
        simulator,
        done + len(trials) * len(search.tuning.train),
    )
    if idle and rank.is_as_good(trial, winner.trial, SLACK):
        search = replace(search, winner=Tried(f"{winner.name}, simplified", plain, trial))
    else:
        idle = set()
    values = _settings(winner.candidate)
    defaults = {
        name: _settings(candidate).get(name, "default") for name, candidate in without.items()
    }
    worth = tuple(
        Worth(
            name,
            values[name],
            defaults[name],
            trial.mean(search.tuning.objective),
            name not in idle,
        )
        for name, trial in zip(without, trials, strict=True)
    )
    return search, worth


def _settings(candidate: Candidate) -> dict[str, str]:
    named = {name: str(value) for name, value in candidate.params.items()}
    return {LAYOUT: candidate.layout.label, **named}


def _without_each(search: Search, winner: Candidate) -> dict[str, Candidate]:
    """Return the winner with each of its settings that differs from the default taken back."""
    base = search.default.candidate
    found = {name: _plain(search, winner, {name}) for name in (LAYOUT, *winner.params)}
    return {
        name: candidate
        for name, candidate in found.items()
        if candidate != winner and (name != LAYOUT or winner.layout != base.layout)
    }


def _plain(search: Search, winner: Candidate, taken_back: set[str]) -> Candidate:
    """Return the winner without some settings: as the run has them, or as the scheduler does."""
    base = search.default.candidate
    own = base.params if base.scheduler == winner.scheduler else {}
    params = {
        name: own.get(name) if name in taken_back else value
        for name, value in winner.params.items()
        if name not in taken_back or name in own
    }
    layout = base.layout if LAYOUT in taken_back else winner.layout
    return Candidate(winner.scheduler, params, layout)
