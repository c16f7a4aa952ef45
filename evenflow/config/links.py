"""Links, nodes and all-reduces: their keys, and the connections that they give GPUs.

Knows no model: the number of bytes that cross is an argument.
"""

import re
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from evenflow.core.world import Link
from evenflow.costs import AllReduceTimes, Fabric, Ring, TwoLevel
from evenflow.errors import UsageError
from evenflow.keys import Count, Keys, NameOr, NonNegative, Positive, expect, needed
from evenflow.specs.gpu import LinkSpec, link, machine


class LinkKeys(Keys):
    """A link: GB/s (1e9 bytes) and microseconds, or a `name` with what differs from it."""

    KEY: ClassVar[str]
    """The run's key for the link, in error messages."""
    ELSE: ClassVar[str] = ", or a name"

    name: str | None = None
    """A name of `evenflow links`; the other keys say what differs."""
    bandwidth_gb_s: Positive | None = None
    """1e9 bytes a second, one direction."""
    latency_us: NonNegative | None = None
    """Microseconds that a transfer takes on top; 0 where no name is given."""
    shared_by: Count | None = None
    """GPUs that share the wire: in an all-reduce its ranks divide the bandwidth, and all hops
    between stages queue for it; null: the name's, or 1.
    """

    @classmethod
    def _hint(cls, key: str) -> str:
        if re.search(r"gbit|gbps", key, re.IGNORECASE):
            return '"bandwidth_gb_s" is right, in gigabytes a second: Gbit/s divided by 8'
        return super()._hint(key)

    @model_validator(mode="after")
    def _something_is_known(self) -> Self:
        if not self.says_which_link and getattr(self, "points", None) is None:
            raise needed(self.KEY, f'"{self.KEY}.bandwidth_gb_s"{self.ELSE}')
        return self

    @property
    def says_which_link(self) -> bool:
        return self.name is not None or self.bandwidth_gb_s is not None


def link_spec(given: str | LinkKeys) -> LinkSpec:
    """Return the link that a name or a mapping means; UsageError for an unknown name."""
    if isinstance(given, str):
        if (words := topology_words(given)) is not None:
            raise UsageError(f'link "{given}": {words}')
        return link(given)
    keys = {"latency_us": 0.0} if given.name is None else {}
    if given.latency_us is not None:
        keys["low_latency_us"] = 0.0
    known = {"name", "bandwidth_gb_s", "latency_us", "shared_by"}
    return link(keys | given.model_dump(include=known, exclude_none=True))


def for_steps(given: str | LinkKeys) -> str | LinkKeys:
    """Return the link of the steps of all-reduces and all-to-alls over a link, same changes."""
    name = link_spec(given).all_reduce
    if not name:
        return given
    return name if isinstance(given, str) else given.model_copy(update={"name": name})


TOPOLOGY = {
    **dict.fromkeys(("PIX", "PXB", "PHB"), "PCIe; pcie-gen4 and pcie-gen5 are links"),
    **dict.fromkeys(("NODE", "SYS"), "PCIe through the CPU; give the bandwidth_gb_s that it has"),
}


def topology_words(name: str) -> str | None:
    """Return what a word of `nvidia-smi topo -m` means, and the link to give; None for others."""
    if re.fullmatch(r"NV\d{1,2}", name):
        lanes = int(name[2:])
        gb_s = f"25 GB/s each, 50 on B200 (bandwidth_gb_s: {25 * lanes})"
        return f"in nvidia-smi topo -m, {lanes} NVLinks of {gb_s}; or a name of evenflow links"
    return f"in nvidia-smi topo -m, {TOPOLOGY[name]}" if name in TOPOLOGY else None


class LinkConfig(LinkKeys):
    """The link between neighbouring stages, and within each.

    All-reduces and all-to-alls over PCIe take the bandwidth and the latency that were measured of
    them, another row of `evenflow links`; numbers of your own hold for both.
    """

    KEY = "link"
    shared: bool = False
    """Whether all neighbouring stages queue for one link, as under `shared_by`; an all-reduce does
    not share it.
    """


Point = Annotated[
    list[Positive],
    expect(lambda v: isinstance(v, list) and len(v) == 2, "a pair [bytes, microseconds]"),
]


class AllReduceConfig(LinkKeys):
    """The link between the tensor-parallel GPUs of a stage, as `link`; or measured `points`."""

    KEY = "all_reduce"
    ELSE = ", a name, or points"
    points: Annotated[list[Point], Field(min_length=1)] | None = None
    """Measured pairs [bytes, microseconds] of an all-reduce on this number of GPUs, or the file
    that nccl-tests' all_reduce_perf printed; the link then serves the experts' all-to-all only.
    """


NameOrLink = NameOr[str, LinkConfig]
NameOrAllReduce = NameOr[str, AllReduceConfig]


