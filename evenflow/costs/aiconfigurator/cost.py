"""Costs of a deployment from AIConfigurator's compiled engine.

The engine answers for a layer of each kind, so that a stage takes its own layers. The config.json
that it reads is written from the shape where the family is plain. Else it has the first layers of
the user's file, or of the package's. Of several tokens a decode step (speculation) the keys are
read once. Known error: experts of groups with separate requests are those of prompts, also in
decode steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evenflow.costs.aiconfigurator.engine import QUANT, Answer, LayerQuestion, answer
from evenflow.costs.roofline import Part
from evenflow.costs.silicon.cost import GPUS
from evenflow.costs.silicon.tables import package_folder
from evenflow.costs.tables import (
    Attending,
    BySize,
    Curve,
    Estimate,
    Surface,
    TableCost,
    added,
    table_cost,
)
from evenflow.errors import UsageError, instead_of
from evenflow.specs.deployment import Deployment
from evenflow.specs.hybrids import READERS
from evenflow.specs.model import kept_config, models
from evenflow.specs.modelspec import ModelSpec

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
    """Return the user's config.json of a model with several kinds of layers, or the package's.

    UsageError if both are missing.
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
    """Return the first `count` entries of a value with an entry a layer; others unchanged."""
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


SYSTEMS = {name: source.system for name, source in GPUS.items() if name == source.on}
"""The package's names of the GPUs that it has measurements of."""

SAME = {name: name for name in ("fp8_block", "int4_wo", "nvfp4", "nvfp4_wo")}
SAME |= {"": "bfloat16", "int4_wo_32": "int4_wo"}
PRODUCTS = SAME | {"fp8": "fp8_static", "int8": "sq", "int8_wo": "int8_wo"}
EXPERTS = SAME | {"fp8": "fp8", "mxfp4": "w4a16_mxfp4", "mxfp4_wo": "w4a16_mxfp4"}
"""Formats -> the engine's names of them, of products and of experts."""

FOUR_BITS = {
    (True, True): "w4a8_mxfp4_mxfp8_trtllm",
    (True, False): "w4a16_mxfp4_cutlass",
    (False, True): "w4a8_mxfp4_mxfp8",
    (False, False): "w4a16_mxfp4",
}
"""Kernels of DeepSeek-V4's experts: of SGLang, on GPUs with 4-bit arithmetic."""


def engine_cost(
    deployment: Deployment, framework: str, wanted: str | None = None, part: Part = "all"
) -> TableCost:
    """Return the costs of a deployment; `wanted`: the framework's version, None for the current.

    `part`: as for `RooflineCost`. UsageError where the package is missing or has no such thing.
    """
    system = SYSTEMS.get(deployment.gpu.name)
    if system is None:
        raise UsageError(
            f"costs: aiconfigurator has no measurements of {deployment.gpu.name}; "
            f"{instead_of(deployment.gpu.name, SYSTEMS)}; for others: costs: roofline"
        )

    def parts_of(kind: ModelSpec) -> EngineParts:
        asked = question(deployment, kind, system, framework, wanted)
        return EngineParts(answer(asked), deployment, part)

    return table_cost(deployment.model, deployment.layers_per_stage, parts_of)


def question(
    deployment: Deployment, kind: ModelSpec, system: str, framework: str, wanted: str | None
) -> LayerQuestion:
    """Return the question to the package's engine about a layer of one kind."""
    model, ranks = deployment.model, deployment.tensor_parallel
    # Its mixtures have experts in all layers: of a dense one the MLP's products are asked for.
    dense = bool(model.num_experts) and not kind.num_experts and model.family not in READERS
    like = next(each for each in model.kinds() if each.num_experts) if dense else kind
    entry = ((2 * kind.hidden_size, kind.hidden_size),) if kind.is_mtp else ()
    config, less = _configs(model, kind) or (written(like), None)
    split, gpu = deployment.expert_split, deployment.gpu
    four_bits = FOUR_BITS[framework == "sglang", gpu.fp4_tflops > 0]
    return LayerQuestion(
        system,
        framework,
        wanted,
        json.dumps(config, sort_keys=True),
        json.dumps(less, sort_keys=True) if less else "",
        ranks,
        deployment.data_parallel,
        (split.slices, split.ranks) if model.num_experts or model.family in READERS else (1, 1),
        tuple(formats(model, like, framework, four_bits).items()),
        (*(kind.mlp_shapes(ranks) if dense else ()), *entry),
        dense,
    )


