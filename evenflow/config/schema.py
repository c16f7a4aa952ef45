"""The keys of RUN.yaml and SWEEP.yaml as a JSON schema and, from that, as a reference in Markdown.

Both follow from the classes that check a file, and from the policies. A key's or parameter's
description is the text below it in its class.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from evenflow.compiled import docstring
from evenflow.config.pools import POOLED
from evenflow.errors import MOST
from evenflow.keys import below_keys
from evenflow.report.tables import markdown_table
from evenflow.schedulers import POLICIES, parameters, policy
from evenflow.schedulers.limits import declared
from evenflow.specs.gpu import GpuSpec, gpus, links
from evenflow.specs.model import models

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Described(GenerateJsonSchema):
    """Pydantic's schema, in which each key has its description and no title."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> Json:
        """Add the bare word of a short form; and what `expect` asks for, in words."""
        made = super().function_before_schema(schema)
        check = schema["function"]["function"]
        if "short_form" in check.__qualname__:
            return {"anyOf": [{"type": "string"}, made]}
        words = inspect.getclosurevars(check).nonlocals.get("expected")
        return made | {"$comment": words} if words else made

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Json:
        return _described(super().dataclass_schema(schema), schema["cls"])


def _described(made: Json, cls: type) -> Json:
    about = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    below = below_keys(cls) | {"kind": about}
    for name, each in made.get("properties", {}).items():
        made["properties"][name] = {"description": below.get(name, ""), **each}
    return made | {"description": about}


def _keys_of(top: Any) -> Json:
    return TypeAdapter(top).json_schema(schema_generator=_Described)


def schema(top: type[BaseModel]) -> Json:
    """Return the JSON schema of a file with the keys of `top`."""
    whole = _keys_of(top)
    known = whole.pop("$defs")
    if "SchedulerConfig" in known:
        known |= _policies()
        known["GpuSpec"] = _keys_of(GpuSpec) | {"additionalProperties": False}
        del known["GpuSpec"]["required"]  # what is not given is that of the GPU of this name
        known["ProcessConfig"] = OWN_PROCESS
    for each in (whole, *known.values()):
        for key, value in each.get("properties", {}).items():
            each["properties"][key] = _as_written(key, value, known)
    return {"$schema": DIALECT, **whole, "$defs": known}


def _policies() -> Json:
    """Return the schema of a scheduler: each policy with its parameters."""
    known: Json = {}
    for name in (*POLICIES, *POOLED):
        made = _keys_of(POOLED[name] if name in POOLED else _parameters_of(name))
        known |= made.pop("$defs", {})
        known[name] = _named(made, name)
    references = [{"$ref": f"#/$defs/{name}"} for name in (*POLICIES, *POOLED)]
    return known | {"SchedulerConfig": {"anyOf": [*references, OWN_POLICY]}}


OWN_POLICY: Json = {
    "description": "A policy of your own, and the parameters of its constructor.",
    "properties": {"name": {"description": "module:Class", "pattern": ":", "type": "string"}},
    "required": ["name"],
    "type": "object",
}


OWN_PROCESS: Json = {
    "description": "A process of your own, and the parameters of its function behind `world`.",
    "properties": {"name": {"description": "module:function", "type": "string"}},
    "required": ["name"],
    "type": "object",
}


def _parameters_of(name: str) -> type[BaseModel]:
    """Return a policy's parameters, as it declares them, as a class."""
    cls = policy(name)
    types, below = declared(cls), below_keys(cls)
    keys: Any = {
        key: (types[key], Field(each.default, description=below.get(key, "")))
        for key, each in parameters(cls).items()
    }
    config = ConfigDict(extra="forbid")
    made: type[BaseModel] = create_model(name, __config__=config, __module__="", **keys)
    made.__doc__ = docstring(cls)
    return made


def _named(made: Json, name: str) -> Json:
    key = {"name": {"description": made["description"], "const": name, "type": "string"}}
    return made | {
        "title": name,
        "properties": {**key, **made["properties"]},
        "required": ["name", *made.get("required", ())],
    }


ABOUT = ("description", "default", "examples", "$comment")


def _as_written(key: str, value: Json, known: Json) -> Json:
    """Return a key's schema with the bare words and the GPU's keys that a file may have there."""
    about = {name: value[name] for name in ABOUT if name in value}
    rest = {name: value[name] for name in value if name not in about}
    choices = rest.get("anyOf") or [rest]
    choices = [inner for each in choices for inner in each.get("oneOf", [each])]
    if key == "gpu":
        either = {"anyOf": [{"type": "string"}, _GPU]}
        of_kind = {"object": _GPU, "array": {"type": "array", "items": either}}
        choices = [of_kind.get(each.get("type", ""), each) for each in choices]
    words = _words(choices, known)
    choices = [each | words if each == {"type": "string"} else each for each in choices]
    names = {"examples": _names()[key]} if key in _names() else {}
    choices = [each | names if each.get("type") == "string" else each for each in choices]
    return about | (choices[0] if len(choices) == 1 else {"anyOf": choices})


_GPU = {"$ref": "#/$defs/GpuSpec"}


def _words(choices: list[Json], known: Json) -> Json:
    """Return the bare words that stand for mappings: kinds that require no other key."""
    named = [known[each["$ref"].rpartition("/")[2]] for each in choices if "$ref" in each]
    alone = [
        each.get("properties", {}) for each in named if set(each.get("required", ())) <= {"kind"}
    ]
    words = [keys["kind"]["const"] for keys in alone if "kind" in keys]
    return {"enum": words} if words else {}


@cache
def _names() -> dict[str, list[str]]:
    """Return the names in the tables, for keys with values that are looked up there."""
    of_links = [each.name for each in links()]
    return {
        "model": list(models()),
        "gpu": [each.name for each in gpus()],
        "scheduler": [*POLICIES, *POOLED],
        **dict.fromkeys(("link", "all_reduce", "transfer_link"), of_links),
    }


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
    for name, schema in files.items():
        new = {key: title for key, title in _titles(schema).items() if key not in titles}
        titles |= new
        parts += [f"## {name}", schema["description"], _table(schema, titles)]
        for key, title in new.items():
            mapping = schema["$defs"][key]
            parts += [f"### {title}", mapping["description"], _table(mapping, titles)]
    return "\n\n".join(parts) + "\n"


def _titles(schema: Json) -> dict[str, str]:
    """Return a title for each mapping below a file's keys: the key that holds it, and its kind."""
    titles: dict[str, str] = {}

    def visit(dotted: str, part: Json) -> None:
        known = {name: schema["$defs"][name] for name in _references(part) if name not in titles}
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

    for key, value in schema["properties"].items():
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
