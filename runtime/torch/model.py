"""Decoder-only Llama, Mistral, Mixtral, Qwen and DeepSeek-V2, cut into stages, with paged KV.

Knows one micro-batch at a time; no scheduler, no processes, no clock. Weights are those of
Hugging Face checkpoints. Query, key and value are one matrix here, and so are gate and up. Not
supported: shared experts with a gate, groups of experts, and quantisation (a profiler times 8-bit
floats). Rotary embeddings are scaled as `linear` and `llama3` do, not as yarn or longrope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn import functional

from evenflow.runtime.torch.inputs import BatchInputs, Draws, batch_inputs
from evenflow.runtime.torch.layers import (
    Experts,
    GatedMlp,
    HeadAttention,
    KvPages,
    LatentAttention,
    Layer,
    Linear,
    Mark,
    Norm,
    Pass,
    unmarked,
)
from evenflow.runtime.wire import Draw, Piece
from evenflow.specs.modelspec import ModelSpec

Part = tuple[slice, ...]
"""The rows, and perhaps columns, of a weight that a rank holds."""

Source = Callable[[str, tuple[int, ...], Part], Tensor]
"""Returns a part of the weights of a name. The shape is that of the whole, by the config.json."""

ALL: Part = (slice(None),)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process's rank among the `size` that compute a stage together, and their `group`.

    The first matrices are divided by columns, the others by rows (Shoeybi et al., Megatron-LM,
    section 3). What the others give is summed over the ranks. Without a group nothing is exchanged:
    so a profiler times the work of one rank.
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
    """The frequencies of a rotary embedding, in the terms of config.json."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: float = 1.0

    def inverse_frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the radians per position of each pair of dimensions: float32 [head_dim / 2].

        theta^(-2i/d) (Su et al., RoFormer). `linear` divides all by the factor. `llama3` divides
        those of long wavelength, leaves those of short, and blends between (Llama 3.1's reference
        code). Float32 throughout, as the checkpoints were trained.
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


class Stage:
    """Layers [start, stop) of a model: with the embedding when first, norm and LM head when last.

    `forward` takes token ids [tokens] on the first stage and hidden states [tokens, hidden] on the
    others. It returns hidden states, and logits [sampled rows, vocabulary] on the last. `spec` is
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
        parts = [_LayerWeights(spec, index, weights, ranks) for index in range(start, stop)]
        self.layers = tuple(part.layer() for part in parts)
        self.head: tuple[Norm, Linear] | None = None
        if self.is_last:
            norm = Norm(weights("model.norm.weight", (spec.hidden_size,), ALL), spec.norm_epsilon)
            shared = self.embedding if spec.tie_word_embeddings else None
            self.head = norm, Linear(weights(head, *vocabulary) if shared is None else shared)
        some_weight = self.layers[0].mlp_norm.weight
        self.dtype, self.device = some_weight.dtype, some_weight.device
        if self.device.type == "cuda":
            # cuDNN's attention makes a plan for each new length: 44 to 58 ms on an H200, not 3.
            # It is up to twice as fast for 32,000 keys a row.
            torch.backends.cuda.enable_cudnn_sdp(False)
        rotated = spec.qk_rope_head_dim if spec.kv_lora_rank else spec.head_dim
        self._frequencies = rope.inverse_frequencies(rotated, self.device)

    def inputs(
        self, rows: Sequence[Piece], page_tokens: int, ids: Sequence[int] = (), draws: Draws = ()
    ) -> BatchInputs:
        """Return a micro-batch as `forward` takes it; see `batch_inputs`."""
        windows = sorted({layer.attention.window for layer in self.layers})
        return batch_inputs(rows, page_tokens, self.device, ids, draws, windows=windows)

    def kv_pages(self, pages: int, page_tokens: int) -> KvPages:
        spec, latent = self.spec, self.spec.kv_lora_rank
        heads = (
            (1, latent + spec.qk_rope_head_dim) if latent else (spec.num_kv_heads, spec.head_dim)
        )
        shape = (len(self.layers), pages, page_tokens, *heads)
        return KvPages(shape, latent, dtype=self.dtype, device=self.device)

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
                normed = layer.attention_norm(hidden)
                mark("norm")
                hidden = hidden + self.ranks.total(layer.attention(index, normed, passing), mark)
                normed = layer.mlp_norm(hidden)
                mark("norm")
                hidden = hidden + self.ranks.total(layer.mlp(normed, mark), mark)
            mark("norm")
            if self.head is None:
                return hidden
            norm, matrix = self.head
            logits = matrix(norm(hidden.index_select(0, batch.sampled)))
            mark("head")
            return self.ranks.joined(logits)

    def _embedded(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Return the hidden states of `ids` [tokens]; another rank's words are zeros here."""
        if self.ranks.size == 1:
            return functional.embedding(ids, embedding)
        rows = ids - self._words.start
        here = (rows >= 0) & (rows < len(embedding))
        return self.ranks.total(functional.embedding(rows * here, embedding) * here[:, None])


