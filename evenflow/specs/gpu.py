"""GPUs and links as data: peak numbers, and how much of them is reached. Knows no model, no policy.

Memory is nominal, in GiB; cards with inline ECC (L20, A40, L40S) show about 6 % less to programs.
The reached shares are facts only where `source` says that they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from evenflow.errors import NonNegative, Positive, UsageError, instead_of, require_declared
from evenflow.specs.precision import Arithmetic

L20_COMPUTE_EFFICIENCY = 0.9438
L20_BANDWIDTH_EFFICIENCY = 0.7884
L20_PER_LAYER_OVERHEAD_S = 1.378e-4
"""Fitted by `tools.calibrate l20` on two models measured on L20: docs/costs-errors.md."""

TRANSFERRED = "efficiency transferred from L20 fit"

MEASURED = "fitted on measured operators (vLLM); mean and P95 error on other models"
SCALED = "fitted on operators measured on A100-80G, scaled; mean and P95 error of the fit"
PUBLISHED = (
    "fitted on published times of linear operators (Vidur, Llama2-70B shapes); mean and P95 error "
    "4.1 %, 8.5 %; attention not measured"
)

LIKE_L40S = "assumed: those of L40S, the same architecture; nothing was measured, error not known"

REACHED = frozenset({"compute_efficiency", "bandwidth_efficiency", "per_layer_overhead_s"})
"""The fields of a GpuSpec whose origin its `source` states."""

GIB = 1024**3


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
    """Seconds a layer that neither explains: kernel launches and gaps."""
    source: str = TRANSFERRED
    """Where these three come from."""
    fp8_tflops: NonNegative = 0.0
    """Dense fp8 peak, 1e12 operations a second; 0: the GPU has none."""
    fp4_tflops: NonNegative = 0.0
    """Dense fp4 peak, 1e12 operations a second; 0: the GPU has none."""
    p95_error: NonNegative = 0.0
    """The error of `costs: roofline` that 95 % of whole-model times keep, a share; 0: not known."""

    def __post_init__(self) -> None:
        require_declared(f"gpu {self.name}", self)

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the data sheet's dense operations a second, 0 where the GPU has no such units."""
        peaks = {"16-bit": self.fp16_tflops, "fp8": self.fp8_tflops, "fp4": self.fp4_tflops}
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


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Describe a link between two GPUs, one direction: 1e9 bytes a second, microseconds.

    `direct`: each GPU of a machine reads the memory of every other one (NVLink with a switch).
    """

    bandwidth_gb_s: Positive
    latency_us: NonNegative
    name: str = "link"
    source: str = "given"
    direct: bool = False

    def __post_init__(self) -> None:
        require_declared(self.name, self)

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6

    def transfer_s(self, size_bytes: float) -> float:
        """Return the seconds that `size_bytes` take, latency + bytes / bandwidth."""
        return self.latency_s + size_bytes / (self.bandwidth_gb_s * 1e9)


GPUS: tuple[GpuSpec, ...] = (
    GpuSpec(
        "L20",
        119.5,
        864,
        48,
        source="fitted on whole-model times of two models on L20",
        fp8_tflops=239,
        p95_error=0.046,
    ),
    GpuSpec(
        "A100-40G",
        312,
        1555,
        40,
        0.836,
        0.778,
        1.056e-4,
        f"{SCALED}: 4.1 %, 10.0 %",
        p95_error=0.100,
    ),
    GpuSpec(
        "A100-80G",
        312,
        2039,
        80,
        0.826,
        0.772,
        7.90e-5,
        f"{MEASURED}: 4.6 %, 11.7 %",
        p95_error=0.117,
    ),
    GpuSpec(
        "A100-80G-PCIe",
        312,
        1935,
        80,
        0.742,
        0.770,
        8.15e-5,
        f"{SCALED}: 4.5 %, 12.0 %",
        p95_error=0.120,
    ),
    GpuSpec(
        "A800-80G",
        312,
        1935,
        80,
        0.742,
        0.770,
        8.15e-5,
        f"{SCALED}: 4.5 %, 12.0 %",
        p95_error=0.120,
    ),
    GpuSpec("A40", 149.7, 696, 48, 0.736, 0.764, 2.8e-5, PUBLISHED, p95_error=0.085),
    GpuSpec(
        "L40S", 362, 864, 48, 0.634, 0.753, 0.0, f"{MEASURED}: 4.8 %, 10.1 %", 733, p95_error=0.101
    ),
    GpuSpec(
        "H100",
        989,
        3350,
        80,
        0.800,
        0.849,
        4.51e-5,
        f"{MEASURED}: 4.3 %, 9.9 %",
        1979,
        p95_error=0.099,
    ),
    GpuSpec(
        "H200",
        989,
        4800,
        141,
        0.776,
        0.841,
        4.72e-5,
        f"{MEASURED}: 4.5 %, 9.4 %",
        1979,
        p95_error=0.094,
    ),
    GpuSpec(
        "B200",
        2250,
        7700,
        180,
        0.685,
        0.875,
        4.13e-05,
        f"{MEASURED}: 4.2 %, 11.6 %",
        4500,
        9000,
        p95_error=0.116,
    ),
    GpuSpec(
        "B300",
        2250,
        7750,
        268.6,
        0.762,
        0.825,
        3.49e-05,
        f"{MEASURED}: 4.1 %, 11.8 %",
        4500,
        14000,
        p95_error=0.118,
    ),
    GpuSpec(
        "GB200",
        2500,
        8000,
        185,
        0.627,
        0.859,
        3.94e-05,
        f"{MEASURED}: 5.4 %, 15.9 %",
        5000,
        10000,
        p95_error=0.159,
    ),
    GpuSpec(
        "GB300",
        2500,
        8000,
        277.5,
        0.756,
        0.813,
        3.55e-05,
        f"{MEASURED}: 3.7 %, 11.5 %",
        5000,
        15000,
        p95_error=0.115,
    ),
    GpuSpec(
        "RTX-PRO-6000",
        467.8,
        1792,
        95.6,
        0.813,
        0.798,
        2.44e-05,
        f"{MEASURED}: 4.3 %, 13.9 %",
        935.6,
        1871,
        p95_error=0.139,
    ),
    GpuSpec("L4", 121, 300, 24, 0.634, 0.753, 0.0, LIKE_L40S, 242),
    GpuSpec("RTX-4090", 165.2, 1008, 24, 0.634, 0.753, 0.0, LIKE_L40S, 330.3),
)
"""The GPUs of the papers and their successors; data-sheet peaks, dense. The efficiencies are fitted
by `tools.calibrate_silicon`, which also gives mean and P95 error on models it has
not seen. They are of kernels back to back, as CUDA graphs run them; L20's are of an engine without
graphs. Peaks and memory of B200 and later are those that aiconfigurator-core states (memory as
nvidia-smi shows it).
"""

EXCHANGE = "exchange measured (aiconfigurator-core), two"

LINKS: tuple[LinkSpec, ...] = (
    LinkSpec(20.79, 10, "pcie-l20", "P2P bandwidth measured (gLLM); latency assumed"),
    LinkSpec(14.65, 10, "allreduce-l20", "all-reduce peak measured (TD-Pipe); latency assumed"),
    LinkSpec(14.82, 10, "allreduce-a100-pcie", "all-reduce peak (TD-Pipe); latency assumed"),
    LinkSpec(9.16, 30, "socket-73g", "73.28 Gbit/s over sockets (gLLM); latency assumed"),
    LinkSpec(12.5, 30, "ethernet-100g", "100 Gbit/s nominal (Sarathi-Serve); latency assumed"),
    LinkSpec(300, 5, "nvlink-a100", "NVLink 3, one direction, nominal; latency assumed", True),
    LinkSpec(450, 5, "nvlink-h100", "NVLink 4, one direction, nominal; latency assumed", True),
    LinkSpec(900, 5, "nvlink-b200", "NVLink 5, one direction, nominal; latency assumed", True),
    LinkSpec(25.6, 7.9, "pcie-gen5", f"{EXCHANGE} RTX PRO 6000 (NCCL 2.29.2; nominal 64)"),
    LinkSpec(20.8, 10.6, "pcie-gen4", f"{EXCHANGE} L40S (NCCL 2.27.3; nominal 32)"),
    LinkSpec(56.25, 5, "nvlink-a40", "NVLink bridge, one direction, nominal; latency assumed"),
)
"""The links of the papers."""

Spec = TypeVar("Spec", GpuSpec, LinkSpec)


def gpu(name_or_mapping: str | Mapping[str, Any]) -> GpuSpec:
    """Return the GPU of that name, or the one that a mapping describes.

    A mapping whose `name` is in the table changes that GPU, e.g. `{name: L20, memory_gb: 45}`; any
    other one gives at least the peaks and the memory. Efficiencies in a mapping without a `source`
    have the source "given". UsageError lists what is known.
    """
    wanted = name_or_mapping
    if not isinstance(wanted, str) and REACHED & wanted.keys():
        wanted = {"source": "given", "p95_error": 0.0} | dict(wanted)
    return _look_up("gpu", GpuSpec, GPUS, wanted)


def link(name_or_mapping: str | Mapping[str, Any]) -> LinkSpec:
    """Return the link of that name, or the one that a mapping describes.

    A mapping gives `bandwidth_gb_s` and `latency_us`. UsageError lists what is known.
    """
    return _look_up("link", LinkSpec, LINKS, name_or_mapping)


def _look_up(
    kind: str, make: Callable[..., Spec], table: Iterable[Spec], wanted: str | Mapping[str, Any]
) -> Spec:
    by_name = {spec.name: spec for spec in table}
    if isinstance(wanted, str):
        if wanted in by_name:
            return by_name[wanted]
        several = [name for name in by_name if name.lower().startswith(wanted.lower())]
        if len(several) > 1 and wanted:
            raise UsageError(f'unknown {kind} "{wanted}"; there are {", ".join(several)}')
        raise UsageError(f'unknown {kind} "{wanted}"; {instead_of(wanted, by_name)}')
    known = {field.name: field for field in fields(next(iter(by_name.values())))}
    for key in wanted:
        if key not in known:
            raise UsageError(f'{kind}: unknown key "{key}"; {instead_of(key, known)}')
    if wanted.get("name") in by_name:
        return replace(by_name[wanted["name"]], **wanted)
    try:
        return make(**({"name": kind} | dict(wanted)))
    except TypeError as error:
        no_default = (key for key, field in known.items() if field.default is MISSING)
        needed = ", ".join(key for key in no_default if key != "name")
        raise UsageError(f"{kind}: a key is missing; needed are {needed}") from error
