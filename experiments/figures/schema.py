"""The schema of a figure's YAML, and the layers that its runs are made of: keys over keys.

Those set by hand lie over the file's. Knows which keys there are, not what a figure makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from evenflow.config import yaml_file
from evenflow.config.files import make_importable
from evenflow.config.systems import keys_of_system
from evenflow.config.yaml_file import Document, as_patch, patched
from evenflow.errors import UsageError, instead_of
from evenflow.keys import Keys, expect
from evenflow.report.style import FORMATS
from evenflow.report.tables import is_number

Layer: TypeAlias = Mapping[str, Any]
"""Keys of a run."""

SAMPLING = ("requests", "capacity_requests", "seeds", "tolerance")
"""Numbers of a study that say how closely is looked, not at what."""


def _is_plain(value: object) -> bool:
    return not isinstance(value, dict | list)


def _are_plain(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_plain, parts))


ONE = "a text, a number, true, false or null"
Value = Annotated[Any, expect(_is_plain, ONE)]
"""What a row of a figure's table may have in a column."""
Values = Annotated[Any, expect(_are_plain, f"{ONE}, or a list or a mapping of them")]
Text = Annotated[str, Field(min_length=1)]


class OwnAxis(Keys):
    """An axis of one figure. `of`: the number of the study that has its values, by default its own
    name with an s. They are labels with keys, or, where `key` names one, values of that. `words` is
    the format of a label, `more` labels with keys after those. `digits` is how finely `load` is
    written.
    """

    of: str | None = None
    key: str | None = None
    words: str = ""
    more: dict[str, dict[str, Any]] = Field(default_factory=dict)
    digits: int = 3


class Over(Keys):
    """Columns by name that are a metric over that of the run at `reference`, all else equal.

    `reference` has a value by column; the name of a column for what is different in every row.
    """

    reference: dict[str, Value] = Field(examples=[{"system": "sarathi"}])
    of: dict[str, str] = Field(examples=[{"faster": "mean_ttft_ms"}])


PAPER = ", paper"
"""Ends the name of a column that has the paper's values of another."""
MISSED = ", missed"
"""Ends the name of a column that is 1 where ours is further off the paper's than 25 %."""

Shape = str | list[str] | dict[str, str]


class Query(Keys):
    """Our value of a claim: a mean over the seeds, where the columns have these values.

    `take`: the column. `over`: that of the runs which differ in these values. `best`: the largest
    of what is left (`max`), the least, or its `range`. `how`: the mean, or the `geomean`. A list or
    a mapping in place of one value makes as many answers. `then` takes one of them.
    """

    take: Shape = Field(examples=["mean_ttft_ms"])
    where: dict[str, Values] = Field(default_factory=dict)
    over: dict[str, Values] = Field(default_factory=dict)
    how: Literal["mean", "geomean"] = "mean"
    best: Shape | None = None
    then: Literal["max", "min"] | None = None


def _of_parts(value: object) -> str:
    parts = value.values() if isinstance(value, dict) else ()
    return "parts" if parts and all(isinstance(e, dict) and "take" in e for e in parts) else "query"


Asked = Annotated[
    Annotated[Query, Tag("query")] | Annotated[dict[str, Query], Tag("parts")],
    Discriminator(_of_parts),
]
"""What answers a claim: a query, or one for each part of it."""


