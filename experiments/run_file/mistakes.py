"""Turn what pydantic reports about a document into one line that a person can act on."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenflow.errors import instead_of
from experiments.run_file.yaml_file import Document, KeyPath

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "string_too_short": "not empty",
    "string_type": "a text",
    "too_short": "not empty",
}
"""What pydantic's error types ask for, in the words of someone who writes YAML."""


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
    expected = EXPECTED.get(kind, "{expected}" if "expected" in context else detail["msg"])
    shown = _shown(detail["input"])
    return (), f"{dotted}: should be {expected.format(**context)}, not {shown}"


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


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
