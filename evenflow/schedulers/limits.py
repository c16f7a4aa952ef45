"""What a policy declares of its parameters, checked: types and limits, in one place.

Knows annotations; no policy. A limit is part of the type: `token_budget: Count = 512`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from evenflow.keys import expected, shown

Fraction = Annotated[float, Field(ge=0, lt=1)]

Policy = TypeVar("Policy")


@dataclass_transform(kw_only_default=True, eq_default=False)
def checked(cls: type[Policy]) -> type[Policy]:
    """Make a class take the parameters that it declares, as a dataclass does, each by its name.

    What follows from them is set in `__post_init__`. The constructor raises ValueError for a value
    that is not of the type and limits declared: `kv_thresh should be less than 1.0, not 2`.
    """
    made: Any = dataclass(kw_only=True, eq=False, repr=False)(cls)
    init = made.__init__
    init.declared_by = made

    @wraps(init)
    def checking(self: Policy, /, **params: Any) -> None:
        refuse(init, params)
        init(self, **params)

    made.__init__ = checking
    return cls


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
        return get_type_hints(getattr(init, "declared_by", init), include_extras=True)
    except NameError:
        return {}


@cache
def _adapter(init: Callable[..., None], name: str) -> TypeAdapter[Any]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(_declared(init)[name], config=config)