class FigureKeys(Keys):
    """Keys of a figure. `run` holds RUN.yaml's keys, shared by all that is simulated.

    `systems`: names of `evenflow schedulers`, by the label in the figure; or the keys that a label
    stands for. `study`: the figure's own numbers (rates, requests, seeds ...); `quick` replaces
    some of them for a coarse pass. `title` may name numbers of the study in braces, and `{gpus}`.
    `differs` says what is not as in the paper. `says` gives, by the key read so, the section and
    the words behind it. `like`: the figure whose keys hold where this one has none. They hold of
    `plot` key by key, and of `study` number by number. `claims`, `beside` and, in a figure of the
    user's, `differs` are left out.

    `vary`: the axes of its cases, the last fastest (`cases.AXES`, or its own in `axes`). `columns`:
    which of them stand first in a row, in which order. `measure`: what is kept of each run, a
    function of `measures` or MODULE.FUNCTION. `args`: the values of a case, or numbers of the
    study, that it gets, or a list itself. `table`: in place of these, the function that has the
    rows. `add`: columns by the function that makes them, `over`: as ratios. `explode`: columns
    whose lists the data has a row a value of, in place of all. `shown`: those a terminal shows.
    `claims`: what of the table answers a published claim, by its id. `beside`: the same in other
    readings, by their words. `plot`: how the table is drawn (`panels.Plot`), or `draw`: the
    function that does. `module`: in place of all of these, the function that makes the figure.
    """

    title: Text = Field(examples=["Latency by rate"])
    source: Text = Field(examples=["own"])
    like: str | None = None
    run: dict[str, Any] = Field(examples=[{"stages": 4}])
    systems: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    study: dict[str, Any] = Field(examples=[{"rates": [1.0, 2.0]}])
    quick: dict[str, Any] = Field(default_factory=dict)
    differs: str = ""
    module: str | None = None
    vary: list[str] = Field(default_factory=list)
    axes: dict[str, OwnAxis] = Field(default_factory=dict)
    columns: list[str] = Field(default_factory=list)
    measure: str = "overview"
    args: dict[str, str | list[str]] = Field(default_factory=dict)
    table: str | None = None
    add: dict[str, str] = Field(default_factory=dict)
    over: Over | None = None
    explode: list[list[str]] = Field(default_factory=list)
    shown: list[str] | None = None
    draw: str | None = None
    claims: dict[str, Asked] = Field(default_factory=dict)
    beside: dict[str, dict[str, Asked]] = Field(default_factory=dict)
    says: dict[str, str] = Field(default_factory=dict)
    plot: dict[str, Any] = Field(default_factory=dict)


LEAST_WIDTH, MOST_WIDTH = 2, 40


@dataclass(frozen=True, slots=True)
class Look:
    """Form of figures: `width` in inches (None: as their panels need).

    `style` is matplotlib's, a name or a file. Raises UsageError for invalid ones.
    """

    width: float | None = None
    style: str | None = None
    formats: tuple[str, ...] = ("png", "svg")

    def __post_init__(self) -> None:
        for kind in self.formats:
            if kind not in FORMATS:
                raise UsageError(f"--format {kind}: {instead_of(kind, FORMATS)}")
        if self.width is not None and not LEAST_WIDTH <= self.width <= MOST_WIDTH:
            raise UsageError(f"--width {self.width:g}: {LEAST_WIDTH} to {MOST_WIDTH} is right")

    @property
    def keys(self) -> dict[str, Any]:
        return {} if self.width is None else {"width": self.width}


PLAIN = Look()


@dataclass(frozen=True, slots=True)
class FigurePlan:
    """A figure to make: its name, its keys with the user's `overrides`, its run as a document.

    `published`: the set-up is the one that the figure's file describes, not one set by hand.
    `allow_refused`: it is made though too many requests are refused.
    """

    name: str
    keys: FigureKeys
    run: Document
    beside: Path
    quick: bool = False
    overrides: tuple[str, ...] = ()
    published: bool = True
    allow_refused: bool = False
    look: Look = PLAIN

    @property
    def of_a_paper(self) -> bool:
        """Whether it is one of ours, and not a file of the user's own."""
        return self.beside == Path(__file__).parent

    @property
    def study(self) -> dict[str, Any]:
        """The figure's own numbers, the coarse ones where asked for."""
        return self.keys.study | (self.keys.quick if self.quick else {})

    @property
    def by_hand(self) -> dict[str, Any]:
        return set_by_hand(self.run)

    def sets(self, key: str) -> bool:
        """Whether the user has set a key, or a part of the file that it is in."""
        return any(f"{key}.".startswith(f"{_key(each)}.") for each in self.overrides)


