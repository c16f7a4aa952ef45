"""Attributes of classes that mypyc may compile (setup.py), and facts that it does not keep.

Where nothing is compiled, the decorator does nothing, without needing mypy.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class")

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a class as it is."""
        return lambda cls: cls


__all__ = ["docstring", "is_compiled", "mypyc_attr", "own_annotations", "written"]


def is_compiled(module: str) -> bool:
    """Say whether an imported module of this package is compiled by mypyc."""
    file = getattr(sys.modules[module], "__file__", None) or ""
    return module.startswith("evenflow.") and not file.endswith((".py", ".pyc"))


def docstring(cls: type) -> str:
    """Return a class's docstring, without the margin."""
    source = written(cls)
    return inspect.cleandoc((ast.get_docstring(source) if source else cls.__doc__) or "")


def own_annotations(cls: type) -> dict[str, Any]:
    """Return the annotations of a compiled class, none of any other.

    Of `Annotated[int, Field(ge=1)]` mypyc keeps `int`.
    """
    source = written(cls)
    names = vars(sys.modules[cls.__module__])
    return {
        node.target.id: eval(ast.unparse(node.annotation), names)
        for node in (source.body if source else ())
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def written(cls: type) -> ast.ClassDef | None:
    """Return the syntax tree of a compiled class, from its source."""
    if not is_compiled(cls.__module__):
        return None
    folder = Path(str(sys.modules[cls.__module__].__file__)).parent
    source = folder / f"{cls.__module__.rpartition('.')[2]}.py"
    nodes = ast.parse(source.read_text(encoding="utf-8")).body
    return next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