# -- the next token of each row ----------------------------------------------------------------

LEAST_TEMPERATURE = 1e-5
"""Below it, as in vLLM, tokens are greedy: logits divided by less would not be finite."""


def drawn_by(draws: Sequence[Draw | None], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return the settings and random numbers by which `sample` draws, for all rows that are not
    greedy.

    `draws`: settings of each row, None: greedy; `positions`: of its next token. Returned are bits
    of float64, [5 x rows that draw]: row, temperature, top_k, top_p, uniform random number. NumPy
    draws that number, so CPU and CUDA draw alike.
    """
    rows = [
        (row, how.temperature, how.top_k or np.inf, how.top_p, chance.random())
        for row, (how, position) in enumerate(zip(draws, positions, strict=True))
        if how is not None and how.temperature >= LEAST_TEMPERATURE
        for chance in [np.random.default_rng((how.seed, position))]
    ]
    return np.array(rows, dtype=np.float64).T.flatten().view(np.int64)


def sample(logits: Tensor, draws: Tensor | None = None) -> list[int]:
    """Return a token id for each row of `logits` [rows, vocabulary].

    Greedy, except rows in `draws`, as `drawn_by` returns them. It waits for the device once.
    """
    tokens = logits.argmax(dim=-1)
    if draws is not None and len(draws):
        row, *settings = draws.view(torch.float64).unflatten(0, (5, -1, 1))
        where = row.flatten().long()
        tokens[where] = _draw(logits[where], *settings)
    ids: list[int] = tokens.tolist()
    return ids


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, chance: Tensor
) -> Tensor:
    """Draw a token a row: where a uniform number falls among the summed, sorted probabilities.

    `logits` is [rows, vocabulary], the others are [rows, 1]. Rows are computed alone, so what else
    is drawn changes nothing. Known error: on a GPU the last bit of a sum may follow from the number
    of rows.
    """
    ordered, ids = torch.sort(logits.float() / temperature.float(), descending=True, stable=True)
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    sums = ordered.masked_fill(places >= top_k, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    # The token that crosses top_p stays in; rounding may leave all sums below it.
    last = (sums < top_p.float()).sum(dim=-1, keepdim=True)
    last = last.clamp(max=top_k.clamp(max=ordered.shape[-1]).long() - 1)
    limit = (sums.gather(-1, last).double() * chance).float()
    index = torch.searchsorted(sums, limit, right=True).minimum(last)
    return ids.gather(-1, index).flatten()


# -- the weights of a layer ---------------------------------------------------------------------

DENSE = ("gate_proj", "up_proj", "down_proj")
LATENT_EPSILON = 1e-6
"""Of the norms of latents, which follows no key of config.json."""
EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""Family -> the module of its mixtures, and the matrices of an expert: gate, up and down."""


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    """Parts of one layer: the names of its weights, and the shards that are here."""

    spec: ModelSpec
    index: int
    weights: Source
    ranks: Ranks

    def layer(self) -> Layer:
        (kind,) = self.spec.kinds(self.index, self.index + 1)
        mlp = f"{self._prefix}.mlp"
        return Layer(
            self.norm("input_layernorm"),
            self.latent_attention() if kind.kv_lora_rank else self.head_attention(kind),
            self.norm("post_attention_layernorm"),
            self.mixture() if kind.num_experts else self.gated(mlp, kind.intermediate_size, *DENSE),
        )

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.index}"

    def norm(self, name: str, size: int | None = None, epsilon: float | None = None) -> Norm:
        shape = (size or self.spec.hidden_size,)
        weight = self.weights(f"{self._prefix}.{name}.weight", shape, ALL)
        return Norm(weight, epsilon or self.spec.norm_epsilon)

    def fused(self, module: str, outputs: dict[str, tuple[int, slice]], bias: bool) -> Linear:
        def joined(kind: str, *inputs: int) -> Tensor:
            return torch.cat(
                [
                    self.weights(f"{module}.{name}.{kind}", (size, *inputs), (part,))
                    for name, (size, part) in outputs.items()
                ]
            )

        matrix = joined("weight", self.spec.hidden_size)
        return self._stored(Linear(matrix, joined("bias") if bias else None))

    def summed(self, module: str, inputs: tuple[int, slice], bias: bool) -> Linear:
        """Return a matrix with outputs that are summed over the ranks."""
        hidden = self.spec.hidden_size
        matrix = self.weights(f"{module}.weight", (hidden, inputs[0]), (slice(None), inputs[1]))
        added = self.weights(f"{module}.bias", (hidden,), ALL) if bias else None
        return self._stored(Linear(matrix, None if self.ranks.rank else added))  # once, in the sum

    def _stored(self, linear: Linear) -> Linear:
        return linear.in_8_bits() if self.spec.quantization else linear

    def gated(self, module: str, width: int, gate: str, up: str, down: str) -> GatedMlp:
        columns = (width, self.ranks.part(width))
        both = self.fused(module, {gate: columns, up: columns}, bias=False)
        return GatedMlp(both, self.summed(f"{module}.{down}", columns, bias=False))

    def mixture(self) -> Experts:
        spec = self.spec
        name, *names = EXPERTS.get(spec.family, ("mlp", *DENSE))
        module, width = f"{self._prefix}.{name}", spec.expert_intermediate_size
        router = self.weights(f"{module}.gate.weight", (spec.num_experts, spec.hidden_size), ALL)
        each = (f"{module}.experts.{index}" for index in range(spec.num_experts))
        experts = tuple(self.gated(expert, width, *names) for expert in each)
        columns = spec.shared_intermediate_size
        shared = self.gated(f"{module}.shared_experts", columns, *DENSE) if columns else None
        return Experts(Linear(router), experts, spec.experts_per_token, spec.norm_topk_prob, shared)

    def head_attention(self, kind: ModelSpec) -> HeadAttention:
        module, size, ranks = f"{self._prefix}.self_attn", kind.head_dim, self.ranks
        query, key = (
            (count * size, ranks.part(count, size)) for count in (kind.num_heads, kind.num_kv_heads)
        )
        here = shard(kind, ranks.size)
        return HeadAttention(
            self.fused(
                module, {"q_proj": query, "k_proj": key, "v_proj": key}, kind.attention_bias
            ),
            self._head_norms() if kind.qk_norm else None,
            # attention_bias is on all four projections; Qwen2 has no such key, and three biases.
            self.summed(f"{module}.o_proj", query, kind.attention_bias and kind.family != "qwen2"),
            (here.num_heads, here.num_kv_heads),
            kind.sliding_window,
        )

    def _head_norms(self) -> tuple[Norm, Norm]:
        queries, keys = (self.norm(f"self_attn.{x}_norm", self.spec.head_dim) for x in "qk")
        return queries, keys

    def latent_attention(self) -> LatentAttention:
        spec, ranks, module = self.spec, self.ranks, f"{self._prefix}.self_attn"
        keys = self.weights(
            f"{module}.kv_a_proj_with_mqa.weight",
            (spec.kv_lora_rank + spec.qk_rope_head_dim, spec.hidden_size),
            ALL,
        )
        down, query_up = self._queries(module)
        both = self._of_heads("kv_b_proj", spec.kv_lora_rank, spec.head_dim + spec.v_head_dim)
        columns = spec.num_heads * spec.v_head_dim, ranks.part(spec.num_heads, spec.v_head_dim)
        return LatentAttention(
            Linear(torch.cat((down, _in_halves(keys, spec.qk_rope_head_dim)))),
            query_up,
            self.norm("self_attn.kv_a_layernorm", spec.kv_lora_rank, LATENT_EPSILON),
            (both[:, : spec.head_dim], both[:, spec.head_dim :]),
            self.summed(f"{module}.o_proj", columns, bias=False),
        )

    def _queries(self, module: str) -> tuple[Tensor, tuple[Norm, Linear] | None]:
        """Return what makes queries of hidden states, or their latents, and queries of those."""
        spec = self.spec
        latent, rotated = spec.q_lora_rank, spec.qk_rope_head_dim
        name = "q_b_proj" if latent else "q_proj"
        heads = self._of_heads(name, latent or spec.hidden_size, spec.head_dim + rotated)
        matrix = _in_halves(heads, rotated).flatten(0, 1)
        if not latent:
            return matrix, None
        down = self.weights(f"{module}.q_a_proj.weight", (latent, spec.hidden_size), ALL)
        return down, (self.norm("self_attn.q_a_layernorm", latent, LATENT_EPSILON), Linear(matrix))

    def _of_heads(self, name: str, inputs: int, width: int) -> Tensor:
        heads = self.spec.num_heads
        name = f"{self._prefix}.self_attn.{name}.weight"
        matrix = self.weights(name, (heads * width, inputs), (self.ranks.part(heads, width),))
        return matrix.unflatten(0, (-1, width))


def _in_halves(rows: Tensor, rotated: int) -> Tensor:
    """Return `rows` [..., outputs, inputs] with the last `rotated` outputs ordered for `rotate`.

    DeepSeek's checkpoints turn neighbours, the first with the second; here those of two halves.
    """
    kept, turned = rows.split((rows.shape[-2] - rotated, rotated), dim=-2)
    return torch.cat((kept, turned[..., 0::2, :], turned[..., 1::2, :]), dim=-2)


def shard(spec: ModelSpec, tensor_parallel: int) -> ModelSpec:
    """Return the shapes that one of `tensor_parallel` ranks holds, as a separate model."""
    return replace(
        spec,
        num_heads=-(-spec.num_heads // tensor_parallel),
        num_kv_heads=spec.local_kv_heads(tensor_parallel),
        intermediate_size=-(-spec.intermediate_size // tensor_parallel),
        vocab_size=-(-spec.vocab_size // tensor_parallel),
    )
