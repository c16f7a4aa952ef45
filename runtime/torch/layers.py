"""A layer of a decoder-only transformer: its products, norms, attention and MLP, one of each kind.

Attention is paged: keys and values lie in pages, are gathered, and go through SDPA. CPU and CUDA
have one code path. Known cost: gathering copies the context once, and decodes are padded within
their group. A kernel that reads the pages in place would do neither. Knows one micro-batch's
tensors; no names of weights and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from evenflow.runtime.torch.inputs import BatchInputs, ChunkInputs, DecodeInputs

Mark = Callable[[str], None]
"""Called with the name of each operator once it is issued; a profiler's stopwatch is one."""


def unmarked(operator: str) -> None:
    """Ignore a mark."""


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `heads` [tokens, heads, head_dim] by their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [outputs, inputs] and perhaps a bias [outputs].

    With a `scale` the matrix is in 8-bit floats. Inputs become 8-bit floats, too, by a scale that
    follows from their largest, and `torch._scaled_mm` multiplies both.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        if self.scale is None:
            return functional.linear(values, self.weight, self.bias)
        narrow, scale = _in_8_bits(values)
        wide: Tensor = torch._scaled_mm(
            narrow, self.weight.t(), scale, self.scale, bias=self.bias, out_dtype=values.dtype
        )
        return wide

    def in_8_bits(self) -> Linear:
        weight, scale = _in_8_bits(self.weight)
        return Linear(weight, self.bias, scale)