class NodesConfig(Keys):
    """Machines of several GPUs each."""

    gpus: Count = Field(examples=[8])
    """GPUs of a machine, filled stage by stage."""
    link: NameOrLink = Field(examples=["ethernet-100g"])
    """Between neighbouring machines."""
    all_reduce: Literal["ring", "hierarchical"] = "ring"
    """How a stage that spans machines adds up: one ring over `link`, or within the machines first.
    """
    adapters: Count = 1
    """Number of links of this kind that a machine has: `hierarchical` adds up over all of them."""

    def fabric(self, within: LinkSpec, ranks: int) -> Fabric:
        """Return what connects the ranks of a stage that spans nodes; `within` is a node's link."""
        if ranks % self.gpus:
            raise UsageError(
                f"nodes: {ranks} tensor-parallel GPUs do not fill nodes of {self.gpus} evenly"
            )
        across = link_spec(for_steps(self.link))
        if self.all_reduce == "ring":
            return Ring(across)
        wide = replace(across, bandwidth_gb_s=across.bandwidth_gb_s * self.adapters)
        return TwoLevel(within, wide, self.gpus)

    def crossed(self, stages: int, ranks: int) -> list[bool]:
        """Return for each hop between neighbouring stages whether it leaves a node.

        A node holds as many whole stages as fit; a stage of more GPUs fills whole nodes.
        """
        home = [stage // max(self.gpus // ranks, 1) for stage in range(stages)]
        return [here != there for here, there in pairwise(home)]


class MachineConfig(Keys):
    """A machine, by what differs from the one that it names, or whole."""

    name: str | None = None
    """A name of `evenflow machines`; the other keys say what differs."""
    gpus: Count | None = None
    """GPUs of a machine, filled stage by stage."""
    link: NameOrLink | None = None
    """Between the GPUs of a machine."""
    network: NameOrLink | None = None
    """Between machines, through one adapter."""
    all_reduce: NameOrLink | None = None
    """Between the GPUs of a stage within a machine; null: what `link` has for all-reduces."""
    adapters: Count | None = None
    """Number of network adapters of a machine: an all-reduce between machines uses all; null: 1."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for key in ("gpus", "link", "network"):
            if self.name is None and getattr(self, key) is None:
                raise needed("machine", f'"machine.{key}", or "machine.name"')
        return self


NameOrMachine = NameOr[str, MachineConfig]


def link_words(link: str | LinkKeys) -> str:
    """Return a link in words: its name, and the numbers given."""
    if isinstance(link, str):
        return link
    units = {
        "name": "{}",
        "bandwidth_gb_s": "{:g} GB/s",
        "latency_us": "{:g} us",
        "shared_by": "shared by {}",
    }
    given = {name: getattr(link, name) for name in units}
    return " ".join(units[name].format(value) for name, value in given.items() if value is not None)


class Wires(NamedTuple):
    """Links of neighbouring stages, of machines, and of the GPUs of a stage (null: `link`)."""

    link: str | LinkConfig | None = None
    nodes: NodesConfig | None = None
    all_reduce: str | LinkKeys | None = None

    @classmethod
    def of(cls, given: str | MachineConfig, num_gpus: int) -> Self:
        """Return what connects `num_gpus` GPUs in machines of one kind; UsageError if unknown."""
        keys: dict[str, Any] = {}
        if isinstance(given, MachineConfig):
            keys = {name: value for name, value in given if value is not None}
        known = given if isinstance(given, str) else given.name
        if known is not None:
            keys = asdict(machine(known)) | keys
        gpus, adapters = keys["gpus"], keys.get("adapters", 1)
        link_spec(keys["network"])  # refuses what is none, whether anything crosses it or not
        nodes = None
        if num_gpus > gpus:
            nodes = NodesConfig(
                gpus=gpus,
                link=keys["network"],
                all_reduce="hierarchical" if adapters > 1 else "ring",
                adapters=adapters,
            )
        return cls(keys["link"], nodes, keys.get("all_reduce") or None)

    @property
    def reduced(self) -> str | LinkKeys | None:
        """The link of the all-reduces within a machine; None if no link is known."""
        own = self.all_reduce
        if own is None or (isinstance(own, LinkKeys) and not own.says_which_link):
            own = self.link
        return None if own is None else for_steps(own)

    def fabric(self, ranks: int) -> Fabric | None:
        """Return what connects the `ranks` GPUs of a stage; None if no link is known."""
        points = self.all_reduce.points if isinstance(self.all_reduce, AllReduceConfig) else None
        fabric: Fabric | None = None
        if self.reduced is not None:
            spec = link_spec(self.reduced)
            spans = self.nodes is not None and ranks > self.nodes.gpus
            fabric = self.nodes.fabric(spec, ranks) if self.nodes and spans else Ring(spec)
        if points is None:
            return fabric
        return AllReduceTimes(
            [(size, microseconds * 1e-6) for size, microseconds in points], fabric
        )

    def hops(
        self, stages: int, ranks: int, token_bytes: float
    ) -> tuple[Link | None, tuple[Link, ...] | None]:
        """Return the link of all hops between stages of `ranks` GPUs, or else one for each hop.

        `token_bytes` cross from stage to stage for each token of a micro-batch.
        """
        if self.link is None:
            return None, None

        within = self._hop(self.link, stages * ranks, token_bytes)
        if self.nodes is None:
            return within, None
        across = self._hop(self.nodes.link, stages * ranks, token_bytes)
        crossed = self.nodes.crossed(stages, ranks)
        hops = tuple(across if leaves else within for leaves in crossed)
        shared = {each for each in (within, across) if each.shared}
        if hops and shared and shared != set(hops):
            where = "there is no one link for all stages where there are nodes"
            raise UsageError(f"link.shared: {where}")
        return None, hops

    @staticmethod
    def _hop(given: str | LinkConfig, gpus: int, token_bytes: float) -> Link:
        spec = link_spec(given)
        if 1 < spec.shared_by < gpus:
            raise UsageError(
                f"link.shared_by: {spec.shared_by} of the {gpus} GPUs of the pipeline; 1 or at "
                f"least {gpus} is right"
            )
        shared = spec.shared_by > 1 or (isinstance(given, LinkConfig) and given.shared)
        return Link(token_bytes / (spec.bandwidth_gb_s * 1e9), spec.latency_s, shared)
