"""Models, GPUs, links, deployments: published numbers, some counted by hand, every refusal."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenflow.config.parts import RuntimeConfig
from evenflow.errors import UsageError
from evenflow.runtimes import RuntimeName, RuntimeOverheads, runtimes
from evenflow.specs import quantization
from evenflow.specs.deployment import split_layers
from evenflow.specs.gpu import GIB, GpuSpec, LinkSpec, gpu, gpus, link
from evenflow.specs.hybrids import READERS
from evenflow.specs.model import listed, model, models
from evenflow.specs.modelspec import ModelSpec, in_precision
from evenflow.specs.precision import FORMATS
from evenflow.specs.tables import read_rows
from tests.command_line import refused
from tests.configs import CONFIGS, read, written
from tests.profiles import deployed

QWEN, OLD_FALCON, GLM = (CONFIGS[name] for name in ("qwen2", "falcon", "glm"))
QWEN2_MOE, QWEN3_MOE = CONFIGS["qwen2_moe"], CONFIGS["qwen3_moe"]


# ---- models


with Path(__file__).with_name("published.csv").open(encoding="utf-8") as table:
    PUBLISHED = list(csv.DictReader(table))
"""As their publishers state them, written down from memory; tied ones count once. GLM, Gemma 3,
Ministral 3 and models of unlike layers: of transformers 5.23 on its meta device, text alone, but
for Kimi-K3 and Step-3.7, which it does not build. What is checked against files at hand are the
shapes: `aiconfigurator_keeps`, below."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
def test_parameter_counts_are_those_published(row: dict[str, str]) -> None:
    billions, within = float(row["billions"]), float(row["within"])
    assert models()[row["name"]].num_parameters / 1e9 == pytest.approx(billions, rel=within)


def test_every_model_of_alike_layers_has_a_published_count() -> None:
    plain = {name for name, spec in models().items() if spec.family not in READERS}
    assert plain <= {row["name"] for row in PUBLISHED}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-2-70b-chat-hf", "Llama2-70B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("google/gemma-4-31B-it", "Gemma-4-31B"),
        ("Qwen/Qwen3.5-27B", "Qwen3.5-27B"),
        ("Qwen/Qwen3.6-27B", "Qwen3.6-27B"),
        ("zai-org/GLM-5.1", "GLM-5.1"),
    ],
)
def test_models_go_by_the_names_that_people_write(written: str, name: str) -> None:
    assert model(written) == models()[name]


