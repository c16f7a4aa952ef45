"""GPUs and links as data: peak numbers, and how much of them is reached. Knows no model, no policy.

Memory is nominal, in GiB; `visible_gb` is what a card shows to programs.
The reached shares are facts only where `source` says that they were measured.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

from evenflow.errors import (
    Count,
    NonNegative,
    Positive,
    UsageError,
    instead_of,
    known_near,
    near,
    require_declared,
)
from evenflow.specs.precision import Arithmetic
from evenflow.specs.tables import read_table

L20_COMPUTE_EFFICIENCY = 0.9438
L20_BANDWIDTH_EFFICIENCY = 0.7884
L20_PER_LAYER_OVERHEAD_S = 1.378e-4
"""Fitted by `tools.calibrate l20` on two models measured on L20: docs/costs-errors.md."""

TRANSFERRED = "efficiency transferred from L20 fit"

REACHED = frozenset({"compute_efficiency", "bandwidth_efficiency", "per_layer_overhead_s"})
"""The fields of a GpuSpec whose origin its `source` states."""

GIB = 1024**3

CHIP = re.compile(r"([a-z]+)[-_ ]?(\d+[a-z]?)(?![a-z])")
"""The letters and the number that name a chip: others are of another generation or vendor."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU: dense peaks, memory, and how much of the peaks is reached.

    Of fp8 and fp4 the share that is reached is that of 16 bits, an assumption.
    """

    name: str
    """A GPU of the table, whose numbers the other keys replace; or, with all of them, another."""
    fp16_tflops: Positive
    """Dense fp16 and bf16 peak, 1e12 operations a second."""
    memory_bandwidth_gb_s: Positive
    """Peak, 1e9 bytes a second."""
    memory_gb: Positive
    """GiB."""
    compute_efficiency: Positive = L20_COMPUTE_EFFICIENCY
    """The share of the peak that large operators reach."""
    bandwidth_efficiency: Positive = L20_BANDWIDTH_EFFICIENCY
    """The share of the peak that large operators reach."""
    per_layer_overhead_s: NonNegative = L20_PER_LAYER_OVERHEAD_S
    """Seconds that neither explains in a dense layer of 16 bits: the gaps of its 10 kernels. Any
    other layer has as much for each of its kernels."""
    source: str = TRANSFERRED
    """Where these three come from."""
    fp8_tflops: NonNegative = 0.0
    """Dense fp8 peak, 1e12 operations a second; 0: the GPU has none."""
    fp4_tflops: NonNegative = 0.0
    """Dense fp4 peak, 1e12 operations a second; 0: the GPU has none."""
    int8_tops: NonNegative = 0.0
    """Dense INT8 peak, 1e12 operations a second; 0: the GPU has none, or none is known."""
    p95_error: NonNegative = 0.0
    """The error of `costs: roofline` that 95 % of whole-model times keep, a share; 0: not known."""
    machine: str = ""
    """The machine that is sold with the card, a name of `evenflow machines`; empty: not known."""
    visible_gb: NonNegative = 0.0
    """GiB that programs see (cudaMemGetInfo), as engines log them; 0: `memory_gb`."""

    def __post_init__(self) -> None:
        require_declared(f"gpu {self.name}", self)

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the data sheet's dense operations a second, 0 where the GPU has no such units."""
        peaks = {
            "16-bit": self.fp16_tflops,
            "int8": self.int8_tops,
            "fp8": self.fp8_tflops,
            "fp4": self.fp4_tflops,
        }
        return peaks[arithmetic] * 1e12

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations a second that large operators reach."""
        return self.fp16_tflops * 1e12 * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that large operators move to and from memory."""
        return self.memory_bandwidth_gb_s * 1e9 * self.bandwidth_efficiency

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * GIB)

    @property
    def visible_bytes(self) -> int:
        return int((self.visible_gb or self.memory_gb) * GIB)

    @property
    def is_joined(self) -> bool:
        """Whether the machine sold with the card joins all of its GPUs directly (NVLink)."""
        return bool(self.machine) and link(machine(self.machine).link).direct


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Describe a link between two GPUs, one direction: 1e9 bytes a second, microseconds.

    `direct`: each GPU of a machine reads the memory of every other one (NVLink with a switch).
    `shared_by`: GPUs that divide the bandwidth among those of them that send at once.
    """

    bandwidth_gb_s: Positive
    latency_us: NonNegative
    name: str = "link"
    source: str = "given"
    direct: bool = False
    shared_by: Count = 1
    low_latency_us: NonNegative = 0.0
    """Latency at half of the bandwidth, a flag beside each word (NCCL's LL); 0: no such way."""
    all_reduce: str = ""
    """The link that the steps of an all-reduce over this one are like; empty: this one."""

    def __post_init__(self) -> None:
        require_declared(self.name, self)

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6

    def transfer_s(self, size_bytes: float, senders: int = 1) -> float:
        """Return the seconds of `size_bytes` from each of the senders: latency + bytes / share.

        The faster of both ways where there is one of a low latency at half of the bandwidth.
        """
        share_gb_s = self.bandwidth_gb_s / min(senders, self.shared_by)
        bytes_s = size_bytes / (share_gb_s * 1e9)
        if not self.low_latency_us:
            return self.latency_s + bytes_s
        return min(self.latency_s + bytes_s, self.low_latency_us * 1e-6 + 2 * bytes_s)


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine of several GPUs; links by their names."""

    name: str
    gpus: int
    """GPUs of a machine, filled stage by stage."""
    link: str
    """Between the GPUs of a machine."""
    network: str
    """Between machines, through one adapter."""
    all_reduce: str = ""
    """Between the GPUs of a stage within a machine; empty: as the links table has for `link`."""
    adapters: int = 1
    """Network adapters of a machine: an all-reduce between machines uses all of them."""
    source: str = "given"


@cache
def gpus() -> tuple[GpuSpec, ...]:
    """Return the table of GPUs (`gpus.csv`): those of the papers and their successors.

    Peaks are of data sheets, dense; of B200 and later they and the memory are as
    aiconfigurator-core states them. Efficiencies are fits of `tools.calibrate`, of kernels back to
    back but for L20's (docs/costs-errors.md).
    """
    return tuple(read_table("gpus", GpuSpec).values())


@cache
def links() -> tuple[LinkSpec, ...]:
    """Return the table of links (`links.csv`): those of the papers and what newer GPUs have."""
    return tuple(read_table("links", LinkSpec).values())


@cache
def machines() -> tuple[MachineSpec, ...]:
    """Return the table of machines (`machines.csv`): what is sold, and those of the papers."""
    return tuple(read_table("machines", MachineSpec).values())


Spec = TypeVar("Spec", GpuSpec, LinkSpec, MachineSpec)


def gpu(name_or_mapping: str | Mapping[str, Any]) -> GpuSpec:
    """Return the GPU of that name, or the one that a mapping describes.

    A mapping whose `name` is in the table changes that GPU: `{name: L20, memory_gb: 45}`. Any other
    one gives at least the peaks and the memory. Efficiencies in a mapping without a `source` have
    the source "given". UsageError lists what is known.
    """
    wanted = name_or_mapping
    if not isinstance(wanted, str) and REACHED & wanted.keys():
        wanted = {"source": "given", "p95_error": 0.0} | dict(wanted)
    if not isinstance(wanted, str) and "memory_gb" in wanted:
        wanted = {"visible_gb": 0.0} | dict(wanted)
    return _look_up("gpu", GpuSpec, gpus(), wanted)


def link(name_or_mapping: str | Mapping[str, Any]) -> LinkSpec:
    """Return the link of that name, or the one that a mapping describes.

    A mapping gives `bandwidth_gb_s` and `latency_us`. UsageError lists what is known.
    """
    return _look_up("link", LinkSpec, links(), name_or_mapping)


def machine(name: str) -> MachineSpec:
    """Return the machine of that name; UsageError lists what is known."""
    return _look_up("machine", MachineSpec, machines(), name)


def _begun_or_nearest(wanted: str, known: Iterable[str]) -> str:
    several = [name for name in known if name.lower().startswith(wanted.lower())]
    if len(several) > 1 and wanted:
        return f"there are {', '.join(several)}"
    return instead_of(wanted, known)


def _instead_of_gpu(wanted: str, known: Iterable[str]) -> str:
    """Return what to write instead: a GPU of the same chip, or a mapping of other values."""
    given, chip = wanted.lower(), _chip(wanted)
    alike = {name.lower(): name for name in known if chip and _chip(name) == chip}
    form = FORM.search(given)
    alike = {low: name for low, name in alike.items() if not form or form[0] in low}
    hint = ""
    if len(alike) > 1 and all(name.startswith(given) for name in alike):
        hint = f"there are {', '.join(alike.values())}; "
    elif alike:
        hint = f'did you mean "{near(wanted, alike.values())[0]}"? '
    keys = "fp16_tflops: ..., memory_bandwidth_gb_s: ..., memory_gb: ..."
    other = f"any other is a mapping, gpu: {{name: {wanted}, {keys}}}"
    return f"{hint}{other}; {known_near(wanted, known)}"


FORM = re.compile(r"pcie|nvl(?!72)")
"""Word of a card whose peaks are not those of its chip's SXM card."""


def _chip(name: str) -> str:
    """Return the letters and the number of a chip, `rtx4090` of `NVIDIA RTX 4090`; "" for none."""
    found = CHIP.search(name.lower())
    return "".join(found.groups()) if found else ""


def _look_up(
    kind: str, make: Callable[..., Spec], table: Iterable[Spec], wanted: str | Mapping[str, Any]
) -> Spec:
    by_name = {spec.name: spec for spec in table}
    if isinstance(wanted, str):
        if wanted in by_name:
            return by_name[wanted]
        words = _instead_of_gpu if make is GpuSpec else _begun_or_nearest
        raise UsageError(f'unknown {kind} "{wanted}"; {words(wanted, by_name)}')
    known = {field.name: field for field in fields(next(iter(by_name.values())))}
    for key in wanted:
        if key not in known:
            raise UsageError(f'{kind}: unknown key "{key}"; {instead_of(key, known)}')
    for key in ("name", "source", "machine"):
        if not isinstance(value := wanted.get(key, ""), str):
            raise UsageError(f"{kind}: {key}: should be a text, not {value!r}")
    if (name := wanted.get("name", kind)) in by_name:
        return replace(by_name[name], **wanted)
    needed = {key for key, field in known.items() if field.default is MISSING} - {"name", *wanted}
    if needed:
        raise UsageError(
            f"{kind}: needs {', '.join(sorted(needed))}, or the name of one that has them; "
            f"{instead_of(name, by_name)}"
        )
    return make(**({"name": kind} | dict(wanted)))
