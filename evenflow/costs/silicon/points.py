"""Estimate what the measured tables of a GPU do not hold: other products, heads and experts.

Knows the tables and how operators scale; no model and no stage. A point taken out of a table it can
estimate from the rest. That is how its errors are known (docs/costs-errors.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from evenflow.costs.roofline import active_experts, pairs
from evenflow.costs.silicon.tables import (
    DTYPE,
    ExpertLayer,
    ExpertShape,
    Heads,
    Products,
    SiliconTables,
    Wanted,
    each_product,
    latent_files,
    latent_products,
    latent_steps,
    read_experts,
)
from evenflow.costs.tables import Curve, Surface
from evenflow.errors import UsageError
from evenflow.specs.gpu import GpuSpec
from evenflow.specs.modelspec import Split
from evenflow.specs.precision import FORMATS
from evenflow.sums import plain_sum

Key = TypeVar("Key", int, tuple[int, int])


class Peak(NamedTuple):
    """Peak operations and bytes a second: the scale on which efficiencies are interpolated.

    `matrix_bits`: of a value of the matrix, 16 where it is not quantised.
    """

    flops_per_s: float
    bytes_per_s: float
    matrix_bits: float = 16

    @classmethod
    def of(cls, gpu: GpuSpec, share: float = 1.0) -> Peak:
        """Return the peaks of a GPU in 16 bits, of which it sustains a share of the arithmetic."""
        return cls(gpu.fp16_tflops * 1e12 * share, gpu.memory_bandwidth_gb_s * 1e9)

    def product_s(self, m: int, n: int, k: int) -> float:
        """Return the least seconds of a product [m, k] x [k, n] with 16-bit inputs and outputs."""
        moved = 2 * (m * n + m * k) + n * k * self.matrix_bits / 8
        return max(2 * m * n * k / self.flops_per_s, moved / self.bytes_per_s)


def memory_bytes_per_s(gemm: Products) -> float:
    """Return the memory bandwidth that products reach, in bytes/s.

    The best of the largest twentieth of matrices, which no cache holds, at the fewest rows, where
    nearly all bytes moved are the matrix's.
    """
    columns = [(n * k, by_m) for n, by_k in gemm.items() for k, by_m in by_k.items()]
    columns.sort(key=lambda column: -column[0])
    largest = columns[: -(-len(columns) // 20)]
    return max(2 * size / by_m[min(by_m)] for size, by_m in largest)


def from_memory(
    tables: SiliconTables, key_bytes: int, bits: float = 16, window: int = 0
) -> SiliconTables:
    """Return tables in which products and decode steps take at least their reads from memory.

    A benchmark repeats an operator, so its matrix, keys and values lie in the cache
    (docs/costs-errors.md); a model's are read at `memory_bytes_per_s`. `bits`: of a value of the
    quantised matrices. `key_bytes`: KV bytes of a token for a KV head. `window`: tokens, 0: all.
    """
    per_byte_s = 1 / memory_bytes_per_s(tables.gemm)

    def read(gemm: Products, bits: float) -> Products:
        return each_product(gemm, lambda n, k, m, s: max(s, bits / 8 * n * k * per_byte_s))

    most = window or math.inf
    generation = {
        (heads, kv_heads): {
            (rows, context): max(
                seconds, key_bytes * kv_heads * rows * min(context, most) * per_byte_s
            )
            for (rows, context), seconds in steps.items()
        }
        for (heads, kv_heads), steps in tables.generation.items()
    }
    return replace(
        tables,
        gemm=read(tables.gemm, 16),
        quantized=read(tables.quantized, bits),
        generation=generation,
    )


def windowed(tables: SiliconTables, window: int) -> dict[str, Any]:
    """Return attention to a window, as fields of the tables, from attention to all tokens.

    A decode step takes what one with as much context does; a prompt has its share of the pairs.
    """

    def share(tokens: int) -> float:
        return pairs(0, tokens, window) / pairs(0, tokens)

    context = {
        heads: {
            tokens: times[min(times)] + (seconds - times[min(times)]) * share(tokens)
            for tokens, seconds in times.items()
        }
        for heads, times in tables.context.items()
    }
    generation = {}
    for heads, steps in tables.generation.items():
        surface = Surface(steps)
        generation[heads] = {
            (rows, step): surface.decode(rows, rows * min(step, window))[0] for rows, step in steps
        }
    return {"context": context, "generation": generation}


def product_times(
    gemm: Mapping[int, Mapping[int, Mapping[int, float]]], n: int, k: int, peak: Peak
) -> dict[int, float]:
    """Return m -> seconds of a product [m, k] x [k, n] of any shape.

    Along k, the number of steps of every tile, seconds follow a straight line between measured
    shapes. Along n, and beyond the measured shapes, the efficiency does (over log n).
    """
    if n in gemm and k in gemm[n]:
        return dict(gemm[n][k])
    columns = {each: _along_k(gemm[each], each, k, peak) for each in _around(gemm, n)}
    common = set.intersection(*(set(times) for times in columns.values()))
    ends = sorted(columns)
    share = _share(math.log(ends[0]), math.log(ends[-1]), math.log(n))
    return {
        m: peak.product_s(m, n, k)
        * _between(*(columns[end][m] / peak.product_s(m, end, k) for end in ends), share=share)
        for m in sorted(common)
    }


def _along_k(
    by_k: Mapping[int, Mapping[int, float]], n: int, k: int, peak: Peak
) -> dict[int, float]:
    ends = _around(by_k, k)
    common = set.intersection(*(set(by_k[end]) for end in ends))
    if len(ends) == 1:  # at a measured shape, or beyond all of them at their efficiency
        end = ends[0]
        return {
            m: by_k[end][m] * peak.product_s(m, n, k) / peak.product_s(m, n, end) for m in common
        }
    share = _share(ends[0], ends[1], k)
    return {m: _between(*(by_k[end][m] for end in ends), share=share) for m in common}


def prompt_times(context: Mapping[Heads, Mapping[int, float]], heads: Heads) -> dict[int, float]:
    """Return tokens -> seconds of causal attention of one prompt, for `heads`: (heads, KV heads).

    Linear between measured numbers of heads; beyond the largest, in proportion to the heads. A
    number of KV heads that was not measured is replaced by the nearest: prompts hardly depend on
    it.
    """
    times = context.get(heads, {})
    lines = _prompt_lines(context, heads)
    return _completed(times, lines, heads[0], _prompt_estimates, grows=True)


def _prompt_estimates(times: Mapping[int, float], tokens: int) -> list[float]:
    if not times or not min(times) < tokens < max(times):
        return []
    own = Surface({(each, 0): times[each] for each in _around(times, tokens)})
    return [own.prefill(tokens, 0)[0]]


def step_times(
    generation: Mapping[Heads, Mapping[tuple[int, int], float]], heads: Heads
) -> dict[tuple[int, int], float]:
    """Return (rows, context) -> seconds of a decode step, for heads with measured KV heads.

    A point that is not measured is the median of up to three estimates. They are over the heads at
    the same point, along its context, and over the rows at the same total.
    """
    times = generation.get(heads, {})
    lines = [
        (pair[0], generation[pair])
        for pair in sorted(generation)
        if pair[1] == heads[1] and pair != heads
    ]
    return _completed(times, lines, heads[0], _decode_estimates, grows=False)


def _completed(
    times: Mapping[Key, float],
    lines: Sequence[tuple[int, Mapping[Key, float]]],
    heads: int,
    estimates_of: Callable[[Mapping[Key, float], Key], list[float]],
    *,
    grows: bool,
) -> dict[Key, float]:
    """Return point -> seconds: `times`, and points measured only with other numbers of heads.

    `lines`: the times of those. An added point is the median of `estimates_of(times, point)` and of
    the interpolation over heads.
    """
    points = set(times).union(*(line for _, line in lines))
    completed = dict(times)
    for point in sorted(points - set(times)):
        estimates = estimates_of(times, point)
        over_heads = _over_heads(lines, heads, point, grows=grows)
        if over_heads is not None:
            estimates.append(over_heads)
        if estimates:
            completed[point] = median(estimates)
    return completed


def _decode_estimates(
    times: Mapping[tuple[int, int], float], point: tuple[int, int]
) -> list[float]:
    rows, context = point
    estimates = []
    own = [each for count, each in times if count == rows]
    if own and min(own) < context < max(own):
        line = Surface({each: seconds for each, seconds in times.items() if each[0] == rows})
        estimates.append(line.decode(rows, rows * context)[0])
    others = {count for count, _ in times if count != rows}
    if others and min(others) < rows < max(others):
        totals = {
            (count, count * each): seconds
            for (count, each), seconds in times.items()
            if count in _around(others, rows)
        }
        estimates.append(Surface(totals).decode(rows, rows * rows * context)[0])
    return estimates


def _prompt_lines(
    context: Mapping[Heads, Mapping[int, float]], heads: Heads
) -> list[tuple[int, Mapping[int, float]]]:
    """Return (heads, times) of the configurations to interpolate prompts over, by heads.

    They have the same or the nearest KV heads; without grouped queries, KV heads equal heads.
    """
    count, kv_heads = heads
    chosen = [pair for pair in context if pair[0] == pair[1]]
    if count != kv_heads:
        known = {pair[1] for pair in context if pair[0] > pair[1]}
        nearest = min(known, key=lambda each: (abs(math.log(each / kv_heads)), each))
        chosen = [pair for pair in context if pair[1] == nearest]
    return [(pair[0], context[pair]) for pair in sorted(chosen) if pair != heads]


def measured_kv_heads(generation: Mapping[Heads, object], heads: Heads) -> int:
    """Return the KV heads measured in decode steps that stand for `heads`: the same, or fewer.

    Only numbers that were measured with several numbers of heads can be interpolated over.
    """
    if heads in generation:
        return heads[1]
    known = sorted({pair[1] for pair in generation if pair[0] > pair[1]})
    return max((each for each in known if each <= heads[1]), default=known[0])


def _over_heads(
    lines: Iterable[tuple[int, Mapping[Key, float]]], heads: int, key: Key, *, grows: bool
) -> float | None:
    at = {count: times[key] for count, times in lines if key in times}
    if not at:
        return None
    ends = _around(at, heads)
    if len(ends) == 1:
        return at[ends[0]] * (heads / ends[0] if grows else 1.0)
    return _between(at[ends[0]], at[ends[1]], share=_share(ends[0], ends[1], heads))


def chunk_times(
    times: Mapping[int, float], tile_times: Mapping[int, float], window: int = 0
) -> Callable[[int, int], float]:
    """Return seconds of a chunk after some context, from prompts without any.

    The prompt of length L = context + chunk gives the seconds per (query, key) pair at that length.
    The shortest prompt's seconds (the launch) are subtracted first. The chunk has its share of the
    pairs. It takes at least as long as one query tile that reads L keys (`tile_times`). That is a
    prompt of one head, which leaves most of the GPU idle. Beyond the longest measured prompt its
    seconds per pair go on. Known error: kernels that split the keys of few, long rows beat it.
    """
    prompt = Surface({(tokens, 0): seconds for tokens, seconds in times.items()})
    tile = Surface({(tokens, 0): seconds for tokens, seconds in tile_times.items()})
    first, last = min(times), max(times)
    launch_s = times[first]

    def seconds(tokens: int, context: int) -> float:
        length = context + tokens
        measured = min(length, last)
        beyond = pairs(0, length, window) / pairs(0, measured, window)
        whole_s = launch_s + (prompt.prefill(measured, 0)[0] - launch_s) * beyond
        if not context:
            return whole_s
        share = pairs(context, length, window) / pairs(0, length, window)
        keys = min(length, last, window or length)
        return max(launch_s + (whole_s - launch_s) * share, tile.prefill(keys, 0)[0])

    return seconds


# -- layers of experts ----------------------------------------------------------------------------
# A shape, format or split that was not measured is the nearest one that was: what it takes at least
# beyond its roofline (launches, sorting tokens) as it is, the rest times the ratio of the two
# rooflines. Of another shape those sizes count that have as many rows an expert, as kernels compute
# each expert's rows in blocks.


def least_s(shape: ExpertShape, tokens: int, split: Split, bits: float, peak: Peak) -> float:
    """Return the least seconds of a layer of experts: its arithmetic, or the active experts'
    weights.
    """
    one = 3 * shape.hidden_size * shape.columns / split.slices
    pairs = tokens * shape.experts_per_token / split.ranks
    active = active_experts(tokens, shape.num_experts, shape.experts_per_token) / split.ranks
    moved = active * one * bits / 8 + 4 * pairs * shape.hidden_size
    return max(2 * pairs * one / peak.flops_per_s, moved / peak.bytes_per_s)


AWAKE = {1: 3.2, 2: 5.1, 4: 8.2, 8: 13, 16: 19.2, 32: 25.4, 48: 28.5, 64: 30, 96: 31.4, 128: 31.8}
"""Tokens -> active experts of DeepSeek-V3 on the busiest of 8 ranks (docs/costs-errors.md)."""


def experts_of(
    base: Path, framework: str, version: str | None, shape: ExpertShape, wanted: Wanted
) -> ExpertLayer:
    """Read the experts nearest to a shape, under the load that is wanted."""
    if wanted.load != "counted":
        return read_experts(base, framework, version, shape, wanted)
    if (shape.num_experts, shape.experts_per_token) != (256, 8):
        raise UsageError("costs.expert_load: counted is of 256 experts, 8 a token")
    power, even = (
        read_experts(base, framework, version, shape, wanted._replace(load=load))
        for load in ("power_law_1.01", "balanced")
    )
    return counted(power, even)


def counted(power: ExpertLayer, even: ExpertLayer) -> ExpertLayer:
    """Return seconds of experts by tokens; the busiest of 8 ranks reads AWAKE's active experts.

    Tokens -> seconds on 8 ranks of whole experts are at least those of that many active experts;
    other splits stay as in `power`. `even` has the seconds by active experts, as each token of a
    balanced load activates one more on a rank.
    """
    sizes = sorted(even.times[1, 8])
    awake = np.interp(sizes, list(AWAKE), list(AWAKE.values()))
    least_s = np.interp(awake, sizes, [even.times[1, 8][size] for size in sizes])
    least = dict(zip(sizes, least_s.tolist(), strict=True))
    spread = {tokens: max(s, least[tokens]) for tokens, s in power.times[1, 8].items()}
    return power._replace(times={**power.times, (1, 8): spread})


def expert_times(
    experts: ExpertLayer, shape: ExpertShape, split: Split, on: Peak, target: Peak
) -> tuple[dict[int, float], bool]:
    """Return tokens -> seconds of a layer of experts, and whether it was measured as it is.

    `on` is the GPU that was measured, with the bits of the measured weights. `target` is the GPU,
    and the bits, in question.
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
    return plain_sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def bits_of(name: str) -> float:
    """Return the bits of a value of the weights in a format of the tables."""
    known = {"": 16, "w4a16_mxfp4": 4, "w4a8_mxfp4_mxfp8": 4}
    return known[name] if name in known else FORMATS[name].bits