@pytest.mark.parametrize(
    ("written", "name", "quantization"),
    [
        ("Qwen/Qwen3-32B-FP8", "Qwen3-32B", "fp8_block"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "Llama-3.1-8B", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "Llama-3.3-70B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen2.5-72B", "int4_wo"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen2.5-7B", "int8_wo"),
        ("deepseek-ai/DeepSeek-V3-FP8", "DeepSeek-V3", "fp8_block"),
    ],
)
def test_the_end_of_a_name_says_the_format(written: str, name: str, quantization: str) -> None:
    assert model(written) == replace(models()[name], quantization=quantization)


def test_a_folder_goes_before_the_table_unless_it_has_the_very_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen3-32B", "Qwen3-32B"):
        Path(name).mkdir(parents=True)
        written(Path(name), QWEN)
    assert model("Qwen/Qwen3-32B").attention_bias
    assert not model("Qwen3-32B").attention_bias


def test_the_table_has_the_shapes_of_the_config_files_that_aiconfigurator_keeps() -> None:
    package = pytest.importorskip("aiconfigurator_core")
    folder = Path(package.__file__).parent / "model_configs"
    names = {
        path: path.stem.removesuffix("_config").replace("--", "/") for path in folder.iterdir()
    }
    known = {path: name for path, name in names.items() if listed(name)}
    assert len(known) > 10
    for path, name in known.items():
        spec = ModelSpec.from_config_json(path)
        beside = path.with_name(path.name.replace("_config", "_hf_quant_config"))
        if beside.exists():  # where NVIDIA's checkpoints said it first
            said = json.loads(beside.read_text())["quantization"]["quant_algo"]
            spec = spec.changed(quantization=said.lower())
        assert spec.changed(name=model(name).name) == model(name)


def test_kv_of_llama_30b_is_what_td_pipe_states() -> None:
    spec = model("Llama-30B")
    assert spec.kv_bytes_per_token() / 2**20 == pytest.approx(1.52, abs=0.005)
    assert 400 * 300 * spec.kv_bytes_per_token() / GIB == pytest.approx(178, rel=0.01)


def test_tensor_parallel_ranks_share_the_matrices() -> None:
    spec = model("Llama2-70B")
    assert sum(i * o for i, o in spec.linear_shapes(4)) * 4 == sum(
        i * o for i, o in spec.linear_shapes()
    )


def test_kv_heads_are_replicated_when_ranks_outnumber_them() -> None:
    spec = model("Llama-3.1-8B")
    assert [spec.local_kv_heads(ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert spec.kv_bytes_per_token(32, 16) == spec.kv_bytes_per_token(32, 8)


def test_unknown_model_suggests_the_nearest() -> None:
    with refused('unknown model "Qwen2.5-32", and no such file; did you mean "Qwen2.5-32B"?'):
        model("Qwen2.5-32")


# ---- config.json


def test_a_config_file_gives_the_model_of_the_table(tmp_path: Path) -> None:
    parsed = read(tmp_path, QWEN)
    assert replace(parsed, name="Qwen2.5-32B") == model("Qwen2.5-32B")
    assert model(tmp_path) == parsed
    assert parsed.name == tmp_path.name


def test_the_spelling_of_transformers_5_is_the_same_model(tmp_path: Path) -> None:
    newer = {key: value for key, value in QWEN.items() if key not in {"rope_theta", "torch_dtype"}}
    newer |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    old = read(tmp_path, QWEN)
    assert read(tmp_path, newer) == old


def test_both_spellings_of_falcon_are_the_model_of_the_table(tmp_path: Path) -> None:
    newer = OLD_FALCON | {"model_type": "falcon", "num_attention_heads": 232, "num_kv_heads": 8}
    newer = newer | {"num_hidden_layers": 80, "n_head": None, "n_head_kv": None, "n_layer": None}
    for values in (OLD_FALCON, newer):
        parsed = read(tmp_path, values)
        assert replace(parsed, name="Falcon-180B") == model("Falcon-180B")


def test_multi_query_falcon_has_one_kv_head(tmp_path: Path) -> None:
    values = OLD_FALCON | {"new_decoder_architecture": False, "n_head_kv": None}
    assert read(tmp_path, values).num_kv_heads == 1


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    values = {key: QWEN[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    values |= {"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 2}
    parsed = read(tmp_path, values)
    assert (parsed.num_kv_heads, parsed.head_dim, parsed.dtype_bytes) == (32, 160, 4)
    assert (parsed.tie_word_embeddings, parsed.attention_bias) == (False, False)
    assert parsed.rope_theta == 10000.0


DEFAULTS = json.loads(
    (Path(quantization.__file__).parent / "defaults.json").read_text(encoding="utf-8")
)


@pytest.mark.slow
def test_what_a_file_leaves_out_is_what_transformers_declares() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    for model_type, known in DEFAULTS.items():
        declared: dict[str, Any] = {}
        for cls in reversed(auto.CONFIG_MAPPING[model_type].__mro__):
            declared |= vars(cls)
        theta = declared["default_theta"]
        declared["rope_theta"] = theta["global"] if isinstance(theta, dict) else theta
        assert {key: declared[key] for key in known} == known


def test_the_text_of_a_model_that_sees_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    """The keys of gemma-3-4b-it, llava-1.5-7b and pixtral-12b as the hub has them."""
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    gemma |= {"num_hidden_layers": 34, "sliding_window": 1024}
    vicuna = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    pixtral = {
        "hidden_size": 5120,
        "head_dim": 128,
        "num_hidden_layers": 40,
        "model_type": "mistral",
    }
    pixtral |= {"num_key_value_heads": 8, "vocab_size": 131072, "sliding_window": None}
    for kind, text, billions, kv_heads in (
        ("gemma3", gemma, 3.88, 4),
        ("llava", vicuna, 6.74, 32),
        ("llava", pixtral, 12.25, 8),
    ):
        file = written(tmp_path, {"model_type": kind, "text_config": text, "dtype": "bfloat16"})
        spec = model(file)
        assert spec.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
        assert (spec.num_kv_heads, spec.dtype_bytes) == (kv_heads, 2)
    assert model(file).sliding_window == 0  # null is no default


HYBRID = QWEN3_MOE | {"num_hidden_layers": 4, "model_type": "zamba2"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["conv", "full_attention"] * 2}, "(2 of 4 layers are conv, which is not"),
        ({"layer_types": ["a\nb", "full"] * 2}, "(2 of 4 layers are a b, which is not"),
        ({"full_attention_interval": 4}, "(3 of 4 layers are linear_attention, which is not"),
        ({"attn_type_list": [0, 1, 1, 0]}, "(2 of 4 layers are linear_attention, which is not"),
        ({"mamba_d_state": 16}, '(has layers with "mamba_d_state", which is not modelled)'),
        ({"model_type": "deepseek_v9", "index_topk": 2048}, 'has layers with "index_topk"'),
        ({"model_type": "qwen3_moe", "layer_types": ["mamba"] * 4}, "4 of 4 layers are mamba"),
    ],
)
def test_layers_that_are_not_modelled_are_named(tmp_path: Path, change: Any, words: str) -> None:
    with refused(words) as raised:
        model(written(tmp_path, HYBRID | change))
    assert "did you mean" not in str(raised.value)


def test_a_shared_expert_is_counted_as_published_for_qwen2_moe(tmp_path: Path) -> None:
    parsed = read(tmp_path, QWEN2_MOE)
    assert parsed.num_parameters / 1e9 == pytest.approx(14.3, rel=2e-3)
    assert parsed.active_parameters / 1e9 == pytest.approx(2.7, rel=0.02)


FLASH = {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"] + ["sparse"] * 46}
PHI = {"model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "vocab_size": 100352}
PHI |= {"num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 17920}
SERVED = [(GLM, 356.8, 33.6), (FLASH, 29.9, 3.9), (PHI, 14.66, 14.66)]
SERVED += [({"model_type": "smollm3"}, 3.08, 3.08)]
SERVED += [({"model_type": "seed_oss", "hidden_size": 5120}, 36.2, 36.2)]


@pytest.mark.parametrize(("values", "billions", "active"), SERVED)
def test_glm_phi_and_others_have_the_parameters_of_their_code(
    tmp_path: Path, values: Any, billions: float, active: float
) -> None:
    """GLM-4.5, GLM-4.7-Flash, Phi-4, SmolLM3 and Seed-OSS-36B; those of MTP count."""
    spec = model(written(tmp_path, {"text_config": values}))
    more = spec.mtp().layer_parameters() if spec.mtp_layers else 0
    assert (spec.num_parameters + more) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert spec.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_active_parameters_are_those_published() -> None:
    assert model("Mixtral-8x7B").active_parameters / 1e9 == pytest.approx(12.9, rel=2e-3)
    assert model("Qwen3-30B-A3B").active_parameters / 1e9 == pytest.approx(3.3, rel=0.02)
    assert model("Qwen3-235B-A22B").active_parameters / 1e9 == pytest.approx(22, rel=0.01)
    assert model("Mixtral-8x22B").active_parameters / 1e9 == pytest.approx(39, rel=5e-3)
    for name, billions in (("DeepSeek-V2", 21), ("DeepSeek-V3", 37), ("Kimi-K2", 32)):
        assert model(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.03)
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        spec = model(name)  # the card leaves the embedding out
        active = spec.active_parameters - spec.embedding_parameters
        assert active / 1e9 == pytest.approx(billions, rel=2e-3)
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
        (
            {"model_type": "mixtrl"},
            '"model_type" is \'mixtrl\', not supported; did you mean "mixtral"',
        ),
        ({"model_type": None}, '"model_type" is None, not supported; '),
        ({"model_type": "gemma3"}, "\"model_type\" is 'gemma3', not supported; "),  # no text_config
        ({"hidden_size": None}, 'the key "hidden_size" is missing'),
        (
            {"hidden_size": None, "vocab_size": None, "num_hidden_layers": None},
            'the keys "num_hidden_layers", "hidden_size", "vocab_size" are missing',
        ),
        ({"hidden_size": 5121}, '"hidden_size" 5121 is no multiple of 40 heads; add "head_dim"'),
        ({"num_hidden_layers": -1}, '"num_hidden_layers" is -1; it must be a whole number'),
        ({"num_hidden_layers": "64"}, "\"num_hidden_layers\" is '64'; it must be a whole number"),
        ({"vocab_size": 1.5}, '"vocab_size" is 1.5; it must be a whole number'),
        ({"torch_dtype": "int4"}, "\"torch_dtype\" is 'int4', not supported; "),
        ({"rope_theta": -1}, '"rope_theta" is -1; it must be a number above 0'),
        ({"tie_word_embeddings": "no"}, "\"tie_word_embeddings\" is 'no'; it must be true or"),
        ({"num_key_value_heads": 7}, "7 KV heads do not divide 40 heads"),
        ({"num_experts": None}, 'the key "num_experts" is missing'),
        ({"num_experts_per_tok": 0}, '"num_experts_per_tok" is 0; it must be a whole number'),
        ({"num_experts_per_tok": 129}, "experts_per_token is 129; there are only 128 experts"),
        ({"mlp_only_layers": 3}, '"mlp_only_layers" is 3; it must be a list'),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers; 10000 at most are right"),
        ({"decoder_sparse_step": 49}, '"decoder_sparse_step" is 49; of 48 layers some must have'),
        ({"moe_intermediate_size": None}, 'the key "moe_intermediate_size" is missing'),
    ],
)
def test_a_wrong_config_names_the_key(tmp_path: Path, change: Any, message: str) -> None:
    dense = change.keys() <= QWEN.keys()
    with refused(message):
        read(tmp_path, (QWEN if dense else QWEN3_MOE) | change)


@pytest.mark.parametrize(
    ("values", "lack"),
    [
        ({"num_key_value_heads": 8}, '"num_attention_heads", "num_hidden_layers", "hidden_size"'),
        ({key: QWEN[key] for key in ("num_hidden_layers", "vocab_size")}, '"hidden_size" are miss'),
    ],
)
def test_a_model_does_not_leave_its_size_to_defaults(
    tmp_path: Path, values: Any, lack: str
) -> None:
    with refused(lack):
        model(written(tmp_path, {"model_type": "llama"} | values))


def grouped(*groups: Any, **beside: Any) -> dict[str, Any]:
    """Return what compressed-tensors says of groups: bits, type, and bits of inputs if any."""
    named = {}
    for number, (bits, kind, inputs, more) in enumerate(groups):
        weights = {"num_bits": bits, "type": kind, **more}
        acts = inputs and {"num_bits": inputs, "type": kind}
        targets = more.get("targets", ["Linear"])
        named[f"group_{number}"] = {
            "weights": weights,
            "input_activations": acts,
            "targets": targets,
        }
    return {"quant_method": "compressed-tensors", "config_groups": named, **beside}


FP8 = {"quant_algo": "FP8"}
MLP, SELF = {"targets": ["re:.*mlp.*"]}, {"targets": ["re:.*self_attn.*"]}


@pytest.mark.parametrize(
    ("said", "quantization"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "FP8", "config_groups": {}}, "fp8"),
        ({"quant_algo": None, "kv_cache_quant_algo": None}, ""),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
            "fp8",
        ),
        ({"quant_method": "awq", "bits": 4}, "int4_wo"),
        ({"quant_method": "gptq", "bits": 8}, "int8_wo"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "int"}, "int4_wo"),
        (grouped((4, "int", None, {})), "int4_wo"),
        (grouped((4, "int", None, {"group_size": 32})), "int4_wo_32"),
        (grouped((4, "int", None, {"group_size": 128})), "int4_wo"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4_wo_32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4_wo"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "int8_wo"),
        (grouped((8, "int", 8, {})), "int8"),
        (grouped((4, "float", 4, {"group_size": 16})), "nvfp4"),
        (grouped((4, "float", None, {"group_size": 16})), "nvfp4_wo"),
        (grouped((4, "float", 4, {"group_size": 32})), "mxfp4"),
        (grouped((4, "float", None, {}), format="mxfp4-pack-quantized"), "mxfp4_wo"),
        (grouped((8, "float", 8, {"strategy": "channel"})), "fp8"),
        (grouped((8, "float", 8, {"strategy": "block"})), "fp8_block"),
        (grouped((8, "float", 8, {"strategy": "group", "group_size": 32})), "mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8"),
        (grouped((8, "float", None, {})), "fp8_wo"),
        (grouped((8, "float", 8, MLP), (8, "float", 8, SELF)), "fp8"),
    ],
)
def test_a_quantised_checkpoint_is_read(tmp_path: Path, said: Any, quantization: str) -> None:
    file = written(tmp_path, QWEN | {"quantization_config": said})
    assert ModelSpec.from_config_json(file).quantization == quantization


UNREAD: list[tuple[Any, str, str]] = [
    (grouped((4, "float", 4, MLP), (8, "float", 8, SELF)), '"group_1" is fp8 beside', "fp8"),
    (grouped((8, "float", 8, SELF), (4, "float", 4, MLP)), '"group_1" is nvfp4 beside', "fp8"),
    (grouped((4, "int", 8, {})), "weights in 4 bits of int with inputs in 8 bits", "int4_wo"),
    (grouped((8, "float", 8, {"strategy": "group", "group_size": 64})), "8 bits of float", "fp8"),
    (grouped((8, "float", 8, {}), sparsity_config={"sparsity_structure": "2:4"}), "'2:4'", "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "blocks of [1, 32]", "fp8_block"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is none of", "int4_wo"),
    ({"quant_algo": "MIXED_PRECISION"}, 'has no "quantized_layers"', "bfloat16"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {}}}, '"dynamic" has formats', "int4_wo"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "fp"}, "bits of fp", "int4_wo"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
        "only",
        "int4_wo",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "t": "fp4"},
        "only fp8, fbgemm_fp8, ",
        "int8_wo",
    ),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "'torchao'", "int4_wo"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8Dy"}}}, "only", "fp8"),
    ({"quant_method": "quark", "global": {"weight": {"dtype": "fp8_e4m3"}}}, "only", "fp8"),
    ({"quant_method": "quark", "global": {"weight": {"dtype": "fp4e8m0"}}}, "only", "mxfp4"),
    ({"quant_method": "aqlm"}, "'aqlm': only", "bfloat16"),
    (grouped((4, "in\nt", 4, {})), "weights in 4 bits of in t", "int4_wo"),
]


