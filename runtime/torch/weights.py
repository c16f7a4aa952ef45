"""The weights of a stage: read from safetensors by name, or drawn at random in the same shapes.

Knows names, shapes and files; not what the tensors are for. Pickle is never read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from evenflow.errors import UsageError

Source = Callable[[str, tuple[int, ...]], Tensor]
"""Returns the tensor of that name; the shape is what the config.json asks for."""

INDEX = "model.safetensors.index.json"


def random_weights(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Source:
    """Return a source of random tensors that depend on `seed` and their name alone.

    Matrices are normal with the standard deviation of a fresh model (0.02), so that a model drawn
    stage by stage is the model drawn whole. Vectors are ones for norms and zeros for biases.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=dtype, device=device)
        generator = torch.Generator(device=device)
        generator.manual_seed(zlib.crc32(name.encode()) + seed)
        weights = torch.empty(shape, dtype=dtype, device=device)
        return weights.normal_(0.0, 0.02, generator=generator)

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
        """The names of all tensors."""
        return frozenset(self._file_of)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the source's dtype, on its device."""
        if name not in self._file_of:
            raise UsageError(f'{self.folder}: no tensor "{name}"; config.json asks for it')
        path = self._file_of[name]
        with _open(path) as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f'{path}: "{name}" is {list(tensor.shape)}; config.json asks for {list(shape)}'
            )
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