def load_plan(
    path: Path,
    overrides: tuple[str, ...] = (),
    *,
    quick: bool = False,
    keys: Mapping[str, Any] | None = None,
) -> FigurePlan:
    """Read a figure's YAML; `overrides` are `KEY=VALUE` of its run, `study.KEY` or `systems.LABEL`.

    `keys`: what would stand in the file. Raises UsageError for unknown keys, and for a `study.KEY`
    that the figure does not have. So it does for a value of another kind than the figure's.
    """
    document = _completed(_read(path) if keys is None else Document(path.stem, {**keys}, {}), path)
    yaml_file.checked(FigureKeys, document)
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    run = Document(str(path), document.data["run"], places)
    original = document.data
    for assignment in overrides:
        head, dot, _ = _key(assignment).partition(".")
        if head == "study":
            document = _with_number(document, assignment, path)
        elif head == "systems":
            if not dot:
                raise UsageError(f"--set {assignment}: should be systems.LABEL=NAME, or its keys")
            document = yaml_file.override(_with_its_keys(document, assignment), assignment)
        else:
            run = yaml_file.override(run, assignment)
    by_hand = set_by_hand(run)
    if "gpu" in by_hand:  # the links that the file gives are another's
        run = run._replace(data=layered(without_links(run.data), by_hand))
    all_keys = document._replace(data=document.data | {"run": run.data})
    figure = yaml_file.checked(FigureKeys, all_keys)
    make_importable([run.data, figure.systems, figure.study], path.parent)
    _check_not_taken(by_hand, figure.study)
    numbers = {dotted.split(".")[1] for dotted in map(_key, overrides) if dotted[:6] == "study."}
    quickly = {name: value for name, value in figure.quick.items() if name not in numbers}
    figure = figure.model_copy(update={"quick": quickly})
    new = {name for name, value in figure.study.items() if value != original["study"][name]}
    same = run.data == original["run"] and figure.systems == original.get("systems", {})
    name, published = path.stem.replace("_", "-"), same and new <= set(SAMPLING)
    return FigurePlan(name, figure, run, path.parent, quick, overrides, published)


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _read(path: Path) -> Document:
    return yaml_file.read(path, "title, run, study")


def _completed(document: Document, path: Path, above: tuple[Path, ...] = ()) -> Document:
    """Return a figure's keys with those of the figure that it is `like`, from that one's file."""
    if "like" not in document.data:
        return document
    name = f"{str(document.data['like']).replace('-', '_')}.yaml"
    folder = path.parent if (path.parent / name).exists() else Path(__file__).parent
    if folder / name in (path, *above):
        raise UsageError(f"{document.place(('like',))}: like: the figure would be like itself")
    under = _completed(_read(folder / name), folder / name, (path, *above))
    data = under.data | {"claims": {}, "beside": {}}
    if path.parent != Path(__file__).parent:
        data |= {"differs": "", "source": f"like {under.data.get('source')}"}
    data |= document.data
    if isinstance(own := document.data.get("plot"), dict):
        data["plot"] = layered(under.data.get("plot", {}), own)
    if isinstance(own := document.data.get("study"), dict):
        data["study"] = {**under.data.get("study", {}), **own}
    return Document(document.name, data, {**under.places, **document.places})


TAKEN = {"requests": "requests", "seed": "seeds", "arrivals": "rates"}
"""Keys of a run's workload that a figure replaces by numbers of its study, if it has them."""


def _check_not_taken(by_hand: Layer, study: Mapping[str, Any]) -> None:
    for key, number in TAKEN.items():
        if key in by_hand.get("workload", {}) and number in study:
            raise UsageError(
                f"--set workload.{key}: the figure has numbers of its own; give --set "
                f"study.{number}=..., in place of {json.dumps(study[number])}"
            )


