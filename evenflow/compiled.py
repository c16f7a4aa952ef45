"""What mypyc is told of the classes that it may compile (setup.py).

Here is what the decorator does where nothing is compiled: nothing, without needing mypy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class")

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a class as it is."""
        return lambda cls: cls


__all__ = ["mypyc_attr"]
