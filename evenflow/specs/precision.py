"""Number formats of weights: their bytes with scales, and the arithmetic that they call for.

Knows no model and no GPU. Embedding, LM head, norms and routers stay in the model's own dtype, as
engines keep them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Arithmetic = Literal["16-bit", "int8", "fp8", "fp4"]


class Format(NamedTuple):
    """A format of weights: `bits` each, and scales of `scale_bytes`, one a block of the matrix.

    `block` is (inputs, outputs) of what shares a scale, 0 for all of them. `arithmetic` is what the
    GPU multiplies in if it can. Else, and always for "16-bit", weights are widened as they are read
    (weight-only).
    """

    bits: int
    scale_bytes: float
    block: tuple[int, int]
    arithmetic: Arithmetic

    def matrix_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a matrix [inputs, outputs] with its scales."""
        inputs, outputs = shape
        blocks = -(-inputs // (self.block[0] or inputs)) * -(-outputs // (self.block[1] or outputs))
        return -(-inputs * outputs * self.bits // 8) + round(blocks * self.scale_bytes)


FORMATS = {
    "fp8": Format(8, 4, (0, 0), "fp8"),
    "fp8_block": Format(8, 4, (128, 128), "fp8"),
    "fp8_wo": Format(8, 2, (0, 1), "16-bit"),
    "mxfp8": Format(8, 1, (32, 1), "fp8"),
    "int8": Format(8, 4, (0, 1), "int8"),
    "int8_wo": Format(8, 2, (0, 1), "16-bit"),
    "int4_wo": Format(4, 2.5, (128, 1), "16-bit"),
    "int4_wo_32": Format(4, 2, (32, 1), "16-bit"),
    "nvfp4": Format(4, 1, (16, 1), "fp4"),
    "nvfp4_wo": Format(4, 1, (16, 1), "16-bit"),
    "mxfp4": Format(4, 1, (32, 1), "fp4"),
    "mxfp4_wo": Format(4, 1, (32, 1), "16-bit"),
}
"""As engines store them (vLLM 0.24): with a scale a matrix and one of its inputs (`fp8`), a block
(`fp8_block`), a column (`int8`, whose inputs are too, `int8_wo`, `fp8_wo`), 128 values, with a
4-bit zero (`int4_wo`: AWQ, GPTQ), 32 without (`int4_wo_32`: Kimi-K2.5), 16 (`nvfp4`) or 32
(`mxfp8`, `mxfp4`). `_wo`: inputs stay in 16 bits."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value in a model's own dtype."""

KV_BYTES = {"fp8": 1} | DTYPE_BYTES
"""Bytes of a key's or value's element; scales are one a layer."""
