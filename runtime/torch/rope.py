"""Rotary position embedding: the frequencies that a config.json asks for, and the rotation.

Knows the kinds default, linear and llama3; refuses others (dynamic, yarn, longrope).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.errors import UsageError, instead_of

KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Kind of scaling -> the keys it needs."""


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


def read_rope(path: str | Path, theta: float) -> Rope:
    """Read the scaling from a config.json or the folder that holds one; `theta` is its base.

    UsageError names the kind or the key that is missing.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = json.loads(file.read_text(encoding="utf-8"))
    # transformers 5 renamed the mapping, and an early spelling of its kind was "type".
    scaling: dict[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        known = instead_of(kind, KINDS)
        raise UsageError(f'{file}: RoPE scaling "{kind}" is not supported; {known}')
    for key in KINDS[kind]:
        if not isinstance(scaling.get(key), (int, float)):
            raise UsageError(f'{file}: RoPE scaling "{kind}" needs a number "{key}"')
    return Rope(theta, kind, **{key: float(scaling[key]) for key in KINDS[kind]})


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of `positions` [tokens]: each [tokens, 1, head_dim]."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `heads` [tokens, heads, head_dim] by their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
