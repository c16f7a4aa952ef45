"""Compare what hybrids keep of a token and of a request with the KV cache specs of vLLM 0.32.

    python -m tools.vllm_kv CONFIG.json ...

Runs in the environment of `make test-vllm`. vLLM builds each model on torch's meta device and one
rank, with two experts, which keep nothing, and without what sees. No GPU is here: sparse attention
takes the backend of plain latent attention, whose specs are the same.
Prints a table; exit status 1 where a number is another.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
from vllm import ModelRegistry
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.kv_cache_interface import MambaSpec

from evenflow.report.tables import markdown_table
from evenflow.specs.modelspec import ModelSpec

ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m3_text": "MiniMaxM3SparseForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
PICTURES = (
    ("vllm.model_executor.models.qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    ("vllm.models.minimax_m3", "MiniMaxM3SparseForCausalLM"),
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "n_group",
    "topk_group",
    "num_expert_group",
)


class Kept(NamedTuple):
    """Bytes on one rank: of a token, of a token inside a window, and of a request."""

    token: float
    windowed: float
    request: float


def of_vllm(path: Path) -> Kept:
    """Return what vLLM keeps of a config.json's model."""
    found = [spec for spec in _specs(path) if spec is not None]
    states = [spec for spec in found if isinstance(spec, MambaSpec)]
    caches = [spec for spec in found if not isinstance(spec, MambaSpec)]
    windows = {id(spec): _window(spec) for spec in caches}
    each = {id(spec): spec.real_page_size_bytes / spec.block_size for spec in caches}
    small = [spec for spec in caches if windows[id(spec)] and "MLA" in type(spec).__name__]
    return Kept(
        sum(each[id(spec)] for spec in caches if not windows[id(spec)]),
        sum(each[id(spec)] for spec in caches if windows[id(spec)] and spec not in small),
        sum(spec.real_page_size_bytes for spec in states)
        + sum(each[id(spec)] * windows[id(spec)] for spec in small),
    )


def _window(spec: Any) -> int:
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0


def _specs(path: Path) -> Iterator[Any]:
    keys = json.loads(path.read_text(encoding="utf-8"))
    keys = keys.get("text_config") or keys
    kind = {"step3p7": "step3p5", "minimax_m3": "minimax_m3_text"}.get(
        keys["model_type"], keys["model_type"]
    )
    keys |= {name: 2 for name in EXPERTS if keys.get(name)}
    keys |= {name: 1 for name in CHOSEN if name in keys}
    keys |= {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    keys.pop("quantization_config", None)
    # Experts of two families are not built without a GPU: theirs are dense layers.
    if isinstance(keys.get("moe_layer_freq"), list):
        keys["moe_layer_freq"] = [0] * len(keys["moe_layer_freq"])
    if "hybrid_override_pattern" in keys:
        keys["hybrid_override_pattern"] = keys["hybrid_override_pattern"].replace("E", "-")
    if "layers_block_type" in keys:
        kinds = keys["layers_block_type"]
        keys["layers_block_type"] = ["mlp" if kind == "moe" else kind for kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys), encoding="utf-8")
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=4096,
            mamba_block_size=4096,
            load_format="dummy",
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, "tcp://127.0.0.1:29511", 0, backend="gloo")
                initialize_model_parallel(1)
            with torch.device("meta"):
                initialize_model(config)
            for layer in config.compilation_config.static_forward_context.values():
                if hasattr(layer, "get_kv_cache_spec"):
                    yield layer.get_kv_cache_spec(config)


def of_evenflow(spec: ModelSpec) -> Kept:
    kinds = spec.kinds().items()
    return Kept(
        sum(n * kind.kv_token_bytes() for kind, n in kinds if not kind.sliding_window),
        sum(n * kind.kv_token_bytes() for kind, n in kinds if kind.sliding_window),
        sum(n * kind.state_bytes() for kind, n in kinds),
    )


def import_readers_of_pictures() -> None:
    """Import the modules that import torchvision, which is not here, with stand-ins for that."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    sys.modules |= {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in names}
    for module, *models in PICTURES:
        for name in models:
            ModelRegistry.register_model(name, getattr(import_module(module), name))
    for name in names:
        del sys.modules[name]


def dense(given: Any) -> Any:
    """Return a choice of backends that takes sparse attention for plain."""

    def chosen(selected: Any, attn_selector_config: Any, **more: Any) -> Any:
        return given(selected, attn_selector_config._replace(use_sparse=False), **more)

    return chosen


def main() -> None:
    import_readers_of_pictures()
    _CONFIG_REGISTRY["minimax_m3_text"] = "MiniMaxM3TextConfig"
    rows, same = [], True
    choose = staticmethod(dense(CpuPlatform.get_attn_backend_cls))
    events = patch.object(torch.cuda, "Event", MagicMock)
    with events, patch.object(CpuPlatform, "get_attn_backend_cls", choose):
        for path in map(Path, sys.argv[1:]):
            name = path.name.removesuffix("_config.json").rpartition("--")[2]
            ours = of_evenflow(ModelSpec.from_config_json(path, "bfloat16"))
            try:
                theirs = of_vllm(path)
            except Exception as error:
                traceback.print_exc(limit=-3)
                reason = " ".join(str(error).split())[:90]
                rows.append([name, *(f"{a:,.0f}" for a in ours), f"not built: {reason}"])
                continue
            same &= [*map(round, ours)] == [*map(round, theirs)]
            rows.append([name, *(f"{a:,.0f}, {b:,.0f}" for a, b in zip(ours, theirs, strict=True))])
    print(markdown_table(["ours, vLLM's", "a token", "of windows", "a request"], rows))
    sys.exit(not same)


if __name__ == "__main__":
    main()
