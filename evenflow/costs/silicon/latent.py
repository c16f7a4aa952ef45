"""Multi-head latent attention, from measured kernels or measured modules.

Knows the tables of latent attention. Prompts and decode steps are given with what the heads'
up-projection takes: of keys and values in prompts, of queries and outputs in decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenflow.costs.silicon.points import Peak, product_times
from evenflow.costs.silicon.tables import (
    DTYPE,
    NotMeasuredError,
    Products,
    calm_steps,
    rows_of,
    table_file,
)
from evenflow.costs.tables import Curve
from evenflow.specs.model import ModelSpec

KERNELS = "mla/{framework}/{version}/KIND_mla_perf.parquet"
MODULES = "mla/{framework}/{version}/mla_KIND_module_perf.parquet"
BATCHED = "mla_bmm/{framework}/{version}/mla_bmm_perf.parquet"

LATENT, ROTATED, KEY, VALUE = SIZES = (512, 64, 128, 128)
"""Those of DeepSeek-V2 and V3 and Kimi-K2; key and value of a head."""

HIDDEN, QUERIES = 7168, 1536
"""Hidden size and the queries' latent of the measured modules: DeepSeek-V3's."""

Points = dict[tuple[int, int], float]
"""(rows, tokens or context) -> seconds."""

ByTokens = Callable[[int], float]


def read_latent(
    base: Path,
    framework: str,
    version: str | None,
    kv_dtype: str,
    products: Mapping[str, tuple[Products, Peak]],
) -> dict[str, Any]:
    """Return fields of the tables: `context` and `generation` by (heads, 1), and `rotates`.

    Of modules, where there are any, the measured `products` of the same shapes and format are
    taken: vLLM's in 16 bits, as its quantised ones wait for the host, others' in the model's format
    if it was measured.
    """
    known = MODULES.replace("KIND", "context").format(framework=framework, version=version or "*")
    modules = any(base.glob(known))
    pattern = MODULES if modules else KERNELS
    formats = [DTYPE] if framework == "vllm" or not modules else [*products][::-1]
    (prompts, dtype), (steps, _) = (
        _points(
            table_file(base, pattern.replace("KIND", kind), framework, version),
            (kv_dtype, formats),
            size,
        )
        for kind, size in (("context", "isl"), ("generation", "step"))
    )
    gemm, peak = products[dtype]

    def product(k: int, n: int) -> ByTokens:
        return Curve.of(product_times(gemm, n, k, peak))

    heads_known = sorted(set(prompts) & set(steps))
    if modules:
        in_prompts = in_steps = {heads: _less_products(heads, product) for heads in heads_known}
    else:
        in_prompts = {heads: product(LATENT, heads * (KEY + VALUE)) for heads in heads_known}
        in_steps = _batched(table_file(base, BATCHED, framework, version), [*products][-1])
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
    return {"context": context, "generation": generation, "rotates": modules}


def _less_products(heads: int, product: Callable[[int, int], ByTokens]) -> ByTokens:
    """Return what a module takes for its products, below 0, as they are counted apart."""
    shapes = (
        (HIDDEN, QUERIES + LATENT + ROTATED),
        (QUERIES, heads * (KEY + ROTATED)),
        (heads * VALUE, HIDDEN),
    )
    parts = [product(*shape) for shape in shapes]
    return lambda tokens: -sum(part(tokens) for part in parts)


def uncut(times: Mapping[int, float]) -> dict[int, float]:
    """Return tokens -> seconds of prompts without a longest one that the benchmark cut short.

    In attention each token takes longer than the one before. Prompts of 32,768 tokens of these
    tables take as long as those of 16,384 (all GPUs, engines and heads that were looked at).
    """
    *_, before, last = sorted(times)
    cut = times[last] / last < times[before] / before
    return {tokens: seconds for tokens, seconds in times.items() if not (cut and tokens == last)}


def require_measured(model: ModelSpec) -> None:
    """Raise UsageError where latents have other sizes than those measured."""
    sizes = model.kv_lora_rank, model.qk_rope_head_dim, model.head_dim, model.v_head_dim
    if sizes != SIZES:
        raise NotMeasuredError(
            f"costs: silicon: latents, rotated keys, keys and values of {model.name} have sizes "
            f"{sizes}; measured: {SIZES}; use costs: roofline"
        )


def _points(
    path: Path, dtypes: tuple[str, Sequence[str]], size: str
) -> tuple[dict[int, Points], str]:
    """Return heads -> points of attention by rows and the column `size`, and the products' format.

    `dtypes`: that of keys and values, and those of products, of which the first one counts.
    """
    kv_dtype, wanted = dtypes
    names = ("mla_dtype", "kv_cache_dtype", "num_heads", "batch_size", size, "latency")
    found: dict[str, dict[int, Points]] = {}
    for dtype, kv, heads, rows, tokens, latency_ms, gemm in rows_of(path, *names, gemm_type=DTYPE):
        if (dtype, kv) == (DTYPE, kv_dtype):
            found.setdefault(gemm, {}).setdefault(heads, {})[rows, tokens] = latency_ms / 1000
    gemm = next((each for each in wanted if each in found), None)
    if gemm is None:
        raise NotMeasuredError(f"costs: silicon, {path.parent}: no latents with {kv_dtype} KV")
    return {heads: calm_steps(points) for heads, points in found[gemm].items()}, gemm


def _batched(path: Path, quantization: str) -> dict[int, ByTokens]:
    """Return heads -> seconds of both products of a decode step's queries and outputs, by rows.

    Engines have their matrix in FP8 where the checkpoint has it so, with scales of any kind.
    """
    wanted = "fp8" if quantization.startswith("fp8") else DTYPE
    names = ("bmm_dtype", "op_name", "num_heads", "num_tokens", "latency")
    times: dict[int, dict[int, dict[str, float]]] = {}
    for dtype, name, heads, tokens, latency_ms in rows_of(path, *names):
        if dtype == wanted:
            by_tokens = times.setdefault(heads, {})
            by_tokens.setdefault(tokens, {}).setdefault(name, latency_ms / 1000)
    return {
        heads: Curve.of({tokens: sum(both.values()) for tokens, both in by_tokens.items()})
        for heads, by_tokens in times.items()
    }
