"""Where a policy that a run names as `module:Class` is looked for: beside the run's file.

A RUN.yaml that names one is code; any other is data, and nothing beside it is ever imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def make_importable(config: object, *folders: Path) -> None:
    """Let a policy that `config` (plain data) names be imported from these folders, in order.

    They are looked at after everything that is installed, and not at all where no policy is named
    so. Worker processes do not inherit it.
    """
    if _names_code(config):
        present = {finder.folder for finder in sys.meta_path if isinstance(finder, _PolicyFolder)}
        paths = dict.fromkeys(str(folder.resolve()) for folder in folders)
        sys.meta_path.extend(_PolicyFolder(path) for path in paths if path not in present)


def _names_code(value: object) -> bool:
    if isinstance(value, str):
        return re.search(r"[A-Za-z_]\w*:[A-Za-z_]", value) is not None
    if isinstance(value, Mapping):
        return any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


@dataclass(frozen=True, slots=True)
class _PolicyFolder(MetaPathFinder):
    """Finds modules in one folder, as the last finder of all."""

    folder: str

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folder], target) if path is None else None
