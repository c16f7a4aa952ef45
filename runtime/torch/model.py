"""Decoder-only Llama, Mistral, Mixtral, Qwen2 and Qwen3, cut into stages, with paged KV.

Knows one micro-batch at a time; no scheduler, no processes, no clock. Weights are those of
Hugging Face checkpoints; query, key and value are one matrix here, and so are gate and up. Not
supported: shared experts, latent attention, quantisation, and rotary embeddings scaled in other
ways than `linear` and `llama3` (dynamic, yarn, longrope).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn import functional

from evenflow.specs.model import ModelSpec
from runtime.torch.attention import KvPages, attend_chunks, attend_decodes
from runtime.torch.inputs import BatchInputs

Mark = Callable[[str], None]
"""Is told the name of each operator when it has been issued; a profiler's stopwatch is one."""

Part = tuple[slice, ...]
"""The rows, and perhaps columns, of a weight that a rank holds."""

Source = Callable[[str, tuple[int, ...], Part], Tensor]
"""Returns that part of the weights of that name; the shape, which is that of the whole, is what the
config.json asks for."""

ALL: Part = (slice(None),)


def unmarked(operator: str) -> None:
    """Take no notice."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of the `size` processes this is that compute a stage together, and their `group`.

    Columns of the matrices that come first are divided, and rows of those after them, whose sum
    over the ranks is the result (Shoeybi et al., Megatron-LM, section 3). Without a group nothing
    is exchanged: so a profiler times the work of one rank.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    def part(self, count: int, each: int = 1) -> slice:
        """Return which of `count` units of `each` rows are here; fewer than ranks are shared."""
        start = self.rank * count // self.size
        return slice(start * each, (start + -(-count // self.size)) * each)

    def total(self, parts: Tensor, mark: Mark = unmarked) -> Tensor:
        """Return the sum of all ranks' `parts`, in their place."""
        if self.group is not None:
            distributed.all_reduce(parts, group=self.group)
            mark("all_reduce")
        return parts

    def joined(self, parts: Tensor) -> Tensor:
        """Return all ranks' `parts` [rows, columns] beside each other."""
        if self.group is None:
            return parts
        every = [torch.empty_like(parts) for _ in range(self.size)]
        distributed.all_gather(every, parts, group=self.group)
        return torch.cat(every, dim=1)


ALONE = Ranks()
"""What computes a stage where no others do."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Describe the frequencies of a rotary embedding, in the terms of config.json."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: float = 1.0

    def inverse_frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the radians per position of each pair of dimensions: float32 [head_dim / 2].

        theta^(-2i/d) (Su et al., RoFormer). `linear` divides all by the factor. `llama3` divides
        those whose wavelength is long, leaves the short ones, and blends between (Llama 3.1's
        reference code). Float32 throughout, as the checkpoints were trained.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            keep = ((turns - self.low_freq_factor) / span).clamp(0, 1)
            return (1 - keep) * frequencies / self.factor + keep * frequencies
        return frequencies


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of `positions` [tokens]: each [tokens, 1, head_dim]."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `heads` [tokens, heads, head_dim] by their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [outputs, inputs] and perhaps a bias [outputs]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        return functional.linear(values, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm (Zhang and Sennrich), computed in float32 as the checkpoints were."""

    weight: Tensor
    epsilon: float

    def __call__(self, values: Tensor) -> Tensor:
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(values.dtype)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU (Shazeer, GLU Variants): gate and up are one matrix, `up`."""

    up: Linear
    down: Linear

    def __call__(self, normed: Tensor, mark: Mark = unmarked) -> Tensor:
        gate, up = self.up(normed).chunk(2, dim=-1)
        mark("linear_up")
        activated = functional.silu(gate) * up
        mark("activation")
        projected = self.down(activated)
        mark("linear_down")
        return projected


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (Shazeer et al.; Mixtral): each token passes the `top` best of them.

    The router is a softmax over all, in float32; `normed`: the chosen shares then add up to 1. An
    expert computes its tokens alone, so how many these are comes back from the device once a layer.
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    top: int
    normed: bool

    def __call__(self, normed: Tensor, mark: Mark = unmarked) -> Tensor:
        shares = functional.softmax(self.router(normed), dim=-1, dtype=torch.float32)
        shares, chosen = shares.topk(self.top, dim=-1)
        if self.normed:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares, mixed = shares.to(normed.dtype), torch.zeros_like(normed)
        mark("router")
        for index in chosen.unique().tolist():
            rows, place = torch.where(chosen == index)
            computed = self.experts[index](normed[rows])
            mixed.index_add_(0, rows, computed * shares[rows, place, None])
        mark("experts")
        return mixed


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer: attention, then an MLP, each on the normed sum so far."""

    attention_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None  # of each query head, and of each key head
    o: Linear
    mlp_norm: Norm
    mlp: GatedMlp | Experts
    window: int  # the last so many tokens are attended to; 0: all


