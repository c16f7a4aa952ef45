"""Stands in for modules that a machine lacks, with classes of any name that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Anything(type):
    """A class whose attributes are classes of the same kind."""

    def __getattr__(cls, name: str) -> type:
        return _anything(name)


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {"__init__": lambda self, *args, **options: None})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        return _anything(name)


class AbsentFinder(MetaPathFinder, Loader):
    """Finds the modules of which `is_absent` says so; `fill` puts into one what is called."""

    def __init__(
        self,
        is_absent: Callable[[str], bool],
        fill: Callable[[ModuleType], None] = lambda module: None,
    ) -> None:
        self._is_absent, self._fill = is_absent, fill

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self._is_absent(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)
