"""Parts that the schemas share: limits of numbers, short forms, refusal of unknown keys.

Knows no key by name. The reader of a document says what is wrong in it, and where.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from typing import Annotated, Any, Self, TypeVar, get_args

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

from evenflow.compiled import written
from evenflow.errors import MOST, instead_of

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


MOST_INSTANCES = 4096
"""Limit of stages, replicas, data-parallel groups and proposed tokens: each is an object."""

MOST_MODEL_LEN = 10**7
"""The longest request: it is computed token by token, which takes minutes."""

Count = Annotated[int, Field(ge=1, le=MOST)]
Instances = Annotated[int, Field(ge=1, le=MOST_INSTANCES)]


Name = TypeVar("Name")
Mapped = TypeVar("Mapped")
NameOr = Annotated[
    Annotated[Name, Tag("name")] | Annotated[Mapped, Tag("mapping")],
    Discriminator(lambda value: "mapping" if isinstance(value, dict | BaseModel) else "name"),
]
"""A key that takes a name or a mapping; a complaint is about the one that was given."""


class Keys(BaseModel):
    """A mapping that takes only the keys it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def place_of(cls, word: str) -> str | None:
        """Return the place of a word that this mapping has no key for; None if unknown."""
        return None

    @model_validator(mode="wrap")
    @classmethod
    def _only_known_keys(cls, data: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        given = data if isinstance(data, dict) else {}
        unknown = [key for key in given if key not in cls.model_fields]
        found: list[InitErrorDetails] = []
        for key in unknown:
            hint = cls._hint(str(key))
            context = {"key": key, "hint": hint}
            kind = PydanticCustomError("unknown_key", "{hint}", context)
            found.append({"type": kind, "input": key})
        try:
            known = {key: given[key] for key in given if key not in unknown}
            checked = check(known if unknown else data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            # A key that is missing beside unknown ones is most likely there, and misspelt.
            likely = [d for d in details if d["type"] != "missing" or len(d["loc"]) > 1]
            found += [_again(cls, d) for d in (likely if unknown else details)]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return checked

    @classmethod
    def _hint(cls, key: str) -> str:
        """Return what to write instead of an unknown key."""
        place = _elsewhere(cls, key)
        return f'did you mean "{place}"?' if place else instead_of(key, cls.model_fields)


def _again(cls: type[Keys], detail: ErrorDetails) -> InitErrorDetails:
    """Return the error of a value below a mapping, with what a missing key would be."""
    kind, place, context = detail["type"], detail["loc"], detail.get("ctx", {})
    words = {"words": detail["msg"]}
    if kind == "missing" and len(place) == 1:
        words["remedy"] = remedy(cls, str(place[0]))
    elif kind == "union_tag_not_found" and "remedy" not in context:
        kinds = _kinds(cls.model_fields[str(place[0])].annotation)
        words["remedy"] = f"known: {', '.join(kinds)}"
    again = PydanticCustomError(kind, "{words}", words | context)
    return {"type": again, "loc": place, "input": detail["input"]}


def remedy(cls: Any, key: str) -> str:
    """Return what a key that is missing would hold: an example, and what it is; "" if unknown."""
    field = cls.model_fields.get(key)
    if field is None or not field.examples:
        return ""
    example = json.dumps(field.examples[0], ensure_ascii=False).replace('"', "")
    return f"e.g. {key}: {example}. {below_keys(cls).get(key, '')}".strip()


def _kinds(annotation: Any) -> Iterator[str]:
    """Yield the kinds of the mappings that a key takes."""
    for mapping in _mappings(annotation):
        yield from get_args(mapping.model_fields["kind"].annotation)


def _mappings(annotation: Any) -> Iterator[type[Keys]]:
    if isinstance(annotation, type) and issubclass(annotation, Keys):
        yield annotation
    for inner in get_args(annotation):
        yield from _mappings(inner)


def _elsewhere(cls: Any, word: str) -> str | None:
    """Return the key, here or in a mapping below, that has this name or, `(word)`, an engine's."""
    listed = re.compile(rf"\((?:[\w-]+, )*{re.escape(word)}(?:, [\w-]+)*\)")
    here = (key for key, text in below_keys(cls).items() if listed.search(text))
    if place := next(here, None) or cls.place_of(word):
        return place
    places = []
    for key, field in cls.model_fields.items():
        for mapping in dict.fromkeys(_mappings(field.annotation)):
            if mapping is not cls:
                place = word if word in mapping.model_fields else _elsewhere(mapping, word)
                places += [f"{key}.{place}"] if place else []
    return min(places, key=lambda place: place.count("."), default=None)


@cache
def below_keys(cls: type) -> dict[str, str]:
    """Return the text below each key of a class and of its bases."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not each.__module__.startswith("evenflow."):
            continue
        body = written(each) or ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for key, text in zip(body.body, body.body[1:], strict=False):
            match key, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = " ".join(words.split())
    return found


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


def needed(reason: str, key: str, remedy: str = "") -> PydanticCustomError:
    """Return the error that `reason` needs `key`, which the message quotes as it is."""
    return PydanticCustomError("needed", "", {"reason": reason, "key": key, "remedy": remedy})


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
    if isinstance(value, date):
        return f'the date {value} ("{value}", in quotes, is a text)'
    text = f'"{value}"' if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
