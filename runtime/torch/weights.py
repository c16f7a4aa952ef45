"""A stage and its weights: from a model's folder (config.json and safetensors), or drawn at random.

Pickle is never read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.errors import UsageError, instead_of
from evenflow.runtime.torch.model import ALONE, Part, Ranks, Rope, Source, Stage
from evenflow.specs.huggingface import families
from evenflow.specs.model import listed, model
from evenflow.specs.modelspec import ModelSpec
from evenflow.specs.precision import DTYPE_BYTES

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
NOT_COMPUTED = {
    "deepseek": ("kv_lora_rank", "latent attention (measured, not served)"),
    "falcon": ("parallel_attn", "attention beside the MLP"),
    "gemma2": ("attn_logit_softcapping", "soft caps"),
    "gemma3": ("query_pre_attn_scalar", "norms after each block"),
    "gpt_oss": ("model_type", "attention sinks"),
    "minimax_m2": ("scoring_func", "a router of sigmoids"),
    "qwen2_moe": ("shared_expert_intermediate_size", "shared experts with a gate"),
}
"""Family -> a key of its config.json, and what it means that the torch model lacks."""
INDEX = "model.safetensors.index.json"


ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kind of RoPE scaling -> the keys it needs."""


def random_weights(dtype: torch.dtype, device: torch.device) -> Source:
    """Return a source of random tensors, each of which depends on its name alone.

    Matrices are normal with the standard deviation of a fresh model (0.02). A model drawn stage by
    stage, or in parts, is the model drawn whole. Vectors are ones for norms and zeros for biases.
    """

    def draw(name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=dtype, device=device)[part]
        generator = torch.Generator(device=device)
        generator.manual_seed(zlib.crc32(name.encode()))
        weights = torch.empty(shape, dtype=dtype, device=device)
        whole = weights.normal_(0.0, 0.02, generator=generator)
        return whole if whole[part].shape == whole.shape else whole[part].clone()

    return draw


class Checkpoint:
    """The tensors of a Hugging Face folder: model.safetensors, or shards with an index.

    UsageError names the file and the tensor: no safetensors, truncated, missing, another shape.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = device
        self._file_of = self._locate()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def __call__(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """Return a part of a tensor, which alone is read, in the source's dtype, on its device."""
        if name not in self._file_of:
            raise UsageError(f'{self.folder}: no tensor "{name}"; config.json asks for it')
        path = self._file_of[name]
        with _open(path) as file:
            whole = file.get_slice(name)
            if (found := whole.get_shape()) != list(shape):
                raise UsageError(f'{path}: "{name}" is {found}; config.json asks for {list(shape)}')
            tensor: Tensor = whole[part]
        return tensor.to(device=self.device, dtype=self.dtype)

    def _locate(self) -> dict[str, Path]:
        if (self.folder / INDEX).is_file():
            return self._from_index(self.folder / INDEX)
        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise UsageError(f"{self.folder}: no model.safetensors and no {INDEX}")
        with _open(path) as file:
            return dict.fromkeys(file.keys(), path)

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: self.folder / file for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f'{index}: no "weight_map" of names to files') from error
        absent = sorted(path.name for path in set(files.values()) if not path.is_file())
        if absent:
            raise UsageError(f"{index}: names {absent[0]}, which is not there")
        return files


def _open(path: Path):  # type: ignore[no-untyped-def]
    """Open a safetensors file; a damaged one is a UsageError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: truncated or not a safetensors file ({error})") from error


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name; UsageError lists the names."""
    if name not in DTYPES:
        raise UsageError(f"dtype: unknown {name!r}; {instead_of(name, DTYPES)}")
    return DTYPES[name]


def read_model(name_or_path: str | Path, *, timed: bool = False) -> tuple[ModelSpec, Rope]:
    """Return a model of the table, or of a config.json or the folder that holds one.

    Refuses what the torch model does not compute; UsageError names the file and the key. `timed`:
    what it does not serve but a profiler times with random weights is let through. That is latent
    attention, 8-bit floats, and any scaling of positions, which changes no time of a layer.
    """
    spec = model(name_or_path)
    require_runnable(spec, timed=timed)
    if listed(name_or_path):
        return spec, Rope(spec.rope_theta)
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    values = json.loads(file.read_text(encoding="utf-8"))
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f'{file}: "hidden_act" is {activation!r}; only "silu" can be run')
    windowed = {family.name for family in families().values() if family.full_every >= 0}
    for key in ("mlp_bias", "use_sliding_window"):
        if values.get(key) and not (key == "use_sliding_window" and spec.family in windowed):
            raise UsageError(f'{file}: "{key}" is set, and such models cannot be run')
    return spec, Rope(spec.rope_theta) if timed else _rope(file, values, spec.rope_theta)


def _rope(file: Path, values: dict[str, Any], theta: float) -> Rope:
    # transformers 5 renamed the mapping, and an early spelling of its kind was "type".
    scaling: dict[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        known = instead_of(kind, ROPE_KINDS)
        raise UsageError(f'{file}: RoPE scaling "{kind}" is not supported; {known}')
    for key in ROPE_KINDS[kind]:
        if not isinstance(scaling.get(key), (int, float)):
            raise UsageError(f'{file}: RoPE scaling "{kind}" needs a number "{key}"')
    return Rope(theta, kind, **{key: float(scaling[key]) for key in ROPE_KINDS[kind]})


def require_runnable(spec: ModelSpec, *, timed: bool = False) -> None:
    """Raise a UsageError unless the torch model computes such models, as they are stored."""
    latent = timed and spec.kv_lora_rank > 0 and spec.family == "deepseek"
    if spec.family not in FAMILIES and not latent:
        key, what = NOT_COMPUTED.get(spec.family, ("model_type", "layers of other kinds"))
        raise UsageError(
            f'{spec.name}: "{key}" in its config.json means {what}, which cannot be run; a model '
            f"of {', '.join(FAMILIES)} is right"
        )
    formats = ("", "fp8") if timed and not latent else ("",)
    if spec.quantization not in formats or spec.plain_attention or spec.plain_mlp:
        right = " or ".join((*DTYPES, *formats[1:]))
        raise UsageError(
            f'{spec.name}: "quantization_config" in its config.json means weights in '
            f"{spec.quantization}, which cannot be run; {right} is right"
        )


def load_stage(
    folder: str | Path,
    start: int,
    stop: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    ranks: Ranks = ALONE,
) -> Stage:
    """Load layers [start, stop) of the checkpoint in `folder`, as one of `ranks` holds them.

    UsageError when weights and config.json do not belong together, or a file is damaged.
    """
    spec, rope = read_model(folder)
    weights = Checkpoint(folder, dtype_of(dtype), torch.device(device))
    asked: set[str] = set()

    def recorded(name: str, shape: tuple[int, ...], part: Part) -> torch.Tensor:
        asked.add(name)
        return weights(name, shape, part)

    stage = Stage(spec, rope, start, stop, recorded, ranks=ranks)
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
    ranks: Ranks = ALONE,
) -> Stage:
    """Return layers [start, stop) with random weights, as one of `ranks` holds them.

    UsageError when they do not fit into the device's memory.
    """
    weights = random_weights(dtype_of(dtype), torch.device(device))
    try:
        return Stage(spec, rope, start, stop, weights, ranks=ranks)
    except torch.OutOfMemoryError:
        raise UsageError(f"{spec.name}: {stop - start} layers do not fit; use fewer") from None
