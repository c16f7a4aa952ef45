"""Leave points out of the silicon tables, estimate them from the rest, and say how far off it is.

`python -m tools.silicon_errors` prints the table of docs/costs-errors.md, with `experts` and
`attention` how far the roofline's are off measured ones, with `links` how far all-reduces are in
each GPU's machine. Needs the extra `silicon`. Tables are compared as costs use them, read from
memory, and as they were measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.config.links import Wires
from evenflow.costs.launches import DENSE_KERNELS, expert_kernels
from evenflow.costs.roofline import AttentionRates, Rates, experts_s
from evenflow.costs.silicon.cost import GPUS as SOURCES
from evenflow.costs.silicon.cost import shape_of, silicon_source
from evenflow.costs.silicon.points import (
    Peak,
    expert_times,
    from_memory,
    product_times,
    prompt_times,
    step_times,
)
from evenflow.costs.silicon.tables import (
    TABLES,
    Heads,
    SiliconTables,
    all_reduce_times,
    data_folder,
    load_tables,
)
from evenflow.errors import UsageError
from evenflow.report.tables import markdown_table
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model

GPUS = {"a100_sxm": "A100-80G", "l40s": "L40S", "h100_sxm": "H100", "h200_sxm": "H200"}
SIDES = (256, 20_000)
"""Matrices are left out whose sides lie between these: those of layers and their shards."""

EVERY_SHAPE = 10_000
MIN_HEADS = 4
HEAD_DIM = 128


FRAMEWORKS = ("vllm", "sglang", "trtllm")
WITH_EXPERTS = ("H100", "H200", "B200")
MIXTURES = (
    *("Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "MiniMax-M2.5", "gpt-oss-120b"),
    *("DeepSeek-V3", "Kimi-K2"),
)
TOKENS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Where the bins of tokens end."""


BYTES = {0: "", 2**13: "to 8 KB", 2**17: "to 128 KB", 2**20: "to 1 MB", 2**26: "to 64 MB"}
"""Where the bins of messages end."""

PROMPTS = (0, 256, 1024, 4096, 16384)
"""Where the bins of a prompt's tokens end."""

OTHER_HOSTS = {"L40S": ("0.5.12",), "RTX-PRO-6000": ("0.19.0", "0.5.10", "1.3.0rc10")}
"""Versions of engines whose all-reduces are of another host, as their bandwidths show."""


class Errors(NamedTuple):
    """Absolute relative errors, as shares of the measured times."""

    median: float
    p95: float
    points: int


def product_errors(tables: SiliconTables, peak: Peak, shapes: int = 60) -> Errors:
    """Leave out random shapes (n, k), every m of each, one shape at a time."""
    gemm = tables.gemm
    low, high = SIDES
    known = [
        (n, k)
        for n in sorted(gemm)
        for k in sorted(gemm[n])
        if low <= min(n, k) <= max(n, k) <= high
    ]
    chosen = np.random.default_rng(0).choice(len(known), min(shapes, len(known)), replace=False)

    def pairs() -> Iterator[tuple[float, float]]:
        for n, k in (known[each] for each in chosen):
            rest = {**gemm, n: {other: gemm[n][other] for other in gemm[n] if other != k}}
            estimated = product_times(rest, n, k, peak)
            yield from ((estimated[m], gemm[n][k][m]) for m in gemm[n][k] if m in estimated)

    return _errors(pairs())


Points = Mapping[Heads, Mapping[Any, float]]
"""Seconds by heads, then by the size of what is attended to."""


def attention_errors(
    known: Points,
    estimate: Callable[[Any, Heads], Mapping[Any, float]],
) -> Errors:
    """Leave out random points of attention, one at a time: `estimate` them from the rest.

    A point is (heads, tokens) of a prompt, or (heads, rows, context) of a decode step.
    """
    large = [(heads, size) for heads in known for size in known[heads] if heads[0] >= MIN_HEADS]
    chosen = np.random.default_rng(0).choice(len(large), min(600, len(large)), replace=False)

    def pairs() -> Iterator[tuple[float, float]]:
        for heads, size in (large[each] for each in chosen):
            rest = {each: times for each, times in known[heads].items() if each != size}
            estimated = estimate({**known, heads: rest}, heads)
            if size in estimated:
                yield estimated[size], known[heads][size]

    return _errors(pairs())


