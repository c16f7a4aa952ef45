"""The processes that a run names, as functions with their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evenflow.config.files import make_importable
from evenflow.config.parts import ProcessConfig
from evenflow.errors import UsageError, instead_of
from evenflow.schedulers.limits import NAMED, refuse, require_given
from evenflow.user_code import imported

READY = {
    "straggler": "evenflow.sim.faults:straggler",
    "outage": "evenflow.sim.faults:outage",
    "contended_link": "evenflow.sim.faults:contended_link",
    "autoscaler": "evenflow.sim.autoscaler:autoscaler",
}
"""Where each is that has a name."""


def processes_of(named: Sequence[ProcessConfig], beside: Path) -> list[Callable[..., Any]]:
    """Return the functions that a run names; UsageError for an unknown one or a wrong value.

    A module is looked for as a policy's is, in the current folder, then in `beside`.
    """
    make_importable([each.name for each in named], beside, kind="process")
    return [_with(each.name, _function(each.name), each.params) for each in named]


def _function(name: str) -> Callable[..., Any]:
    if ":" not in name and name not in READY:
        hint = instead_of(name, READY)
        raise UsageError(f"unknown process {name!r}; {hint}, or your own as module:function")
    function, module = imported("process", READY.get(name, name))
    if not callable(function):
        inner = name.partition(":")[2]
        raise UsageError(f"process {name!r}: {module} has no function {inner!r} of a world")
    return function


def _with(name: str, function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a process with its parameters, of the types that it declares."""
    try:
        _, *listed = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"process {name!r} is no function of a world") from None
    known = {each.name: each for each in listed if each.kind in NAMED}
    for key in params:
        if key not in known:
            hint = instead_of(key, known) if known else "it has none"
            raise UsageError(f"process {name} has no parameter {key!r}; {hint}")
    typed = function if inspect.isfunction(function) else None
    try:
        require_given(f"process {name}", typed, known, params)
        refuse(typed, params)
    except ValueError as error:
        raise UsageError(f"process {name}: {error}") from None
    return partial(function, **params) if params else function
