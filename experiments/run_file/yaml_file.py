"""A YAML file whose values know their lines: reading, changing and checking it.

What a schema refuses becomes one line that a person can act on. Knows nothing of what keys mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evenflow.errors import UsageError, instead_of
from evenflow.keys import expected, shown

KeyPath = tuple[str | int, ...]

Patch = Mapping[str, Any]
"""What shall differ in a run: a value, as plain data, for each `dotted.key`."""

SHORT_FORMS = {
    "scheduler": "name",
    "costs": "kind",
    "arrivals": "kind",
    "workers": "kind",
    "link": "name",
    "all_reduce": "name",
    "transfer_link": "name",
}
"""Keys where a bare word stands for a mapping, and the key the word belongs to."""


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader that also reads `2e-5` as a number, as YAML 1.2 and JSON do."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML mapping, and where each of its values was written ("RUN.yaml:3", or "--set a.b=1")."""

    name: str
    data: dict[str, Any]
    places: Mapping[KeyPath, str]

    def place(self, path: KeyPath) -> str:
        """Return where the value at `path` was written, or the nearest mapping around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def find(name: str, beside: Path) -> str:
    """Return where a file is: in the current folder, or else in `beside`; or the name as it is."""
    below = beside / name
    return str(below) if not Path(name).exists() and below.exists() else name


def read(path: Path, holds: str = "model, stages, workload") -> Document:
    """Read a YAML file whose top level is a mapping; UsageError when it is not one.

    `holds` names some of its keys, for whoever gave an empty file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {_one_line(error)}") from None
    try:
        loader = Loader(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {_one_line(error)}") from None
    try:
        node = loader.get_single_node()
        places = {key: f"{path}:{line}" for key, line in _lines(node, ())} if node else {}
        data = loader.construct_document(node) if node else None
    except _DuplicateKeyError as error:
        raise UsageError(f"{path}:{error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path}: not valid YAML: {_one_line(error)}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deep, or an alias that holds itself") from None
    finally:
        loader.dispose()
    if data is None:
        raise UsageError(f"{path}: the file is empty; it should hold {holds} ...")
    if not isinstance(data, dict):
        raise UsageError(f"{path}:1: should be a mapping of keys to values, like `stages: 4`")
    return Document(str(path), data, places)


def patched(document: Document, patch: Patch, places: Mapping[str, str] | None = None) -> Document:
    """Return the document with the patch's values in it; `run.with_` checks one of a run besides.

    A value replaces all that was below its key. Outer keys go first, whatever their order in the
    patch: `scheduler` would undo what is said of `scheduler.max_prefill`. A bare word on the way is
    the mapping it stands for: `scheduler.token_budget` adds to `scheduler: sarathi`. `places` say
    where a key's value was written, for the error messages.
    """
    places = places or {}
    for dotted in sorted(patch, key=lambda key: key.count(".")):
        place = places.get(dotted, f"set {dotted}")
        document = assign(document, dotted.split("."), patch[dotted], place)
    return document


def as_patch(data: Mapping[str, Any], layer: Mapping[str, Any]) -> Patch:
    """Return a layer of nested keys as a patch of `data`, which only adds to its mappings.

    A mapping replaces one of another kind: `scheduler: {name: vllm}` leaves nothing of
    `scheduler: {name: sarathi, token_budget: 512}`, `scheduler: {token_budget: 256}` does.
    """
    patch: dict[str, Any] = {}
    for key, value in layer.items():
        below, above = long_form(key, data.get(key)), long_form(key, value)
        if isinstance(below, Mapping) and isinstance(above, Mapping) and _alike(below, above):
            patch |= {f"{key}.{inner}": one for inner, one in as_patch(below, above).items()}
        elif value != data.get(key):
            patch[key] = value
    return patch


def long_form(key: str, value: Any) -> Any:
    """Return the mapping that a bare word at `key` stands for; any other value as it is."""
    return {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value


def _alike(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Say whether `above` adds to `below`: it names no other kind or thing, or names none."""
    return all(below.get(name) == above[name] for name in ("name", "kind") if name in above)


def override(document: Document, assignment: str, below: str = "") -> Document:
    """Return the document with one `dotted.key=value` applied; the value is parsed as YAML.

    `below` is what the key starts with besides, where the document is a part of another.
    """
    dotted, equals, text = assignment.partition("=")
    dotted = dotted.strip().removeprefix(below)
    if not equals or not all(dotted.split(".")):
        raise UsageError(
            f"--set {assignment}: should be KEY=VALUE, like scheduler.max_prefill=1024"
        )
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {assignment}: not valid YAML: {_one_line(error)}") from None
    return patched(document, {dotted: value}, {dotted: f"--set {assignment}"})


def assign(document: Document, keys: Sequence[str], value: object, place: str) -> Document:
    """Return the document with the value below these keys replaced, as if written at `place`."""
    path = tuple(keys)
    data = _with_value(document.data, path, value, place)
    kept = {key: old for key, old in document.places.items() if key[: len(path)] != path}
    around: dict[KeyPath, str] = {path[:length]: place for length in range(1, len(path))}
    return Document(document.name, data, {**around, **kept, path: place})


def _with_value(
    mapping: Mapping[str, Any], keys: tuple[str, ...], value: object, place: str
) -> dict[str, Any]:
    head, *rest = keys
    if not rest:
        return {**mapping, head: value}
    inner = long_form(head, mapping.get(head))
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise UsageError(f'{place}: "{head}" has no keys of its own')
    return {**mapping, head: _with_value(inner, tuple(rest), value, place)}


class _DuplicateKeyError(Exception):
    """The same key twice in one mapping; PyYAML would silently keep the last."""


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and key.value != "<<":
                raise _DuplicateKeyError(f'{line}: the key "{key.value}" is given twice')
            seen.add(key.value)
            yield (*path, key.value), line
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _lines(value, (*path, index))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# -- what a schema says of a document -------------------------------------------------------------

Schema = TypeVar("Schema", bound=BaseModel)


def checked(schema: type[Schema], document: Document) -> Schema:
    """Return what a document's keys say; UsageError with each mistake's place, key and remedy."""
    try:
        return schema.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None


def mistakes(document: Document, error: ValidationError) -> str:
    """Return each mistake as `place: key: what would be right`; several are numbered."""
    found = [_mistake(document, detail) for detail in error.errors(include_url=False)]
    if len(found) == 1:
        return found[0]
    numbered = (f"({number}) {text}" for number, text in enumerate(found, 1))
    return f"{len(found)} mistakes: {' '.join(numbered)}"


def _mistake(document: Document, detail: ErrorDetails) -> str:
    path = _path_in(document.data, detail)
    key, problem = _problem(".".join(map(str, path)), detail)
    return f"{document.place((*path, *key))}: {problem}"


def _problem(dotted: str, detail: ErrorDetails) -> tuple[KeyPath, str]:
    """Return which key below the reported one is meant, and what is wrong there."""
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "missing":
            return (), f'the key "{dotted}" is missing'
        case "unknown_key":
            below = f"{dotted}.{context['key']}".lstrip(".")
            return (context["key"],), f'unknown key "{below}"; {context["hint"]}'
        case "needed":
            return (), f"{context['reason']} needs the key {context['key']}"
        case "union_tag_not_found":
            return (), f'{dotted}: the key "{dotted}.kind" is missing'
        case "union_tag_invalid":
            known = str(context["expected_tags"]).replace("'", "").split(", ")
            hint = instead_of(context["tag"], known)
            return ("kind",), f'{dotted}.kind: unknown "{context["tag"]}"; {hint}'
    return (), f"{dotted}: should be {expected(detail)}, not {shown(detail['input'])}"


def _path_in(data: object, detail: ErrorDetails) -> KeyPath:
    """Return the error's location as keys of the document, without pydantic's union tags."""
    *outer, last = detail["loc"] or ("",)
    path: list[str | int] = []
    for key in (*outer, last):
        inside = data if isinstance(data, dict) else {}
        if isinstance(data, list) and isinstance(key, int):
            inside = dict(enumerate(data))
        if key in inside:
            path.append(key)
            data = inside[key]
    if detail["type"] == "missing":
        path.append(last)
    return tuple(path)
