"""Layers of several kinds: dense ones before experts, latents and windows, by hand and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenflow.costs import RooflineCost, balanced_layers, decode_work, prefill_work
from evenflow.costs.roofline import AttentionRates, Rates, pairs
from evenflow.specs.gpu import LinkSpec, gpu
from evenflow.specs.model import model
from tests.command_line import refused
from tests.configs import CONFIGS, read
from tests.profiles import deployed, measured

DEEPSEEK, GEMMA = CONFIGS["deepseek"], CONFIGS["gemma2"]


def test_latents_and_dense_layers_are_those_of_deepseek(tmp_path: Path) -> None:
    spec = read(tmp_path, DEEPSEEK)
    assert {kind.num_experts: count for kind, count in spec.kinds().items()} == {0: 3, 256: 58}
    assert spec.kv_values(tensor_parallel=8) == 512 + 64  # whole on every rank
    attention = 7168 * 2112 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = next(iter(spec.kinds()))
    vectors = 2 * 7168 + 1536 + 512
    assert dense.layer_parameters() == attention + 3 * 7168 * 18432 + vectors


def test_windows_alternate_with_global_layers(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA)
    assert {kind.sliding_window: count for kind, count in spec.kinds().items()} == {4096: 21, 0: 21}
    assert spec.tie_word_embeddings
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 14
    thirds = read(tmp_path, GEMMA | {"layer_types": types})
    assert sorted(thirds.kinds().values()) == [14, 28]
    uneven = read(tmp_path, GEMMA | {"layer_types": ["full_attention"] * 2 + types[:-2]})
    assert [kind.sliding_window for kind in uneven.kinds(0, 4)] == [0, 4096]


def test_of_a_model_that_also_sees_the_text_is_read(tmp_path: Path) -> None:
    text = {key: value for key, value in DEEPSEEK.items() if key != "tie_word_embeddings"}
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    packed = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    seeing = {"model_type": "kimi_k25", "quantization_config": packed, "vision_config": {}}
    spec = read(tmp_path, seeing | {"text_config": text})
    assert spec == read(tmp_path, text | {"quantization_config": packed})
    assert (spec.quantization, spec.plain_attention, spec.plain_mlp) == ("int4_wo_32", True, False)
    packed["ignore"] = ["lm_head", "model.layers.0.self_attn.kv_b_proj"]
    assert not read(tmp_path, seeing | {"text_config": text}).plain_attention


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            DEEPSEEK | {"kv_lora_rank": None, "v_head_dim": None},
            'keys "kv_lora_rank", "v_head_dim"',
        ),
        (DEEPSEEK | {"first_k_dense_replace": 61}, '"first_k_dense_replace" is 61; of 61 layers'),
        (DEEPSEEK | {"first_k_dense_replace": -1}, "whole number, 0 or above"),
        (DEEPSEEK | {"moe_layer_freq": 2}, '"moe_layer_freq" is 2, not supported'),
        (DEEPSEEK | {"kv_lora_rank": 0}, '"kv_lora_rank" is 0; it must be a whole number, 1 or'),
        (DEEPSEEK | {"num_experts_per_tok": 300}, "there are only 256 experts"),
        (
            GEMMA | {"layer_types": ["full_attention"] * 3},
            "it must be a list of 42, one a layer",
        ),
        (GEMMA | {"layer_types": 7}, "it must be a list of 42, one a layer"),
        (
            GEMMA | {"layer_types": [[]] * 42},
            "it must be a list of 42, one a layer",
        ),
        (
            GEMMA | {"layer_types": ["sliding_attention"] * 42, "sliding_window": None},
            'config.json: "layer_types" has "sliding_attention"; add its "sliding_window"',
        ),
        (GEMMA | {"num_key_value_heads": 7}, "config.json: "),
        (GEMMA | {"model_type": ["gemma2"]}, "\"model_type\" is ['gemma2'], not supported"),
    ],
)
def test_a_contradictory_config_is_one_line(tmp_path: Path, values: Any, message: str) -> None:
    with refused(message):
        read(tmp_path, values)


def test_pairs_of_a_window_are_counted_one_by_one() -> None:
    for start, stop, window in ((0, 9, 4), (3, 9, 4), (6, 9, 4), (0, 3, 4), (2, 9, 0)):
        counted = sum(min(i + 1, window or i + 1) for i in range(start, stop))
        assert pairs(start, stop, window) == counted


def test_attention_to_a_window_stops_growing() -> None:
    full = AttentionRates.of(next(iter(model("Gemma-2-9B").kinds())), 1, Rates(1e12, 1e9))
    everywhere = full._replace(window=0)
    assert full.decode_s(4, 4 * 2000) == everywhere.decode_s(4, 4 * 2000)
    assert full.decode_s(4, 4 * 9000) == everywhere.decode_s(4, 4 * 4095)
    assert full.prefill_s(8192, 8320) < everywhere.prefill_s(8192, 8320)


def test_stages_cost_their_own_kinds_and_split_by_them() -> None:
    spec = replace(model("DeepSeek-V3"), num_layers=8)
    link, work = LinkSpec(450, 5), decode_work(64, 64 * 1024)
    even = RooflineCost(deployed(spec, stages=2, ranks=8), link).times(work)
    uneven = balanced_layers(spec, gpu("H200"), 2, tensor_parallel=8, fabric=link)
    assert uneven[0] > uneven[1]  # three of the first are dense, and the last has the head
    balanced = RooflineCost(deployed(spec, stages=uneven, ranks=8), link).times(work)
    assert max(balanced) < max(even)


def test_pages_leave_room_for_windows() -> None:
    spec = model("Gemma-3-27B")
    few = deployed(spec, windows=4)
    whole = deployed(replace(spec, sliding_window=0, parts=(), pattern=()))
    assert 5 < few.kv_pages() / whole.kv_pages() < 6.2  # 10 of 62 layers keep all
    many = deployed(spec, windows=1024)
    assert many.kv_pages() <= few.kv_pages()


@pytest.mark.parametrize(
    ("name", "card", "ranks", "framework", "whole_experts"),
    [
        ("Qwen3-30B-A3B", "H100", 1, "vllm", False),
        ("DeepSeek-R1", "B200", 8, "sglang", False),
        ("DeepSeek-V3", "H200", 8, "trtllm", True),
        pytest.param("DeepSeek-V3", "H200", 8, "vllm", False, marks=pytest.mark.long),
        ("gpt-oss-120b", "H200", 1, "vllm", False),
        ("Gemma-3-27B", "H100", 1, "vllm", False),
    ],
)
def test_measured_costs_are_between_the_peaks_and_a_few_times_them(
    name: str, card: str, ranks: int, framework: str, whole_experts: bool
) -> None:
    spec, half = model(name), model(name).num_layers // 2
    layers = half, spec.num_layers - half
    cost = measured(deployed(spec, card, layers, ranks, expert_parallel=whole_experts), framework)
    read_s = spec.active_parameters / ranks / (gpu(card).memory_bandwidth_gb_s * 1e9)
    read_s *= 2 if spec.format is None else spec.format.bits / 8
    assert read_s < sum(cost.times(decode_work(1, 128))) < 25 * read_s
    computed_s = 2 * spec.active_parameters * 8192 / ranks / gpu(card).peak("16-bit")
    assert computed_s / 2 < sum(cost.times(prefill_work(8192))) < 8 * computed_s
    assert cost.extrapolated_share < 0.35
    long, short = (sum(cost.times(decode_work(16, 16 * n))) for n in (20_000, 1000))
    assert long > short
