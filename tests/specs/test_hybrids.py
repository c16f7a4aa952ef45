"""Models of several kinds of layers: read, counted, and refused where nothing has their times."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.build import build
from evenflow.config.run import RunConfig
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec
from tests.command_line import evenflow
from tests.configs import CONFIGS, read
from tests.profiles import deployed

LINEAR = CONFIGS["qwen3_5"]


@pytest.mark.parametrize("name", ["MiniMax-M3", "Nemotron-3-Super-120B-A12B"])
def test_modules_without_weights_or_unlike_any_layer_predict_nothing(name: str) -> None:
    with pytest.raises(UsageError, match="has no layer that predicts further tokens"):
        model(name).mtp()


def test_layers_of_a_hybrid_keep_tokens_or_a_state(tmp_path: Path) -> None:
    spec = read(tmp_path, LINEAR)
    (linear, full), (many, few) = zip(*spec.kinds().items(), strict=True)
    assert (many, few) == (6, 2)
    assert (linear.kv_token_bytes(), full.kv_token_bytes()) == (0, 2 * 2 * 16 * 2)
    state = 4 * 8 * 8 * 4 + (2 * 2 * 8 + 4 * 8) * 3 * 2
    assert (linear.state_bytes(), linear.state_bytes(2), full.state_bytes()) == (
        state,
        state / 2,
        0,
    )
    assert spec.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2


def test_a_stage_keeps_what_its_own_layers_do(tmp_path: Path) -> None:
    on = deployed(read(tmp_path, LINEAR), "L40S", [3, 5])
    assert [on.kv_bytes_per_token(stage) for stage in (0, 1)] == [0, 2 * 2 * 2 * 16 * 2]
    assert on.state_bytes(0) == on.state_bytes(1)


def test_states_of_all_seats_are_set_apart_from_the_pages() -> None:
    few = deployed("Qwen3.5-27B", "H100", ranks=2, logits_rows=1)
    many = deployed("Qwen3.5-27B", "H100", ranks=2, logits_rows=101)
    pages = 100 * few.state_bytes(0) / (16 * few.kv_bytes_per_token(0))
    logits = 100 * few.model.vocab_size * 6 / (16 * few.kv_bytes_per_token(0))
    assert few.kv_pages() - many.kv_pages() == pytest.approx(pages + logits, abs=2)


def test_compressed_and_indexed_attention_keep_few_bytes_a_token() -> None:
    """vLLM's own specs are the same: `python -m tools.vllm_kv` on the models' files."""
    indexed, compressed = model("DeepSeek-V3.2"), model("DeepSeek-V4-Flash", kv_dtype="bfloat16")
    assert indexed.kv_bytes_per_token() == 61 * (2 * (512 + 64) + 128 + 4)
    picked, coarse = 2 * 512 / 4 + (128 + 4) / 4, 2 * 512 / 128
    assert compressed.kv_bytes_per_token() == 21 * picked + 20 * coarse
    kept = sum(n * kind.state_bytes(8) for kind, n in compressed.kinds().items())
    pending = 21 * 8 * 4 * (2 * 512 + 2 * 128) * 2 + 20 * 128 * 4 * 2 * 512
    assert kept == 43 * 128 * 512 * 2 + pending
    small = model("DeepSeek-V4-Flash")
    assert small.kv_bytes_per_token() == int(21 * (584 + 132) / 4 + 20 * 584 / 128)
    assert sum(n * kind.state_bytes(8) for kind, n in small.kinds().items()) == (
        43 * 128 * 584 + pending
    )


def test_a_kind_that_is_not_known_is_named(tmp_path: Path) -> None:
    values = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "lru"]}
    wrong = LINEAR | values | {"num_hidden_layers": 2, "sliding_window": 64}
    with pytest.raises(UsageError, match=r"layer_types.*a list of 2, one a layer, of sliding"):
        read(tmp_path, wrong)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_types": ["full_attention"] * 7}, "says 7 layers one by one, and has 8"),
        ({"layer_types": 3}, "the layers cannot be read"),
        ({"linear_num_key_heads": "2"}, "linear_num_key_heads.*whole number"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MXMMMMMM"}
            | dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups"), 1)
            | dict.fromkeys(("ssm_state_size", "conv_kernel"), 1),
            "the layers cannot be read, for 'X'",
        ),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": "4"}}
            | dict.fromkeys(("v_head_dim", "num_experts", "num_experts_per_token"), 1),
            '"num_heads" is .4.; a whole number',
        ),
    ],
)
def test_layers_that_make_no_sense_are_a_line(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        read(tmp_path, LINEAR | values)
    assert "\n" not in str(refused.value)


def test_a_roofline_names_the_layers_that_it_has_no_formula_for(tmp_path: Path) -> None:
    from evenflow.costs import RooflineCost

    spec = read(tmp_path, LINEAR)
    with pytest.raises(UsageError, match=r"no formula for gated_delta layers.*aiconfigurator"):
        RooflineCost(deployed(spec, "L40S"))


class ThreeOrOne:
    """Seconds of a stage: three for a layer of attention, one for another."""

    def __init__(self, deployment: Deployment, *_: object) -> None:
        stages = map(deployment.kinds, range(deployment.depth))
        self.seconds = [
            sum(n * (1 if kind.mixer else 3) for kind, n in at.items()) for at in stages
        ]

    def times(self, batch: object) -> list[int]:
        return self.seconds

    def transfer_bytes(self, batch: object) -> float:
        return 0.0


def test_stages_of_a_hybrid_are_balanced_by_the_seconds_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.costs.aiconfigurator.cost.engine_cost", ThreeOrOne)
    monkeypatch.setattr("evenflow.costs.aiconfigurator.cost.facts", lambda *_: {})
    read(tmp_path, LINEAR | {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 6})
    run = {"model": str(tmp_path), "gpu": "H100", "stages": 2, "costs": "aiconfigurator"}
    run |= {"split": "balanced", "scheduler": "sarathi", "workload": {"trace": "sharegpt-sample"}}
    built = build(RunConfig.model_validate(run), tmp_path)
    assert built.deployment["layers_per_stage"] == [2, 6]


def test_models_prints_what_a_config_is_read_as(tmp_path: Path) -> None:
    read(tmp_path, LINEAR)
    shown = " ".join(evenflow("models", "--from-config", str(tmp_path))[1].split())
    for words in ("gated_delta", "6", "KV: 256 bytes a token", "Precision: 16 bits"):
        assert words in shown


UNREAD = {
    "nvidia--Qwen3.6-27B-NVFP4": "one format",
}
OWN_FORMATS = {
    "deepseek-ai--DeepSeek-V4-Flash": ("fp8_block", "mxfp4"),
    "nvidia--DeepSeek-V4-Flash-NVFP4": ("fp8_block", "nvfp4"),
    "nvidia--MiniMax-M3-NVFP4": ("mxfp8", "nvfp4"),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": ("fp8", "nvfp4_wo"),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": ("fp8", "nvfp4_wo"),
}
"""The formats of all else and of the experts, where these are two."""


def test_all_configs_of_the_package_are_read_but_those_of_other_formats(tmp_path: Path) -> None:
    package = pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    folder, refused, own = Path(package.__file__).parent / "model_configs", {}, {}
    paths = [path for path in folder.glob("*_config.json") if "_hf_quant_" not in path.name]
    for path in paths:
        name = path.name.removesuffix("_config.json")
        shutil.copy(path, tmp_path / "config.json")
        said = path.with_name(f"{name}_hf_quant_config.json")
        (tmp_path / "hf_quant_config.json").write_text(said.read_text() if said.is_file() else "{}")
        try:
            spec = ModelSpec.from_config_json(tmp_path)
        except UsageError as error:
            refused[name] = str(error)
            continue
        if spec.expert_quantization:
            own[name] = (spec.quantization, spec.expert_quantization)
            assert not spec.plain_attention
    assert OWN_FORMATS.items() <= own.items()
    assert refused.keys() == UNREAD.keys()
    assert all(words in refused[name] for name, words in UNREAD.items())
    assert len(paths) - len(refused) >= 88
