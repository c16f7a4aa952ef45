"""The files that a run reads: its own, and those that its configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import find


def inputs_of(config: RunConfig, run: Path) -> list[Path]:
    """Return the files that a run reads: its own, and those that its configuration names."""
    return [run, *files_of(config.resolved(), run.parent)]


def files_of(value: object, beside: Path) -> Iterator[Path]:
    """Yield the files that a configuration names: a trace, a profile, a model, a user's policy."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from files_of(inner, beside)
    elif isinstance(value, list):
        for inner in value:
            yield from files_of(inner, beside)
    elif isinstance(value, str):
        path = Path(find(value, beside))
        if path.is_dir():
            path /= "config.json"
        if path.is_file():
            yield path
        elif ":" in value and (module := _module_file(value.partition(":")[0], beside)):
            yield module


def _module_file(name: str, beside: Path) -> Path | None:
    if name.endswith(".py"):
        path = Path(find(name, beside))
        return path if path.is_file() else None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None
