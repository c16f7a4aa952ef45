"""The systems of the papers as keys of RUN.yaml, from config/systems.yaml.

For `evenflow systems`, docs/systems.md and examples/systems; the code is the policies' and the
deployment's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evenflow.errors import UsageError, instead_of


class PublishedSystem(NamedTuple):
    """A system: its `keys` are YAML laid over a run with four GPUs; `name` is its example's."""

    name: str
    title: str
    keys: str
    source: str
    checked: str

    def patch(self) -> dict[str, Any]:
        """Return the keys as data."""
        return dict(yaml.safe_load(self.keys))


@cache
def systems() -> tuple[PublishedSystem, ...]:
    """Return the systems in the order of the document."""
    path = Path(__file__).with_name("systems.yaml")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    sentences = {name: text for name, text in data.items() if name != "systems"}
    return tuple(
        PublishedSystem(name, **{**facts, "checked": facts["checked"].format(**sentences)})
        for name, facts in data["systems"].items()
    )


def keys_of_system(name: str) -> dict[str, Any]:
    """Return the keys of a published system; UsageError with the known ones for another name."""
    (system,) = systems_of([name])
    return system.patch()


def systems_of(names: Sequence[str]) -> list[PublishedSystem]:
    """Return the systems of these names; UsageError with the known ones for another."""
    by_name = {system.name: system for system in systems()}
    for name in names:
        if name not in by_name:
            raise UsageError(f"--systems {name}: no such system; {instead_of(name, by_name)}")
    return [by_name[name] for name in names]
