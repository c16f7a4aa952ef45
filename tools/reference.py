"""Write docs/reference.md: every key of RUN.yaml and SWEEP.yaml, from their JSON schemas.

`python -m tools.reference systems` prints the table of docs/systems.md instead.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from evenflow.config.run import RunConfig
from evenflow.config.schema import Json, schema
from evenflow.config.systems import systems
from evenflow.errors import MOST
from evenflow.report.tables import markdown_table
from evenflow.study.sweep_file import SweepConfig

HEAD = """# RUN.yaml and SWEEP.yaml: every key

`make reference` writes this page, [run.schema.json](run.schema.json) and
[sweep.schema.json](sweep.schema.json) from the classes that check a file. An editor with a YAML
language server completes and explains keys as you type, once the schema is beside your file and
named in its first line (tried with yaml-language-server 1.25.0):

```console
$ evenflow init RUN.yaml
$ evenflow schema run
```

```text
# yaml-language-server: $schema=run.schema.json
```

A key without a *default* has to be given. A default of `null` means what the key's line says of it.
A bare word may stand for a mapping: `costs: roofline` is `costs: {kind: roofline}`, and
`scheduler: sarathi` is `scheduler: {name: sarathi}`.
"""


def reference(files: Mapping[str, Json]) -> str:
    """Return the reference of the keys of some files, given as schemas by name."""
    parts = [HEAD.rstrip()]
    titles: dict[str, str] = {}
    for name, whole in files.items():
        new = {key: title for key, title in _titles(whole).items() if key not in titles}
        titles |= new
        parts += [f"## {name}", whole["description"], _table(whole, titles)]
        for key, title in new.items():
            mapping = whole["$defs"][key]
            parts += [f"### {title}", mapping["description"], _table(mapping, titles)]
    return "\n\n".join(parts) + "\n"


def _titles(whole: Json) -> dict[str, str]:
    """Return a title for each mapping below a file's keys: the key that holds it, and its kind."""
    titles: dict[str, str] = {}

    def visit(dotted: str, part: Json) -> None:
        known = {name: whole["$defs"][name] for name in _references(part) if name not in titles}
        known = {
            name: each for name, each in known.items() if "properties" in each or "anyOf" in each
        }
        titles.update(
            {name: dotted + _kind(each) for name, each in known.items() if "properties" in each}
        )
        for each in known.values():
            if "anyOf" in each:
                visit(dotted, each)
            for key, value in each.get("properties", {}).items():
                visit(f"{dotted}.{key}", value)

    for key, value in whole["properties"].items():
        visit(key, value)
    return titles


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from [part["$ref"].rpartition("/")[2]] if "$ref" in part else []
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _references(each)


def _kind(mapping: Json) -> str:
    consts = (mapping["properties"].get(key, {}).get("const") for key in ("kind", "name"))
    return "".join(f": {each}" for each in consts if each)


def _table(mapping: Json, titles: Mapping[str, str]) -> str:
    required = mapping.get("required", ())
    rows = []
    for key, value in mapping["properties"].items():
        if "const" not in value:  # the title says it
            given = key in required or "default" not in value
            default = "" if given else _default(value["default"])
            rows.append((f"`{key}`", _values(value, titles), default, value["description"]))
    heads = ("key", "values", "default", "what it is")
    return markdown_table(heads, rows).rstrip() if rows else "No other keys."


def _default(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("kind", value.get("name", {}))
        return f"`{value}`" if value else "as below"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _values(part: Json, titles: Mapping[str, str]) -> str:
    """Return in words which values a key takes."""
    if "$comment" in part:
        return str(part["$comment"]).removesuffix(f" and at most {MOST}")
    if "anyOf" in part:
        found = dict.fromkeys(_values(each, titles) for each in part["anyOf"])
        return " or ".join(each for each in found if each)
    if "$ref" in part:
        title = titles.get(part["$ref"].rpartition("/")[2])
        anchor = re.sub(r"[^a-z0-9 _-]", "", (title or "scheduler: static").lower())
        return f"[{title or 'a policy'}](#{anchor.replace(' ', '-')})"
    if "const" in part or "enum" in part:
        return ", ".join(f"`{each}`" for each in part.get("enum", [part.get("const")]))
    if part.get("type") == "array":
        return f"a list of: {_values(part['items'], titles)}"
    if part.get("type") == "object" and isinstance(part.get("additionalProperties"), dict):
        keys = part.get("propertyNames")
        of = f" of {_values(keys, titles)}" if keys else ""
        return f"a mapping{of} to: {_values(part['additionalProperties'], titles)}"
    return f"{TYPES.get(part.get('type', ''), 'any')}{_bounds(part)}"


TYPES = {
    "array": "a list",
    "boolean": "true, false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "a mapping",
    "string": "a text",
}

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _bounds(part: Json) -> str:
    found = [f"{sign} {part[key]:,}" for key, sign in BOUNDS.items() if part.get(key, 1e12) < 1e12]
    return "".join(f" {each}" for each in [" and ".join(found)] if each)


def systems_table() -> str:
    """Return the table of docs/systems.md."""
    rows = ((each.title, f"`{each.keys}`", each.source, each.checked) for each in systems())
    return markdown_table(("system", "YAML", "from", "how it was checked"), rows)


if __name__ == "__main__":
    files = {"RUN.yaml": schema(RunConfig), "SWEEP.yaml": schema(SweepConfig)}
    print(systems_table() if sys.argv[1:] == ["systems"] else reference(files), end="")
