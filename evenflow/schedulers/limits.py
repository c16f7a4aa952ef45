"""Checks of a policy's declared parameters: types and limits, in one place.

Knows annotations; no policy. A limit is part of the type: `token_budget: Count = 512`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evenflow.compiled import mypyc_attr, own_annotations
from evenflow.keys import expected, shown

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Range(NamedTuple):
    """Values worth trying of a parameter: from `low` to `high`, whole numbers where both are.

    `log`: steps are equal ratios, not equal differences.
    """

    low: float
    high: float
    log: bool = False


SearchSpace = Mapping[str, Range | tuple[Any, ...]]
"""Values worth trying of a policy's parameters, by name: a range, or all of them."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Policy:
    """A policy that declares its parameters as a dataclass does, each given by its name.

    What follows from them is set in `__post_init__`. The constructor raises ValueError for a value
    that is not of the type and limits declared: `kv_thresh should be less than 1.0, not 2`.
    """

    def __new__(cls, **params: Any) -> Self:
        refuse(cls, params)
        return super().__new__(cls)


def refuse(cls: Any, params: Mapping[str, Any]) -> None:
    """Raise ValueError for the first parameter not of the type that a policy or function declares.

    A parameter without a type, or with one that cannot be looked up, is left to the constructor.
    """
    types = declared(cls)
    for name, value in params.items():
        if name not in types:
            continue
        try:
            _adapter(cls, name).validate_python(value, strict=True)
        except ValidationError as error:
            words = " or ".join(dict.fromkeys(map(expected, error.errors(include_url=False))))
            raise ValueError(f"{name} should be {words}, not {shown(value)}") from None


@cache
def declared(cls: Any) -> dict[str, Any]:
    """Return the types of a policy's parameters, as far as they are declared, by name."""
    plain = isinstance(cls, type) and not is_dataclass(cls)
    try:
        found = get_type_hints(cls.__init__ if plain else cls, include_extras=True)
    except NameError:
        return {}
    for each in reversed(getattr(cls, "__mro__", ())):
        found |= own_annotations(each)
    return found


@cache
def _adapter(cls: Any, name: str) -> TypeAdapter[Any]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(declared(cls)[name], config=config)
