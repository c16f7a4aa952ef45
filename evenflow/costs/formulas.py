"""The roofline formulas, one function each: seconds of one operator in one layer on one rank.

Each operator takes the longer of its arithmetic and its memory traffic, at the rates that the GPU
reaches (`Rates`). Knows no pipeline and no micro-batch. Factors: a multiply-add is 2 operations.
"""

from __future__ import annotations

from typing import NamedTuple

from evenflow.specs.gpu import GpuSpec
from evenflow.specs.model import ModelSpec


class Rates(NamedTuple):
    """What a GPU reaches: floating-point operations and bytes of memory traffic a second."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, gpu: GpuSpec) -> Rates:
        """Return the rates of a GPU: peaks times efficiencies."""
        return cls(gpu.flops_per_s, gpu.bytes_per_s)


def linear_s(
    tokens: int, shape: tuple[int, int], dtype_bytes: int, tile_tokens: int, rates: Rates
) -> float:
    """Return the seconds of a product [tokens, inputs] x [inputs, outputs], `shape` the matrix's.

    Operations: 2 x inputs x outputs x tokens, tokens rounded up to whole tiles because a partly
    filled tile takes as long as a full one (the steps in the measured L20 curves; Sarathi-Serve,
    section 4.3). Bytes: the matrix, its input and its output, once each.
    Known error: below one tile the kernel changes with the tokens, so real times creep up where
    this is flat. On L20: 15 % too slow up to 16 tokens, right at 17-64, 2-7 % too fast at 65-128.
    """
    inputs, outputs = shape
    padded = -(-tokens // tile_tokens) * tile_tokens
    compute_s = 2 * inputs * outputs * padded / rates.flops_per_s
    moved = inputs * outputs + tokens * (inputs + outputs)
    return max(compute_s, moved * dtype_bytes / rates.bytes_per_s)


def elementwise_s(tokens: int, model: ModelSpec, tensor_parallel: int, rates: Rates) -> float:
    """Return the seconds of a layer's norms, rotary embedding, activation and KV write.

    All are bound by memory. Values moved per token: 8 x hidden for two norms fused with the
    residual (read two, write two), 2 x (heads + KV heads) x head size for the rotary embedding
    (read, write) and as many for the norms of queries and keys, if there are any, 2 or 3 x MLP
    columns for the activation (read up and gate, write), 4 x KV heads x head size for the KV write
    (read, write). Known error: small kernels reach less than the bandwidth of large ones; what is
    missing is in the per-layer overhead.
    """
    heads = model.num_heads / tensor_parallel
    kv_heads = model.local_kv_heads(tensor_parallel)
    columns = model.shared_columns / tensor_parallel
    values = (
        8 * model.hidden_size
        + (4 if model.qk_norm else 2) * (heads + kv_heads) * model.head_dim
        + (3 if model.gated_mlp else 2) * columns
        + 4 * kv_heads * model.head_dim
    )
    return tokens * values * model.dtype_bytes / rates.bytes_per_s


class AttentionRates(NamedTuple):
    """Seconds of attention per unit of work in one layer on one rank."""

    per_pair_s: float
    per_key_s: float
    per_query_s: float

    @classmethod
    def of(cls, model: ModelSpec, tensor_parallel: int, rates: Rates) -> AttentionRates:
        """Return the seconds per (query, key) pair, per key and value read, per query and output.

        A pair takes 4 x heads x head size operations (2 each for the score and for the value); a
        key brings 2 x KV heads x head size values; a query reads and writes heads x head size.
        """
        heads = model.num_heads / tensor_parallel
        kv_values = 2 * model.local_kv_heads(tensor_parallel) * model.head_dim
        query_values = 2 * heads * model.head_dim
        return cls(
            4 * heads * model.head_dim / rates.flops_per_s,
            kv_values * model.dtype_bytes / rates.bytes_per_s,
            query_values * model.dtype_bytes / rates.bytes_per_s,
        )

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the seconds of one prompt chunk [start, stop), causal.

        Token i attends to i + 1 tokens, so the pairs are the sum of start + 1 .. stop. Keys and
        values are read once. Known error: attention kernels reach less of the peak than products
        do (FlashAttention-2 reports 50-73 % on A100), so long contexts come out too fast.
        """
        tokens = stop - start
        pairs = tokens * (start + stop + 1) / 2
        return max(pairs * self.per_pair_s, stop * self.per_key_s + tokens * self.per_query_s)

    def decode_s(self, rows: int, context_tokens: int) -> float:
        """Return the seconds of one decode step: every row attends to its context and to itself.

        Known error: only the total context counts, so a batch with one very long row, which leaves
        parts of the GPU idle, comes out too fast.
        """
        keys = context_tokens + rows
        return max(keys * self.per_pair_s, keys * self.per_key_s + rows * self.per_query_s)


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
