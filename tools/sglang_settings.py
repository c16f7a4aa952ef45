"""The settings of SGLang's server for a recorded load, published as the server does.

`tools.sglang_loads.stand_in` is to be called before this is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

END_TOKEN = 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "vocab_size": 512,
    "eos_token_id": END_TOKEN,
}


SETTINGS = (
    *("page_size", "max_running_requests", "max_prefill_tokens", "prefill_max_requests"),
    *("pp_async_batch_depth", "pp_max_micro_batch_size", "schedule_policy"),
    *("schedule_conservativeness", "prefill_decode_interval", "prefill_decode_interval_min_bs"),
    "scheduler_recv_interval",
)
"""What a journal's `config` calls as the server does."""


def server_args(config: dict[str, Any], model: Path) -> ServerArgs:
    """Publish the settings of a journal's `config` as the server's."""
    (model / "config.json").write_text(json.dumps(MODEL))
    args = ServerArgs(
        model_path=str(model),
        load_format="dummy",
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        context_length=config["context"],
        max_total_tokens=config["tokens"],
        chunked_prefill_size=config["chunked_prefill_size"] or -1,
        enable_mixed_chunk=config["mixed_chunk"],
        enable_dynamic_chunking=config["dynamic_chunking"] is not None,
        pp_size=config["pp"],
        disable_overlap_schedule=not config["overlap"],
        disable_radix_cache=not config["radix"],
        **_speculation(config, model),
        **_disaggregation(config),
        **{name: config[name] for name in SETTINGS if name in config},
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    return args


def _disaggregation(config: dict[str, Any]) -> dict[str, Any]:
    """Return the server's settings of a decode server, which keeps retracted KV on the host."""
    if config.get("disaggregation_mode") != "decode":
        return {}
    return {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "num_reserved_decode_tokens": config["num_reserved_decode_tokens"],
    }


def _speculation(config: dict[str, Any], model: Path) -> dict[str, Any]:
    """Return the server's settings of speculation, and let it go on pipelines."""
    spec = config.get("speculative")
    envs.SGLANG_ENABLE_PP_SPEC.set(spec is not None)
    if spec is None:
        return {}
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": spec["k"],
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": spec["k"] + 1,
    }