def _in_8_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as the nearest 8-bit floats after division by a scale, and the scale."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = values.abs().amax().float() / largest
    return (values / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


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
    `shared` is one that every token passes (DeepSeekMoE).
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    top: int
    normed: bool
    shared: GatedMlp | None

    def __call__(self, normed: Tensor, mark: Mark = unmarked) -> Tensor:
        mixed = torch.zeros_like(normed) if self.shared is None else self.shared(normed, mark)
        shares = functional.softmax(self.router(normed), dim=-1, dtype=torch.float32)
        shares, chosen = shares.topk(self.top, dim=-1)
        if self.normed:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares.to(normed.dtype)
        mark("router")
        for index in chosen.unique().tolist():
            rows, place = torch.where(chosen == index)
            computed = self.experts[index](normed[rows])
            mixed.index_add_(0, rows, computed * shares[rows, place, None])
            mark("experts")
        return mixed


class KvPages:
    """The keys and values of a stage's layers: each [layers, pages, page_tokens, KV heads, head].

    Of latents the first `latent` of a key are its value, which has no separate place. Zeros at
    first, because a masked key still meets a weight of 0, and 0 x NaN is NaN.
    """

    def __init__(
        self, shape: tuple[int, ...], latent: int = 0, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_tokens = shape[2]
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = self.keys[..., :latent] if latent else torch.zeros_like(self.keys)
        self._latent = latent

    def write(self, layer: int, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """Store `keys` and `values` [tokens, KV heads, head] of a layer in their slots."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        if values is not None:
            self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Gather the pages of `rows` rows: keys and values, each [rows, KV heads, tokens, head]."""
        heads = self.keys.shape[-2:]
        keys = self.keys[layer].index_select(0, pages).view(rows, -1, *heads).transpose(1, 2)
        if self._latent:
            return keys, keys[..., : self._latent]
        values = self.values[layer].index_select(0, pages).view(rows, -1, *heads)
        return keys, values.transpose(1, 2)


def _earlier_keys(chunk: ChunkInputs, device: torch.device, window: int) -> Any:
    """Return the mask that lets a chunk's tokens see what is before them, and themselves."""
    if device.type == "cuda" and not window:
        # Flash attention knows this mask by its name. NOTE: that name takes a second to import.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(chunk.length, chunk.context)
    before = chunk.context - chunk.length
    visible = torch.ones(chunk.length, chunk.context, dtype=torch.bool, device=device).tril(before)
    return visible.triu(before - window + 1) if window else visible


class Pass(NamedTuple):
    """The inputs of one micro-batch that all layers need."""

    batch: BatchInputs
    kv: KvPages
    cosines: Tensor  # [tokens, 1, head_dim]
    sines: Tensor
    mark: Mark

    def attend(
        self, layer: int, queries: Tensor, width: int, window: int, scale: float | None = None
    ) -> Tensor:
        """Return the attention of `queries` [tokens, heads, head] in a layer: [tokens, heads,
        width].

        Each token sees the last `window` keys, its own among them (0: all). `scale` is that of the
        products; None: one over the root of the head's size.
        """
        chunks, decodes = self.batch.reaches[window]
        attended = queries.new_empty(*queries.shape[:2], width)
        within = "_window" if window else ""
        if chunks:
            for chunk in chunks:
                span = slice(chunk.first, chunk.first + chunk.length)
                attended[span] = self._of_chunk(layer, queries[span], chunk, window, scale)
            self.mark(f"attention_prefill{within}")
        if decodes:
            for group in decodes:
                asked = queries.index_select(0, group.tokens)
                attended.index_copy_(0, group.tokens, self._of_decodes(layer, asked, group, scale))
            self.mark(f"attention_decode{within}")
        return attended

    def _of_chunk(
        self, layer: int, queries: Tensor, chunk: ChunkInputs, window: int, scale: float | None
    ) -> Tensor:
        """Attend from a prompt chunk, causally.

        Query heads that share a KV head become its batch: keys and values are expanded, not copied.
        """
        keys, values = self.kv.read(layer, chunk.pages, 1)
        # grouped: [KV heads, heads per KV head, chunk, head]
        grouped = queries.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
        per_kv = grouped.shape[1]
        is_whole = chunk.length == chunk.context and not 0 < window < chunk.context
        attended = functional.scaled_dot_product_attention(
            grouped,
            keys[0, :, None, : chunk.context].expand(-1, per_kv, -1, -1),
            values[0, :, None, : chunk.context].expand(-1, per_kv, -1, -1),
            attn_mask=None if is_whole else _earlier_keys(chunk, queries.device, window),
            is_causal=is_whole,
            scale=scale,
        )
        return attended.permute(2, 0, 1, 3).flatten(1, 2)

    def _of_decodes(
        self, layer: int, queries: Tensor, group: DecodeInputs, scale: float | None
    ) -> Tensor:
        """Attend from single tokens.

        With one token a row, the query heads of a KV head take the place of the query positions.
        """
        keys, values = self.kv.read(layer, group.pages, group.tokens.shape[0])
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        attended = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=scale
        )
        return attended.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention of heads, some of which share their keys and values (Ainslie et al., GQA)."""

    qkv: Linear
    norms: tuple[Norm, Norm] | None  # of each query head, and of each key head
    o: Linear
    heads: tuple[int, int]  # of queries, and of keys and values
    window: int  # how many tokens, the last, are attended to; 0: all

    def __call__(self, layer: int, normed: Tensor, passing: Pass) -> Tensor:
        """Return the attention [tokens, hidden] of a layer to `normed` and what was before."""
        batch, kv, cosines, sines, mark = passing
        heads, kv_heads = self.heads
        packed = self.qkv(normed)
        mark("linear_qkv")
        packed = packed.unflatten(1, (heads + 2 * kv_heads, -1))
        queries, keys, values = packed.split((heads, kv_heads, kv_heads), dim=1)
        if self.norms is not None:
            query_norm, key_norm = self.norms
            queries, keys = query_norm(queries), key_norm(keys)
            mark("norm")
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        mark("rope")
        kv.write(layer, keys, values, batch.slots)
        mark("kv_write")
        attended = passing.attend(layer, queries, queries.shape[-1], self.window)
        projected = self.o(attended.flatten(1, 2))
        mark("linear_o")
        return projected


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), of chunks and decodes alike absorbed.

    What makes keys and values of latents is multiplied into queries and outputs instead. So all
    heads attend to one key, the latent and the rotated part, and to one value, the latent.
    """

    down: Linear  # of the queries or their latents, the latents, and the rotated keys
    query_up: tuple[Norm, Linear] | None
    norm: Norm
    up: tuple[Tensor, Tensor]  # of keys and of values: each [heads, head, latent]
    o: Linear
    window: int = 0

    def __call__(self, layer: int, normed: Tensor, passing: Pass) -> Tensor:
        batch, kv, cosines, sines, mark = passing
        keys_up, values_up = self.up
        heads, plain, latent = keys_up.shape
        packed = self.down(normed)
        mark("linear_qkv")
        rotated = cosines.shape[-1]
        queries, keys, turned = packed.split(
            (packed.shape[1] - latent - rotated, latent, rotated), 1
        )
        keys = self.norm(keys)
        if self.query_up is not None:
            norm, query_up = self.query_up
            queries = norm(queries)
            mark("norm")
            queries = query_up(queries)
            mark("linear_q_up")
        else:
            mark("norm")
        queries, turning = queries.unflatten(1, (heads, -1)).split((plain, rotated), dim=2)
        turning, turned = (rotate(part, cosines, sines) for part in (turning, turned[:, None]))
        mark("rope")
        queries = torch.einsum("thk,hkl->thl", queries, keys_up)
        queries = torch.cat((queries, turning), dim=2)
        mark("linear_kv_up")
        kv.write(layer, torch.cat((keys[:, None], turned), dim=2), None, batch.slots)
        mark("kv_write")
        scale = (plain + rotated) ** -0.5  # as if nothing were absorbed
        attended = passing.attend(layer, queries, latent, self.window, scale)
        values = torch.einsum("thl,hvl->thv", attended, values_up)
        mark("linear_kv_up")
        projected = self.o(values.flatten(1, 2))
        mark("linear_o")
        return projected


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer: attention, then an MLP, each on the normed sum so far."""

    attention_norm: Norm
    attention: HeadAttention | LatentAttention
    mlp_norm: Norm
    mlp: GatedMlp | Experts
