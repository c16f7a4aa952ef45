"""Checks of a policy's declared parameters: types and limits, in one place.

Knows annotations; no policy. A limit is part of the type: `token_budget: Count = 512`.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evenflow.compiled import mypyc_attr, own_annotations
from evenflow.errors import UsageError
from evenflow.keys import expected, shown

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Range(NamedTuple):
    """Values worth trying of a parameter: from `low` to `high`, whole numbers where both are.

    `log`: steps are equal ratios, not equal differences.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return type(self.low) is type(self.high) is int


SearchSpace = Mapping[str, Range | tuple[Any, ...]]
"""Values worth trying of a policy's parameters, by name: a range, or all of them."""


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Policy:
    """A policy that declares its parameters as a dataclass does, each given by its name.

    What follows from them is set in `__post_init__`. The constructor raises ValueError for a value
    beyond its type and limits: `kv_thresh should be less than 1.0, not 2`.
    """

    def __new__(cls, **params: Any) -> Self:
        refuse(cls, params)
        return super().__new__(cls)

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        """Say whether the policy sends all ready `decodes`, one whole group, as a micro-batch.

        Called in place of `schedule` where no prompt waits or runs; `running` counts all decodes.
        Where true, it updates the policy's state as `schedule` would. Not inherited: a subclass
        defines it itself, or is always asked by `schedule`.
        """
        return False


def refuse(cls: Any, params: Mapping[str, Any]) -> None:
    """Raise ValueError for the first parameter not of the type that a policy or function declares.

    A parameter without a type, or with one that cannot be looked up, is left to the constructor.
    """
    types = declared(cls)
    for name, value in params.items():
        if name not in types:
            continue
        if right := _instead_of(cls, name, value):
            raise ValueError(f"{name} should be {right}, not {shown(value)}")


NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def require_given(
    who: str, cls: Any, known: Mapping[str, inspect.Parameter], given: Container[str]
) -> None:
    """Raise a UsageError for the first parameter that a policy or function needs and lacks."""
    for name, each in known.items():
        if each.default is each.empty and each.kind in NAMED and name not in given:
            right = _instead_of(cls, name, None) if name in declared(cls) else ""
            raise UsageError(f"{who} needs a value of {name!r}{right and f', {right}'}")


def _instead_of(cls: Any, name: str, value: object) -> str:
    """Return what would be right in place of a parameter's value; "" where that is."""
    try:
        _adapter(cls, name).validate_python(value, strict=True)
    except ValidationError as error:
        return " or ".join(dict.fromkeys(map(expected, error.errors(include_url=False))))
    return ""


@cache
def declared(cls: Any) -> dict[str, Any]:
    """Return the types of a policy's parameters, as far as they are declared, by name."""
    plain = isinstance(cls, type) and not is_dataclass(cls)
    try:
        found = get_type_hints(cls.__init__ if plain else cls, include_extras=True)
    except (NameError, TypeError):
        return {}
    for each in reversed(getattr(cls, "__mro__", ())):
        found |= own_annotations(each)
    return found


@cache
def _adapter(cls: Any, name: str) -> TypeAdapter[Any]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(declared(cls)[name], config=config)
