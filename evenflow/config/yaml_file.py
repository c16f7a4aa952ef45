"""Read, change and check a YAML file whose errors name the line of a value.

Each error of a schema becomes one line that says what would be right. Knows no key's meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evenflow.errors import UsageError, instead_of, shortened
from evenflow.files import local_file
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


MOST_BYTES = 2**20
"""No person writes a longer file, which would take minutes to read."""

MOST_VALUES = 100_000
"""The most values of a document, each counted as often as aliases repeat it."""

MOST_MISTAKES, MOST_OF_A_MISTAKE = 8, 130
"""The most mistakes of a document in one line, and letters of one where there are several."""

MOST_DIGITS = 40
"""The longest whole number."""


class _MistakeError(yaml.MarkedYAMLError):
    """A value that YAML accepts and that cannot be meant."""

    def __init__(self, node: yaml.Node, words: str) -> None:
        super().__init__(problem=words, problem_mark=node.start_mark)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader that also reads `2e-5` as a number, as YAML 1.2 and JSON do.

    What means another number to YAML 1.1 than to people and to YAML 1.2 is a mistake: `0200` (128)
    and `1:30` (90).
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """Return a text, with characters written as surrogate pairs joined, as JSON does."""
        text = str(super().construct_scalar(node))
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _MistakeError(node, "half of a character, such as \\ud800") from None

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number of the kind that its tag says."""
        text = node.value
        if len(text) > MOST_DIGITS:
            words = f"a number of {len(text)} letters; at most {MOST_DIGITS} is right"
            raise _MistakeError(node, words)
        whole = node.tag.endswith("int")
        value = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if ":" in text:
            words = f"{text} would be {value}, a time; write it as one number, or in quotes"
            raise _MistakeError(node, words)
        if whole and re.fullmatch(r"[-+]?0[0-7_]+", text):
            plain = text.replace("0", "", 1)
            words = f"{text} is {value} to some readers of YAML and {plain} to others; "
            raise _MistakeError(node, f"{words}write it without the 0 in front, or in quotes")
        return value


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_number)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class Document(NamedTuple):
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
    below = str(beside / name)
    return below if below != name and not exists(name) and exists(below) else name


def read(path: Path, holds: str = "model, stages, workload") -> Document:
    """Read a YAML file whose top level is a mapping; UsageError when it is not one.

    `holds` names some of its keys, for the error of an empty file.
    """
    return document_of(read_text(path), str(path), holds)


def read_text(path: Path) -> str:
    """Return the text of a YAML file; UsageError for another kind of file, or a longer one."""
    file = local_file(path)
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; a file is right")
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: has more than {MOST_BYTES} bytes; a shorter file is right")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {_one_line(error)}") from None


def document_of(text: str, name: str, holds: str = "model, stages, workload") -> Document:
    """Return a YAML text as a document of that name; UsageError when it is no mapping."""
    data, lines = _parsed(text, name, in_lines=True)
    if data is None:
        raise UsageError(f"{name}: the file is empty; it should hold {holds} ...")
    if not isinstance(data, dict):
        raise UsageError(f"{name}:1: should be a mapping of keys to values, like `stages: 4`")
    return Document(name, data, {key: f"{name}:{line}" for key, line in lines.items()})


def value_of(text: str, name: str) -> Any:
    """Return what a text in YAML holds; UsageError, for the text of that name, when it cannot."""
    return _parsed(text, name, in_lines=False)[0]


def in_blocks(data: Any) -> str:
    """Return data as YAML, with a line for each of the innermost mappings and lists."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)


def in_a_line(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _parsed(text: str, name: str, *, in_lines: bool) -> tuple[Any, dict[KeyPath, int]]:
    """Return what a text holds, and the line of each value."""

    def at(error: yaml.MarkedYAMLError) -> str:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return f"{name}:{line}" if in_lines else name

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        lines = _lines(node)
        return loader.construct_document(node) if node else None, lines
    except _MistakeError as error:
        raise UsageError(f"{at(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"{at(error)}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{name}: not valid YAML: {_one_line(error)}") from None
    except RecursionError:
        raise UsageError(f"{name}: nested too deep, or an alias that holds itself") from None


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


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings by dotted key, inner ones both whole and key by key."""
    dotted: dict[str, Any] = {}
    for key, value in nested.items():
        dotted[prefix + key] = value
        if isinstance(value, Mapping):
            dotted |= flat(value, f"{prefix}{key}.")
    return dotted


def overridden(document: Document, assignments: Iterable[str], below: str = "") -> Document:
    """Return the document with several `dotted.key=value` applied in turn, as by `override`."""
    for assignment in assignments:
        document = override(document, assignment, below)
    return document


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
    place = f"--set {assignment}"
    return patched(document, {dotted: value_of(text, place)}, {dotted: place})


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


def _lines(node: yaml.Node | None) -> dict[KeyPath, int]:
    """Return the line of each value below a node."""
    lines: dict[KeyPath, int] = {}
    for count, (path, below) in enumerate(_below(node, ()), 1):
        lines[path] = below.start_mark.line + 1
        if count > MOST_VALUES:
            words = f"more than {MOST_VALUES} values, counting what aliases repeat"
            raise _MistakeError(below, words)
    return lines


def _below(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node]]:
    """Yield the keys of mappings and the items of lists below a node, with where they are."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                words = "a list or a mapping as a key; one word or number is right"
                raise _MistakeError(key, words)
            if key.value in seen:
                several = "; << takes a list of several" if key.value == "<<" else ""
                raise _MistakeError(key, f'the key "{key.value}" is given twice{several}')
            seen.add(key.value)
            yield (*path, key.value), key
            yield from _below(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value
            yield from _below(value, (*path, index))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    told = found[:MOST_MISTAKES]
    numbered = (f"({n}) {shortened(text, MOST_OF_A_MISTAKE)}" for n, text in enumerate(told, 1))
    first = "" if told == found else f", of which the first {len(told)}"
    return f"{len(found)} mistakes{first}: {' '.join(numbered)}"


def _mistake(document: Document, detail: ErrorDetails) -> str:
    path = _path_in(document.data, detail)
    key, problem = _problem(".".join(map(str, path)), detail)
    return f"{document.place((*path, *key))}: {problem}"


def _problem(dotted: str, detail: ErrorDetails) -> tuple[KeyPath, str]:
    """Return which key below the reported one is meant, and what is wrong there."""
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "missing":
            return (), f'the key "{dotted}" is missing{_remedy(context)}'
        case "missing_name":
            return (), f'the key "{dotted}.name" is missing{_remedy(context)}'
        case "unknown_key":
            below = f"{dotted}.{context['key']}".lstrip(".")
            return (context["key"],), f'unknown key "{below}"; {context["hint"]}'
        case "needed":
            return (), f"{context['reason']} needs the key {context['key']}{_remedy(context)}"
        case "union_tag_not_found":
            return (), f'the key "{dotted}.kind" is missing{_remedy(context)}'
        case "union_tag_invalid":
            known = str(context["expected_tags"]).replace("'", "").split(", ")
            hint = instead_of(context["tag"], known)
            return ("kind",), f'{dotted}.kind: unknown "{context["tag"]}"; {hint}'
    return (), f"{dotted}: should be {expected(detail)}, not {shown(detail['input'])}"


def _remedy(context: Mapping[str, Any]) -> str:
    return f"; {context['remedy']}" if context.get("remedy") else ""


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