@dataclass(frozen=True, slots=True)
class Head:
    """What turns the last hidden states into logits."""

    norm: Norm
    matrix: Linear


class Pass(NamedTuple):
    """What all layers need of one micro-batch."""

    batch: BatchInputs
    kv: KvPages
    cosines: Tensor  # [tokens, 1, head_dim]
    sines: Tensor
    mark: Mark


class Stage:
    """Layers [start, stop) of a model: with the embedding when first, norm and LM head when last.

    `forward` takes token ids [tokens] on the first stage and hidden states [tokens, hidden] on the
    others; it returns hidden states, and logits [sampled rows, vocabulary] on the last. `spec` is
    the whole model; as an attribute it has the shapes that this one of `ranks` holds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope: Rope,
        start: int,
        stop: int,
        weights: Source,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        self.spec = shard(spec, ranks.size)
        self.ranks = ranks
        self.is_first = start == 0
        self.is_last = stop == spec.num_layers
        self._words = ranks.part(spec.vocab_size)
        vocabulary = (spec.vocab_size, spec.hidden_size), (self._words,)
        embedding = "model.embed_tokens.weight"
        head = embedding if spec.tie_word_embeddings else "lm_head.weight"
        self.embedding = weights(embedding, *vocabulary) if self.is_first else None
        self.layers = tuple(_layer(spec, index, weights, ranks) for index in range(start, stop))
        self.head: Head | None = None
        if self.is_last:
            norm = Norm(weights("model.norm.weight", (spec.hidden_size,), ALL), spec.norm_epsilon)
            shared = self.embedding if spec.tie_word_embeddings else None
            self.head = Head(norm, Linear(weights(head, *vocabulary) if shared is None else shared))
        some_weight = self.layers[0].o.weight
        self.dtype, self.device = some_weight.dtype, some_weight.device
        self._frequencies = rope.inverse_frequencies(spec.head_dim, self.device)

    def kv_pages(self, pages: int, page_tokens: int) -> KvPages:
        """Return empty pages for the keys and values of this stage."""
        heads = (self.spec.num_kv_heads, self.spec.head_dim)
        return KvPages(
            len(self.layers), pages, page_tokens, heads, dtype=self.dtype, device=self.device
        )

    def forward(
        self, inputs: Tensor, batch: BatchInputs, kv: KvPages, mark: Mark = unmarked
    ) -> Tensor:
        """Run a micro-batch through the stage and write its keys and values into the pages."""
        with torch.inference_mode():
            hidden = inputs
            if self.embedding is not None:
                hidden = self._embedded(inputs, self.embedding)
                mark("embedding")
            turn = rotation(batch.positions, self._frequencies, self.dtype)
            mark("rope")
            passing = Pass(batch, kv, *turn, mark)
            for index, layer in enumerate(self.layers):
                hidden = self._attention(index, layer, hidden, passing)
                hidden = self._mlp(layer, hidden, mark)
            mark("norm")
            if self.head is None:
                return hidden
            logits = self.head.matrix(self.head.norm(hidden.index_select(0, batch.sampled)))
            mark("head")
            return self.ranks.joined(logits)

    def _embedded(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Return the hidden states of `ids` [tokens]; another rank's words are zeros here."""
        if self.ranks.size == 1:
            return functional.embedding(ids, embedding)
        rows = ids - self._words.start
        here = (rows >= 0) & (rows < len(embedding))
        return self.ranks.total(functional.embedding(rows * here, embedding) * here[:, None])

    def _attention(self, index: int, layer: Layer, hidden: Tensor, passing: Pass) -> Tensor:
        """Return `hidden` [tokens, hidden] with a layer's attention added."""
        batch, kv, cosines, sines, mark = passing
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        normed = layer.attention_norm(hidden)
        mark("norm")
        packed = layer.qkv(normed)
        mark("linear_qkv")
        packed = packed.unflatten(1, (-1, self.spec.head_dim))
        queries, keys, values = packed.split((heads, kv_heads, kv_heads), dim=1)
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            queries, keys = query_norm(queries), key_norm(keys)
            mark("norm")
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        mark("rope")
        kv.write(index, keys, values, batch.slots)
        mark("kv_write")
        attended = torch.empty_like(queries)
        if batch.chunks:
            attend_chunks(queries, attended, index, batch.chunks, kv, window=layer.window)
            mark("attention_prefill")
        if batch.decodes:
            attend_decodes(queries, attended, index, batch.decodes, kv, window=layer.window)
            mark("attention_decode")
        projected = layer.o(attended.flatten(1, 2))
        mark("linear_o")
        return hidden + self.ranks.total(projected, mark)

    def _mlp(self, layer: Layer, hidden: Tensor, mark: Mark) -> Tensor:
        """Return `hidden` [tokens, hidden] with a layer's MLP, or mixture of such, added."""
        normed = layer.mlp_norm(hidden)
        mark("norm")
        return hidden + self.ranks.total(layer.mlp(normed, mark), mark)


