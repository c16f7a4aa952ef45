"""The keys of a Hugging Face config.json, checked; every error names the file and the key.

A key that is left out is as in transformers (`defaults.json`), but for a model's SIZES. Knows
nothing of what a key means.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, is_count, once
from evenflow.files import require_file
from evenflow.specs.quantization import mapping

TEXT = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""`model_type` of a multimodal model -> that of its `text_config`, where the file does not say."""

BESIDE_TEXT = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Keys that hold for `text_config`, too, where they stand beside it."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""What transformers writes of every model; a `text_config` alone leaves out what is by default."""

BESIDE = "hf_quant_config.json"
"""Where NVIDIA's older checkpoints say how they are quantised, and nowhere else."""


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; UsageError names the file."""
    require_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a JSON file ({error})") from error
    except RecursionError:
        raise UsageError(f"{path}: nested too deep") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds no JSON object; a config.json of a model is one")
    return values


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Return what transformers takes for keys that a file leaves out, by `model_type`.

    From the configuration classes of transformers 5.23.0; `rope_theta` is their `default_theta`.
    Of kimi_k2, mimo and Falcon's first spelling it has none; of hybrids only Qwen3.5's are here.
    """
    return dict(json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")))


class ConfigJson:
    """The keys of a model's text in a config.json."""

    def __init__(self, path: Path) -> None:
        self.path = path / "config.json" if path.is_dir() else path
        values = _object(self.path)
        said = self.path.with_name(BESIDE)
        if not values.get("quantization_config"):
            values["quantization_config"] = values.get("compression_config")
            if self.path.name == "config.json" and said.is_file():
                values["quantization_config"] = _object(said).get("quantization")
        text = TEXT.get(str(values.get("model_type")))
        reading = mapping(values.get("text_config"))
        if reading or (text and "hidden_size" not in values):
            beside = {key: values[key] for key in BESIDE_TEXT if key in values}
            values = {"model_type": text or values.get("model_type")} | beside | reading
        self.values: dict[str, Any] = values
        defaults = _defaults().get(str(values.get("model_type")), {})
        needed = () if reading else SIZES
        self.defaults = {key: said for key, said in defaults.items() if key not in needed}
        self._missing: list[str] = []

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first key that is there and not null.

        `default` where all are null, and where they are left out and transformers has none.
        """
        said = self.values if any(key in self.values for key in keys) else self.defaults
        return next((said[key] for key in keys if said.get(key) is not None), default)

    def count(self, *keys: str, default: int | None = None) -> int:
        """Return a whole number above 0 under the first of `keys` that is there.

        What is missing is kept for `require_all`, so that one line names all of it.
        """
        value = self.get(*keys, default=default)
        if value is None:
            self._missing.append(f'"{keys[0]}"')
            return 1
        return int(self._right(keys[0], value, is_count(value), "a whole number, 1 or above"))

    def whole(self, key: str, default: int = 0) -> int:
        """Return a whole number, 0 or above; 0 also for null."""
        value = self.get(key, default=default)
        is_whole = type(value) is int and value >= 0
        return int(self._right(key, value, is_whole, "a whole number, 0 or above"))

    def require_all(self) -> None:
        """Raise UsageError that names every count that was asked for and is not there."""
        keys = ", ".join(dict.fromkeys(self._missing))
        if len(set(self._missing)) == 1:
            raise UsageError(f"{self.path}: the key {keys} is missing")
        if keys:
            raise UsageError(f"{self.path}: the keys {keys} are missing")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default=default)
        return bool(self._right(key, value, isinstance(value, bool), "true or false"))

    def listed(self, key: str, known: Any, layers: int) -> list[Any]:
        """Return the first `layers` values of a list, all of them among `known` (None: any)."""
        found = self.get(key)
        kept = found[:layers] if isinstance(found, list) else []
        is_right = len(kept) == layers and (known is None or all(one in known for one in kept))
        some = "" if known is None else f", of {', '.join(map(str, known))}"
        right = f"a list of {layers}, one a layer{some}"
        return list(self._right(key, found, is_right, right))[:layers]

    def plain_layers(self) -> list[Any]:
        """Return the numbers of layers that have an MLP alone."""
        said = self.get("mlp_only_layers", default=[])
        return list(self._right("mlp_only_layers", said, isinstance(said, list), "a list"))

    def number(self, value: Any, key: str) -> float:
        is_above = type(value) in (int, float) and value > 0
        return float(self._right(key, value, is_above, "a number above 0"))

    def _right(self, key: str, value: Any, is_right: bool, what: str) -> Any:
        if not is_right:
            raise UsageError(f'{self.path}: "{key}" is {value!r}; it must be {what}')
        return value
