"""Which points a sweep that knows them all beforehand consists of.

Knows parameters and their values, not what comes of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from evenflow.errors import UsageError
from evenflow.schedulers import POOLED, parameters, policy
from experiments.run_file import pools as config_pools
from experiments.run_file.run import RunConfig
from experiments.sweep.config import (
    Assignment,
    OneAtATime,
    Parameter,
    Random,
    Range,
    Sweep,
    SweepConfig,
)
from traces.samples import random_stream


def assignments(config: SweepConfig, default: Assignment | None) -> list[Assignment]:
    """Return the points of a grid, of one parameter at a time, or of random draws, each once.

    The last parameter of a grid varies fastest. UsageError when only one is to vary at a time and
    the run does not say what the others are.
    """
    method = config.method
    if isinstance(method, Random):
        return distinct(_drawn(config.parameters, method))
    listed = {name: values_of(parameter) for name, parameter in config.parameters.items()}
    if isinstance(method, OneAtATime):
        if default is None:
            raise UsageError(
                "method: one_at_a_time: the run has to say what every parameter is by default"
            )
        return distinct([default, *_neighbours(listed, default)])
    return [
        dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())
    ]


def values_of(parameter: Parameter) -> list[Any]:
    """Return the values of a parameter that a grid takes; of a range without steps, its ends."""
    if not isinstance(parameter, Range):
        return parameter
    return [parameter.at(0), parameter.at(1)] if parameter.steps is None else parameter.grid()


def distinct(found: Iterable[Assignment]) -> list[Assignment]:
    """Return each assignment once, in order."""
    return list({identity(each): each for each in found}.values())


def identity(assignment: Assignment) -> str:
    """Return a text that is the same for equal assignments, 1 and 1.0 being equal."""
    plain = {key: float(value) if _is_number(value) else value for key, value in assignment.items()}
    return json.dumps(plain, sort_keys=True, default=str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _neighbours(listed: Mapping[str, list[Any]], default: Assignment) -> Iterable[Assignment]:
    for name, values in listed.items():
        for value in values:
            yield {**default, name: value}


def _drawn(space: Mapping[str, Parameter], method: Random) -> Iterable[Assignment]:
    """Draw each parameter from a stream of its own: one more leaves the others as they were."""
    columns = [
        [_at(parameter, share) for share in random_stream(method.seed, name).random(method.points)]
        for name, parameter in space.items()
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(space, values, strict=True))


def _at(parameter: Parameter, share: float) -> Any:
    if isinstance(parameter, Range):
        return parameter.at(float(share))
    return parameter[int(share * len(parameter))]


def default_assignment(sweep: Sweep) -> Assignment | None:
    """Return what the parameters are in the run as it is; None where it does not say."""
    try:
        run = sweep.run_config({})
    except UsageError:  # it may lack a key that is swept; a mistake shows in every point
        return None
    found = {}
    for name, parameter in sweep.config.parameters.items():
        try:
            found[name] = _default(sweep, run, name, parameter)
        except KeyError:
            return None
    return found


def _default(sweep: Sweep, run: RunConfig, name: str, parameter: Parameter) -> Any:
    """Return the run's own value of a key; KeyError where there is none."""
    for value in [] if isinstance(parameter, Range) else parameter:
        try:
            if sweep.run_config({name: value}) == run:
                return value
        except UsageError:
            continue
    outer, _, inner = name.partition(".")
    if outer != "scheduler":
        return _flat(run.resolved())[name]
    if not inner:
        return {"name": run.scheduler.name, **run.scheduler.params}
    return {**_policy_defaults(run.scheduler.name), **_flat(run.scheduler.params)}[inner]


def _policy_defaults(name: str) -> dict[str, Any]:
    if name in POOLED:
        return dict(config_pools.parameters(name))
    found = parameters(policy(name)).items()
    return {key: each.default for key, each in found if each.default is not each.empty}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found[prefix + key] = value
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
    return found
