"""Stands in for packages that SGLang imports and a machine without a GPU lacks."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

ABSENT = ("IPython", "flashinfer", "gguf", "sgl_kernel", "torchvision")


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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find what belongs to one of `ABSENT`."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: what is asked of the module is made then."""


def install() -> None:
    """Let everything that is imported from now on find the packages of `ABSENT`."""
    importlib.import_module("transformers.image_utils")  # looks for a real torchvision
    sys.meta_path.insert(0, _Finder())
