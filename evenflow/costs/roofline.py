"""Seconds per stage, for any GPU in the table, from a model's shapes and the GPU's peaks.

The formulas come first, one function each: seconds of one operator in one layer on one rank. They
are the longer of its arithmetic and its memory traffic (experts: both), at `Rates` that the GPU
reaches. A multiply-add is 2 operations. Does not know: overlap of compute and
communication, kernels that change with the batch size, CUDA graphs, CPU time. Where it is off is in
docs/costs-errors.md, with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from evenflow.costs.base import BatchShape
from evenflow.costs.collectives import Fabric, Ring
from evenflow.costs.launches import (
    DENSE_KERNELS,
    SHARED_BESIDE,
    expert_kernels,
    layer_kernels,
    mlp_kernels,
)
from evenflow.errors import UsageError, require_counts, require_positive
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import GpuSpec, LinkSpec
from evenflow.specs.modelspec import QK_NORM_BYTES, ModelSpec, Split, parameters
from evenflow.specs.precision import Arithmetic
from evenflow.sums import plain_sum

LEAST_TILE = 16
"""Rows of the smallest tile that tensor cores multiply (mma.m16n8k16)."""
WEIGHT_ONLY_TILE = 16
"""Rows of a tile of the kernels that widen weights as they read them (Marlin in vLLM)."""

REACHED: Mapping[Arithmetic, float] = {"16-bit": 1.0, "fp8": 0.85, "int8": 0.85, "fp4": 0.7}
"""What products reach of their peak, over what those of 16 bits reach of theirs. Fitted on measured
products (docs/costs-errors.md, narrow products); int8 is taken to be as fp8."""


class Rates(NamedTuple):
    """Rates that a GPU reaches: floating-point operations and bytes of memory traffic a second."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, gpu: GpuSpec, arithmetic: Arithmetic = "16-bit") -> Rates:
        """Return a GPU's rates: peaks times efficiencies, and what the format reaches of them."""
        reached = gpu.compute_efficiency * REACHED[arithmetic]
        return cls(gpu.peak(arithmetic) * reached, gpu.bytes_per_s)

    @classmethod
    def of_experts(cls, gpu: GpuSpec, arithmetic: Arithmetic) -> Rates:
        """Return the rates of experts: 8 bits are multiplied no faster than 16, as measured."""
        return cls.of(gpu, "fp4" if arithmetic == "fp4" else "16-bit")


