"""Read the measured operator tables of real GPUs in the package `aiconfigurator-core`.

Knows the package's folders and columns; does not interpolate. The package is the optional extra
`silicon` and is only read as data. Its times are milliseconds; all-reduce sizes count elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

from evenflow.errors import UsageError, instead_of
from evenflow.sums import plain_sum

DTYPE = "bfloat16"
"""The tables' 16-bit type; float16 takes as long."""

PER_TENSOR, PER_BLOCK = "fp8", "fp8_block"

PROMPT_DTYPES = {"vllm": (DTYPE, "fp8")}
"""What prompts are attended to in with 8-bit keys and values, by what a framework prefers."""

TABLES = {
    "gemm": "gemm/{framework}/{version}/gemm_perf.parquet",
    "context": "attention/{framework}/{version}/context_attention_perf.parquet",
    "generation": "attention/{framework}/{version}/generation_attention_perf.parquet",
    "all_reduce": "comm/{framework}/{version}/custom_allreduce_perf.parquet",
}
SCALES = "computescale_perf.parquet"

Products = Mapping[int, Mapping[int, Mapping[int, float]]]
"""Columns, inputs and rows of a product -> seconds."""

Heads = tuple[int, int]
"""(heads, KV heads) on one rank."""


class NotMeasuredError(UsageError):
    """A table has other heads, windows or formats than those asked for."""


class ExpertShape(NamedTuple):
    """A layer of experts as the tables name it."""

    hidden_size: int
    columns: int
    num_experts: int
    experts_per_token: int

    def rows(self, tokens: int) -> float:
        """Return the rows that an expert has of `tokens` tokens, on average."""
        return tokens * self.experts_per_token / self.num_experts