@pytest.mark.parametrize(("said", "words", "stand_in"), UNREAD)
def test_what_is_not_read_has_a_dtype_that_stands_in(
    tmp_path: Path, said: Any, words: str, stand_in: str
) -> None:
    file = written(tmp_path, QWEN | {"quantization_config": said})
    with refused(words):
        model(file)
    with refused(f"; dtype: {stand_in} in the run stands in for it"):
        model(file)
    assert model(file, stand_in).quantization == ("" if stand_in == "bfloat16" else stand_in)


@pytest.mark.parametrize(
    ("said", "kv_dtype"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, ""),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        (grouped((8, "float", 8, {}), kv_cache_scheme=None), ""),
    ],
)
def test_keys_and_values_are_in_what_the_checkpoint_says(
    tmp_path: Path, said: Any, kv_dtype: str
) -> None:
    file = written(tmp_path, QWEN | {"quantization_config": said})
    assert model(file).kv_dtype == kv_dtype
    assert model(file, kv_dtype="bfloat16").kv_value_bytes == 2


def test_keys_and_values_that_are_not_read_have_a_dtype_that_stands_in(tmp_path: Path) -> None:
    for said in (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
    ):
        file = written(tmp_path, QWEN | {"quantization_config": said})
        with refused("not supported; 8-bit floats are, and kv_dtype: fp8 in the run stands in"):
            model(file)
        assert model(file, kv_dtype="fp8").kv_value_bytes == 1


