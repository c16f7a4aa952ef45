"""What a policy's constructor declares of its parameters, checked: types and limits, in one place.

Knows annotations; no policy. A limit is part of the type: `token_budget: Count = 512`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evenflow.keys import expected, shown

Fraction = Annotated[float, Field(ge=0, lt=1)]

Policy = TypeVar("Policy")
Params = ParamSpec("Params")


def checked(
    init: Callable[Concatenate[Policy, Params], None],
) -> Callable[Concatenate[Policy, Params], None]:
    """Make a constructor refuse values that are not of the types and limits it declares.

    Raises ValueError: `kv_thresh should be less than 1.0, not 2`.
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
        if name not in declared:
            continue
        try:
            _adapter(init, name).validate_python(value, strict=True)
        except ValidationError as error:
            words = " or ".join(dict.fromkeys(map(expected, error.errors(include_url=False))))
            raise ValueError(f"{name} should be {words}, not {shown(value)}") from None


@cache
def _declared(init: Callable[..., None]) -> dict[str, Any]:
    try:
        return get_type_hints(init, include_extras=True)
    except NameError:
        return {}


@cache
def _adapter(init: Callable[..., None], name: str) -> TypeAdapter[Any]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(_declared(init)[name], config=config)
