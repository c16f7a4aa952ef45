"""Random plans as engines would be started with them: lines to check with each engine's parser.

`python -m tools.launch_plans FILE` writes a plan a line: an engine's command, the config.json of
its model, the layers of each stage, and the bytes that our memory leaves for KV on each.
`tools.launch_check` reads them beside an engine, where Evenflow need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from evenflow.config.build import build, model_of
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document
from evenflow.core.world import World
from evenflow.errors import UsageError
from evenflow.specs.gpu import gpus
from evenflow.specs.model import models
from evenflow.specs.modelspec import ModelSpec
from evenflow.study.deployments import launch_lines, most_tokens, shifted
from tools.recordings import arguments, drawn

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""Of a family: what a config.json names as its architecture, and as its model_type."""


TAKEN = ("weight", "activation", "other")


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json that engines take for a model of this shape, in 16 bits."""
    architecture, kind = ARCHITECTURES[spec.family]
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    if spec.family == "falcon":
        found |= {"num_kv_heads": spec.num_kv_heads, "new_decoder_architecture": True}
        del found["head_dim"]  # which its hidden size and heads say
    if spec.sliding_window:
        found |= {"sliding_window": spec.sliding_window}
    if spec.num_experts:
        found |= {
            **dict.fromkeys(("num_experts", "num_local_experts"), spec.num_experts),
            "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.expert_intermediate_size,
        }
    if spec.kv_lora_rank:
        shared = spec.shared_intermediate_size // spec.expert_intermediate_size
        found |= {
            "n_routed_experts": spec.num_experts,
            "n_shared_experts": shared,
            "first_k_dense_replace": spec.dense_layers,
            "kv_lora_rank": spec.kv_lora_rank,
            "q_lora_rank": spec.q_lora_rank or None,
            "qk_rope_head_dim": spec.qk_rope_head_dim,
            "qk_nope_head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
        }
    return found


def keys_of(random: Random) -> dict[str, Any]:
    """Draw a run's deployment and policy."""
    spec = random.choice([each for each in models().values() if each.family in ARCHITECTURES])
    stages, ranks = random.choice([1, 1, 2, 3, 4, 8]), random.choice([1, 2, 4, 8])
    seqs = random.choice([8, 64, 256, 1024])
    budget = max(random.choice([256, 512, 2048, 8192]), seqs)
    policies: dict[str, dict[str, Any]] = {
        "vllm_v1": {"max_num_batched_tokens": budget, "max_num_seqs": seqs},
        "sarathi": {"token_budget": budget, "max_num_seqs": seqs},
        "sglang": {"chunked_prefill_size": budget, "max_running_requests": seqs},
        "token_throttling": {"max_prefill": budget},
    }
    policy = random.choice(list(policies))
    keys: dict[str, Any] = {
        "model": spec.name,
        "gpu": random.choice(gpus()).name,
        "stages": stages,
        "tensor_parallel": ranks,
        "scheduler": {"name": policy, **policies[policy]},
        "kv": {
            "memory_utilization": round(random.uniform(0.1, 0.95), 2),
            "page_tokens": random.choice([16, 16, 32, 64]),
            "prefix_cache": random.random() < 0.5,
        },
        "workload": {"trace": "azure-conv-sample", "arrivals": "offline"},
    }
    if stages > 1 and random.random() < 0.5 and spec.num_layers % stages == 0:
        even = [spec.num_layers // stages] * stages
        keys["stages"] = list(shifted(even, min(random.randint(1, 2), even[0] - 1)))
    if random.random() < 0.3:
        keys["kv_dtype"] = random.choice(["fp8", "bfloat16"])
    if random.random() < 0.3 and not spec.quantization:
        keys["dtype"] = random.choice(["fp8", "int4_wo"])
    if random.random() < 0.3:
        keys["max_model_len"] = random.choice([4096, 32768])
    if spec.num_experts and random.random() < 0.5:
        keys["expert_parallel"] = True
        if stages == 1 and random.random() < 0.5:
            keys["data_parallel"] = 2
    if stages > 1 and random.random() < 0.4:
        keys["nodes"] = {"gpus": random.choice([1, 2, 4, 8]), "link": "ib-ndr"}
    if random.random() < 0.2:
        keys["replicas"] = {"count": 3}
    return keys


def plans(seeds: Iterator[tuple[int, Random]], wanted: int) -> Iterator[dict[str, Any]]:
    """Yield `wanted` drawn plans that fit in memory."""
    for _, random in seeds:
        keys = keys_of(random)
        config = configured(Document("plan", keys, {}))
        try:
            built = build(config, Path())
        except UsageError:
            continue
        assert isinstance(built.world, World)
        if built.world.total_pages == 1:  # vLLM keeps one empty
            continue
        yield {"keys": keys, **_facts(config, built.deployment)}
        wanted -= 1
        if not wanted:
            return


def _facts(config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    layers, spec = facts["layers_per_stage"], model_of(config, Path())
    assert spec is not None
    lines = launch_lines(config, layers, most_tokens(config, Path()))
    named = dict(line.split(": ", 1) for line in lines if line[0] != " ")
    (card,) = set(config.gpus)
    whole = card.visible_bytes if "memory_like" in facts else card.memory_bytes
    taken = [facts[f"{what}_bytes_per_gpu"] for what in TAKEN if f"{what}_bytes_per_gpu" in facts]
    usable = whole * config.memory_utilization
    return {
        "commands": {name.split()[0]: command for name, command in named.items()},
        "config": config_json(spec),
        "layers": layers,
        "free_bytes": [int(usable - sum(of_stage)) for of_stage in zip(*taken, strict=True)],
    }


def main() -> None:
    """Write the plans that the command line asks for."""
    parser = arguments("Write random plans as launch lines.", runs=200)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    wanted, given.runs = given.runs, 100 * given.runs
    text = "".join(json.dumps(each) + "\n" for each in plans(drawn(given, "plan"), wanted))
    given.file.write_text(text, encoding="utf-8")
    print(f"seed {given.seed}: {text.count(chr(10))} plans", flush=True)


if __name__ == "__main__":
    main()
