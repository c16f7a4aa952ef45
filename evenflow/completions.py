"""Completions for a shell: the names that an option or an argument may take.

Imports are inside, so that only a shell that asks pays for them.
"""

from collections.abc import Callable, Iterable


def schedulers(incomplete: str) -> list[str]:
    """Complete the last of several policies."""
    from evenflow.schedulers import POLICIES, POOLED

    return _last(incomplete, (*POLICIES, *POOLED))


def systems(incomplete: str) -> list[str]:
    """Complete the last of several published systems."""
    from evenflow.config.systems import systems as published

    return _last(incomplete, (system.name for system in published()))


def figures(incomplete: str) -> list[str]:
    """Complete the name of a figure."""
    from evenflow.experiments.figures import names

    return _begun(incomplete, names())


def models(incomplete: str) -> list[str]:
    """Complete the name of a model."""
    from evenflow.specs.model import models as known

    return _begun(incomplete, known())


def gpus(incomplete: str) -> list[str]:
    """Complete the name of a GPU."""
    from evenflow.specs.gpu import gpus as known

    return _begun(incomplete, (spec.name for spec in known()))


def machines(incomplete: str) -> list[str]:
    """Complete the name of a machine."""
    from evenflow.specs.gpu import machines as known

    return _begun(incomplete, (spec.name for spec in known()))


def changes(incomplete: str) -> list[str]:
    """Complete a key of a run, or its value where that is a name."""
    from evenflow.config.run import RunConfig

    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in _begun(key, RunConfig.model_fields)]
    return [f"{key}={name}" for name in VALUES[key](value)] if key in VALUES else []


def changes_of_sweep(incomplete: str) -> list[str]:
    """Complete a key of a sweep's run."""
    return [f"run.{change}" for change in changes(incomplete.removeprefix("run."))]


VALUES: dict[str, Callable[[str], list[str]]] = {
    "gpu": gpus,
    "machine": machines,
    "model": models,
    "scheduler": schedulers,
}
"""How the values of keys are completed."""


def _begun(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last of names that are parted by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _begun(last, names)]
