"""Let Optuna propose points, batch by batch, from what the earlier batches came to.

A batch is told in the order in which it was asked, so that the proposals depend on the sweep's seed
and on results only: an interrupted search, run again, proposes the same and finds it in the store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evenflow.errors import UsageError
from experiments.sweep.config import Assignment, Optuna, Parameter, Range, Sweep
from experiments.sweep.trials import Simulator, Trial


def search(sweep: Sweep, method: Optuna, simulator: Simulator, done: int) -> list[Trial]:
    """Return the trials of a search in the order proposed; the same one may be there twice.

    `done` points were simulated before. UsageError without the extra `tune`.
    """
    study = study_of(method, [objective.goal for objective in sweep.config.objectives])
    found: list[Trial] = []
    while len(found) < method.trials:
        size = min(method.batch_size, method.trials - len(found))
        asked = [study.ask() for _ in range(size)]
        wanted = [_assignment(each, sweep) for each in asked]
        before = (done + len(found)) * sweep.config.replications
        trials = simulator.trials(sweep, wanted, before)
        for each, trial in zip(asked, trials, strict=True):
            _tell(study, each, trial, sweep)
        found += trials
    return found


def study_of(method: Optuna, goals: Sequence[str]) -> Any:
    """Return a study that proposes by a method; UsageError without the extra `tune`."""
    try:
        import optuna
    except ImportError:
        raise UsageError("method: optuna: needs optuna; pip install 'evenflow[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if method.sampler == "tpe":
        sampler: Any = optuna.samplers.TPESampler(seed=method.seed, constant_liar=True)
    else:
        sampler = optuna.samplers.NSGAIISampler(population_size=method.batch_size, seed=method.seed)
    return optuna.create_study(directions=goals, sampler=sampler)


def _assignment(asked: Any, sweep: Sweep) -> Assignment:
    return {name: proposed(asked, name, each) for name, each in sweep.config.parameters.items()}


def proposed(asked: Any, name: str, parameter: Parameter) -> Any:
    """Ask for one value; a list of numbers is in order, one of anything else is not."""
    if isinstance(parameter, Range):
        return parameter.at(asked.suggest_float(name, 0.0, 1.0))
    if all(type(value) in (int, float) for value in parameter):
        return sorted(parameter)[asked.suggest_int(name, 0, len(parameter) - 1)]
    return parameter[asked.suggest_categorical(name, range(len(parameter)))]


def _tell(study: Any, asked: Any, trial: Trial, sweep: Sweep) -> None:
    from optuna.trial import TrialState

    values = [trial.mean(objective.metric) for objective in sweep.config.objectives]
    excess = {name: each.excess(trial.mean(name)) for name, each in sweep.config.limits.items()}
    if any(map(math.isnan, [*values, *excess.values()])):
        study.tell(asked, state=TrialState.FAIL)
        return
    for name, amount in excess.items():
        asked.set_constraint(name, amount)
    study.tell(asked, values)