def disagreement(tables: SiliconTables, other: SiliconTables) -> Errors:
    """Compare two collections of the same products: what no estimate can be better than."""

    def shapes(gemm: Mapping[int, Mapping[int, Mapping[int, float]]]) -> Iterator[tuple[int, int]]:
        low, high = SIDES
        yield from ((n, k) for n in gemm for k in gemm[n] if low <= min(n, k) <= max(n, k) <= high)

    both = set(shapes(tables.gemm)) & set(shapes(other.gemm))
    return _errors(
        (other.gemm[n][k][m], seconds)
        for n, k in sorted(both)
        for m, seconds in tables.gemm[n][k].items()
        if m in other.gemm[n][k]
    )


def _errors(pairs: Iterator[tuple[float, float]]) -> Errors:
    off = np.array([abs(estimated / measured - 1) for estimated, measured in pairs])
    return Errors(float(np.median(off)), float(np.percentile(off, 95)), len(off))


def peak_of(name: str) -> Peak:
    """Return the peaks of a GPU in the table."""
    return Peak.of(gpu(name))


def expert_ratios(name: str, framework: str, mixture: str, ranks: int) -> dict[int, float]:
    """Return the roofline of a layer's experts over what was measured, by tokens.

    None where experts of this shape were not measured.
    """
    spec = model(mixture)
    placed = Deployment(spec, gpu(name), (spec.num_layers,), ranks)
    try:
        source = silicon_source(placed, framework)
    except UsageError:
        return {}
    kind = [*spec.kinds()][-1]
    experts, split, peak = source.of(kind).experts, placed.expert_split, peak_of(name)
    assert experts is not None
    times, measured = expert_times(experts, shape_of(kind), split, peak, peak)
    rates = Rates.of_experts(placed.gpu, placed.arithmetic)
    launched = expert_kernels(kind, narrow=placed.arithmetic != "16-bit")
    gaps_s = placed.gpu.per_layer_overhead_s * launched / DENSE_KERNELS
    return {
        tokens: (experts_s(tokens, kind, split, rates, imbalance=1.0) + gaps_s) / taken_s
        for tokens, taken_s in times.items()
        if measured and tokens <= TOKENS[-1]
    }


def print_experts() -> None:
    """Print the ratios of the experts by tokens, and the errors of all."""
    found = [
        (tokens, ratio)
        for name in WITH_EXPERTS
        for framework in FRAMEWORKS
        for mixture in MIXTURES
        for ranks in (1, 2, 4, 8)
        for tokens, ratio in expert_ratios(name, framework, mixture, ranks).items()
    ]
    table = pd.DataFrame(found, columns=["tokens", "ratio"])
    bins = pd.cut(table["tokens"], TOKENS, labels=[f"to {most:,}" for most in TOKENS[1:]])
    medians = table.groupby(bins, observed=True)["ratio"].median()
    cells = [f"{median:.2f}" for median in medians]
    print(markdown_table(["tokens", *medians.index], [["predicted / measured", *cells]]), end="")
    off = (table["ratio"] - 1).abs()
    print(f"{len(table):,} points: median off {off.median():.1%}, P90 {off.quantile(0.9):.1%}")


def attention_ratios(name: str, system: str) -> Iterator[tuple[int, float]]:
    """Yield a prompt's tokens, and the roofline of its attention over what was measured."""
    rates, gap_s = Rates.of(gpu(name)), gpu(name).per_layer_overhead_s / DENSE_KERNELS
    flops, moved = 4 * HEAD_DIM / rates.flops_per_s, 4 * HEAD_DIM / rates.bytes_per_s
    for framework in FRAMEWORKS:
        for (heads, kv_heads), times in load_tables(system, framework).context.items():
            keys = kv_heads or heads
            of = AttentionRates(heads * flops, keys * moved, heads * moved, 0.0)
            for tokens, seconds in times.items() if heads >= MIN_HEADS else ():
                yield tokens, (of.prefill_s(0, tokens) + gap_s) / seconds


