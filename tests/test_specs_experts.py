"""Mixtures of experts from config.json: sizes against published ones, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenflow.specs.model import ModelSpec, model
from tests.test_specs import refused, written

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("values", "name"), [(MIXTRAL, "Mixtral-8x7B"), (QWEN3_MOE, "Qwen3-30B-A3B")]
)
def test_mixtures_of_experts_are_read(tmp_path: Path, values: Any, name: str) -> None:
    parsed = ModelSpec.from_config_json(written(tmp_path, values))
    assert replace(parsed, name=name) == model(name)


def test_a_shared_expert_is_counted_as_published_for_qwen2_moe(tmp_path: Path) -> None:
    parsed = ModelSpec.from_config_json(written(tmp_path, QWEN2_MOE))
    assert parsed.num_parameters / 1e9 == pytest.approx(14.3, rel=2e-3)
    assert parsed.active_parameters / 1e9 == pytest.approx(2.7, rel=0.02)


def test_active_parameters_are_those_published() -> None:
    assert model("Mixtral-8x7B").active_parameters / 1e9 == pytest.approx(12.9, rel=2e-3)
    assert model("Qwen3-30B-A3B").active_parameters / 1e9 == pytest.approx(3.3, rel=0.02)
    dense = model("Qwen2.5-32B")
    assert dense.active_parameters == dense.num_parameters


def test_the_mlp_of_a_mixture_is_its_shared_one_and_the_router_is_whole() -> None:
    spec = model("Mixtral-8x7B")
    assert spec.linear_shapes(2) == ((4096, 3072), (2048, 4096), (4096, 8))
    assert spec.expert_shapes(2) == ((4096, 14336), (7168, 4096))
    shared = replace(spec, shared_intermediate_size=100)
    assert shared.linear_shapes()[2:] == ((4096, 200), (100, 4096), (4096, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, 'the key "num_experts" is missing'),
        ({"num_experts_per_tok": 0}, '"num_experts_per_tok" is 0; it must be a whole number'),
        ({"num_experts_per_tok": 129}, "experts_per_token is 129; there are only 128 experts"),
        ({"mlp_only_layers": [0]}, "some layers have no experts (mlp_only_layers, decoder_sparse"),
        ({"decoder_sparse_step": 2}, "all layers must be alike"),
        ({"moe_intermediate_size": None}, 'the key "moe_intermediate_size" is missing'),
    ],
)
def test_a_wrong_mixture_names_the_key(tmp_path: Path, change: Any, message: str) -> None:
    with refused(message):
        ModelSpec.from_config_json(written(tmp_path, QWEN3_MOE | change))