NAMES = """\
quant_method quant_algo bits num_bits type float int fp8 modelopt gptq compressed-tensors Linear
config_groups weights input_activations targets ignore group_size strategy block FP8 re:.*mlp.* re:(
kv_cache_scheme kv_cache_quant_algo MIXED_PRECISION quantized_layers"""
WORDS = st.sampled_from(NAMES.split())
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([4, 8, 16, 32, 1.5]) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


@given(said=st.dictionaries(WORDS, VALUES, max_size=6) | VALUES, experts=st.sampled_from([0, 8]))
@example(said={"quantized_layers": {"experts": {"quant_algo": 4}}}, experts=8)
@example(said=MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": 4}}, experts=0)
def test_whatever_a_quantisation_says_is_a_format_or_one_line(said: Any, experts: int) -> None:
    quantization.plain_parts(said, 4)
    assert quantization.expert_format(said) in ("", *FORMATS)
    told, file = "", Path("c.json")
    try:
        assert quantization.weights_format(said, experts, file) in ("", *FORMATS)
        assert quantization.kv_format(said, file) in ("", "fp8")
    except UsageError as error:
        told = str(error)
    assert not told or re.fullmatch(r"c\.json: .*type: \w+ in the run stands in for it", told)


FIRST = [f"model.layers.{layer}.mlp" for layer in range(24)]
FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize("base", [QWEN, QWEN3_MOE, QWEN3_MOE | {"model_type": "mixtral"}])
@pytest.mark.parametrize(
    ("said", "plain"),
    [
        (FP8, (False, False)),
        (FP8 | {"ignore": ["re:.*self_attn.*"]}, (True, False)),
        (FP8 | {"ignored_layers": ["model.layers.*.self_attn"]}, (True, False)),
        (FP8 | {"ignore": ["model.layers.0.self_attn", *FIRST[:3]]}, (False, False)),
        (FP8 | {"ignore": ["re:.*mlp", "re:.*self_attn.o_proj"]}, (True, True)),
        (FP8 | {"ignore": ["*.linear_attn*", "mlp.shared_experts*"]}, (True, True)),
        (grouped((8, "float", 8, MLP)), (True, False)),
    ],
)
def test_what_most_layers_leave_out_of_a_format_stays_plain(
    tmp_path: Path, base: dict[str, Any], said: Any, plain: tuple[bool, bool]
) -> None:
    spec = model(written(tmp_path, base | {"quantization_config": said}))
    assert (spec.quantization, spec.plain_attention, spec.plain_mlp) == ("fp8", *plain)


def test_parts_that_stay_plain_have_the_bytes_of_the_models_dtype(tmp_path: Path) -> None:
    """Of one layer: attention in 16 bits, an MLP in 8 with a float32 scale a matrix and input."""
    said = FP8 | {"ignore": ["re:.*self_attn.*"]}
    whole = model(written(tmp_path, QWEN | {"quantization_config": FP8}))
    plain = model(written(tmp_path, QWEN | {"quantization_config": said}))
    attention = 5120 * (5120 + 2 * 1024) + 5120 * 5120
    assert plain.layer_bytes() - whole.layer_bytes() == attention - 2 * 4
    assert plain.layer_bytes(2) - whole.layer_bytes(2) == attention // 2 - 2 * 4


def test_kimi_k2_5_takes_what_its_checkpoint_takes() -> None:
    """555 GiB: huggingface.co/gratex/Kimi-K2.6-REAM-25 of Kimi-K2.6, whose text has K2.5's shapes;
    sight is 0.9 GiB of it."""
    spec = model("Kimi-K2.6")
    layers = sum(count * kind.layer_bytes() for kind, count in spec.kinds().items())
    held = layers + 2 * 2 * spec.embedding_parameters
    assert held / GIB == pytest.approx(554, rel=0.003)


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 40.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            81920,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"type": "su", "factor": 32.0}}, 4096),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 4096),
        ({"max_position_embeddings": None, "model_max_length": 1048576}, 1048576),
    ],
)
def test_requests_may_be_as_long_as_rope_scaling_allows(
    tmp_path: Path, said: dict[str, Any], tokens: int
) -> None:
    file = written(tmp_path, QWEN | {"max_position_embeddings": 4096} | said)
    assert model(file).max_position_embeddings == tokens


