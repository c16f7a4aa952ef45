"""Check a policy's parameters against the types its constructor declares. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from evenflow.errors import UsageError


def check_parameter_types(name: str, cls: type, params: Mapping[str, Any]) -> None:
    """Raise UsageError when a parameter's value is not of the type that `cls` declares for it.

    A parameter without a type, or with one that cannot be looked up, is left to the constructor.
    """
    try:
        declared = get_type_hints(cls.__init__)  # type: ignore[misc]
    except NameError:
        return
    for key, value in params.items():
        if key in declared and not _fits(value, declared[key]):
            expected = _words(declared[key])
            raise UsageError(f"scheduler {name}: {key} should be {expected}, not {value!r}")


def _fits(value: object, declared: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    adapter = TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _words(declared: Any) -> str:
    if get_origin(declared) is Literal:
        return " or ".join(map(str, get_args(declared)))
    if get_origin(declared) in (Union, UnionType):
        return " or ".join(map(_words, get_args(declared)))
    if get_origin(declared) is Sequence:
        return f"a list (each {_words(get_args(declared)[0])})"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if declared is NoneType:
        return "null"
    return words.get(declared, getattr(declared, "__name__", str(declared)))
