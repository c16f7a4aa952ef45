"""Where a policy that a run names as `module:Class` or `FILE.py:Class` is: beside the run's file.

A RUN.yaml that names one is code; any other is data, and nothing beside it is ever imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from evenflow.errors import UsageError


def make_importable(config: object, *folders: Path) -> None:
    """Let a policy that `config` (plain data) names be imported from these folders, in order.

    They are looked at after everything that is installed, and not at all where no policy is named
    so. Worker processes do not inherit it.
    """
    names = set(_names_of_code(config))
    for name in sorted(name for name in names if name.endswith(".py")):
        _load(name, [folder / name for folder in folders])
    if names:
        present = {finder.folder for finder in sys.meta_path if isinstance(finder, _PolicyFolder)}
        paths = dict.fromkeys(str(folder.resolve()) for folder in folders)
        sys.meta_path.extend(_PolicyFolder(path) for path in paths if path not in present)


def _names_of_code(value: object) -> Iterator[str]:
    """Yield what stands before the colon of each `module:Class` or `FILE.py:Class`."""
    if isinstance(value, str) and re.search(r"[A-Za-z_]\w*:[A-Za-z_]", value):
        yield value.rpartition(":")[0]
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _names_of_code(inner)


def _load(name: str, places: Sequence[Path]) -> None:
    """Make the first of some files the module of a name; UsageError where none is there."""
    path = next((path.resolve() for path in places if path.is_file()), None)
    if path is None:
        raise UsageError(f"scheduler {name}: no such file")
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return
    spec = spec_from_file_location(name, path)
    assert spec is not None  # of a file whose name ends in .py
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"scheduler {name}: cannot import it ({told})") from error


@dataclass(frozen=True, slots=True)
class _PolicyFolder(MetaPathFinder):
    """Finds modules in one folder, as the last finder of all."""

    folder: str

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folder], target) if path is None else None
