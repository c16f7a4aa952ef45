"""The shape of a decoder-only transformer: what its memory and its costs follow from.

Knows parameter counts and KV bytes; no GPU, no seconds, no weights. Dense models only: no mixture
of experts, no sliding window, no quantisation.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, instead_of
from evenflow.specs.checks import require_counts, require_positive
from evenflow.specs.huggingface import read_config


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe one model in the terms of its config.json.

    `gated_mlp`: three MLP matrices (gate, up, down) instead of two. `attention_bias`: a bias on the
    query, key and value projections. `parallel_attention`: attention and MLP read the same input
    and are summed once (Falcon), so tensor parallelism reduces once a layer instead of twice.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    gated_mlp: bool = True
    dtype_bytes: int = 2
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    parallel_attention: bool = False
    norm_epsilon: float = 1e-5
    family: str = "llama"

    def __post_init__(self) -> None:
        require_counts(
            self.name,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            dtype_bytes=self.dtype_bytes,
        )
        require_positive(self.name, rope_theta=self.rope_theta, norm_epsilon=self.norm_epsilon)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name}: {self.num_kv_heads} KV heads do not divide {self.num_heads} heads"
            )

    @classmethod
    def from_config_json(cls, path: str | Path) -> ModelSpec:
        """Read a Hugging Face config.json, or the folder that holds one.

        Families: Llama, Mistral, Qwen2, Falcon. UsageError names the file and the key.
        """
        return cls(**read_config(path))

    def linear_shapes(self, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of a layer's matrices on one rank: qkv, o, gate and up, down.

        Heads and MLP columns are divided over the ranks (rounded up); KV heads are replicated
        where there are fewer of them than ranks.
        """
        heads = -(-self.num_heads // tensor_parallel)
        columns = -(-self.intermediate_size // tensor_parallel)
        qkv = (heads + 2 * self.local_kv_heads(tensor_parallel)) * self.head_dim
        up = 2 * columns if self.gated_mlp else columns
        hidden = self.hidden_size
        return (hidden, qkv), (heads * self.head_dim, hidden), (hidden, up), (columns, hidden)

    def local_kv_heads(self, tensor_parallel: int = 1) -> int:
        """Return the KV heads that one tensor-parallel rank holds, at least 1."""
        return -(-self.num_kv_heads // tensor_parallel)

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Return the parameters of one layer on one rank: matrices, qkv bias, two norm vectors."""
        shapes = self.linear_shapes(tensor_parallel)
        bias = shapes[0][1] if self.attention_bias else 0
        return sum(inputs * outputs for inputs, outputs in shapes) + bias + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; the LM head is as large."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embedding and LM head count once."""
        ends = 1 if self.tie_word_embeddings else 2
        layers = self.num_layers * self.layer_parameters()
        return layers + ends * self.embedding_parameters + self.hidden_size

    def kv_bytes_per_token(self, layers: int | None = None, tensor_parallel: int = 1) -> int:
        """Return the bytes that one token's keys and values take in `layers` layers of one rank.

        `layers` defaults to the whole model. 2 (K and V) x layers x KV heads x head size x bytes.
        """
        count = self.num_layers if layers is None else layers
        return 2 * count * self.local_kv_heads(tensor_parallel) * self.head_dim * self.dtype_bytes


def models() -> dict[str, ModelSpec]:
    """Return the table of models (`models.csv`): those of the papers and a few common ones.

    All are 2 bytes a parameter. Llama-3.1-100B is the 405B cut to 30 of its 126 layers, which gives
    the size that the gLLM paper names.
    """
    text = resources.files("evenflow.specs").joinpath("models.csv").read_text(encoding="utf-8")
    specs = (_from_row(row) for row in csv.DictReader(text.splitlines()))
    return {spec.name: spec for spec in specs}


def _from_row(row: dict[str, str]) -> ModelSpec:
    read: dict[str, Callable[[str], Any]]
    read = {"int": int, "float": float, "bool": lambda text: text == "true", "str": str}
    kinds = {field.name: str(field.type) for field in fields(ModelSpec)}
    return ModelSpec(**{key: read[kinds[key]](text) for key, text in row.items()})


def model(name_or_path: str | Path) -> ModelSpec:
    """Return the model of that name in the table, or read the config.json at that path.

    UsageError lists the names, nearest first.
    """
    table = models()
    if str(name_or_path) in table:
        return table[str(name_or_path)]
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".json":
        return ModelSpec.from_config_json(path)
    known = instead_of(name_or_path, table)
    raise UsageError(f'unknown model "{name_or_path}", and no such file; {known}')
