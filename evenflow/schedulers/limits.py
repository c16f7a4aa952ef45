"""What a policy's constructor declares of its parameters, checked: types and limits, in one place.

Knows annotations; no policy. A limit is part of the type: `token_budget: Count = 512`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Fraction = Annotated[float, Field(ge=0, lt=1)]

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}

Policy = TypeVar("Policy")
Params = ParamSpec("Params")


def checked(
    init: Callable[Concatenate[Policy, Params], None],
) -> Callable[Concatenate[Policy, Params], None]:
    """Make a constructor refuse values that are not of the types and limits it declares.

    Raises ValueError: `kv_thresh should be a number of at least 0 and below 1, not 2`.
    """

    @wraps(init)
    def checking(policy: Policy, /, *args: Params.args, **params: Params.kwargs) -> None:
        refuse(init, params)
        init(policy, *args, **params)

    return checking


def refuse(init: Callable[..., None], params: Mapping[str, Any]) -> None:
    """Raise ValueError for the first parameter that is not of the type that `init` declares.

    A parameter without a type, or with one that cannot be looked up, is left to the constructor.
    """
    declared = _declared(init)
    for name, value in params.items():
        if name in declared and not _fits(value, _adapter(init, name)):
            raise ValueError(f"{name} should be {_words(declared[name])}, not {value!r}")


@cache
def _declared(init: Callable[..., None]) -> dict[str, Any]:
    try:
        return get_type_hints(init, include_extras=True)
    except NameError:
        return {}


@cache
def _adapter(init: Callable[..., None], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_declared(init)[name], config=ConfigDict(arbitrary_types_allowed=True))


def _fits(value: object, adapter: TypeAdapter[Any]) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _words(declared: Any) -> str:
    """Say what values a type takes; a text among its annotations says it itself."""
    if get_origin(declared) is Annotated:
        plain, *limits = get_args(declared)
        told = [limit for limit in limits if isinstance(limit, str)]
        bounds = [bound for limit in limits for bound in _bounds(limit)]
        return told[0] if told else f"{_words(plain)} {' and '.join(bounds)}"
    if get_origin(declared) is Literal:
        return " or ".join(map(str, get_args(declared)))
    if get_origin(declared) in (Union, UnionType):
        return " or ".join(map(_words, get_args(declared)))
    if get_origin(declared) is Sequence:
        return f"a list (each {_words(get_args(declared)[0])})"
    if declared is NoneType:
        return "null"
    return WORDS.get(declared, getattr(declared, "__name__", str(declared)))


def _bounds(limit: Any) -> list[str]:
    """Return the bounds in one annotation, pydantic's `Field(gt=0, le=1)` or a single one."""
    return [
        f"{words} {getattr(part, key)}"
        for part in getattr(limit, "metadata", [limit])
        for key, words in BOUNDS.items()
        if hasattr(part, key)
    ]