# -- attention of latents, from measured kernels or measured modules ------------------------------
# Prompts and decode steps are given with what the heads' up-projection takes: of keys and values in
# prompts, of queries and outputs in decode steps.

LATENT, ROTATED, KEY, VALUE = LATENT_SIZES = (512, 64, 128, 128)
"""Those of DeepSeek-V2 and V3 and Kimi-K2; key and value of a head."""

HIDDEN, QUERIES = 7168, 1536
"""Hidden size and the queries' latent of the measured modules: DeepSeek-V3's."""

ByTokens = Callable[[int], float]


def read_latent(
    base: Path,
    framework: str,
    version: str | None,
    kv_dtype: str,
    products: Mapping[str, tuple[Products, Peak]],
) -> dict[str, Any]:
    """Return fields of the tables: `context` and `generation` by (heads, 1), and `rotates`.

    Where whole attention modules were measured, the measured `products` of the same shapes and
    format are subtracted. vLLM's are in 16 bits, as its quantised ones wait for the host. Others'
    are in the model's format if it was measured.
    """
    files, around = latent_files(base, framework, version)
    formats = [DTYPE] if framework == "vllm" or around else [*products][::-1]
    (prompts, dtype), (steps, _) = (
        latent_steps(path, (kv_dtype, formats), size)
        for path, size in zip(files, ("isl", "step"), strict=True)
    )
    gemm, peak = products[dtype]

    def product(k: int, n: int) -> ByTokens:
        return Curve.of(product_times(gemm, n, k, peak))

    heads_known = sorted(set(prompts) & set(steps))
    if around is None:
        in_prompts = in_steps = {heads: _less_products(heads, product) for heads in heads_known}
    else:
        in_prompts = {heads: product(LATENT, heads * (KEY + VALUE)) for heads in heads_known}
        batched = latent_products(around, [*products][-1])
        in_steps = {heads: Curve.of(by_rows) for heads, by_rows in batched.items()}
    launch_s = min(by_m[min(by_m)] for by_k in gemm.values() for by_m in by_k.values())
    context = {
        (heads, 1): uncut(
            {
                tokens: max(seconds + in_prompts[heads](tokens), launch_s)
                for (rows, tokens), seconds in prompts[heads].items()
                if rows == 1
            }
        )
        for heads in heads_known
    }
    generation = {
        (heads, 1): {
            (rows, step): max(seconds + in_steps[heads](rows), launch_s)
            for (rows, step), seconds in steps[heads].items()
        }
        for heads in heads_known
        if heads in in_steps
    }
    return {"context": context, "generation": generation, "rotates": around is None}


