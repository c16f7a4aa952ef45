"""Layers of a run's keys: over each other, set by hand, and the links of a GPU's host under all.

Knows no figure and no system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenflow.errors import UsageError
from evenflow.specs.gpu import gpu, links
from experiments.run_file.links import HOSTS
from experiments.run_file.yaml_file import Document, as_patch, long_form, patched

Keys = Mapping[str, Any]


def layered(under: Keys, over: Keys) -> dict[str, Any]:
    """Return `under` with the keys of `over` in place; mappings merge, if they are of one kind."""
    return patched(Document("", dict(under), {}), as_patch(under, over)).data


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


def gpu_name(given: str | Mapping[str, Any]) -> str:
    """Return what a figure calls a GPU that is named or described."""
    return given if isinstance(given, str) else str(given.get("name", "gpu"))


def with_host(run: Keys) -> Keys:
    """Return a run's keys with the links of its GPU's host under them.

    A run that has a link keeps its own, and so does one of one stage that says how its GPUs add up;
    what they leave open (`link: {latency_us: 100}`) is the host's. Raises UsageError for several
    GPUs whose links are known neither here nor in the run.
    """
    costs = long_form("costs", run.get("costs", "roofline"))
    if run.get("gpu") is None or costs.get("kind") == "affine":
        return run
    given = run.get("link", costs.get("all_reduce") if run.get("stages") == 1 else None)
    if given is not None and not _partial(given):
        return run
    name = gpu(run["gpu"]).name
    if name not in HOSTS:
        if run.get("stages", 1) == 1 and run.get("tensor_parallel", 1) == 1:
            return run
        known = ", ".join(sorted(link.name for link in links()))
        raise UsageError(
            f"gpu {name}: its links are not known; give --set link=NAME ({known}), or "
            "--set 'link={bandwidth_gb_s: 20, latency_us: 10}'"
        )
    host = HOSTS[name]
    below: dict[str, Any] = {"link": host.link}
    if host.nodes is not None:
        below["nodes"] = host.nodes.model_dump(exclude_unset=True)
    if costs.get("kind") == "roofline" and (host.all_reduce or "all_reduce" in costs):
        below["costs"] = {"kind": "roofline", "all_reduce": host.all_reduce or host.link}
    return layered(below, run)


def _partial(link: object) -> bool:
    return isinstance(link, Mapping) and not {"name", "bandwidth_gb_s", "points"} & link.keys()