def _with_its_keys(document: Document, assignment: str) -> Document:
    """Return the document with the keys of a system in place of its name, where one is set."""
    path = _key(assignment).split(".")
    name = document.data.get("systems", {}).get(path[1]) if len(path) > 2 else None
    if not isinstance(name, str):
        return document
    return yaml_file.assign(document, path[:2], keys_of_system(name), document.place(("systems",)))


def _with_number(document: Document, assignment: str, path: Path) -> Document:
    known = document.data["study"]
    key = _key(assignment)
    name = key.removeprefix("study.").partition(".")[0]
    if key == "study" or name not in known:
        raise UsageError(
            f"--set {assignment}: {path.stem.replace('_', '-')} has "
            f"{', '.join(f'study.{each}' for each in known)}"
        )
    document = yaml_file.override(document, assignment)
    check_like(document.data["study"][name], known[name], assignment)
    return document


def check_like(value: Any, known: Any, assignment: str) -> None:
    """Raise a UsageError unless `value` is of the kind of `known`, the figure's own.

    Counts and rates are positive, lists and mappings hold something; where the figure has null, a
    list may stand.
    """
    if not _like(value, known):
        raise UsageError(f"--set {assignment}: should be {_words(known)}")


def _like(value: Any, known: Any, *, inside: bool = False) -> bool:
    """Say whether a value is like the known one; `inside` numbers may be 0 and have fractions."""
    match known:
        case None:
            return value is None or _like(value, [[1.0], 1.0])
        case bool() | str():
            return type(value) is type(known)
        case int() | float() if inside:
            return is_number(value) and value >= 0
        case int() | float():
            return is_number(value) and isinstance(value, type(known) | int) and value > 0
        case Mapping() if inside:
            return isinstance(value, Mapping)
    kind = Mapping if isinstance(known, Mapping) else list
    if not isinstance(value, kind) or not value:
        return False
    values, examples = (v.values() if isinstance(v, Mapping) else v for v in (value, known))
    return all(any(_like(v, each, inside=True) for each in examples) for v in values if examples)


def _words(known: Any) -> str:
    match known:
        case None:
            return "null, or a list of numbers above 0"
        case bool():
            return "true or false"
        case int():
            return f"a whole number of at least 1, like {known}"
        case float():
            return f"a number above 0, like {known:g}"
        case str():
            return f"a text, like {known}"
        case Mapping():
            return f"a mapping that is not empty, like {{{next(iter(known))}: ...}}"
    return f"a list that is not empty, like {str(known[:3]).replace(chr(39), '')}"


def layered(under: Layer, over: Layer) -> dict[str, Any]:
    """Return `under` with the keys of `over` in place; mappings merge, if they are of one kind."""
    return patched(Document("", dict(under), {}), as_patch(under, over)).data


def set_by_hand(document: Document) -> dict[str, Any]:
    """Return the keys of a document that the user has set, as a layer."""
    patch: dict[str, Any] = {}
    for path, place in document.places.items():
        if place.startswith("--set"):
            value: Any = document.data
            for key in path:  # a key that was set to null may be gone
                value = value.get(key) if isinstance(value, Mapping) else value[key]
            patch[".".join(map(str, path))] = value
    return patched(Document("", {}, {}), patch).data


def without_links(run: Layer) -> dict[str, Any]:
    """Return a run's keys without those of its links within a machine."""
    kept = {key: value for key, value in run.items() if key not in ("link", "machine")}
    if isinstance(costs := kept.get("costs"), Mapping):
        kept["costs"] = {key: value for key, value in costs.items() if key != "all_reduce"}
    return kept


def gpu_name(given: str | Mapping[str, Any]) -> str:
    """Return a figure's name for a GPU that is named or described."""
    return given if isinstance(given, str) else str(given.get("name", "gpu"))
