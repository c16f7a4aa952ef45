"""The schema of a figure's YAML. Knows which keys there are, not what a figure makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from evenflow.errors import UsageError
from evenflow.keys import Keys
from experiments.figures.kinds import check_like
from experiments.figures.layers import layered, set_by_hand, without_links
from experiments.run_file import yaml_file
from experiments.run_file.yaml_file import mistakes
from experiments.systems import keys_of_system

SAMPLING = ("requests", "capacity_requests", "seeds", "tolerance")
"""Numbers of a study that say how closely is looked, not at what."""

Text = Annotated[str, Field(min_length=1)]


class FigureKeys(Keys):
    """What a figure needs. `run` holds RUN.yaml's keys, shared by all that is simulated.

    `systems`: names of `evenflow schedulers`, by the label in the figure; or the keys that a label
    stands for. `study`: the figure's own numbers (rates, requests, seeds ...); `quick` replaces
    some of them for a coarse pass. `title` may name numbers of the study in braces, and `{gpus}`.
    `differs` says what is not as in the paper. `module`: the module
    that makes it, or MODULE.FUNCTION where one makes several; null: that of the figure's name.
    `plot`: how its table is drawn, where that is data.
    """

    title: Text
    source: Text
    run: dict[str, Any]
    systems: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    study: dict[str, Any]
    quick: dict[str, Any] = Field(default_factory=dict)
    differs: str = ""
    module: str | None = None
    plot: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A figure to make: its name, its keys with the user's `overrides`, its run as a document.

    `published`: the set-up is the one that the figure's file describes, not one set by hand.
    """

    name: str
    keys: FigureKeys
    run: yaml_file.Document
    beside: Path
    quick: bool = False
    overrides: tuple[str, ...] = ()
    published: bool = True

    @property
    def maker(self) -> tuple[str, str]:
        """The full name of the module that makes the figure, and of its function."""
        module, _, function = (self.keys.module or self.name.replace("-", "_")).partition(".")
        return f"experiments.figures.{module}", function or "make"

    @property
    def study(self) -> dict[str, Any]:
        """The figure's own numbers, the coarse ones where asked for."""
        return self.keys.study | (self.keys.quick if self.quick else {})

    @property
    def by_hand(self) -> dict[str, Any]:
        """The keys of the run that the user has set, as a layer."""
        return set_by_hand(self.run)


def load_plan(path: Path, overrides: tuple[str, ...] = (), *, quick: bool = False) -> Plan:
    """Read a figure's YAML; `overrides` are `KEY=VALUE` of its run, `study.KEY` or `systems.LABEL`.

    Raises UsageError for unknown keys, for a `study.KEY` that the figure does not have, and for one
    whose value is of another kind than the figure's.
    """
    document = yaml_file.read(path)
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    run = yaml_file.Document(str(path), document.data["run"], places)
    original = document.data
    for assignment in overrides:
        head = assignment.partition("=")[0].strip().partition(".")[0]
        if head == "study":
            document = _with_number(document, assignment, path)
        elif head == "systems":
            if "." not in assignment.partition("=")[0]:
                raise UsageError(f"--set {assignment}: should be systems.LABEL=NAME, or its keys")
            document = yaml_file.override(_with_its_keys(document, assignment), assignment)
        else:
            run = yaml_file.override(run, assignment)
    run = _without_the_links_of_another(run)
    try:
        keys = FigureKeys.model_validate(document.data | {"run": run.data})
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None
    _check_not_taken(set_by_hand(run), keys.study)
    new = {key for key, value in keys.study.items() if value != original["study"][key]}
    set_here = {
        assignment.partition("=")[0].strip().split(".")[1]
        for assignment in overrides
        if assignment.startswith("study.")
    }
    keys = keys.model_copy(
        update={"quick": {k: v for k, v in keys.quick.items() if k not in set_here}}
    )
    same_systems = keys.systems == original.get("systems", {})
    published = run.data == original["run"] and same_systems and new <= set(SAMPLING)
    return Plan(path.stem.replace("_", "-"), keys, run, path.parent, quick, overrides, published)


TAKEN = {"requests": "requests", "seed": "seeds", "arrivals": "rates"}
"""Keys of a run's workload that a figure replaces by numbers of its study, if it has them."""


def _check_not_taken(by_hand: Mapping[str, Any], study: Mapping[str, Any]) -> None:
    for key, number in TAKEN.items():
        if key in by_hand.get("workload", {}) and number in study:
            raise UsageError(
                f"--set workload.{key}: the figure has numbers of its own; give --set "
                f"study.{number}=..., in place of {json.dumps(study[number])}"
            )


def _with_its_keys(document: yaml_file.Document, assignment: str) -> yaml_file.Document:
    """Return the document with the keys of a system in place of its name, where one is set."""
    path = assignment.partition("=")[0].strip().split(".")
    name = document.data.get("systems", {}).get(path[1]) if len(path) > 2 else None
    if not isinstance(name, str):
        return document
    return yaml_file.assign(document, path[:2], keys_of_system(name), document.place(("systems",)))


def _with_number(document: yaml_file.Document, assignment: str, path: Path) -> yaml_file.Document:
    known = document.data["study"]
    key = assignment.partition("=")[0].strip()
    name = key.removeprefix("study.").partition(".")[0]
    if key == "study" or name not in known:
        raise UsageError(
            f"--set {assignment}: {path.stem.replace('_', '-')} has "
            f"{', '.join(f'study.{each}' for each in known)}"
        )
    document = yaml_file.override(document, assignment)
    check_like(document.data["study"][name], known[name], assignment)
    return document


def _without_the_links_of_another(run: yaml_file.Document) -> yaml_file.Document:
    """Drop the links that a figure's file gives where another GPU is set by hand."""

    by_hand = set_by_hand(run)
    if "gpu" not in by_hand:
        return run
    return yaml_file.Document(run.name, layered(without_links(run.data), by_hand), run.places)
