"""Turn what pydantic reports about a document into the one line a person needs."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evenflow.errors import instead_of
from evenflow.yaml_file import Document, KeyPath

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "string_too_short": "not empty",
    "string_type": "a text",
}
"""What pydantic's error types ask for, in the words of someone who writes YAML."""


def first_error(document: Document, error: ValidationError) -> str:
    """Return the first mistake as `place: key: what would be right`, and how many more there are."""
    details = error.errors(include_url=False)
    lines = [_line(document, detail) for detail in details]
    more = len(lines) - 1
    return lines[0] + (f" (and {more} more)" if more else "")


def _line(document: Document, detail: ErrorDetails) -> str:
    path = _path_in(document.data, detail)
    dotted = ".".join(map(str, path))
    kind, context = detail["type"], detail.get("ctx", {})
    place = document.place(path)
    match kind:
        case "missing":
            return f'{document.place(path[:-1])}: the key "{dotted}" is missing'
        case "unknown_key":
            dotted = ".".join(map(str, (*path, context["key"])))
            place = document.place((*path, context["key"]))
            return f'{place}: unknown key "{dotted}"; {context["hint"]}'
        case "needed":
            return f"{place}: {context['reason']} needs the key {context['key']}"
        case "later":
            return f"{place}: {dotted}: {context['kind']} is not available yet; use affine or roofline"
        case "union_tag_not_found":
            return f'{place}: {dotted}: the key "{dotted}.kind" is missing'
        case "union_tag_invalid":
            known = str(context["expected_tags"]).replace("'", "").split(", ")
            return f'{place}: {dotted}.kind: unknown "{context["tag"]}"; ' + instead_of(
                context["tag"], known
            )
    expected = EXPECTED.get(kind, "{expected}" if "expected" in context else detail["msg"])
    return f"{place}: {dotted}: should be {expected.format(**context)}, not {_shown(detail['input'])}"


def _path_in(data: object, detail: ErrorDetails) -> KeyPath:
    """Return the error's location as keys of the document, without pydantic's union tags."""
    path: list[str | int] = []
    location = detail["loc"]
    for position, key in enumerate(location):
        if isinstance(data, dict) and key in data:
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif not (detail["type"] == "missing" and position == len(location) - 1):
            continue
        path.append(key)
    return tuple(path)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
