"""The config.json of some layers of a model, as AIConfigurator's engine reads it.

Written from the shape where the family is plain. Else it has the first layers of the user's file,
or of the package's. Knows no seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenflow.costs.silicon.tables import package_folder
from evenflow.errors import UsageError
from evenflow.specs.model import kept_config
from evenflow.specs.modelspec import ModelSpec

QUANT = "hf_quant_config"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
}
"""Family -> the architecture of which the engine has a model class."""


def config_of(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a model of several kinds of layers: the user's, or the package's.

    UsageError where there is neither.
    """
    folder = package_folder() / "model_configs"
    name = model.source.replace("/", "--")
    paths = [Path(model.source), folder / f"{name}_config.json", kept_config(model.source)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"costs: aiconfigurator has no config.json of {model.name}; give the path of one as "
            "the model"
        )
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    said = path.with_name(path.name.replace("config", QUANT))
    if said.is_file():
        config[QUANT] = json.loads(said.read_text(encoding="utf-8"))
    return config


def first_layers(config: Mapping[str, Any], layers: int, count: int) -> dict[str, Any]:
    """Return the config.json of the first `count` of `layers` layers."""
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": first_layers(config["text_config"], layers, count)}
    cut = {key: _first(value, layers, count) for key, value in config.items()}
    linear = cut.get("linear_attn_config")
    if isinstance(linear, dict):
        cut["linear_attn_config"] = linear | {
            key: [layer for layer in linear[key] if layer <= count]
            for key in ("kda_layers", "full_attn_layers")
        }
    dense = min(cut.get("first_k_dense_replace") or 0, count)
    more = {"first_k_dense_replace": dense} if "first_k_dense_replace" in cut else {}
    return cut | more | {"num_hidden_layers": count, "num_nextn_predict_layers": 0}


def _first(value: Any, layers: int, count: int) -> Any:
    """Return the part of a value by layer, layers of further tokens included."""
    by_layer = isinstance(value, list | str) and layers <= len(value) <= layers + 8
    return value[:count] if by_layer and layers > 1 else value


def written(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of one layer of a plain model; UsageError for other families."""
    if model.family not in ARCHITECTURES:
        raise UsageError(
            f"costs: aiconfigurator has no {model.family} models, of which {model.name} is one; "
            "costs: roofline is right"
        )
    config = {
        "architectures": [ARCHITECTURES[model.family]],
        "num_hidden_layers": 1,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
    }
    if model.num_experts:
        columns = model.expert_intermediate_size
        config |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": columns,
            "n_shared_experts": model.shared_intermediate_size // columns,
        }
    if model.kv_lora_rank:
        config |= {
            "kv_lora_rank": model.kv_lora_rank,
            "q_lora_rank": model.q_lora_rank,
            "qk_nope_head_dim": model.head_dim,
            "qk_rope_head_dim": model.qk_rope_head_dim,
            "v_head_dim": model.v_head_dim,
        }
    return config