def test_a_quantisation_that_stands_beside_the_config_is_read(tmp_path: Path) -> None:
    written(tmp_path, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json")
    assert read(tmp_path, QWEN).quantization == "nvfp4"
    own = QWEN | {"quantization_config": {"quant_method": "fp8"}}
    assert read(tmp_path, own).quantization == "fp8"
    (tmp_path / "hf_quant_config.json").write_text("{", encoding="utf-8")
    with refused("hf_quant_config.json: not a JSON file"):
        read(tmp_path, QWEN)


def test_a_quantisation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    groups: list[Any] = [[1], {"a": None}, {"a": {"weights": "x"}}]
    compressed = [{"quant_method": "compressed-tensors", "config_groups": each} for each in groups]
    unknown = [{"quant_method": "aqlm"}, {"quant_method": "gptq", "bits": 3}, "fp8 or so"]
    for said in (*unknown, {"quant_method": "awq", "bits": [4]}, *compressed):
        with refused('"quantization_config" of '):
            read(tmp_path, QWEN | {"quantization_config": said})


def test_a_file_that_is_no_config_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with refused("broken.json: not a JSON file"):
        model(tmp_path / "broken.json")
    with refused("list.json: holds no JSON object"):
        model(written(tmp_path, [], "list.json"))
    with refused("missing.json: cannot be read (No such file or directory)"):
        model(tmp_path / "missing.json")


# ---- GPUs and links


def test_the_schema_names_the_runtimes_of_the_table() -> None:
    assert {*runtimes(), "profile"} == set(get_args(RuntimeName))


def test_servers_of_today_s_engines_make_a_prompt_s_tokens() -> None:
    """3 us each, between those of Llama-3.1's and DeepSeek-V3's vocabularies (systems-checked)."""
    each = {name: runtime.one_stage.tokenize_s for name, runtime in runtimes().items()}
    served = {name for name, tokenize_s in each.items() if tokenize_s == pytest.approx(3e-6)}
    assert served == {"vllm-0.12", "vllm-0.19", "trtllm-1.0", "trtllm-1.2", "sglang-0.5"}
    assert {each[name] for name in {*each} - served} == {0.0}


def test_a_runtime_like_an_engine_has_its_numbers_but_for_those_that_are_given() -> None:
    asked = RuntimeConfig.model_validate({"like": "vllm-0.8", "tokenize_s": 3e-6, "per_row_s": 0})
    for stages in (1, 2):
        expected = replace(runtimes()["vllm-0.8"].on(stages), tokenize_s=3e-6, per_row_s=0.0)
        assert asked.make(stages) == expected
    assert RuntimeConfig(schedule_s=0.1).make(1) == RuntimeOverheads(schedule_s=0.1)


def test_gpu_names_are_the_contract() -> None:
    names = "L20 A100-40G A100-80G A100-80G-PCIe A800-80G A40 L40S H100 H200 B200 B300 GB200 GB300"
    names += " RTX-PRO-6000 L4 RTX-4090 A800-80G-PCIe H800 H20 MI300X V100-16G V100-32G"
    names += " T4 RTX-A6000 A10 A10G GB10"
    assert {spec.name for spec in gpus()} == set(names.split())


def test_every_gpu_says_what_its_efficiencies_are_fitted_on_and_the_error() -> None:
    assumed = {spec.name for spec in gpus() if spec.source.startswith("assumed")}
    named = "L4 RTX-4090 H800 H20 MI300X V100-16G V100-32G T4 RTX-A6000 A10 A10G GB10"
    assert assumed == set(named.split())
    for spec in gpus():
        assert spec.name in assumed or spec.source.startswith("fitted on")
        if spec.name not in {"L20", *assumed}:
            assert re.search(r"mean and P95 error.*[0-9.]+ %, [0-9.]+ %", spec.source)
    assert gpu({"fp16_tflops": 1, "memory_bandwidth_gb_s": 1, "memory_gb": 1}).source == (
        "efficiency transferred from L20 fit"
    )


def test_no_card_shows_all_of_its_nominal_memory_unless_its_logs_are_not_known() -> None:
    """L4 and A10 keep ECC in their GDDR6: vLLM's logs have 22.03 and 22.06 GiB of their 24."""
    shown = {spec.name: spec.visible_gb for spec in gpus()}
    assert {name for name, visible_gb in shown.items() if not visible_gb} == {"GB300", "H20"}
    assert [shown[name] for name in ("L4", "A10G", "V100-32G")] == [22.03, 22.06, 31.73]


def test_a_mapping_changes_a_known_gpu_or_makes_a_new_one() -> None:
    assert gpu({"name": "L20", "memory_gb": 45}) == replace(gpu("L20"), memory_gb=45, visible_gb=0)
    made = gpu({"fp16_tflops": 100, "memory_bandwidth_gb_s": 500, "memory_gb": 16})
    assert (made.name, made.compute_efficiency) == ("gpu", gpu("L20").compute_efficiency)
    assert gpu({"name": "L20", "compute_efficiency": 0.8}).source == "given"


OTHERS = ("MI325X", "P100", "K80", "GB20", "A30", "L40", "H2000", "B100", "RTX-5090", "4090")
OTHERS += ("H100-PCIe", "H100 NVL", "H200-NVL", "NVIDIA H100 PCIe")
"""GPUs of other chips or peaks than the table's, whatever their names are like."""


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("A100-PCIE-80GB", 'unknown gpu "A100-PCIE-80GB"; did you mean "A100-80G-PCIe"?'),
        ("GB200-NVL72", 'unknown gpu "GB200-NVL72"; did you mean "GB200"?'),
        ("a100", 'unknown gpu "a100"; there are A100-40G, A100-80G, A100-80G-PCIe'),
        ("A100-40GB", 'unknown gpu "A100-40GB"; did you mean "A100-40G"? any other is a mapping'),
        ("rtx 4090", 'unknown gpu "rtx 4090"; did you mean "RTX-4090"?'),
        ("NVIDIA-H100-80GB-HBM3", 'did you mean "H100"?'),
        *((name, f'unknown gpu "{name}"; any other is a mapping') for name in OTHERS),
        (
            "K80",
            "gpu: {name: K80, fp16_tflops: ..., memory_bandwidth_gb_s: ..., memory_gb: ...}; known",
        ),
        ({"name": "L20", "memory": 3}, 'gpu: unknown key "memory"; did you mean "memory_gb"?'),
        ({"fp16_tflops": 100}, "gpu: needs memory_bandwidth_gb_s, memory_gb, or the name of"),
        ({"name": "L20", "memory_gb": -1}, "gpu L20: memory_gb is -1; it must be a finite number"),
        ({"name": "L20", "fp16_tflops": float("nan")}, "gpu L20: fp16_tflops is nan; it must be"),
        ({"name": "L20", "memory_gb": "48"}, "gpu L20: memory_gb is '48'; it must be"),
        ({"name": "L20", "per_layer_overhead_s": -1.0}, "gpu L20: per_layer_overhead_s is -1.0"),
    ],
)
def test_a_wrong_gpu_is_refused(wanted: Any, message: str) -> None:
    with refused(message):
        gpu(wanted)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    ideal = link({"bandwidth_gb_s": 100, "latency_us": 0})
    assert ideal.transfer_s(224e6) == pytest.approx(2.24e-3, rel=1e-12)
    assert link("pcie-l20").transfer_s(20.79e9) == pytest.approx(1 + 10e-6, rel=1e-12)


