"""Parts that the schemas share: limits of numbers, short forms, refusal of unknown keys.

Knows no key by name. The reader of a document says what is wrong in it, and where.
"""

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from evenflow.errors import MOST, instead_of

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


MOST_PIPES = 4096
"""The most stages, replicas and virtual engines: each is kept account of by itself."""

MOST_MODEL_LEN = 10**7
"""The longest request: it is computed token by token, which takes minutes."""

Count = Annotated[int, Field(ge=1, le=MOST)]
Pipes = Annotated[int, Field(ge=1, le=MOST_PIPES)]


Name = TypeVar("Name")
Mapped = TypeVar("Mapped")
NameOr = Annotated[
    Annotated[Name, Tag("name")] | Annotated[Mapped, Tag("mapping")],
    Discriminator(lambda value: "mapping" if isinstance(value, dict | BaseModel) else "name"),
]
"""A key that takes a name or a mapping; a complaint is about the one that was given."""


class Keys(BaseModel):
    """A mapping that takes only the keys it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")

    @model_validator(mode="wrap")
    @classmethod
    def _only_known_keys(cls, data: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        given = data if isinstance(data, dict) else {}
        unknown = [key for key in given if key not in cls.model_fields]
        if not unknown:
            return check(data)
        found: list[InitErrorDetails] = []
        for key in unknown:
            context = {"key": key, "hint": instead_of(key, cls.model_fields)}
            kind = PydanticCustomError("unknown_key", "{hint}", context)
            found.append({"type": kind, "input": key})
        try:
            check({key: value for key, value in given.items() if key not in unknown})
        except ValidationError as error:
            details = error.errors(include_url=False)
            # A key that is missing beside unknown ones is most likely there, and misspelt.
            found += [_again(d) for d in details if d["type"] != "missing" or len(d["loc"]) > 1]
        raise ValidationError.from_exception_data(cls.__name__, found)


def _again(detail: ErrorDetails) -> InitErrorDetails:
    context = {"words": detail["msg"], **detail.get("ctx", {})}
    kind = PydanticCustomError(detail["type"], "{words}", context)
    return {"type": kind, "loc": detail["loc"], "input": detail["input"]}


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


def needed(reason: str, key: str) -> PydanticCustomError:
    """Return the error of a key that `reason` cannot be without; the message has `key` as it is."""
    return PydanticCustomError("needed", "", {"reason": reason, "key": key})


# -- the words for what is wrong ------------------------------------------------------------------

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
    "none_required": "null",
    "string_too_short": "not empty",
    "string_type": "a text",
    "too_short": "not empty",
}
"""What pydantic's error types ask for, in the words of YAML."""


def expected(detail: ErrorDetails) -> str:
    """Return what would be right, in place of a value that pydantic refuses."""
    if detail["type"] == "expected":
        return str(detail["ctx"]["expected"])
    words = EXPECTED.get(detail["type"], detail["msg"].removeprefix("Input should be "))
    return words.format(**detail.get("ctx", {}))


def shown(value: Any) -> str:
    """Return a value as YAML would have it, cut if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
