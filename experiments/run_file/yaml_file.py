"""Read a YAML file and remember the line of each value. Knows nothing of what the keys mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evenflow.errors import UsageError

KeyPath = tuple[str | int, ...]

SHORT_FORMS = {"scheduler": "name", "costs": "kind", "arrivals": "kind", "workers": "kind"}
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


def override(document: Document, assignment: str, below: str = "") -> Document:
    """Return the document with one `dotted.key=value` applied; the value is parsed as YAML.

    `below` is what the key starts with besides, where the document is a part of another.
    """
    dotted, equals, text = assignment.partition("=")
    keys = dotted.strip().removeprefix(below).split(".")
    if not equals or not all(keys):
        raise UsageError(
            f"--set {assignment}: should be KEY=VALUE, like scheduler.max_prefill=1024"
        )
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {assignment}: not valid YAML: {_one_line(error)}") from None
    return assign(document, keys, value, f"--set {assignment}")


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
    inner = mapping.get(head)
    if isinstance(inner, str) and head in SHORT_FORMS:
        inner = {SHORT_FORMS[head]: inner}
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
