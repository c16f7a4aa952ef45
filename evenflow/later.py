"""Names of a package that few runs need: each is loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def loaded(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Return a name of `package` from the module that has it; what its `__getattr__` calls.

    Raises AttributeError for a name that is not among `modules`.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