def _less_products(heads: int, product: Callable[[int, int], ByTokens]) -> ByTokens:
    """Return the seconds of a module's products, negated, as they are counted apart."""
    shapes = (
        (HIDDEN, QUERIES + LATENT + ROTATED),
        (QUERIES, heads * (KEY + ROTATED)),
        (heads * VALUE, HIDDEN),
    )
    parts = [product(*shape) for shape in shapes]
    return lambda tokens: -plain_sum(part(tokens) for part in parts)


def uncut(times: Mapping[int, float]) -> dict[int, float]:
    """Return seconds of prompts by tokens, without a longest one that the benchmark truncated.

    The longest is truncated if its seconds per token are below those of the one before, as causal
    attention takes longer with each token. Source: prompts of 32,768 tokens take as long as those
    of 16,384 in these tables, for all GPUs, engines and heads looked at.
    """
    *_, before, last = sorted(times)
    cut = times[last] / last < times[before] / before
    return {tokens: seconds for tokens, seconds in times.items() if not (cut and tokens == last)}


# -- between measured points ----------------------------------------------------------------------


def _around(values: Iterable[int], wanted: int) -> list[int]:
    """Return the values to interpolate `wanted` from: itself, both neighbours, or an end."""
    ordered = sorted(values)
    at = bisect_left(ordered, wanted)
    if at < len(ordered) and ordered[at] == wanted:
        return [wanted]
    return ordered[max(at - 1, 0) : at + 1]


def _share(low: float, high: float, wanted: float) -> float:
    return (wanted - low) / (high - low) if high > low else 0.0


def _between(low: float, high: float | None = None, *, share: float) -> float:
    return low if high is None else low + (high - low) * share
