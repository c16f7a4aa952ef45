"""Paged attention of a mixed micro-batch: keys and values in pages, gathered, then SDPA.

One code path for CPU and CUDA. Known cost: gathering copies the context once, and decodes are
padded within their group; a kernel that reads the pages in place would do neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.torch.inputs import ChunkInputs, DecodeInputs


class KvPages:
    """The keys and values of a stage's layers: each [layers, pages, page_tokens, KV heads, head].

    Of latents the first `latent` of a key are its value, which has no place of its own. Zeros at
    first, because a masked key still meets a weight of 0, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        latent: int = 0,
        *,
        dtype: torch.dtype,
        device: torch.device,
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


def attend_chunks(
    queries: Tensor,
    out: Tensor,
    layer: int,
    chunks: tuple[ChunkInputs, ...],
    kv: KvPages,
    *,
    window: int,
    scale: float | None = None,
) -> None:
    """Attend from prompt chunks, causally, into `out`; both [tokens, heads, head].

    Each token sees the last `window` keys, its own among them (0: all). `scale` is that of the
    products; None: one over the root of the head's size. Query heads that share a KV head become
    its batch: keys and values are expanded, not copied.
    """
    kv_heads = kv.keys.shape[-2]
    for chunk in chunks:
        keys, values = kv.read(layer, chunk.pages, 1)
        span = slice(chunk.first, chunk.first + chunk.length)
        # grouped: [KV heads, heads per KV head, chunk, head]
        grouped = queries[span].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        per_kv = grouped.shape[1]
        is_whole = chunk.length == chunk.context and not 0 < window < chunk.context
        attended = scaled_dot_product_attention(
            grouped,
            keys[0, :, None, : chunk.context].expand(-1, per_kv, -1, -1),
            values[0, :, None, : chunk.context].expand(-1, per_kv, -1, -1),
            attn_mask=None if is_whole else _earlier_keys(chunk, queries.device, window),
            is_causal=is_whole,
            scale=scale,
        )
        out[span] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _earlier_keys(chunk: ChunkInputs, device: torch.device, window: int) -> Any:
    """Return the mask that lets a chunk's tokens see what is before them, and themselves."""
    if device.type == "cuda" and not window:
        # Flash attention knows this mask by its name. NOTE: that name takes a second to import.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(chunk.length, chunk.context)
    before = chunk.context - chunk.length
    visible = torch.ones(chunk.length, chunk.context, dtype=torch.bool, device=device).tril(before)
    return visible.triu(before - window + 1) if window else visible


def attend_decodes(
    queries: Tensor,
    out: Tensor,
    layer: int,
    decodes: tuple[DecodeInputs, ...],
    kv: KvPages,
    *,
    scale: float | None = None,
) -> None:
    """Attend from single tokens into `out`; both [tokens, heads, head].

    With one token a row, the query heads of a KV head take the place of the query positions.
    """
    kv_heads = kv.keys.shape[-2]
    for group in decodes:
        rows = group.tokens.shape[0]
        keys, values = kv.read(layer, group.pages, rows)
        grouped = queries.index_select(0, group.tokens).unflatten(1, (kv_heads, -1))
        attended = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=scale
        )
        out.index_copy_(0, group.tokens, attended.flatten(1, 2))
