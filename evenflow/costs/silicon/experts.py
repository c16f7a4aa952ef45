"""Seconds of a layer of experts, from those that were measured.

Knows the tables of experts and how they scale; no stage. A shape, format or split that was not
measured is the nearest one that was: what it takes at least beyond its roofline (launches, sorting
tokens) as it is, the rest times the ratio of the two rooflines. Of another shape those sizes count
that have as many rows an expert, as kernels compute each expert's rows in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from evenflow.costs.roofline import active_experts
from evenflow.costs.silicon.points import Peak
from evenflow.costs.silicon.tables import (
    DTYPE,
    Experts,
    ExpertShape,
    calm,
    rows_of,
    table_files,
)
from evenflow.errors import UsageError
from evenflow.specs.model import Split
from evenflow.specs.precision import FORMATS

MOE = "moe/{framework}/{version}/moe_perf.parquet"

Load = Literal["balanced", "power_law_1.01", "power_law_1.2"]
"""How tokens are spread over experts: evenly, or with the stated exponent of a power law."""

NAMES = {"mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"), "fp8": ("fp8", "fp8_block")}
"""Format -> what the tables call it, best first; others go by their own name."""


class Wanted(NamedTuple):
    """Which measurements of experts are meant: a format, a load, and part of a kernel's name.

    Where a kernel is named, the newest tables that have it count, and of the weight-only formats of
    four bits any.
    """

    quantization: str
    load: Load
    kernel: str | None = None


WEIGHT_ONLY = ("w4a16_mxfp4", "int4_wo")
"""Formats of four bits that a kernel such as Marlin widens to 16 as it reads them."""


def read_experts(
    base: Path, framework: str, version: str | None, shape: ExpertShape, wanted: Wanted
) -> Experts:
    """Read the experts nearest to a shape, of the format, load and kernel that are wanted.

    Where none has the format, those of 16 bits. UsageError where no kernel is named so.
    """
    quantization, load, kernel = wanted
    names = NAMES.get(quantization, (quantization,) * bool(quantization))
    alike = WEIGHT_ONLY if kernel and set(names) & set(WEIGHT_ONLY) else ()
    formats = (*names, *(name for name in alike if name not in names), DTYPE)
    measured: dict[tuple[str, ExpertShape], dict[tuple[int, int], dict[int, float]]] = {}
    for path in table_files(base, MOE, framework, version, or_newest=True):
        for name, *sizes, slices, ranks, tokens, latency_ms in _rows(path, formats, load, kernel):
            times = measured.setdefault((name, ExpertShape(*sizes)), {})
            times.setdefault((slices, ranks), {}).setdefault(tokens, latency_ms / 1000)
        exact = any((name, shape) in measured for name in formats[:-1] or formats)
        if exact or (kernel and measured):
            break  # newer tables hold fewer shapes; of a kernel the newest tables count
    if not measured:
        which = "" if kernel is None else f' of a kernel "{kernel}"'
        raise UsageError(f"costs: silicon has no experts{which} of {framework} for {base.name}")

    def unlike(key: tuple[str, ExpertShape]) -> tuple[bool, float, int]:
        far = sum(abs(math.log(one / other)) for one, other in zip(key[1], shape, strict=True))
        return key[0] == DTYPE != formats[0], far, formats.index(key[0])

    dtype, nearest = min(measured, key=unlike)
    times = {split: calm(by_tokens) for split, by_tokens in measured[dtype, nearest].items()}
    return Experts(nearest, "" if dtype == DTYPE else dtype, times)


def _rows(
    path: Path, formats: Sequence[str], load: Load, kernel: str | None
) -> Iterator[tuple[Any, ...]]:
    """Yield format, sizes, slices, ranks, tokens and milliseconds."""
    names = ("moe_dtype", *COLUMNS, "moe_tp_size", "moe_ep_size", "num_tokens", "latency")
    where = [("distribution", "=", load), ("moe_dtype", "in", list(formats))]
    for *row, source in rows_of(path, *names, "kernel_source", where=where):
        if kernel is None or kernel in source:
            yield tuple(row)


COLUMNS = ("hidden_size", "inter_size", "num_experts", "topk")


def least_s(shape: ExpertShape, tokens: int, split: Split, bits: float, peak: Peak) -> float:
    """Return the least seconds of a layer of experts: its arithmetic, or the weights it wakes."""
    one = 3 * shape.hidden_size * shape.columns / split.slices
    pairs = tokens * shape.experts_per_token / split.ranks
    active = active_experts(tokens, shape.num_experts, shape.experts_per_token) / split.ranks
    moved = active * one * bits / 8 + 4 * pairs * shape.hidden_size
    return max(2 * pairs * one / peak.flops_per_s, moved / peak.bytes_per_s)


def expert_times(
    experts: Experts, shape: ExpertShape, split: Split, on: Peak, target: Peak
) -> tuple[dict[int, float], bool]:
    """Return tokens -> seconds of a layer of experts, and whether it was measured as it is.

    `on` is the GPU that was measured, with the bits of the measured weights, `target` the GPU and
    bits in question.
    """
    nearest = min(experts.times, key=lambda each: _far(each, split))
    times: Mapping[int, float] = experts.times[nearest]
    if nearest == split and shape == experts.shape and on == target:
        return dict(times), True
    more = experts.shape.rows(1) / shape.rows(1)
    launches_s = min(
        max(seconds - least_s(experts.shape, size, Split(*cut), on.matrix_bits, on), 0.0)
        for cut, by_size in experts.times.items()
        for size, seconds in by_size.items()
    )
    scaled: dict[int, float] = {}
    for size, seconds in sorted(times.items()):
        tokens = max(round(size * more), 1)
        least = least_s(shape, tokens, split, target.matrix_bits, target)
        ratio = least / least_s(experts.shape, size, Split(*nearest), on.matrix_bits, on)
        scaled.setdefault(tokens, launches_s + (seconds - launches_s) * ratio)
    return scaled, False


def _far(one: tuple[int, int], other: tuple[int, int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def bits_of(name: str) -> float:
    """Return the bits of a value of the weights in a format of the tables."""
    known = {"": 16, "w4a16_mxfp4": 4, "w4a8_mxfp4_mxfp8": 4}
    return known[name] if name in known else FORMATS[name].bits
