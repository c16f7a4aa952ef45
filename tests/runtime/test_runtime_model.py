"""The stages of the torch model against transformers: the same weights, the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from evenflow.runtime.torch.layers import Pass, unmarked  # noqa: E402
from evenflow.runtime.torch.model import Ranks, Rope, Stage, rotation  # noqa: E402
from evenflow.runtime.torch.weights import Checkpoint, random_stage  # noqa: E402
from evenflow.runtime.wire import Piece  # noqa: E402
from tests.command_line import mistake  # noqa: E402
from tests.configs import CONFIGS  # noqa: E402
from tests.tiny_models import (  # noqa: E402
    PAGE_TOKENS,
    SHAPE,
    continued,
    generate,
    load_stage,
    load_stages,
    read_model,
    save_checkpoint,
)
from tools.checkpoints import greedy_tokens  # noqa: E402

PROMPTS = [[5, 17, 3, 88, 41, 9, 60], [7], list(range(30, 51)), [11, 12, 13, 14]]
NEW_TOKENS = 9
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENTS = CONFIGS["tiny_latents"]
CHECKPOINTS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("checkpoints.yaml").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: Any, tmp_path_factory: Any) -> tuple[Path, list[list[int]]]:
    """Return a saved checkpoint and the greedy tokens that transformers generates from it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_checkpoint(folder, **CHECKPOINTS[request.param])
    return folder, [continued(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, list[list[int]]]) -> None:
    """On three stages in pieces of prompts, on one, and by the shortest loop there is."""
    folder, expected = checkpoint
    assert len({token for tokens in expected for token in tokens}) > 5
    assert generate(load_stages(folder, 3), PROMPTS, NEW_TOKENS, 3) == expected
    whole = load_stages(folder, 1)
    assert generate(whole, PROMPTS, NEW_TOKENS, 64) == expected
    assert greedy_tokens(*whole, PROMPTS[2], NEW_TOKENS) == expected[2]