def _configs(
    model: ModelSpec, kind: ModelSpec
) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return two config.json: of the model up to a layer of a kind, and up to the layer before.

    None where all layers are alike. A module that predicts further tokens is like the last layer.
    """
    if kind.is_mtp:
        model = _as_read(model)
    if model.family not in READERS:
        return None
    config = config_of(model)
    part = model.pattern[-1] if kind.is_mtp else model.parts.index(kind)
    at = [layer for layer, each in enumerate(model.pattern) if each == part]
    last = next((layer for layer in at if layer), 0)
    whole = first_layers(config, model.num_layers, last + 1)
    return whole, first_layers(config, model.num_layers, last) if last else None


def formats(
    whole: ModelSpec, model: ModelSpec, framework: str, four_bits: str = ""
) -> dict[str, str]:
    """Return the engine's names for a layer's formats; UsageError for a format without a name.

    Formats in a checkpoint's own config are left to the engine, which reads them part by part.
    `four_bits`: the engine's name for 4-bit experts beside 8-bit matrices.
    """
    if whole.family in READERS and whole.quantization == _as_read(whole).quantization:
        kept = {"kvcache_quant_mode": "fp8"} if model.kv_value_bytes == 1 else {}
        small = model.expert_quantization in ("mxfp4", "nvfp4")
        return kept | ({"moe_quant_mode": four_bits} if small else {})
    given = model.quantization
    products = "" if model.plain_attention else given
    if products not in PRODUCTS or (model.num_experts and given not in EXPERTS):
        what = "experts" if products in PRODUCTS else "products"
        raise UsageError(f"costs: aiconfigurator has no {given} {what}; costs: roofline is right")
    small = model.kv_value_bytes == 1
    prompts = "fp8" if small and framework != "vllm" and not model.kv_lora_rank else "bfloat16"
    return {
        "gemm_quant_mode": PRODUCTS[products],
        "kvcache_quant_mode": "fp8" if small else "bfloat16",
        "fmha_quant_mode": prompts,
        **({"moe_quant_mode": EXPERTS[given]} if model.num_experts else {}),
    }


def _as_read(model: ModelSpec) -> ModelSpec:
    """Return the model with all layers and formats of its config.json."""
    path = Path(model.source)
    if path.is_file():
        return ModelSpec.from_config_json(path)
    return next((each for each in models().values() if each.source == model.source), model)


def facts(deployment: Deployment, framework: str, wanted: str | None) -> dict[str, Any]:
    """Return where the seconds come from, for the provenance."""
    return {
        "system": SYSTEMS[deployment.gpu.name],
        "framework": f"{framework} {wanted or 'current'}",
        "package": f"aiconfigurator-core {version('aiconfigurator-core')}",
    }


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Seconds of a layer and of the ends, from an answer of the engine."""

    found: Answer
    deployment: Deployment
    part: Part

    def layer(self) -> BySize:
        """Return a layer beside attention, where there are prompts."""
        if self.part == "own":
            return self._curve("layer")
        groups = self.deployment.data_parallel
        experts = self._curve("experts")
        if self.part == "experts":
            return lambda tokens: experts(-(-tokens // groups))
        return added([self._curve("layer"), experts])

    def alone(self) -> BySize | None:
        """Return a layer beside attention in a micro-batch of decodes alone, if it differs."""
        return self._curve("alone") if self.part == "all" else None

    def embedding(self) -> BySize:
        if self.part == "experts":
            return lambda _: Estimate(0.0, 0.0)
        return self._curve("embedding")

    def head(self) -> BySize:
        return self._curve("head")

    def attending(self) -> Attending:
        prompts = Surface({(n, at): s for n, at, s in self.found["prompts"]}, calm=False)
        launch_s = min(seconds for *_, seconds in self.found["prompts"])
        steps = Surface({(n, at): s for n, at, s in self.found["steps"]}, calm=False)
        tokens = self.deployment.verified_tokens

        def prefill(count: int, start: int) -> tuple[float, bool]:
            seconds, inside = prompts.prefill(count, start)
            return seconds, inside and self.found["prompts_measured"]

        def decode(count: int, context: int) -> tuple[float, bool]:
            seconds, inside = steps.decode(-(-count // tokens), context)
            return seconds, inside and self.found["steps_measured"]

        return Attending(prefill, decode, launch_s)

    def _curve(self, name: str) -> BySize:
        rows = self.found[name]
        seconds = Curve.of({size: taken_s for size, taken_s, _ in rows})
        unmeasured = Curve.of({size: taken_s for size, _, taken_s in rows})

        def estimate(size: int) -> Estimate:
            taken_s = seconds(size)
            return Estimate(taken_s, unmeasured(size) if seconds.covers(size) else taken_s)

        return estimate
