"""Mixers in place of plain attention, or beside it: their matrices, and what they keep.

Knows sizes; no file and no seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Matrix(NamedTuple):
    """A matrix, and the dimension that tensor-parallel ranks divide (`split`); "": replicated."""

    inputs: int
    outputs: int
    split: Literal["inputs", "outputs", ""] = ""

    def shape(self, ranks: int) -> tuple[int, int]:
        """Return (inputs, outputs) on one rank, rounded up."""
        inputs = -(-self.inputs // ranks) if self.split == "inputs" else self.inputs
        return inputs, -(-self.outputs // ranks) if self.split == "outputs" else self.outputs


@dataclass(frozen=True, slots=True)
class Mixer:
    """Part of a layer that mixes tokens, such as Mamba-2 or a delta rule; `name` is its kind.

    `beside`: it comes beside the layer's plain attention, and else in its place. `vectors` are
    parameters outside matrices. A token keeps `kv_values` in the format of keys and values, and
    `index_bytes` in another. A request keeps `window_values` as of tokens of a window. All of these
    are whole on every rank. A request also keeps `state_bytes`, which ranks share out.
    """

    name: str
    matrices: tuple[Matrix, ...] = ()
    vectors: int = 0
    beside: bool = False
    kv_values: float = 0.0
    index_bytes: float = 0.0
    state_bytes: int = 0
    window_values: int = 0
    pending_bytes: int = 0
    small_bytes: float = 1.0

    def shapes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the matrices on one rank."""
        return tuple(matrix.shape(ranks) for matrix in self.matrices)
