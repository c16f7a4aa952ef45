"""A stage from a model's folder: config.json and safetensors, or random weights of its shapes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from evenflow.errors import UsageError, instead_of
from evenflow.specs.huggingface import DTYPE_BYTES
from evenflow.specs.model import ModelSpec
from runtime.torch.model import Stage, shard
from runtime.torch.rope import Rope, read_rope
from runtime.torch.weights import Checkpoint, random_weights

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
FAMILIES = ("llama", "qwen2")


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name; UsageError lists the names."""
    if name not in DTYPES:
        raise UsageError(f"dtype: unknown {name!r}; {instead_of(name, DTYPES)}")
    return DTYPES[name]


def read_model(path: str | Path) -> tuple[ModelSpec, Rope]:
    """Read the config.json at `path` (or in it) and refuse what `model` does not compute.

    UsageError names the file and the key.
    """
    spec = ModelSpec.from_config_json(path)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = json.loads(file.read_text(encoding="utf-8"))
    require_runnable(spec)
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f'{file}: "hidden_act" is {activation!r}; only "silu" can be run')
    for key in ("mlp_bias", "use_sliding_window", "quantization_config"):
        if values.get(key):
            raise UsageError(f'{file}: "{key}" is set, and such models cannot be run')
    return spec, read_rope(file, spec.rope_theta)


def require_runnable(spec: ModelSpec) -> None:
    """Raise a UsageError unless `runtime.torch.model` computes models of this family."""
    if spec.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"{spec.name}: the family {spec.family} cannot be run; known: {known}")


def load_stage(
    folder: str | Path, start: int, stop: int, *, dtype: str = "float32", device: str = "cpu"
) -> Stage:
    """Load layers [start, stop) of the checkpoint in `folder`.

    UsageError when weights and config.json do not belong together, or a file is damaged.
    """
    spec, rope = read_model(folder)
    weights = Checkpoint(folder, dtype_of(dtype), torch.device(device))
    asked: set[str] = set()

    def recorded(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        asked.add(name)
        return weights(name, shape)

    stage = Stage(spec, rope, start, stop, recorded)
    layers = tuple(f"model.layers.{index}." for index in (*range(start, stop), spec.num_layers))
    spare = {name for name in weights.names if name.startswith(layers)} - asked
    # Old checkpoints carry the frequencies along; they follow from config.json.
    spare = {name for name in spare if not name.endswith("rotary_emb.inv_freq")}
    if spare:
        raise UsageError(f'{folder}: the tensor "{min(spare)}" has no place in its config.json')
    return stage


def random_stage(
    spec: ModelSpec,
    rope: Rope,
    start: int,
    stop: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    tensor_parallel: int = 1,
    seed: int = 0,
) -> Stage:
    """Return layers [start, stop) with random weights, as one tensor-parallel rank holds them.

    UsageError when they do not fit into the device's memory.
    """
    weights = random_weights(dtype_of(dtype), torch.device(device), seed)
    try:
        return Stage(shard(spec, tensor_parallel), rope, start, stop, weights)
    except torch.OutOfMemoryError:
        raise UsageError(f"{spec.name}: {stop - start} layers do not fit; use fewer") from None


def write_config(spec: ModelSpec, path: Path) -> None:
    """Write the config.json of a model that `read_model` can read."""
    values = {
        "model_type": spec.family,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_epsilon,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "torch_dtype": "bfloat16" if spec.dtype_bytes == 2 else "float32",
    }
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_random(spec: ModelSpec, rope: Rope, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of random weights in float32, drawn on the CPU."""
    from safetensors.torch import save_file

    draw = random_weights(torch.float32, torch.device("cpu"), seed)
    tensors: dict[str, torch.Tensor] = {}

    def kept(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensors[name] = draw(name, shape)
        return tensors[name]

    Stage(spec, rope, 0, spec.num_layers, kept)
    save_file(tensors, str(folder / "model.safetensors"))
    write_config(spec, folder / "config.json")
