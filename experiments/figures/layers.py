"""Layers of a run's keys: mappings laid over each other. Knows no figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.run_file.yaml_file import SHORT_FORMS, Document

Keys = Mapping[str, Any]

NAMED = SHORT_FORMS | {"link": "name", "all_reduce": "name"}
"""Keys where a bare word stands for a mapping, and the key of it that the word is."""


def layered(under: Keys, over: Keys) -> dict[str, Any]:
    """Return `under` with the keys of `over` in place; mappings merge, if they are of one kind."""
    merged = dict(under)
    for key, value in over.items():
        below, above = long_form(key, merged.get(key)), long_form(key, value)
        if value == merged.get(key):
            continue
        if isinstance(below, Mapping) and isinstance(above, Mapping) and _alike(below, above):
            merged[key] = layered(below, above)
        else:
            merged[key] = value
    return merged


def long_form(key: str, value: Any) -> Any:
    """Return the mapping that a bare word at `key` stands for; any other value as it is."""
    return {NAMED[key]: value} if key in NAMED and isinstance(value, str) else value


def _alike(below: Keys, above: Keys) -> bool:
    """Say whether `above` adds to `below`: it names no other kind or thing, or names none."""
    return all(below.get(name) == above[name] for name in set(NAMED.values()) if name in above)


def set_by_hand(document: Document) -> dict[str, Any]:
    """Return the keys of a document that the user has set, as a layer."""
    layer: dict[str, Any] = {}
    for path, place in document.places.items():
        if place.startswith("--set"):
            value: Any = document.data
            for key in path:
                value = value[key]
            for key in reversed(path):
                value = {key: value}
            layer = layered(layer, value)
    return layer


def without_links(run: Keys) -> dict[str, Any]:
    """Return a run's keys without those that say what connects its GPUs within a machine."""
    kept = {key: value for key, value in run.items() if key != "link"}
    if isinstance(costs := kept.get("costs"), Mapping):
        kept["costs"] = {key: value for key, value in costs.items() if key != "all_reduce"}
    return kept