@pytest.mark.parametrize(
    ("table", "kind"), [("models", ModelSpec), ("gpus", GpuSpec), ("links", LinkSpec)]
)
def test_no_name_is_twice_in_a_table(table: str, kind: type[Any]) -> None:
    names = [row["name"] for row in read_rows(table, kind)]
    assert len(names) == len(set(names))


def test_a_wrong_link_is_refused() -> None:
    with refused('unknown link "pcie"; there are pcie-l20, pcie-gen5, pcie-gen4'):
        link("pcie")
    with refused("link: needs"):
        link({"latency_us": 3})
    with refused("link: latency_us is -3; it must be a finite number, 0 or above"):
        link({"bandwidth_gb_s": 1, "latency_us": -3})


# ---- deployments


def test_left_over_layers_go_to_the_stages_before_the_last() -> None:
    assert split_layers(64, 4) == (16, 16, 16, 16)
    assert split_layers(64, 5) == (13, 13, 13, 13, 12)
    assert split_layers(64, 6) == (10, 11, 11, 11, 11, 10)
    assert split_layers(64, 7) == (9, 9, 9, 9, 9, 10, 9)
    assert split_layers(64, [20, 22, 22]) == (20, 22, 22)


@given(st.integers(1, 200), st.integers(1, 200))
def test_an_even_split_is_even_and_complete(layers: int, stages: int) -> None:
    if stages > layers:
        with refused("use fewer stages"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (0, "stages is 0; it must be a whole number, 1 or above"),
        (True, "stages is True; it must be a whole number"),
        ([], "stages: [] must list whole numbers"),
        ([32, 0, 32], "stages: [32, 0, 32] must list whole numbers of layers, 1 or above"),
        ([32, 31], "stages: [32, 31] add up to 63 layers; the model has 64"),
    ],
)
def test_a_wrong_split_is_refused(stages: Any, message: str) -> None:
    with refused(message):
        split_layers(64, stages)


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_hold_the_whole_model(name: str, stages: int) -> None:
    """A tied embedding is shared by the ends of one stage, and on both ends of several."""
    deployment = deployed(name, "H200", stages)
    spec = in_precision(deployment.model, "bfloat16", None)
    deployment = replace(deployment, model=spec)
    copies = spec.embedding_parameters if spec.tie_word_embeddings and stages > 1 else 0
    held = sum(deployment.weight_bytes(stage) for stage in range(stages))
    assert held == (spec.num_parameters + copies) * spec.dtype_bytes