DENSE = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", *DENSE),
}
"""Family -> the module of its mixtures, and the matrices of an expert: gate, up and down."""


def _layer(spec: ModelSpec, index: int, weights: Source, ranks: Ranks) -> Layer:
    prefix, hidden = f"model.layers.{index}", spec.hidden_size
    (kind,) = spec.kinds(index, index + 1)
    attention = f"{prefix}.self_attn"
    query, key = (
        (count * spec.head_dim, ranks.part(count, spec.head_dim))
        for count in (spec.num_heads, spec.num_kv_heads)
    )
    # attention_bias is on all four projections; Qwen2 has no such key, and three biases.
    o_bias = spec.attention_bias and spec.family != "qwen2"

    def fused(module: str, outputs: dict[str, tuple[int, slice]], bias: bool) -> Linear:
        def joined(kind: str, *inputs: int) -> Tensor:
            names = outputs.items()
            return torch.cat(
                [weights(f"{module}.{n}.{kind}", (o, *inputs), (part,)) for n, (o, part) in names]
            )

        return Linear(joined("weight", hidden), joined("bias") if bias else None)

    def summed(module: str, inputs: tuple[int, slice], bias: bool) -> Linear:
        matrix = weights(f"{module}.weight", (hidden, inputs[0]), (slice(None), inputs[1]))
        added = weights(f"{module}.bias", (hidden,), ALL) if bias else None
        return Linear(matrix, None if ranks.rank else added)  # once, in the sum over the ranks

    def gated(module: str, width: int, gate: str, up: str, down: str) -> GatedMlp:
        columns = (width, ranks.part(width))
        both = fused(module, {gate: columns, up: columns}, bias=False)
        return GatedMlp(both, summed(f"{module}.{down}", columns, bias=False))

    def mixture() -> Experts:
        module, *names = EXPERTS[spec.family]
        router = weights(f"{prefix}.{module}.gate.weight", (spec.num_experts, hidden), ALL)
        width = spec.expert_intermediate_size
        each = (f"{prefix}.{module}.experts.{index}" for index in range(spec.num_experts))
        experts = tuple(gated(expert, width, *names) for expert in each)
        return Experts(Linear(router), experts, spec.experts_per_token, spec.norm_topk_prob)

    def norm(name: str, size: int = hidden) -> Norm:
        return Norm(weights(f"{prefix}.{name}.weight", (size,), ALL), spec.norm_epsilon)

    def head_norms() -> tuple[Norm, Norm]:
        queries, keys = (norm(f"self_attn.{one}_norm", spec.head_dim) for one in "qk")
        return queries, keys

    return Layer(
        norm("input_layernorm"),
        fused(attention, {"q_proj": query, "k_proj": key, "v_proj": key}, spec.attention_bias),
        head_norms() if spec.qk_norm else None,
        summed(f"{attention}.o_proj", query, o_bias),
        norm("post_attention_layernorm"),
        mixture() if spec.num_experts else gated(f"{prefix}.mlp", spec.intermediate_size, *DENSE),
        kind.sliding_window,
    )


def shard(spec: ModelSpec, tensor_parallel: int) -> ModelSpec:
    """Return the shapes that one of `tensor_parallel` ranks holds, as a model of its own."""
    return replace(
        spec,
        num_heads=-(-spec.num_heads // tensor_parallel),
        num_kv_heads=spec.local_kv_heads(tensor_parallel),
        intermediate_size=-(-spec.intermediate_size // tensor_parallel),
        vocab_size=-(-spec.vocab_size // tensor_parallel),
    )
