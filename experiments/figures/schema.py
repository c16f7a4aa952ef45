"""The schema of a figure's YAML. Knows which keys there are, not what a figure makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from evenflow import yaml_file
from evenflow.config_errors import mistakes
from evenflow.config_fields import Keys
from evenflow.errors import UsageError

Text = Annotated[str, Field(min_length=1)]


class FigureKeys(Keys):
    """What a figure needs. `run` holds RUN.yaml's keys, shared by all that is simulated.

    `systems`: names of `evenflow schedulers`, by the label in the figure; or the keys that a label
    stands for. `study`: the figure's own numbers (rates, requests, seeds ...); `quick` replaces
    some of them for a coarse pass. `differs` says what is not as in the paper. `module`: the module
    that makes it, where several figures share one; null: that of the figure's name.
    """

    title: Text
    source: Text
    run: dict[str, Any]
    systems: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    study: dict[str, Any]
    quick: dict[str, Any] = Field(default_factory=dict)
    differs: str = ""
    module: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A figure to make: its name, its keys with the user's `overrides`, its run as a document."""

    name: str
    keys: FigureKeys
    run: yaml_file.Document
    beside: Path
    quick: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The full name of the module that makes the figure."""
        return f"experiments.figures.{self.keys.module or self.name.replace('-', '_')}"

    @property
    def study(self) -> dict[str, Any]:
        """The figure's own numbers, the coarse ones where asked for."""
        return self.keys.study | (self.keys.quick if self.quick else {})


def load_plan(path: Path, overrides: tuple[str, ...] = (), *, quick: bool = False) -> Plan:
    """Read a figure's YAML; `overrides` are `KEY=VALUE` of its run, `study.KEY` or `systems.LABEL`.

    Raises UsageError for unknown keys, and for a `study.KEY` that the figure does not have.
    """
    document = yaml_file.read(path)
    for assignment in overrides:
        key = assignment.partition("=")[0].strip()
        if key.startswith("study."):
            known = document.data["study"]
            if key.removeprefix("study.") not in known:
                raise UsageError(
                    f"--set {assignment}: {path.stem.replace('_', '-')} has "
                    f"{', '.join(f'study.{name}' for name in known)}"
                )
            document = yaml_file.override(document, assignment)
        elif key.startswith("systems."):
            document = yaml_file.override(document, assignment)
        else:
            document = yaml_file.override(document, f"run.{assignment}")
    try:
        keys = FigureKeys.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None
    set_here = {
        place.partition("=")[0].removeprefix("--set study.")
        for place in document.places.values()
        if place.startswith("--set study.")
    }
    keys = keys.model_copy(
        update={"quick": {k: v for k, v in keys.quick.items() if k not in set_here}}
    )
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    run = yaml_file.Document(str(path), keys.run, places)
    return Plan(path.stem.replace("_", "-"), keys, run, path.parent, quick, overrides)