class ExpertLayer(NamedTuple):
    """A layer of experts: its shape and format as measured.

    `times[slices, ranks][tokens]`: seconds on the busiest rank. Each expert is cut in `slices`
    slices, and the experts are spread over `ranks` ranks. Tokens of all of these ranks together.
    """

    shape: ExpertShape
    format: str
    times: Mapping[tuple[int, int], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class SiliconTables:
    """The seconds measured on one GPU with one framework.

    `gemm[n][k][m]`: a product [m, k] x [k, n]. `quantized`: the same with weights in a format and
    inputs quantised on the way; empty where not measured. `context[heads][tokens]`: causal
    attention of one prompt. `generation[heads][rows, context]`: a decode step of rows with
    `context` tokens each. `all_reduce[ranks][bytes]`. `versions`: of the framework, for each kind
    of operator. `rotates`: attention was measured with the rotary embedding and the KV write.
    """

    system: str
    device: str
    framework: str
    versions: Mapping[str, str]
    gemm: Products
    context: Mapping[Heads, Mapping[int, float]]
    generation: Mapping[Heads, Mapping[tuple[int, int], float]]
    all_reduce: Mapping[int, Mapping[int, float]]
    quantized: Products = field(default_factory=dict)
    experts: ExpertLayer | None = None
    rotates: bool = False


def package_folder() -> Path:
    """Return the folder of the package, of the extra `silicon`; UsageError without it."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        what = "pip install aiconfigurator-core pyarrow"
        raise UsageError(f"costs: silicon and aiconfigurator need their package: {what}")
    return Path(spec.origin).parent


def data_folder() -> Path:
    """Return the folder of the tables."""
    return package_folder() / "systems" / "data"


def systems(folder: Path) -> dict[str, list[str]]:
    """Return the GPUs that have product and attention tables, with their frameworks."""
    found: dict[str, list[str]] = {}
    for gpu in sorted(path for path in folder.iterdir() if path.is_dir()):
        frameworks = {path.name for path in (gpu / "gemm").glob("*") if path.is_dir()}
        frameworks &= {path.name for path in (gpu / "attention").glob("*")}
        if frameworks:
            found[gpu.name] = sorted(frameworks)
    return found


def load_tables(
    system: str,
    framework: str,
    version: str | None = None,
    *,
    head_dim: int = 128,
    quantization: str = "",
    kv_dtype: str = DTYPE,
    window: int = 0,
) -> SiliconTables:
    """Read the tables of one GPU and framework; `version` None takes the newest of each operator.

    `window`: the number of tokens that attention reaches.

    All-reduce is measured for other versions than the rest: the named one where there is, else the
    newest. UsageError lists what there is.
    """
    folder = data_folder()
    known = systems(folder)
    if system not in known:
        raise UsageError(f'costs: silicon has no GPU "{system}"; {instead_of(system, known)}')
    if framework not in known[system]:
        hint = instead_of(framework, known[system])
        raise UsageError(f'costs: silicon has no framework "{framework}" for {system}; {hint}')
    base = folder / system
    files = {
        kind: table_files(base, pattern, framework, version, or_newest=kind == "all_reduce")[0]
        for kind, pattern in TABLES.items()
    }
    products = _gemm(files["gemm"], {DTYPE, PER_TENSOR, quantization})
    quantized: Products = products.get(quantization, {})
    if quantization == PER_BLOCK and PER_TENSOR in products:
        quantized = without_host(quantized, products[PER_TENSOR])
    if quantization == PER_TENSOR:
        quantized = without_scales(quantized, _scales(files["gemm"]))
    prompts = (DTYPE,) if kv_dtype == DTYPE else PROMPT_DTYPES.get(framework, ("fp8", DTYPE))
    return SiliconTables(
        system,
        str(next(rows_of(files["gemm"], "device"))[0]),
        framework,
        {kind: path.parent.name for kind, path in files.items()},
        products[DTYPE],
        _context(files["context"], head_dim, prompts, kv_dtype, window),
        _generation(files["generation"], head_dim, kv_dtype, window),
        all_reduce_times(files["all_reduce"]),
        quantized,
        rotates=framework == "trtllm",  # its operator of attention does both
    )


def each_product(
    gemm: Products, seconds: Callable[[int, int, int, float], float]
) -> dict[int, dict[int, dict[int, float]]]:
    """Return `gemm` with each time replaced by `seconds(n, k, m, time)`."""
    return {
        n: {
            k: {m: seconds(n, k, m, taken_s) for m, taken_s in by_m.items()}
            for k, by_m in by_k.items()
        }
        for n, by_k in gemm.items()
    }


def without_host(blocks: Products, plain: Products) -> Products:
    """Return block-scaled FP8 products without those bound by the launches of the host.

    At m rows they are bound where the fastest takes more than twice the fastest per-tensor one
    (`plain`). Products within twice that fastest then count as per-tensor (docs/costs-errors.md).
    """
    ends = (_least(blocks), _least(plain))
    waits_s = {m: 2 * s for m, s in ends[0].items() if s > 2 * ends[1].get(m, s)}

    def computed_s(n: int, k: int, m: int, s: float) -> float:
        return min(s, plain.get(n, {}).get(k, {}).get(m, s)) if s < waits_s.get(m, 0) else s

    return each_product(blocks, computed_s)


def without_scales(
    plain: Products, scales: Mapping[int, Mapping[int, float]]
) -> dict[int, dict[int, dict[int, float]]]:
    """Return FP8 products with static input scales, as NVIDIA's checkpoints have them.

    Measured products compute the scale of their inputs [m, k] first, in `scales[k][m]` seconds,
    which are subtracted. At least a quarter is left, as both were measured separately.
    """
    return each_product(plain, lambda n, k, m, s: max(s - scales.get(k, {}).get(m, 0.0), s / 4))


def _scales(gemm: Path) -> dict[int, dict[int, float]]:
    """Return k -> m -> seconds to find the scale of inputs [m, k]; none where not measured."""
    path = gemm.parents[3] / "quantize" / gemm.parent.relative_to(gemm.parents[2]) / SCALES
    if not path.is_file():
        return {}
    rows = rows_of(path, "k", "m", "latency", where=[("quant_dtype", "=", PER_TENSOR)])
    return {k: calm(by_m) for k, by_m in nested(rows).items()}


def _least(gemm: Products) -> dict[int, float]:
    """Return m -> seconds of the fastest product of m rows."""
    least: dict[int, float] = {}
    for by_m in (by_m for by_k in gemm.values() for by_m in by_k.values()):
        least |= {m: min(seconds, least.get(m, seconds)) for m, seconds in by_m.items()}
    return least


def table_files(
    base: Path, pattern: str, framework: str, version: str | None, *, or_newest: bool = False
) -> list[Path]:
    """Return the paths of an operator's tables by version; `version` None: the newest first.

    UsageError lists the versions if the wanted one is missing, unless `or_newest`.
    """
    found = {
        path.parent.name: path
        for path in base.glob(pattern.format(framework=framework, version="*"))
    }
    if version in found:
        return [found[version]]
    if not found or (version is not None and not or_newest):
        what = pattern.split("/", maxsplit=1)[0]
        raise UsageError(
            f"costs: silicon has no {what} of {framework} {version or ''} for {base.name}; "
            f"versions: {', '.join(sorted(found, key=_ordered)) or 'none'}"
        )
    return [found[each] for each in sorted(found, key=_ordered, reverse=True)]


def _ordered(version: str) -> list[int]:
    """Return the numbers of a version, to sort by; a release comes after its candidates."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return [*numbers, *([] if re.search(r"rc|dev", version) else [10**9])]


def rows_of(
    path: Path, *names: str, where: Any = None, **otherwise: object
) -> Iterator[tuple[Any, ...]]:
    """Yield each row of a Parquet table as a tuple of the columns `names`, then `otherwise`.

    `where`: filters of pyarrow. `otherwise`: column -> value of all rows where the table lacks the
    column. UsageError for a missing column of `names`.
    """
    from pyarrow import parquet

    there = set(parquet.read_schema(path).names)
    missing = [name for name in names if name not in there]
    if missing:
        raise UsageError(
            f"{path}: lacks the columns {', '.join(missing)}; another package version?"
        )
    wanted = [*names, *(name for name in otherwise if name in there)]
    columns = parquet.read_table(path, columns=wanted, filters=where).to_pydict()
    absent = {name: repeat(value) for name, value in otherwise.items() if name not in there}
    columns |= absent
    return zip(*(columns[name] for name in (*names, *otherwise)), strict=not absent)


def nested(rows: Iterable[tuple[Any, ...]], *, first: bool = False) -> dict[Any, Any]:
    """Return key -> ... -> key -> seconds from rows of keys and milliseconds.

    Of rows with the same keys the last counts; the first one with `first`.
    """
    found: dict[Any, Any] = {}
    for *keys, last, latency_ms in rows:
        table = found
        for key in keys:
            table = table.setdefault(key, {})
        if not first or last not in table:
            table[last] = latency_ms / 1000
    return found


def calm(times: Mapping[int, float]) -> dict[int, float]:
    """Return size -> seconds without outliers of the benchmark.

    An outlier takes more than twice as long as both its neighbours (2,200 of 4.6 million points);
    it is replaced by the longer of the two.
    """
    sizes = sorted(times)
    around = zip(sizes[:1] + sizes[:-1], sizes, sizes[1:] + sizes[-1:], strict=True)
    calmed = dict(times)
    for below, size, above in around:
        most = max((times[each] for each in {below, above} - {size}), default=times[size])
        if times[size] > 2 * most:
            calmed[size] = most
    return calmed


def calm_steps(points: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return (rows, context) -> seconds without outliers along the context (`calm`)."""
    lines: dict[int, dict[int, float]] = {}
    for (rows, context), seconds in points.items():
        lines.setdefault(rows, {})[context] = seconds
    return {(rows, at): s for rows, line in lines.items() for at, s in calm(line).items()}


def _gemm(path: Path, wanted: set[str]) -> dict[str, dict[int, dict[int, dict[int, float]]]]:
    columns = ("gemm_dtype", "n", "k", "m", "latency")
    tables = nested(rows_of(path, *columns, where=[("gemm_dtype", "in", wanted)]))
    for table in tables.values():
        calm_products(table)
    return tables


def calm_products(table: dict[int, dict[int, dict[int, float]]]) -> None:
    """Replace outliers of the benchmark in products, seconds `table[n][k][m]`, in place.

    An outlier takes more than 1.5 times as long as two products with no less work: the same matrix
    with more rows m, and as many rows with a matrix no smaller in n and k. It is replaced by the
    longer of the two. Of 3 million points of 13 GPUs 0.6 % are, of vLLM's FP8 products on B200 7 %.
    """
    most_wide: dict[int, dict[int, float]] = {}  # k -> m -> seconds of the wider ones
    for n in sorted(table, reverse=True):
        longer: dict[int, float] = {}
        for k in sorted({*most_wide, *table[n]}, reverse=True):
            rows, wide = table[n].get(k, {}), most_wide.setdefault(k, {})
            more_rows_s = math.inf
            for m in sorted({*rows, *wide, *longer}, reverse=True):
                larger_s = min(wide.get(m, math.inf), longer.get(m, math.inf))
                own_s = rows.get(m, math.inf)
                if m in rows and own_s > 1.5 * max(larger_s, more_rows_s):
                    rows[m] = max(larger_s, more_rows_s)
                more_rows_s = min(more_rows_s, own_s)
                longer[m] = wide[m] = min(larger_s, own_s)


def _attention_rows(
    path: Path, head_dim: int, dtypes: Iterable[str], kv_dtype: str, window: int = 0
) -> list[tuple[int, int, int, int, int, float]]:
    """Return (heads, KV heads, batch, tokens, step, milliseconds) of attention to a window.

    Computed in the first of `dtypes` that was measured.
    """
    keys = ("attn_dtype", "kv_cache_dtype", "head_dim")
    sizes = ("num_heads", "num_key_value_heads", "batch_size", "isl", "step", "latency")
    rows = list(rows_of(path, *keys, *sizes, window_size=0))
    for dtype in dtypes:
        wanted = (dtype, kv_dtype, head_dim)
        found = [row[3:9] for row in rows if row[:3] == wanted and max(row[9], 0) == window]
        if found:
            return found
    there = ", ".join(sorted({f"{row[2]} with {row[1]} KV" for row in rows}))
    raise NotMeasuredError(
        f"costs: silicon, {path.parent}: heads of {head_dim} with {kv_dtype} KV; measured: {there}"
    )


def _context(
    path: Path, head_dim: int, dtypes: Iterable[str], kv_dtype: str, window: int
) -> dict[Heads, dict[int, float]]:
    rows = _attention_rows(path, head_dim, dtypes, kv_dtype, window)
    table = nested(((row[:2], row[3], row[5]) for row in rows if row[2] == 1), first=True)
    return {each: calm(times) for each, times in table.items()}


def _generation(
    path: Path, head_dim: int, kv_dtype: str, window: int
) -> dict[Heads, dict[tuple[int, int], float]]:
    rows = _attention_rows(path, head_dim, (DTYPE,), kv_dtype, window)
    table = nested(((row[:2], (row[2], row[4]), row[5]) for row in rows), first=True)
    return {each: calm_steps(times) for each, times in table.items()}


def all_reduce_times(path: Path) -> dict[int, dict[int, float]]:
    """Return ranks -> bytes -> seconds of all-reduces, in a CUDA graph where measured so."""
    rows = list(rows_of(path, "num_gpus", "message_size", "latency", kernel_source=""))
    graphs = [row for row in rows if "graph" in str(row[3])]
    table = nested((ranks, 2 * elements, ms) for ranks, elements, ms, _ in graphs or rows)
    return {ranks: calm(times) for ranks, times in table.items()}


# -- attention of latents -------------------------------------------------------------------------

LATENT_KERNELS = "mla/{framework}/{version}/KIND_mla_perf.parquet"
LATENT_MODULES = "mla/{framework}/{version}/mla_KIND_module_perf.parquet"
LATENT_PRODUCTS = "mla_bmm/{framework}/{version}/mla_bmm_perf.parquet"


def latent_files(base: Path, framework: str, version: str | None) -> tuple[list[Path], Path | None]:
    """Return the tables of latent attention (prompts, decode steps), and that of its products.

    None for products where the tables are of whole modules, which include them.
    """
    known = LATENT_MODULES.replace("KIND", "context").format(
        framework=framework, version=version or "*"
    )
    modules = any(base.glob(known))
    pattern = LATENT_MODULES if modules else LATENT_KERNELS
    files = [
        table_files(base, pattern.replace("KIND", kind), framework, version)[0]
        for kind in ("context", "generation")
    ]
    return files, None if modules else table_files(base, LATENT_PRODUCTS, framework, version)[0]


def latent_steps(
    path: Path, dtypes: tuple[str, Sequence[str]], size: str
) -> tuple[dict[int, dict[tuple[int, int], float]], str]:
    """Return heads -> (rows, column `size`) -> seconds of latent attention, and a format.

    The format is that of the module's products. `dtypes`: the KV cache's, and those acceptable for
    products, the first measured one of which is taken. NotMeasuredError where none was.
    """
    kv_dtype, wanted = dtypes
    names = ("num_heads", "batch_size", size, "latency")
    where = [("mla_dtype", "=", DTYPE), ("kv_cache_dtype", "=", kv_dtype)]
    rows = rows_of(path, *names, where=where, gemm_type=DTYPE)
    found = nested((gemm, heads, (n, tokens), ms) for heads, n, tokens, ms, gemm in rows)
    gemm = next((each for each in wanted if each in found), None)
    if gemm is None:
        raise NotMeasuredError(f"costs: silicon, {path.parent}: no latents with {kv_dtype} KV")
    return {heads: calm_steps(points) for heads, points in found[gemm].items()}, gemm


def latent_products(path: Path, quantization: str) -> dict[int, dict[int, float]]:
    """Return heads -> rows -> seconds of the absorbed products of a decode step.

    They are of queries and of outputs, together; in FP8 where the checkpoint's matrix is, whatever
    its scales.
    """
    wanted = "fp8" if quantization.startswith("fp8") else DTYPE
    names = ("num_heads", "num_tokens", "op_name", "latency")
    times = nested(rows_of(path, *names, where=[("bmm_dtype", "=", wanted)]), first=True)
    return {
        heads: {tokens: plain_sum(both.values()) for tokens, both in by_tokens.items()}
        for heads, by_tokens in times.items()
    }


# -- mixtures of experts --------------------------------------------------------------------------

MOE = "moe/{framework}/{version}/moe_perf.parquet"

Load = Literal["balanced", "power_law_1.01", "power_law_1.2", "counted"]
"""How tokens are spread over experts: evenly, with the stated exponent of a power law, or as was
counted in DeepSeek-V3 (`evenflow.costs.silicon.points.counted`)."""

NAMES = {
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "fp8": ("fp8", "fp8_block"),
    "int4_wo_32": ("int4_wo",),
}
"""Format -> what the tables call it, best first; others go by their own name."""


class Wanted(NamedTuple):
    """A selection of MoE measurements: format, load, and part of a kernel's name.

    A kernel is looked for in the newest tables first, in any weight-only format of four bits.
    """

    quantization: str
    load: Load
    kernel: str | None = None


WEIGHT_ONLY = ("w4a16_mxfp4", "int4_wo")
"""Formats of four bits that a kernel such as Marlin widens to 16 as it reads them."""


def read_experts(
    base: Path, framework: str, version: str | None, shape: ExpertShape, wanted: Wanted
) -> ExpertLayer:
    """Return the measured MoE layer nearest to a shape, with the format, load and kernel wanted.

    16-bit experts where the format was not measured. Nearest: the least sum of |log| of the ratios
    of sizes. UsageError where no kernel's name has that part.
    """
    quantization, load, kernel = wanted
    names = NAMES.get(quantization, (quantization,) * bool(quantization))
    alike = WEIGHT_ONLY if kernel and set(names) & set(WEIGHT_ONLY) else ()
    formats = (*names, *(name for name in alike if name not in names), DTYPE)
    measured: dict[tuple[str, ExpertShape], dict[tuple[int, int], dict[int, float]]] = {}
    for path in table_files(base, MOE, framework, version, or_newest=True):
        for each, times in nested(_expert_rows(path, formats, load, kernel), first=True).items():
            known = measured.setdefault(each, {})
            for split, by_tokens in times.items():
                known[split] = by_tokens | known.get(split, {})
        exact = any((name, shape) in measured for name in formats[:-1] or formats)
        if exact or (kernel and measured):
            break  # newer tables hold fewer shapes; of a kernel the newest tables count
    if not measured:
        which = "" if kernel is None else f' of a kernel "{kernel}"'
        raise UsageError(f"costs: silicon has no experts{which} of {framework} for {base.name}")

    def unlike(key: tuple[str, ExpertShape]) -> tuple[bool, float, int]:
        far = plain_sum(
            abs(math.log(one / other)) for one, other in zip(key[1], shape, strict=True)
        )
        return key[0] == DTYPE != formats[0], far, formats.index(key[0])

    dtype, nearest = min(measured, key=unlike)
    times = {split: calm(by_tokens) for split, by_tokens in measured[dtype, nearest].items()}
    return ExpertLayer(nearest, "" if dtype == DTYPE else dtype, times)


def _expert_rows(
    path: Path, formats: Sequence[str], load: Load, kernel: str | None
) -> Iterator[tuple[Any, ...]]:
    """Yield (format, shape), (slices, ranks), tokens and milliseconds."""
    sizes = ("hidden_size", "inter_size", "num_experts", "topk")
    names = ("moe_dtype", *sizes, "moe_tp_size", "moe_ep_size", "num_tokens", "latency")
    where = [("distribution", "=", load), ("moe_dtype", "in", list(formats))]
    for name, *shape, slices, ranks, tokens, ms, source in rows_of(
        path, *names, "kernel_source", where=where
    ):
        if kernel is None or kernel in source:
            yield (name, ExpertShape(*shape)), (slices, ranks), tokens, ms