@pytest.mark.gpu
def test_cuda_gives_the_same_tokens(checkpoint: tuple[Path, list[list[int]]]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder, expected = checkpoint
    assert generate(load_stages(folder, 2, "cuda"), PROMPTS, NEW_TOKENS, 3) == expected


@pytest.mark.parametrize("q_lora_rank", [None, 16])
def test_latent_attention_that_is_profiled_is_that_of_transformers(
    tmp_path: Path, q_lora_rank: int | None
) -> None:
    """DeepSeek-V2: absorbed, beside shared experts after a dense layer; its ranks add up to it."""
    model = save_checkpoint(tmp_path, "deepseek_v2", q_lora_rank=q_lora_rank, **LATENTS)
    spec, _ = read_model(tmp_path, timed=True)
    source = Checkpoint(tmp_path, torch.float32, torch.device("cpu"))
    stages = [Stage(spec, Rope(spec.rope_theta), *span, source) for span in ((0, 1), (1, 3))]
    expected = [continued(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert generate(stages, PROMPTS, NEW_TOKENS, 3) == expected
    hidden = torch.randn(5, spec.hidden_size)

    def attended(rank: int, ranks: int) -> Any:
        stage = Stage(spec, Rope(1e4), 1, 2, source, ranks=Ranks(rank, ranks))
        attention, batch = (
            stage.layers[0].attention,
            stage.inputs([Piece(0, 0, 5, True, [0, 1])], 4),
        )
        turn = rotation(batch.positions, stage._frequencies, torch.float32)
        shapes = spec.linear_shapes(ranks)
        assert attention.down.weight.shape[::-1] == shapes[0]
        assert attention.o.weight.shape[::-1] == shapes[3 if q_lora_rank else 2]
        return attention(0, hidden, Pass(batch, stage.kv_pages(2, 4), *turn, unmarked))

    assert torch.allclose(attended(0, 2) + attended(1, 2), attended(0, 1), rtol=1e-4, atol=1e-4)


def test_sharded_files_are_read(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "one", "llama")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (load_stages(tmp_path / name, 2) for name in ("one", "many"))
    assert generate(many, PROMPTS, 4, 64) == generate(one, PROMPTS, 4, 64)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", initializer_range=0.05)
    work = [Piece(0, 0, 6, True, [0, 1])]
    logits = []
    for name in ("float32", "bfloat16"):
        stage = load_stage(tmp_path, 0, 3, dtype=name)
        ids = torch.tensor([1, 2, 3, 4, 5, 6])
        batch = stage.inputs(work, PAGE_TOKENS)
        logits.append(stage.forward(ids, batch, stage.kv_pages(2, PAGE_TOKENS)).float())
    assert torch.allclose(*logits, atol=0.02)
    assert not torch.equal(*logits)


def test_random_stages_are_cuts_of_one_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    spec, rope = read_model(tmp_path)
    whole = [random_stage(spec, rope, 0, 3)]
    halves = [random_stage(spec, rope, *span) for span in ((0, 1), (1, 3))]
    assert generate(halves, PROMPTS, 5, 4) == generate(whole, PROMPTS, 5, 4)


def test_a_tensor_parallel_shard_has_the_shapes_of_the_model_spec(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    spec, rope = read_model(tmp_path)
    stage = random_stage(spec, rope, 0, 1, ranks=Ranks(size=2))
    layer, attention = stage.layers[0], stage.layers[0].attention
    shapes = [
        tuple(m.weight.shape[::-1])
        for m in (attention.qkv, attention.o, layer.mlp.up, layer.mlp.down)
    ]
    assert tuple(shapes) == spec.linear_shapes(2)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(
        128, torch.device("cpu")
    )
    plain = Rope(500000.0).inverse_frequencies(128, torch.device("cpu"))
    ratio = (plain / scaled).numpy()
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert np.all(np.diff(ratio) >= -1e-6)


# -- what a user can do wrong ---------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> str:
    return mistake(lambda: load_stages(folder, 1))


def test_missing_files_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors, which is not there" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert 'no "weight_map"' in refusal(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    for keep_bytes in (40_000, 500, 5, 0):
        path.write_bytes(path.read_bytes()[:keep_bytes])
        assert "model.safetensors: truncated" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"intermediate_size": 64}, "gate_proj.weight"),
        ("llama", {"vocab_size": 96}, "embed_tokens"),
        ("llama", {"num_hidden_layers": 4}, 'no tensor "model.layers.3.'),
        ("llama", {"num_hidden_layers": 2}, '"model.layers.2.'),
        ("llama", {"model_type": "qwen2", "attention_bias": True}, "q_proj.bias"),
        ("qwen2", {"model_type": "llama"}, 'k_proj.bias" has no place'),
        ("llama", {"num_key_value_heads": 1}, "k_proj.weight"),
        ("qwen3", {"model_type": "llama"}, 'k_norm.weight" has no place'),
        ("llama", {"model_type": "qwen3"}, 'no tensor "model.layers.0.self_attn.q_norm.weight"'),
        ("mixtral", {"num_local_experts": 9}, "gate.weight"),
        ("mixtral", {"model_type": "llama"}, 'no tensor "model.layers.0.mlp.gate_proj.weight"'),
        ("llama", {"hidden_act": "gelu"}, "\"hidden_act\" is 'gelu'"),
        ("llama", {"mlp_bias": True}, '"mlp_bias"'),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, '"yarn" is not supported'),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, 'needs a number "factor"'),
    ],
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], words: str
) -> None:
    save_checkpoint(tmp_path, family)
    edit_config(tmp_path, **change)
    assert words in refusal(tmp_path)


DEEPSEEK = {"model_type": "deepseek_v2", "q_lora_rank": None} | LATENTS
UNCOMPUTED: list[tuple[dict[str, Any], str]] = [
    (DEEPSEEK, '"kv_lora_rank" in its config.json means latent attention'),
    (DEEPSEEK | {"model_type": "deepseek_v3"}, '"kv_lora_rank" in its config.json'),
    ({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
    ({"model_type": "gemma2"}, '"attn_logit_softcapping" in its config.json means soft caps'),
    ({"model_type": "gemma3_text"}, '"query_pre_attn_scalar"'),
    ({"model_type": "falcon", "n_head": 4}, '"parallel_attn"'),
    ({"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2}, "sigmoids"),
    (
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8} | EXPERTS,
        '"shared_expert_intermediate_size" in its config.json means shared experts with a gate',
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, '"quantization_config" in its config.json'),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "weights in int4_wo"),
    (
        {"model_type": "qwen3_moe", "use_sliding_window": True} | EXPERTS,
        '"use_sliding_window" is set',
    ),
]


@pytest.mark.parametrize(("keys", "words"), UNCOMPUTED, ids=lambda value: str(value)[:40])
def test_what_is_not_computed_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPE | keys))
    assert words in refusal(tmp_path)
