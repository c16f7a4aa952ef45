"""Costs from measured operators of real GPUs: products, attention and all-reduce, by framework.

Knows how the tables of `aiconfigurator-core` make a layer of any model. Does not know gaps between
kernels (nearly absent with CUDA graphs, else the runtime's business). Estimated, and counted as
unmeasured: norms, rotary embedding, activation, KV write, embedding and sampling. The tables have
none of these (one launch and their bytes at the bandwidth that products reach).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from evenflow.costs.collectives import Fabric
from evenflow.costs.launches import SHARED_BESIDE
from evenflow.costs.roofline import Part, Rates, elementwise_s
from evenflow.costs.silicon.points import (
    LATENT_SIZES,
    Peak,
    bits_of,
    chunk_times,
    expert_times,
    experts_of,
    from_memory,
    measured_kv_heads,
    memory_bytes_per_s,
    product_times,
    prompt_times,
    read_latent,
    step_times,
    windowed,
)
from evenflow.costs.silicon.tables import (
    DTYPE,
    ExpertShape,
    Load,
    NotMeasuredError,
    SiliconTables,
    Wanted,
    data_folder,
    load_tables,
)
from evenflow.costs.tables import (
    Attending,
    Attention,
    BySize,
    Curve,
    LayerParts,
    Surface,
    TableCost,
    added,
    all_reduces,
    beside,
    table_cost,
    unmeasured,
)
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from evenflow.specs.modelspec import ModelSpec

TILE_TOKENS = 128
QUERY_TILE = 128
"""Queries against the same keys in one tile of a decode kernel; 128 heads of latents fill it."""

DEFAULT_LOAD: Load = "power_law_1.01"
MEASURED_HEAD = 128
"""A head size that all attention tables have: those of latents replace them."""

KERNELS = 5
"""Memory-bound kernels of a layer: two norms, rotary embedding, activation, KV write."""

IN_ATTENTION = 2
"""Those of them that some tables measured with attention: rotary embedding and KV write."""


class TableSource(NamedTuple):
    """Measured tables that stand for a GPU: the folder `system`, measured on the GPU `on`.

    `compute_share`: the share of its peak arithmetic that a power-limited card sustains. `nvlink`:
    the card has the measured GPU's NVLink, so that its measured all-reduces apply.
    """

    system: str
    on: str
    compute_share: float = 1.0
    nvlink: bool = True


GPUS = {
    "A100-80G": TableSource("a100_sxm", "A100-80G"),
    "A100-40G": TableSource("a100_sxm", "A100-80G"),
    "A100-80G-PCIe": TableSource("a100_sxm", "A100-80G", 0.9, nvlink=False),
    "A800-80G": TableSource("a100_sxm", "A100-80G", nvlink=False),
    "A800-80G-PCIe": TableSource("a100_sxm", "A100-80G", 0.9, nvlink=False),
    "L40S": TableSource("l40s", "L40S"),
    "H100": TableSource("h100_sxm", "H100"),
    "H200": TableSource("h200_sxm", "H200"),
    "B200": TableSource("b200_sxm", "B200"),
    "B300": TableSource("b300_sxm", "B300"),
    "GB200": TableSource("gb200", "GB200"),
    "GB300": TableSource("gb300", "GB300"),
    "RTX-PRO-6000": TableSource("rtx_pro_6000_server", "RTX-PRO-6000"),
}
"""Derived GPUs take the measured times x the ratio of the rooflines of the two (peaks of
`gpus.csv`). The PCIe cards sustain 0.9 of the arithmetic: 300 W instead of 400 W, NVIDIA's own
ratio for applications. An assumption, not a measurement; memory-bound work scales with the
bandwidths."""


@dataclass(frozen=True, slots=True)
class SiliconSource:
    """The tables a run uses, by kind of layer where kinds differ, and what its results say."""

    measured: TableSource
    tables: SiliconTables
    others: Mapping[ModelSpec, SiliconTables] = field(default_factory=dict)

    def of(self, kind: ModelSpec) -> SiliconTables:
        """Return the tables for a kind of layers."""
        return self.others.get(kind, self.tables)

    def facts(self) -> dict[str, Any]:
        """Return where the seconds come from, for the provenance."""
        from importlib.metadata import version

        return {
            "device": self.tables.device,
            "system": self.tables.system,
            "framework": self.tables.framework,
            "versions": dict(self.tables.versions),
            "package": f"aiconfigurator-core {version('aiconfigurator-core')}",
            "compute_share": self.measured.compute_share,
        }


def silicon_source(
    deployment: Deployment,
    framework: str = "vllm",
    version: str | None = None,
    load: Load = DEFAULT_LOAD,
    kernel: str | None = None,
) -> SiliconSource:
    """Read the tables for a deployment's GPU; UsageError lists GPUs, frameworks and versions.

    `load`: how tokens are spread over the experts of a mixture. `kernel`: part of the name of the
    kernel that computes them; None: that of the newest tables.
    """
    name = deployment.gpu.name
    if name not in GPUS:
        raise UsageError(
            f'costs: silicon has no measurements of "{name}"; known: {", ".join(sorted(GPUS))}; '
            "for others: costs: roofline, or profile the GPU"
        )
    spec, measured = deployment.model, GPUS[name]
    spec.require_plain("costs: silicon")
    if spec.dtype_bytes != 2:
        raise UsageError("costs: silicon has 16-bit operators and less; use a 2-byte dtype")
    kinds = {
        kind: _tables(kind, measured, framework, version, Wanted(kind.quantization, load, kernel))
        for kind in spec.kinds()
    }
    tables = next(iter(kinds.values()))
    arithmetic, plain = deployment.arithmetic, spec.plain_attention and spec.plain_mlp
    if arithmetic != "16-bit" and not tables.quantized and not plain:
        raise UsageError(
            f"costs: silicon has no {spec.quantization} products of {framework} "
            f"{tables.versions['gemm']} on {name}; use another framework, or costs: roofline"
        )
    return SiliconSource(measured, tables, kinds)


def _require_measured(model: ModelSpec) -> None:
    """Raise UsageError where latents have other sizes than those measured."""
    sizes = model.kv_lora_rank, model.qk_rope_head_dim, model.head_dim, model.v_head_dim
    if sizes != LATENT_SIZES:
        raise NotMeasuredError(
            f"costs: silicon: latents, rotated keys, keys and values of {model.name} have sizes "
            f"{sizes}; measured: {LATENT_SIZES}; use costs: roofline"
        )


@lru_cache(maxsize=4)
def _tables(
    kind: ModelSpec, measured: TableSource, framework: str, version: str | None, wanted: Wanted
) -> SiliconTables:
    kv_dtype = "fp8" if kind.kv_value_bytes == 1 else DTYPE
    quantization = kind.quantization

    def load_with(window: int) -> SiliconTables:
        return load_tables(
            measured.system,
            framework,
            version,
            head_dim=MEASURED_HEAD if kind.kv_lora_rank else kind.head_dim,
            quantization=quantization.removesuffix("_32"),  # groups of 128 were measured
            kv_dtype=kv_dtype,
            window=window,
        )

    try:
        tables = load_with(kind.sliding_window)
    except NotMeasuredError:
        if not kind.sliding_window:
            raise
        tables = load_with(0)
        tables = replace(tables, **windowed(tables, kind.sliding_window))
    base = data_folder() / measured.system
    if kind.kv_lora_rank:
        _require_measured(kind)
        on = gpu(measured.on)
        peak = Peak.of(on)
        products = {DTYPE: (tables.gemm, peak)}
        if tables.quantized and kind.format is not None:
            flops_per_s = on.peak(kind.format.arithmetic)
            narrow = Peak(flops_per_s, peak.bytes_per_s, kind.format.bits)
            products[quantization] = (tables.quantized, narrow)
        tables = replace(tables, **read_latent(base, framework, version, kv_dtype, products))
    if kind.num_experts:
        experts = experts_of(base, framework, version, shape_of(kind), wanted)
        tables = replace(tables, experts=experts)
    bits = 16 if kind.format is None else kind.format.bits
    key_bytes = kind.kv_bytes_per_token(1, kind.num_kv_heads)
    return from_memory(tables, key_bytes, bits, kind.sliding_window)


def silicon_cost(
    deployment: Deployment,
    source: SiliconSource,
    fabric: Fabric | None = None,
    part: Part = "all",
    product_tflops: float | None = None,
) -> TableCost:
    """Return the costs of a deployment from measured tables.

    `product_tflops`: the most that quantised products reach, where their kernel is not the tables'.
    `fabric` replaces the measured all-reduces. UsageError without it where ranks have other links
    than those measured, or their number was not. `part`: as for `RooflineCost`.
    """

    def parts_of(kind: ModelSpec) -> _Parts:
        return _Parts(deployment, source, kind, fabric, part=part, product_tflops=product_tflops)

    return table_cost(deployment.model, deployment.layers_per_stage, parts_of)


class _Parts(LayerParts):
    """Seconds of a layer and of the ends, from one set of tables, corrected for a derived GPU."""

    def __init__(
        self,
        deployment: Deployment,
        source: SiliconSource,
        kind: ModelSpec,
        fabric: Fabric | None,
        *,
        part: Part,
        product_tflops: float | None,
    ) -> None:
        self.model = kind
        self.part = part
        self.least_s_per_flop = 1e-12 / product_tflops if product_tflops else 0.0
        self.deployment = deployment
        self.ranks = deployment.tensor_parallel
        self.fabric = fabric
        self.source = source
        self.tables = source.of(kind)
        on, target = gpu(source.measured.on), deployment.gpu
        self.peak, self.target = Peak.of(on), Peak.of(target, source.measured.compute_share)
        bits = 16 if self.model.format is None else self.model.format.bits
        faster = target.peak(deployment.arithmetic) / target.peak("16-bit")
        self.quantized = Peak(self.peak.flops_per_s * faster, self.peak.bytes_per_s, bits)
        self.narrow = Peak(self.target.flops_per_s * faster, self.target.bytes_per_s, bits)
        gemm = self.tables.gemm
        self.launch_s = gemm[min(gemm)][min(gemm[min(gemm)])][1]
        slower = self.peak.bytes_per_s / self.target.bytes_per_s
        self.per_byte_s = slower / memory_bytes_per_s(gemm)

    def product(self, shape: tuple[int, int], *, plain: bool = False) -> BySize:
        """Return a linear operator [inputs, outputs] against tokens; `plain`: never quantised.

        A format that was not measured is weight-only, and counts as unmeasured. It takes the 16-bit
        product, scaled as for a derived GPU with narrower matrices.
        """
        k, n = shape
        measured = not plain and bool(self.tables.quantized)
        gemm = self.tables.quantized if measured else self.tables.gemm
        peak = self.quantized if measured else self.peak
        target = self.target if plain else self.narrow
        times = product_times(gemm, n, k, peak)
        derived = target.matrix_bits != peak.matrix_bits
        least_s = self.launch_s if derived else 0.0
        flop_s = self.least_s_per_flop if measured else 0.0
        corrected = {
            m: max(
                taken_s * target.product_s(m, n, k) / peak.product_s(m, n, k),
                2 * m * n * k * flop_s,
                least_s,
            )
            for m, taken_s in times.items()
        }
        # Tables with points on both sides of a tile's edge show the steps themselves.
        both_sides = any(m % TILE_TOKENS == 0 and m + 1 in times for m in times)
        curve = Curve.of(corrected, 1 if both_sides else TILE_TOKENS)
        beyond = n > max(gemm) or k > max(gemm[max(gemm)])
        return unmeasured(curve) if beyond or derived else curve.estimate

    def moving(self, bytes_each: float, kernels: int = 1) -> BySize:
        """Return kernels that only move memory, `bytes_each` bytes per token or row."""
        launch_s = kernels * self.launch_s
        return unmeasured(lambda size: launch_s + size * bytes_each * self.per_byte_s)

    def layer(self) -> BySize:
        """Return a layer without attention, or a part of it."""
        if self.part == "experts":
            return self.experts() if self.model.num_experts else added([])
        if self.part == "own" or not self.model.num_experts:
            return added([self.own(), *self.all_reduces()])
        shared, experts = self.model.mlp_shapes(self.ranks), self.experts()
        if shared:
            most = SHARED_BESIDE[self.tables.framework]
            experts = beside(experts, added(self.products(shared)), most)
        return added([self.own(without=shared), experts, *self.all_reduces()])

    def own(self, without: Sequence[tuple[int, int]] = ()) -> BySize:
        """Return the operators that every token passes, except some products."""
        model = self.model
        up = model.up_shape(self.ranks)  # in the tables of latent attention
        passed = [shape for shape in model.linear_shapes(self.ranks) if shape != up]
        for shape in without:
            passed.remove(shape)
        bytes_per_token = elementwise_s(1, model, self.ranks, Rates(1.0, 1.0))
        kernels = KERNELS + (model.num_experts > 0)  # a mixture's choice of experts
        kernels -= IN_ATTENTION * self.tables.rotates
        return added([*self.products(passed), self.moving(bytes_per_token, kernels)])

    def products(self, shapes: Sequence[tuple[int, int]]) -> list[BySize]:
        """Return linear operators of a layer, quantised where the model's are."""
        is_quantized = self.model.is_quantized
        return [self.product(shape, plain=not is_quantized(shape, self.ranks)) for shape in shapes]

    def all_reduces(self) -> list[BySize]:
        """Return the all-reduces of the attention and of the ranks' own MLP."""
        if self.ranks == 1:
            return []
        apart = self.model.num_experts > 0 and self.deployment.data_parallel > 1
        count = 1 if self.model.parallel_attention or apart else 2
        return [all_reduces(self.model, self.all_reduce(self.ranks), count)]

    def experts(self) -> BySize:
        """Return the experts of a layer against tokens, on the busiest rank.

        Groups with separate requests gather the tokens of all before, and scatter the outputs' sums
        after. That is an all-reduce in all.
        """
        experts, deployment = self.tables.experts, self.deployment
        assert experts is not None
        split = deployment.expert_split
        narrow = self.quantized if experts.format else self.peak
        on = narrow._replace(matrix_bits=bits_of(experts.format))
        times, measured = expert_times(experts, shape_of(self.model), split, on, self.narrow)
        curve = Curve.of(times)
        seconds = curve.estimate if measured else unmeasured(curve)
        if deployment.data_parallel == 1:
            return seconds
        once = self.all_reduce(deployment.stage_gpus)
        return added([seconds, all_reduces(self.model, once, 1, attention=False)])

    def embedding(self) -> BySize:
        if self.part == "experts":
            return unmeasured(lambda tokens: 0.0)
        return self.moving(2 * self.model.hidden_size * self.model.dtype_bytes)

    def head(self) -> BySize:
        columns = -(-self.model.vocab_size // self.ranks)
        logits = self.product((self.model.hidden_size, columns), plain=True)
        return added([logits, self.moving(8 * self.model.vocab_size)])

    def attending(self) -> Attending:
        """Return attention of a layer; engines launch one kernel for all prompts."""
        model, ranks = self.model, self.ranks
        heads = -(-model.num_heads // ranks), model.local_kv_heads(ranks)
        times = prompt_times(self.tables.context, heads)
        launch_s = times[min(times)] * self.peak.flops_per_s / self.target.flops_per_s
        return Attending(self.prefill(times), self.decode(*heads), launch_s)

    def prefill(self, times: Mapping[int, float]) -> Attention:
        """Return attention of a chunk: prompts are measured, context before a chunk is derived."""
        tile = min(self.tables.context)
        chunk = chunk_times(times, self.tables.context[tile], self.model.sliding_window)
        slower = self.peak.flops_per_s / self.target.flops_per_s
        first, last = min(times), max(times)

        def seconds(tokens: int, context: int) -> tuple[float, bool]:
            return chunk(tokens, context) * slower, first <= tokens and context + tokens <= last

        return _tabled(seconds, sorted(times))

    def decode(self, own_heads: int, kv_heads: int) -> Attention:
        """Return attention of decoding rows.

        KV heads beyond the measured count as more rows: as many blocks of keys to read. Several
        tokens of a request count as more heads: as many queries against the same keys. These are
        read again for each tile of queries.
        """
        tokens = self.deployment.verified_tokens
        heads = tokens * own_heads
        passes = max(heads / kv_heads / QUERY_TILE, 1.0)
        measured = measured_kv_heads(self.tables.generation, (round(heads / passes), kv_heads))
        factor = kv_heads / measured * passes
        slower = self.peak.bytes_per_s / self.target.bytes_per_s
        points = step_times(self.tables.generation, (round(heads / factor), measured))
        surface = Surface({point: seconds * slower for point, seconds in points.items()})
        if factor == tokens == 1:
            return surface.decode

        def wider(computed: int, context_tokens: int) -> tuple[float, bool]:
            rows = -(-computed // tokens)
            return surface.decode(round(rows * factor), round(context_tokens * factor))

        return wider

    def all_reduce(self, ranks: int) -> BySize:
        """Return one all-reduce of `ranks` ranks against bytes."""
        fabric = self.fabric
        if fabric is not None:
            return unmeasured(lambda size_bytes: fabric.all_reduce_s(size_bytes, ranks))
        if not self.source.measured.nvlink or ranks not in self.tables.all_reduce:
            known = ", ".join(map(str, sorted(self.tables.all_reduce)))
            raise UsageError(
                f"tensor_parallel: no measured all-reduce of {ranks} ranks (measured: {known} over "
                f"the links of {self.tables.device}); give costs.all_reduce, a link"
            )
        return Curve.of(self.tables.all_reduce[ranks]).estimate


def shape_of(kind: ModelSpec) -> ExpertShape:
    """Return a mixture's layer of experts as the tables name it."""
    sizes = (kind.expert_intermediate_size, kind.num_experts, kind.experts_per_token)
    return ExpertShape(kind.hidden_size, *sizes)


def _tabled(seconds: Callable[[int, int], tuple[float, bool]], sizes: list[int]) -> Attention:
    """Return a derived function as a surface over the measured sizes: fast, and never falling."""
    points = {
        (tokens, context): seconds(tokens, context)[0]
        for tokens in sizes
        for context in (0, *sizes, *range(2 * sizes[-1], 9 * sizes[-1], sizes[-1]))
    }
    surface = Surface(points)
    longest = sizes[-1]

    def look_up(tokens: int, context: int) -> tuple[float, bool]:
        taken_s, inside = surface.prefill(tokens, context)
        return taken_s, inside and context + tokens <= longest

    return look_up
