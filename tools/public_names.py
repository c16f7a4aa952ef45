"""Print what is public, a name a line: Python, commands, keys of files, columns, numbers.

`python -m tools.public_names >tests/public/v0.2.0.txt` belongs to a release.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import evenflow as ef
from evenflow.cli.app import app

ROOT = Path(__file__).parent.parent
RUNS = ("quickstart.yaml", "systems/distserve.yaml")
ALL_COLUMNS = {"workload.requests": 3, "goodput": {"ttft": 1000.0}, "kv.prefix_cache": True}
TABLES = ("requests", "batches", "stages", "bubbles", "transfers")


def public_names() -> set[str]:
    """Return all names that a release keeps."""
    return {*_python(), *_commands(), *_keys("run"), *_keys("sweep"), *_columns()}


def _python() -> Iterator[str]:
    for name in (*ef.__all__, *ef.FRONT_DOOR):
        public = getattr(ef, name)
        yield f"ef.{name}"
        if inspect.isfunction(public):
            yield from (f"ef.{name}({each}=)" for each in inspect.signature(public).parameters)
        else:
            own = {*dir(public), *_attributes(public)} - {*dir(tuple), *dir(Exception)}
            yield from (f"ef.{name}.{each}" for each in own if not each.startswith("_"))


def _attributes(cls: type) -> Iterator[str]:
    """Yield what only an object of a class has."""
    yield from inspect.get_annotations(cls)
    yield from re.findall(r"\bself\.(\w+) = ", inspect.getsource(cls))


def _commands() -> Iterator[str]:
    todo = [("evenflow", typer.main.get_command(app))]
    for words, command in todo:
        yield words
        todo += [
            (f"{words} {name}", each) for name, each in getattr(command, "commands", {}).items()
        ]
        yield from (
            f"{words} {option}"
            for each in command.params
            for option in each.opts
            if option[:1] == "-"
        )


def _keys(name: str) -> Iterator[str]:
    schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
    todo: list[tuple[str, Any, frozenset[str]]] = [(f"{name.upper()}.yaml ", schema, frozenset())]
    for path, node, above in todo:
        target = node.get("$ref", "").rpartition("/")[2]
        if target and target not in above:
            todo.append((path, schema["$defs"][target], above | {target}))
        parts = [*node.get("anyOf", ()), *node.get("oneOf", ()), node.get("items")]
        todo += [(path, each, above) for each in parts if each]
        for key, each in node.get("properties", {}).items():
            yield f"{path}{key}"
            todo.append((f"{path}{key}.", each, above))


def _columns() -> Iterator[str]:
    for name in RUNS:
        run = ef.simulate(ROOT / "examples" / name, set=ALL_COLUMNS)
        yield from (f"summary.json {key}" for key in run.summary)
        yield from (f"{table}.csv {name}" for table in TABLES for name in getattr(run, table))


if __name__ == "__main__":
    print("\n".join(sorted(public_names())))