def print_attention() -> None:
    """Print predicted over measured attention of prompts by tokens: medians of three engines."""
    rows, labels = [], [f"to {most:,}" for most in PROMPTS[1:]]
    for name, system in {source.on: source.system for source in SOURCES.values()}.items():
        found = pd.DataFrame(attention_ratios(name, system), columns=["tokens", "ratio"])
        bins = pd.cut(found["tokens"], PROMPTS, labels=labels)
        medians = found.groupby(bins, observed=True)["ratio"].median()
        rows.append([name, *(f"{medians[each]:.2f}" for each in labels)])
    print(markdown_table(["GPU", *labels], rows), end="")


def reduce_ratios(name: str, system: str) -> Iterator[tuple[str, int, float, float]]:
    """Yield version, ranks, bytes, predicted over measured all-reduces in a GPU's machine."""
    tables = TABLES["all_reduce"].format(framework="*", version="*")
    for path in sorted((data_folder() / system).glob(tables)):
        for ranks, points in all_reduce_times(path).items():
            fabric = Wires.of(gpu(name).machine, ranks).fabric(ranks)
            assert fabric is not None
            for size_bytes, seconds in points.items():
                ratio = fabric.all_reduce_s(size_bytes, ranks) / seconds
                yield path.parent.name, ranks, size_bytes, ratio


def print_links() -> None:
    """Print predicted over measured all-reduces by GPU, host and bytes: median, P5 to P95."""
    rows, columns = [], ["version", "ranks", "bytes", "ratio"]
    for name, system in {source.on: source.system for source in SOURCES.values()}.items():
        found = pd.DataFrame(reduce_ratios(name, system), columns=columns)
        found["host"] = np.where(found["version"].isin(OTHER_HOSTS.get(name, ())), "another", "")
        found["bin"] = pd.cut(found["bytes"], list(BYTES), labels=list(BYTES.values())[1:])
        for (host, ranks), part in found.groupby(["host", "ranks"]):
            by_bytes = part.groupby("bin", observed=True)["ratio"]
            low, mid, high = (by_bytes.quantile(share) for share in (0.05, 0.5, 0.95))
            cells = [f"{mid[each]:.2f} ({low[each]:.2f}-{high[each]:.2f})" for each in mid.index]
            rows.append([name, str(host), str(ranks), *cells])
    heads = ["GPU", "host", "ranks", *list(BYTES.values())[1:]]
    print(markdown_table(heads, rows), end="")


def main() -> None:
    """Print the table: GPU, framework, kind of operator, errors."""
    heads = (
        *("GPU", "framework", "products", "prompt attention", "decode attention"),
        *("same products", "products as measured", "decodes as measured"),
    )
    rows = []
    for system, name in GPUS.items():
        measured = {each: load_tables(system, each) for each in FRAMEWORKS}
        tables = {each: from_memory(table, 4 * HEAD_DIM) for each, table in measured.items()}
        peak = peak_of(name)
        for framework, chosen in tables.items():
            errors = (
                product_errors(chosen, peak, EVERY_SHAPE),
                attention_errors(chosen.context, prompt_times),
                attention_errors(chosen.generation, step_times),
                disagreement(chosen, tables["sglang" if framework == "vllm" else "vllm"]),
                product_errors(measured[framework], peak, EVERY_SHAPE),
                attention_errors(measured[framework].generation, step_times),
            )
            cells = [f"{each.median:.1%}, {each.p95:.1%}" for each in errors]
            rows.append([name, f"{framework} {chosen.versions['gemm']}", *cells])
    print(markdown_table(heads, rows), end="")


if __name__ == "__main__":
    if sys.argv[1:] == ["experts"]:
        print_experts()
    elif sys.argv[1:] == ["attention"]:
        print_attention()
    elif sys.argv[1:] == ["links"]:
        print_links()
    else:
        main()
