"""What the parts of the schema share: limits of numbers, short forms, refusal of unknown keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from evenflow.errors import instead_of

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _shape(value: object) -> str:
    return "mapping" if isinstance(value, dict | BaseModel) else "name"


Name = TypeVar("Name")
Mapped = TypeVar("Mapped")
NameOr = Annotated[
    Annotated[Name, Tag("name")] | Annotated[Mapped, Tag("mapping")], Discriminator(_shape)
]
"""A key that takes a name or a mapping; a complaint is about the one that was given."""


class Keys(BaseModel):
    """A mapping that takes only the keys it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    hint = instead_of(key, cls.model_fields)
                    raise PydanticCustomError("unknown_key", "{hint}", {"key": key, "hint": hint})
        return data


def expect(accepts: Callable[[Any], bool], expected: str) -> BeforeValidator:
    """Refuse what `accepts` does not, saying what is `expected`, before types are looked at."""

    def check(value: object) -> object:
        if not accepts(value):
            raise PydanticCustomError("expected", "{expected}", {"expected": expected})
        return value

    return BeforeValidator(check)


def short_form(key: str) -> BeforeValidator:
    """Let a bare word stand for a mapping that holds only `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def is_count(value: object) -> bool:
    """Say whether a value is a whole number of at least 1."""
    return type(value) is int and value > 0
