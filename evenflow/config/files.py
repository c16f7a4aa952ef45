"""The files that a run names: its inputs, and the modules of policies and processes.

A policy named as `module:Class` or `FILE.py:Class` is looked for beside the run's file, and so is
a process. A RUN.yaml
that names one is code; any other is data, and nothing beside it is ever imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import find
from evenflow.errors import UsageError
from evenflow.user_code import user_code, working_folder


def inputs_of(config: RunConfig, run: Path) -> list[Path]:
    """Return the files that a run reads: its own, and all that its configuration names."""
    return [run, *files_of(config.resolved(), run.parent)]


def files_of(config: object, beside: Path) -> Iterator[Path]:
    """Yield the files that a run's keys name: trace, profile, model, the user's policy."""
    for _, text in texts_of(config):
        path = Path(find(text, beside))
        if (is_there := path.exists()) and path.is_dir():
            path /= "config.json"
        if is_there and path.is_file():
            yield path
        elif ":" in text and (module := _module_file(text.partition(":")[0], beside)):
            yield module


def texts_of(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts in plain data, each with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for inner, below in value.items():
            yield from texts_of(below, f"{key}.{inner}".lstrip("."))
    elif isinstance(value, list):
        for below in value:
            yield from texts_of(below, key)


def _module_file(name: str, beside: Path) -> Path | None:
    if name.endswith(".py"):
        path = Path(find(name, beside))
        return path if path.is_file() else None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def make_importable(config: object, beside: Path, kind: str = "scheduler") -> None:
    """Let code that `config` (plain data) names be imported from here, or from beside its file.

    Both are looked at after everything that is installed, and not at all where no code is named so.
    Worker processes do not inherit it. `kind`: what an error calls it.
    """
    code = re.compile(r"[A-Za-z_]\w*:[A-Za-z_]")
    names = {text.rpartition(":")[0] for _, text in texts_of(config) if code.search(text)}
    for name in sorted(name for name in names if name.endswith(".py")):
        _load(kind, name, [Path(name), beside / name])
    if names:
        present = {finder.folder for finder in sys.meta_path if isinstance(finder, _PolicyFolder)}
        here = [] if working_folder() is None else [Path()]  # it may have been removed
        paths = dict.fromkeys(str(folder.resolve()) for folder in (*here, beside))
        sys.meta_path.extend(_PolicyFolder(path) for path in paths if path not in present)


def _load(kind: str, name: str, places: Sequence[Path]) -> None:
    """Make the first of some files the module of a name; UsageError where none is there."""
    path = next((path.resolve() for path in places if path.is_file()), None)
    if path is None:
        raise UsageError(f"{kind} {name}: no such file")
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return
    spec = spec_from_file_location(name, path)
    assert spec is not None  # of a file whose name ends in .py
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    cannot = f"{kind} {name}: cannot import it"
    try:
        with user_code(name, lambda words: UsageError(f"{cannot} ({words})")):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


@dataclass(frozen=True, slots=True)
class _PolicyFolder(MetaPathFinder):
    """Finds modules in one folder, as the last finder of all."""

    folder: str

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folder], target) if path is None else None