def test_kv_pages_follow_from_the_bytes_of_the_fullest_stage() -> None:
    deployment = deployed("Qwen2.5-32B", "L20", 4)
    layer = 5120 * (5120 + 2 * 1024) + 5120 + 2 * 1024 + 5120 * 5120 + 3 * 5120 * 27648 + 2 * 5120
    weights = 2 * (16 * layer + 152064 * 5120 + 5120)
    assert deployment.weight_bytes(3) == weights
    activations = 2048 * (2 * 5120 + 3 * 27648) * 2 + 256 * 152064 * 6
    assert deployment.activation_bytes(3) == activations
    assert deployment.kv_bytes_per_token(3) == 2 * 16 * 8 * 128 * 2
    free = 0.9 * 48 * GIB - weights - activations
    assert deployment.kv_pages() == int(free // (16 * 65536)) == 27284


@pytest.mark.parametrize(
    ("name", "gpu_name", "fits"),
    [
        ("Qwen2.5-32B", "L20", [False, True, True]),
        ("Llama2-70B", "A100-80G-PCIe", [False, True, True]),
        ("Llama2-13B", "L20", [True, True, True]),
    ],
)
def test_what_td_pipe_found_out_of_memory_does_not_fit(
    name: str, gpu_name: str, fits: list[bool]
) -> None:
    for stages, expected in zip((1, 2, 4), fits, strict=True):
        if expected:
            assert deployed(name, gpu_name, stages).kv_pages() > 0
        else:
            with refused("does not fit: each GPU of stage 0 needs"):
                deployed(name, gpu_name, stages).kv_pages()


def test_the_refusal_has_the_numbers() -> None:
    with refused(
        "Qwen2.5-32B does not fit: each GPU of stage 0 needs 61.0 GiB for weights and 0.6 for "
        "activations and has 43.2 (0.9 of an L20's 48); use more stages or tensor_parallel"
    ):
        deployed("Qwen2.5-32B", "L20").kv_pages()
    with refused(
        "activations, 122.1 for a page of 1000000 tokens (kv.page_tokens), and has 43.2"
    ):  # 32 layers x 2 x 8 heads x 128 x 2 bytes a token on each of two stages
        deployed("Qwen2.5-32B", "L20", 2, page_tokens=10**6).kv_pages()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "tensor_parallel: 3 ranks cannot share the 40 heads and 8 KV heads"),
        ({"ranks": 0}, "tensor_parallel is 0"),
        ({"memory_utilization": 1.2}, "memory_utilization is 1.2; at most 1 is right"),
        ({"memory_utilization": float("nan")}, "memory_utilization is nan"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"activation_tokens": -5}, "activation_tokens is -5"),
    ],
)
def test_a_wrong_deployment_is_refused(changes: Any, message: str) -> None:
    with refused(message):
        deployed("Qwen2.5-32B", "L20", 2, **changes)