def linear_s(
    tokens: int,
    shape: tuple[int, int],
    dtype_bytes: int,
    tile_tokens: int,
    rates: Rates,
    *,
    matrix_bytes: int | None = None,
) -> float:
    """Return the seconds of a product [tokens, inputs] x [inputs, outputs], `shape` the matrix's.

    Operations: 2 x inputs x outputs x tokens, tokens rounded up to whole tiles. A partly filled
    tile takes as long as a full one: the steps in L20's measured curves (Sarathi-Serve, section
    4.3). Fewer tokens have a smaller tile, a power of two. Bytes: the matrix (`matrix_bytes` where
    it is quantised), its input and its output, once each. Known error: below one tile the kernel
    changes with the tokens, so real times creep up where this is flat. On L20: 15 % too slow up to
    16 tokens, right at 17-64, 2-7 % too fast at 65-128.
    """
    inputs, outputs = shape
    tile = min(tile_tokens, max(LEAST_TILE, 1 << (tokens - 1).bit_length()))
    padded = -(-tokens // tile) * tile
    compute_s = 2 * inputs * outputs * padded / rates.flops_per_s
    if matrix_bytes is None:
        matrix_bytes = inputs * outputs * dtype_bytes
    moved_bytes = matrix_bytes + tokens * (inputs + outputs) * dtype_bytes
    return max(compute_s, moved_bytes / rates.bytes_per_s)


def quantize_s(tokens: float, inputs: int, dtype_bytes: int, rates: Rates) -> float:
    """Return the seconds in which a product's inputs are read, and written as single bytes.

    Only where the GPU multiplies in the weights' format. Known errors: engines join it with the
    norm or the activation before where they can. 4 bits are counted as 8.
    """
    return tokens * inputs * (dtype_bytes + 1) / rates.bytes_per_s


def elementwise_values(model: ModelSpec, tensor_parallel: int) -> dict[str, float]:
    """Return the values moved per token by each operator of a layer that only moves memory.

    4 x hidden for a norm fused with the residual (read two, write two), of which a layer has two. 2
    x (heads + KV heads) x head size for the rotary embedding (read, write). Norms of queries and
    keys, if any, move as many. 2 or 3 x MLP columns for the activation (read up and gate, write). 2
    x the values kept for the KV write (read, write). Latents are normed too.
    """
    heads = model.num_heads / tensor_parallel
    kv_heads = model.local_kv_heads(tensor_parallel)
    columns = model.shared_columns / tensor_parallel
    rotated = model.qk_rope_head_dim if model.kv_lora_rank else model.head_dim
    latents = 2 * (model.q_lora_rank + model.kv_lora_rank)
    return {
        "norm": 4 * model.hidden_size,
        "rope": (4 if model.qk_norm else 2) * (heads + kv_heads) * rotated + latents,
        "activation": (3 if model.gated_mlp else 2) * columns,
        "kv_write": 2 * model.kv_values(tensor_parallel),
    }


def elementwise_s(tokens: int, model: ModelSpec, tensor_parallel: int, rates: Rates) -> float:
    """Return the seconds of a layer's norms, rotary embedding, activation and KV write.

    Known error: small kernels reach less than the bandwidth of large ones; what is missing is in
    the per-layer overhead.
    """
    moved = elementwise_values(model, tensor_parallel)
    values = 2 * moved["norm"] + moved["rope"] + moved["activation"] + moved["kv_write"]
    return tokens * values * model.dtype_bytes / rates.bytes_per_s


def pairs(start: int, stop: int, window: int = 0) -> float:
    """Return the (query, key) pairs of a chunk [start, stop), keys of a window's tokens at most."""
    cut = min(max(window or stop, start), stop)  # tokens before it see all before them
    return (cut - start) * (start + cut + 1) / 2 + (stop - cut) * window


class AttentionRates(NamedTuple):
    """Seconds of attention per unit of work in one layer on one rank.

    `window`: a token attends to that many last ones, 0: to all. `decode_pair_s` is a decode step's,
    in which each request has `queries` tokens.
    """

    per_pair_s: float
    per_key_s: float
    per_query_s: float
    decode_pair_s: float
    window: int = 0
    queries: int = 1

    @classmethod
    def of(
        cls, model: ModelSpec, tensor_parallel: int, rates: Rates, queries: int = 1
    ) -> AttentionRates:
        """Return the seconds per (query, key) pair, per key and value read, per query and output.

        A pair takes 4 x heads x head size operations (2 each for the score and for the value). A
        key brings 2 x KV heads x head size values. A query reads and writes heads x head size.
        Latent attention makes keys and values of a prompt's latents. It decodes against latents as
        they are (absorbed). That is a key and a value of the latent's size, one for all heads.
        """
        heads = model.num_heads / tensor_parallel
        key, value = model.head_dim + model.qk_rope_head_dim, model.v_head_dim or model.head_dim
        absorbed = key + value
        if model.kv_lora_rank:
            absorbed = 2 * model.kv_lora_rank + model.qk_rope_head_dim
        return cls(
            2 * heads * (key + value) / rates.flops_per_s,
            model.kv_values(tensor_parallel) * model.kv_value_bytes / rates.bytes_per_s,
            heads * (key + value) * model.dtype_bytes / rates.bytes_per_s,
            2 * heads * absorbed / rates.flops_per_s,
            model.sliding_window,
            queries,
        )

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the seconds of one prompt chunk [start, stop), causal.

        Token i attends to i + 1 tokens, a window's at most; the pairs are the sum over the chunk.
        Keys and values are read once. Known error: long contexts come out too fast, as attention
        kernels reach less of the peak than products do. FlashAttention-2 reports 50-73 % on A100.
        """
        tokens, keys = stop - start, stop
        whole = tokens * (start + stop + 1) / 2
        if 0 < self.window < stop:
            whole = pairs(start, stop, self.window)
            keys = min(stop, tokens + self.window)
        return max(whole * self.per_pair_s, keys * self.per_key_s + tokens * self.per_query_s)

    def decode_s(self, tokens: int, context_tokens: int) -> float:
        """Return the seconds of one decode step: every token attends to its context and to itself.

        Requests with several tokens read their keys once for all of them.

        Known errors: only the total context counts. A batch with one very long row, which leaves
        parts of the GPU idle, comes out too fast. Rows shorter than a window beside longer ones
        count as a window's where the mean is above it.
        """
        if self.window:
            context_tokens = min(context_tokens, tokens * (self.window - 1) // self.queries)
        pairs_s = (self.queries * context_tokens + tokens) * self.decode_pair_s
        keys = context_tokens + tokens
        return max(pairs_s, keys * self.per_key_s + tokens * self.per_query_s)


def embedding_s(tokens: int, model: ModelSpec, rates: Rates) -> float:
    """Return the seconds of the embedding look-up: a row read and written per token."""
    return 2 * tokens * model.hidden_size * model.dtype_bytes / rates.bytes_per_s


def head_s(
    rows: int, model: ModelSpec, tensor_parallel: int, tile_tokens: int, rates: Rates
) -> float:
    """Return the seconds of the LM head and of sampling for `rows` rows; 0 rows cost nothing.

    A product with [hidden, vocabulary / ranks], then the logits written and read once as float32.
    Known error: sampling with penalties or top-p sorts, and costs several times that.
    """
    if rows == 0:
        return 0.0
    columns = -(-model.vocab_size // tensor_parallel)
    shape = (model.hidden_size, columns)
    product_s = linear_s(rows, shape, model.dtype_bytes, tile_tokens, rates)
    return product_s + 2 * 4 * rows * model.vocab_size / rates.bytes_per_s


# -- a mixture of experts: which of them a micro-batch wakes, and what they take -------------------
# The router is taken to choose every expert equally often, save for a stated imbalance of ranks.


def active_experts(tokens: int, num_experts: int, experts_per_token: int) -> float:
    """Return the expected number of distinct experts that `tokens` tokens are sent to.

    A token is sent to k of E experts, each as likely as any other. So an expert stays idle with
    probability (1 - k/E) a token: E x (1 - (1 - k/E)^tokens). Known error: real routers have
    favourites and wake fewer.
    """
    idle = (1 - experts_per_token / num_experts) ** tokens
    return num_experts * (1 - idle)


def experts_s(
    tokens: int, model: ModelSpec, split: Split, rates: Rates, *, imbalance: float
) -> float:
    """Return the seconds of a layer's experts for `tokens` tokens, on the busiest rank.

    Operations: 2 x parameters of an expert x tokens x experts a token, divided over the ranks.
    Bytes: the weights of the active experts, once each. Then the inputs and outputs of every token
    at each of its experts. Then the activation in between (3 x columns, 2 without a gate) and the
    weighted sum of the experts' outputs. A rank that holds whole experts has 1/ranks of the (token,
    expert) pairs on average. The busiest rank has `imbalance` times that. Arithmetic and bytes add
    up, as an expert has too few rows for one to hide the other. Measured layers of vLLM, SGLang and
    TensorRT-LLM are nearer to the sum than to the longer (docs/costs-errors.md). Known error: they
    take longer still, up to 4 tokens by their launches, from 4,000 on by a fifth.
    """
    shapes = model.expert_shapes(split.slices)
    share = imbalance / split.ranks if split.ranks > 1 else 1.0
    pairs = tokens * model.experts_per_token * share
    active = active_experts(tokens, model.num_experts, model.experts_per_token) / split.ranks
    operations = 2 * parameters(shapes) * pairs
    weights = sum(model.matrix_bytes(shape, model.expert_format) for shape in shapes)
    moved_bytes = active * weights + pairs * sum(map(sum, shapes)) * model.dtype_bytes
    product_s = operations / rates.flops_per_s + moved_bytes / rates.bytes_per_s
    columns = shapes[-1][0]
    between = pairs * ((3 if model.gated_mlp else 2) * columns + model.hidden_size)
    return product_s + between * model.dtype_bytes / rates.bytes_per_s


def all_to_all_bytes(tokens: int, model: ModelSpec, ranks: int, imbalance: float) -> float:
    """Return the bytes that the busiest rank receives when tokens are sent to their experts.

    Each rank has 1/ranks of the tokens. A copy of a token goes to each of its experts, of which
    (ranks - 1)/ranks are elsewhere. The way back is as much. Known error: several experts of a
    token on one rank need one copy where the library is clever.
    """
    pairs = tokens * model.experts_per_token / ranks * imbalance
    return pairs * (ranks - 1) / ranks * model.hidden_size * model.dtype_bytes


# -- the cost model ---------------------------------------------------------------------------


Part = Literal["all", "own", "experts"]
"""The part of the layers that a cost model counts. Groups of GPUs with separate requests share
their `experts`, and cost the rest (`own`) by themselves."""


class _Layers:
    """The layers of one kind: how many a stage has, and what one takes."""

    def __init__(
        self, deployment: Deployment, kind: ModelSpec, counts: Sequence[int], rates: Rates
    ) -> None:
        self.kind = kind
        self.counts = list(map(float, counts))
        self.attention = AttentionRates.of(
            kind, deployment.tensor_parallel, rates, deployment.verified_tokens
        )
        # A run asks for few distinct sizes, over and over: each is computed once.
        self.by_tokens: dict[int, float] = {}

    def with_attention(self, seconds: float, batch: BatchShape) -> float:
        if batch.decode_tokens:
            seconds += self.attention.decode_s(batch.decode_tokens, batch.decode_context)
        for chunk in batch.chunks:
            seconds += self.attention.prefill_s(chunk.start, chunk.stop)
        return seconds


class RooflineCost:
    """Predict each operator as the longer of arithmetic and memory traffic, and add them up.

    `fabric` connects the tensor-parallel ranks of a stage (a link means a ring over it). UsageError
    without it when there are several. `tile_tokens`: linear operators compute whole tiles of that
    many tokens. `expert_imbalance` is the load of the busiest expert-parallel rank over the mean.
    `part`: only the experts, with what is exchanged around them, or all the rest.
    """

    def __init__(
        self,
        deployment: Deployment,
        fabric: LinkSpec | Fabric | None = None,
        *,
        tile_tokens: int = 128,
        expert_imbalance: float = 1.0,
        part: Part = "all",
    ) -> None:
        require_counts("costs: roofline", tile_tokens=tile_tokens)
        deployment.model.require_plain("costs: roofline")
        _check_imbalance(expert_imbalance, deployment)
        if deployment.stage_gpus > 1 and fabric is None:
            raise UsageError(
                f"tensor_parallel: {deployment.stage_gpus} ranks all-reduce over a link; "
                "give its bandwidth_gb_s and latency_us"
            )
        model = deployment.model
        self.deployment = deployment
        self.fabric = Ring(fabric) if isinstance(fabric, LinkSpec) else fabric
        self.expert_imbalance = expert_imbalance
        self.part = part
        self.tile_tokens = tile_tokens
        self._rates = Rates.of(deployment.gpu)
        self._product_rates = Rates.of(deployment.gpu, deployment.arithmetic)
        self._expert_rates = Rates.of_experts(deployment.gpu, deployment.arithmetic)
        kinds = model.kinds_by_stage(deployment.layers_per_stage)
        self._layers = [_Layers(deployment, *of, self._rates) for of in kinds.items()]
        self._embedding_per_token_s = embedding_s(int(part != "experts"), model, self._rates)
        self._transfer_bytes_per_token = model.hidden_size * model.dtype_bytes
        self._head_by_rows: dict[int, float] = {}

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return self.deployment.depth

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        times: list[float] = []
        for layers in self._layers:
            layer_s = layers.by_tokens.get(tokens)
            if layer_s is None:
                layer_s = layers.by_tokens[tokens] = self._layer_s(tokens, layers.kind)
            layer_s = layers.with_attention(layer_s, batch)
            if times:
                times = [s + n * layer_s for s, n in zip(times, layers.counts, strict=True)]
            else:
                times = [count * layer_s for count in layers.counts]
        logits_s = self._head_by_rows.get(batch.sampled_rows)
        if logits_s is None:
            logits_s = self._head_by_rows[batch.sampled_rows] = self._head_s(batch.sampled_rows)
        times[0] += tokens * self._embedding_per_token_s
        times[-1] += logits_s
        return times

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes of the hidden states that cross from one stage to the next.

        Known error: engines that keep the residual apart (vLLM, gLLM) send it too, twice as much.
        With tensor parallelism each pair of ranks may send its share only.
        """
        return self._transfer_bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)

    def all_reduce_s(self, tokens: int, kind: ModelSpec | None = None) -> float:
        """Return the seconds that one layer (of a kind) spends in all-reduces of hidden states."""
        ranks, model = self.deployment.tensor_parallel, kind or self.deployment.model
        if self.fabric is None or ranks == 1:
            return 0.0
        size_bytes = tokens * model.hidden_size * model.dtype_bytes
        apart = model.num_experts > 0 and self.deployment.data_parallel > 1
        once = model.parallel_attention or apart
        seconds = (1 if once else 2) * self.fabric.all_reduce_s(size_bytes, ranks)
        if model.qk_norm_over_heads:
            seconds += self.fabric.all_reduce_s(tokens * QK_NORM_BYTES, ranks)
        return seconds

    def exchange_s(self, tokens: int) -> float:
        """Return the seconds in which data-parallel groups exchange a layer's expert inputs and
        outputs.

        With expert parallelism: two all-to-alls, to the experts and back. With sliced experts: an
        all-gather of tokens and a reduce-scatter of outputs, as long as an all-reduce. Without
        groups 0: all ranks have all tokens, and `all_reduce_s` has the sum of the outputs.
        """
        deployment, model, fabric = self.deployment, self.deployment.model, self.fabric
        ranks = deployment.stage_gpus
        if fabric is None or deployment.data_parallel == 1:
            return 0.0
        if deployment.expert_parallel:
            size_bytes = all_to_all_bytes(tokens, model, ranks, self.expert_imbalance)
            return 2 * fabric.all_to_all_s(size_bytes, ranks)
        return fabric.all_reduce_s(tokens * model.hidden_size * model.dtype_bytes, ranks)

    def _layer_s(self, tokens: int, model: ModelSpec) -> float:
        """Return a layer's seconds without attention: all that follows from the tokens alone.

        A shared expert of few tokens runs beside the others (SHARED_BESIDE, the least). Known
        error: not with groups (data_parallel).
        """
        shared_s, narrow = 0.0, self.deployment.arithmetic != "16-bit"
        if model.num_experts and self.part != "own":
            overhead_s = self._overhead_s(expert_kernels(model, narrow=narrow))
            experts_s = self.experts_s(tokens)
            shared_s = self.exchange_s(tokens) + experts_s + overhead_s
            if self.deployment.data_parallel == 1 and tokens <= min(SHARED_BESIDE.values()):
                shared_s -= min(self._mlp_s(tokens, model), experts_s + overhead_s)
        if self.part == "experts":
            return shared_s
        ranks = self.deployment.tensor_parallel
        shapes = model.linear_shapes(ranks)
        products_s = plain_sum(self.product_s(tokens, shape, model) for shape in shapes)
        moved_s = elementwise_s(tokens, model, ranks, self._rates)
        overhead_s = self._overhead_s(layer_kernels(model, ranks, narrow=narrow))
        return products_s + moved_s + overhead_s + (self.all_reduce_s(tokens, model) + shared_s)

    def _mlp_s(self, tokens: int, model: ModelSpec) -> float:
        """Return the seconds of the MLP beside experts, if any, without its activation's bytes."""
        ranks, narrow = self.deployment.tensor_parallel, self.deployment.arithmetic != "16-bit"
        products_s = (self.product_s(tokens, each, model) for each in model.mlp_shapes(ranks))
        return plain_sum(products_s) + self._overhead_s(mlp_kernels(model, ranks, narrow=narrow))

    def _overhead_s(self, kernels: int) -> float:
        """Return the seconds of gaps between kernels, in proportion to those fitted on dense
        layers.
        """
        return self.deployment.gpu.per_layer_overhead_s * (kernels / DENSE_KERNELS)

    def product_s(self, tokens: int, shape: tuple[int, int], model: ModelSpec) -> float:
        """Return the seconds of a product of a model's layers, in the format of its matrix."""
        tile = self.tile_tokens
        weight_only = self.deployment.arithmetic == "16-bit"
        if not model.is_quantized(shape, self.deployment.tensor_parallel):
            return linear_s(tokens, shape, model.dtype_bytes, tile, self._rates)
        if weight_only:
            tile = min(tile, WEIGHT_ONLY_TILE)
        weights = model.matrix_bytes(shape, model.quantization)
        rates = self._product_rates
        product_s = linear_s(tokens, shape, model.dtype_bytes, tile, rates, matrix_bytes=weights)
        if weight_only:
            return product_s
        return product_s + quantize_s(tokens, shape[0], model.dtype_bytes, rates)

    def experts_s(self, tokens: int) -> float:
        """Return the seconds of a layer's experts."""
        deployment = self.deployment
        return experts_s(
            tokens,
            deployment.model,
            deployment.expert_split,
            self._expert_rates,
            imbalance=self.expert_imbalance,
        )

    def _head_s(self, rows: int) -> float:
        model, ranks = self.deployment.model, self.deployment.tensor_parallel
        return head_s(rows, model, ranks, self.tile_tokens, self._rates)


def _check_imbalance(imbalance: float, deployment: Deployment) -> None:
    require_positive("costs: roofline", expert_imbalance=imbalance)
    if imbalance < 1:
        raise UsageError(
            f"costs: roofline: expert_imbalance is {imbalance}; the busiest rank has at least the "
            "mean load, so 1 or above is right"
        )
    if imbalance > 1 and not deployment.expert_parallel:
        raise UsageError("costs: roofline: expert_imbalance needs expert_parallel: true")
