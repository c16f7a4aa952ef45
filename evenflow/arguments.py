"""Arguments of Python's functions: those of a wrong type are refused in a line.

Data of numpy, pandas, paths and tuples becomes what a YAML file would hold. One value stands for a
list of one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from evenflow.errors import UsageError, shortened
from evenflow.user_code import shown

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises UsageError for an argument not of the type that it declares."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            kind = signature.parameters[name].annotation
            given.arguments[name] = _of_kind(kind, value, f"{function.__name__}: {name}")
        return function(*given.args, **given.kwargs)

    return call


def _of_kind(kind: Any, value: Any, name: str) -> Any:
    """Return an argument as plain data of its kind, or raise a UsageError in its name."""
    try:
        for each in (made := plain(value), [made]):
            if _accepts(kind, each):
                return each
    except RecursionError:
        raise UsageError(f"{name} is nested too deep, or holds itself") from None
    text = shortened(" ".join(shown(value).split()), 80)
    raise UsageError(f"{name} should be {either(kind).rstrip(',')}, not {text}")


def plain(value: Any) -> Any:
    """Return data as a YAML file would hold it; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _within(each) for key, each in value.items()}
    if type(value) in (list, tuple, range):
        return [_within(each) for each in value]
    if hasattr(value, "tolist") and not isinstance(value, type):  # of numpy or pandas
        return value.tolist()
    return value


def _within(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else plain(value)


def _accepts(kind: Any, value: Any) -> bool:
    """Say whether a plain value is of a kind; a class that is not there yet goes by its name."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType, Annotated):
        return any(_accepts(each, value) for each in inner)
    if isinstance(kind, ForwardRef):
        return any(each.__name__ == kind.__forward_arg__ for each in type(value).__mro__)
    if origin is Literal:
        return value in inner
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        return isinstance(value, dict) and all(
            _accepts(inner[0], key) and _accepts(inner[1], each) for key, each in value.items()
        )
    if origin in (Sequence, list, tuple):
        return isinstance(value, list) and all(_accepts(inner[0], each) for each in value)
    if origin in (int, float):
        kinds = (int,) if origin is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if origin is Any or getattr(kind, "_is_protocol", False):
        return True
    is_one = isinstance(origin, type) and isinstance(value, origin)
    return is_one and not (origin in (str, Path) and "\0" in str(value))


WORDS: dict[Any, str] = {
    Any: "any value",
    Callable: "a function",
    NoneType: "None",
    Path: "a path",
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "a text",
}


def _words(kind: Any) -> Iterator[str]:
    """Yield what an argument may be, in words."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType, Annotated):
        for each in inner:
            yield from _words(each)
    elif origin is Literal:
        yield from map(repr, inner)
    elif origin is Mapping:
        yield f"a mapping of names to {either(inner[1])}"
    elif origin in (Sequence, list, tuple):
        yield f"a list, each {either(inner[0])},"
    elif isinstance(kind, ForwardRef):
        yield f"a {kind.__forward_arg__}"
    elif origin in WORDS:
        yield WORDS[origin]


def either(kind: Any) -> str:
    """Return in words what a value of a kind may be."""
    return " or ".join(dict.fromkeys(_words(kind)))
