"""Layers of a run's keys: over each other, set by hand, and the links of a GPU's host under all.

The hosts are the papers' machines, as data. Knows no figure and no system.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from evenflow.errors import UsageError
from evenflow.specs.gpu import LINKS, gpu
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


_PCIE = {"link": "pcie-l20", "all_reduce": "allreduce-l20"}
_SOCKETS = {"link": "socket-73g"}
_NVLINK_4 = {"link": {"bandwidth_gb_s": 450, "latency_us": 5}}

HOSTS: Mapping[str, Keys] = MappingProxyType(
    {
        "L20": _PCIE,
        "L40S": _PCIE,
        "A100-40G": _SOCKETS,
        "A800-80G": _SOCKETS,
        "A100-80G-PCIe": {"link": "pcie-l20", "all_reduce": "allreduce-a100-pcie"},
        "A100-80G": {"link": "nvlink-a100", "nodes": {"gpus": 2, "link": "allreduce-a100-pcie"}},
        "A40": {"link": "nvlink-a40", "nodes": {"gpus": 2, "link": "allreduce-a100-pcie"}},
        "H100": _NVLINK_4,
        "H200": _NVLINK_4,
    }
)
"""The links of each GPU: L20 (gLLM, TD-Pipe) and A100-80G-PCIe (TD-Pipe) share a PCIe switch;
A100-40G and A800-80G are a machine each (gLLM); NVLink joins A100-80G and A40 in pairs, which meet
over PCIe (Sarathi-Serve). No paper has the others: L40S is taken to sit as L20 does, H100 and H200
behind a switch of NVLink 4 (450 GB/s one direction, nominal; latency assumed).
"""


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
        known = ", ".join(sorted(link.name for link in LINKS))
        raise UsageError(
            f"gpu {name}: its links are not known; give --set link=NAME ({known}), or "
            "--set 'link={bandwidth_gb_s: 20, latency_us: 10}'"
        )
    host = HOSTS[name]
    below = {key: host[key] for key in ("link", "nodes") if key in host}
    if costs.get("kind") == "roofline" and ("all_reduce" in host or "all_reduce" in costs):
        all_reduce = {"all_reduce": host.get("all_reduce", host["link"])}
        below["costs"] = {"kind": "roofline", **all_reduce}
    return layered(below, run)


def _partial(link: object) -> bool:
    return isinstance(link, Mapping) and not {"name", "bandwidth_gb_s", "points"} & link.keys()
