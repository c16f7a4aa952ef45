"""The keys of RUN.yaml and SWEEP.yaml as a JSON schema.

It follows from the classes that check a file, and from the policies. A key's or parameter's
description is the text below it in its class. `tools.reference` makes a page of it.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from evenflow.compiled import docstring
from evenflow.config.pools import POOLED
from evenflow.keys import below_keys
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
