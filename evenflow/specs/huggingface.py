"""Shapes of a config.json: Llama, Mistral, Qwen, Gemma, DeepSeek, GLM, Falcon, their like.

Knows the spellings, old and new; not what the numbers are for.
Of a model of images or sound, only the part that reads text is read (`text_config`). Of biases only
those of queries, keys and values are, of RoPE scaling only the length that it gives. Left unread
are attention sinks, soft caps, and Gemma's norms after a block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from evenflow.errors import MOST, UsageError, instead_of, is_count, known_near
from evenflow.specs.config_json import ConfigJson
from evenflow.specs.hybrids import READERS, layers_of, unlike_layers
from evenflow.specs.precision import DTYPE_BYTES
from evenflow.specs.quantization import (
    expert_format,
    kv_format,
    mapping,
    plain_parts,
    weights_format,
)
from evenflow.specs.tables import read_table


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Keys and habits of one family's config.json: a row of `families.csv`.

    `experts` and `columns` are the keys of how many experts a layer has, and of the columns of one.
    `shared` is that of the shared MLP: its columns, or how many experts it is as wide as.
    `without`: the layers without experts, the first or those between steps; `sometimes`: models of
    the family may have no experts. `latent`: latent attention. `full_every`: n, where every n-th
    layer attends to all tokens unless the file says which (0: none; -1: no windows). Where the file
    does not say: whether embeddings are `tied`, queries, keys and values `biased`, heads `normed`.
    """

    name: str
    model_types: str
    experts: str = ""
    columns: str = ""
    shared: str = ""
    without: Literal["first", "steps", ""] = ""
    sometimes: bool = False
    latent: bool = False
    full_every: int = -1
    tied: bool = False
    biased: bool = False
    normed: bool = False


@cache
def families() -> Mapping[str, ModelFamily]:
    """Return the family of each `model_type`, in the table's order."""
    rows = read_table("families", ModelFamily).values()
    return {model_type: row for row in rows for model_type in row.model_types.split()}


ATTENTION = ("full_attention", "sliding_attention", "attention", "full")
"""Names of the modelled layers in lists of layers."""

OTHER_LAYERS = re.compile(
    r"^(mamba|ssm|conv_|lru|rwkv|recurrent|linear_|index_|sparse_|compress_|hybrid|"
    r"attn_layer)"
)
"""How keys begin that only models with other layers than attention to all tokens have."""

MOST_LAYERS = 10_000
"""Layers of a model: far more than any has, and few enough to list."""


def read_config(
    path: str | Path, dtype: str | None = None, kv_dtype: str | None = None
) -> dict[str, Any]:
    """Return the fields of a ModelSpec from a config.json, or from the folder that holds one.

    A file without a dtype is float32, as in transformers; bfloat16, beside quantised matrices.
    What it says of their formats is not looked at where `dtype` or `kv_dtype` is given.
    UsageError names the file and the key.
    """
    config = ConfigJson(Path(path))
    family = _family(config)
    shape = _falcon_shape(config) if family.name == "falcon" else _llama_shape(config, family)
    shape |= _experts(config, family)
    layers = shape["num_layers"]
    if layers > MOST_LAYERS:
        raise UsageError(f"{config.path}: {layers} layers; {MOST_LAYERS} at most are right")
    shape["sliding_window"], full = _windows(config, family, layers)
    unlike = unlike_layers(_with_experts(config, family, layers), full)
    own = layers_of(family.name, config, layers) if family.name in READERS else [{}] * layers
    shape["layers"] = [each | more for each, more in zip(own, unlike, strict=True)]
    heads, hidden = shape["num_heads"], config.count("hidden_size")
    vocabulary = config.count("vocab_size")
    config.require_all()
    if config.get("head_dim") is None and "head_dim" not in shape and hidden % heads:
        raise UsageError(
            f'{config.path}: "hidden_size" {hidden} is no multiple of {heads} heads; add "head_dim"'
        )
    head_dim = config.count("head_dim", default=max(hidden // heads, 1))
    return (
        {"head_dim": head_dim}
        | shape
        | {
            "name": _name_of(config.path),
            "family": family.name,
            "hidden_size": hidden,
            "vocab_size": vocabulary,
            "dtype_bytes": DTYPE_BYTES[_dtype(config)],
            "max_position_embeddings": _most_tokens(config),
            "rope_theta": _rope_theta(config),
            "source": str(config.path),
        }
        | _formats(config, shape, dtype, kv_dtype)
    )


def _family(config: ConfigJson) -> ModelFamily:
    """Return the family of a model; UsageError where its layers are not modelled."""
    model_type, other = config.get("model_type"), " ".join(_other_layers(config).split())
    words = f"{other}, which is not modelled" if other else ""
    if not isinstance(model_type, str) or model_type not in families():
        stands_in = (
            f'{instead_of(model_type, families())}; for layers as Llama\'s, "llama" is right'
        )
        raise UsageError(
            f'{config.path}: "model_type" is {model_type!r}, not supported'
            + (f" ({words}); {known_near(model_type, families())}" if words else f"; {stands_in}")
        )
    if words and families()[model_type].name not in READERS:
        raise UsageError(f"{config.path}: {words}")
    return families()[model_type]


def _other_layers(config: ConfigJson) -> str:
    """Say which layers do something else than attend to all tokens or a window's; "" for none."""
    lists = [config.get(key) for key in ("layer_types", "layers_block_type", "block_types")]
    types = next((each for each in lists if isinstance(each, list)), [])
    linear = config.get("attn_type_list")
    if isinstance(linear, list):  # MiniMax: 0 is linear attention
        types = ["full" if each == 1 else "linear_attention" for each in linear]
    every = config.get("full_attention_interval")
    if not types and is_count(every) and every > 1:
        layers = config.count("num_hidden_layers")
        return f"{layers - layers // every} of {layers} layers are linear_attention"
    counts = Counter(each for each in types if isinstance(each, str) and each not in ATTENTION)
    if counts:
        some = [f"{count} of {len(types)} layers are {name}" for name, count in counts.items()]
        return ", ".join(some)
    keys = [f'"{key}"' for key, value in config.values.items() if value and OTHER_LAYERS.match(key)]
    return f"has layers with {', '.join(keys[:3])}" if keys else ""


def _formats(
    config: ConfigJson, shape: dict[str, Any], dtype: str | None, kv_dtype: str | None
) -> dict[str, Any]:
    """Return the formats of weights, keys and values that the caller does not give."""
    said = config.get("quantization_config")
    found: dict[str, Any] = plain_parts(said, shape["num_layers"])
    if _family(config).name == "gpt_oss":
        found = dict.fromkeys(("plain_attention", "plain_mlp"), True)
    if dtype is None:
        experts = shape.get("num_experts", 0)
        found["quantization"] = weights_format(said, experts, config.path)
        own = expert_format(said) or ("mxfp4" if config.get("expert_dtype") == "fp4" else "")
        if experts and own not in ("", found["quantization"]):
            found["expert_quantization"] = own
    if kv_dtype is None:
        native = "fp8" if _family(config).name == "deepseek_v4" else ""
        found["kv_dtype"] = kv_format(said, config.path) or native
    return found


def _layers(config: ConfigJson) -> int:
    """Return the number of layers; lists of them stand for it where it is left out."""
    said = config.get("layers_block_type", "hybrid_override_pattern")
    listed = len(said) if isinstance(said, list | str) and said else None
    return config.count("num_hidden_layers", default=listed)


def _llama_shape(config: ConfigJson, family: ModelFamily) -> dict[str, Any]:
    heads = config.count("num_attention_heads")
    columns = config.get("moe_intermediate_size", default=1) if family.name in READERS else None
    return {
        "num_layers": _layers(config),
        "num_heads": heads,
        "num_kv_heads": config.count("num_key_value_heads", default=heads),
        "intermediate_size": config.count("intermediate_size", default=columns),
        "gated_mlp": family.name != "nemotron_h",
        "attention_gate": family.name == "qwen3_5",
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=family.tied),
        "attention_bias": config.flag("attention_bias", default=family.biased),
        "qk_norm": family.normed or config.flag("use_qk_norm", default=False),
        "qk_norm_over_heads": config.get("qk_norm_type", default="") == "per_layer",
        "parallel_attention": False,
        "mtp_layers": _mtp_layers(config, family),
        "norm_epsilon": config.number(config.get("rms_norm_eps", default=1e-6), "rms_norm_eps"),
    }


def _mtp_layers(config: ConfigJson, family: ModelFamily) -> int:
    """Return the number of layers that predict further tokens.

    Nemotron's are not alike. MiniMax's files count some, of which no weights are published
    (github.com/MiniMax-AI, MiniMax-M2.7 issue 16, MiniMax-M3 issue 13).
    """
    said = config.whole("num_nextn_predict_layers") or config.whole("mtp_num_hidden_layers")
    return 0 if family.name in ("nemotron_h", "minimax_m3") else said


def _falcon_shape(config: ConfigJson) -> dict[str, Any]:
    heads = config.count("num_attention_heads", "n_head")
    grouped = config.flag("new_decoder_architecture", default=False)
    kv_heads = config.count("num_kv_heads", "n_head_kv", default=heads)
    if not grouped and config.get("n_head_kv") is None:
        kv_heads = 1 if config.flag("multi_query", default=True) else heads
    hidden = config.count("hidden_size")
    epsilon = config.get("layer_norm_epsilon", default=1e-5)
    return {
        "num_layers": config.count("num_hidden_layers", "n_layer"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": config.count("ffn_hidden_size", default=4 * hidden),
        "gated_mlp": False,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=True),
        "attention_bias": config.flag("bias", default=False),
        "parallel_attention": grouped or config.flag("parallel_attn", default=True),
        "norm_epsilon": config.number(epsilon, "layer_norm_epsilon"),
    }


def _experts(config: ConfigJson, family: ModelFamily) -> dict[str, Any]:
    number, columns, shared = family.experts, family.columns, family.shared
    if not number or (family.sometimes and not config.get(number)):
        return {}
    several, few = (8, 2) if family.name == "mixtral" else (None, None)
    tops = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
    wide = config.count(columns)
    beside = config.whole(shared) if shared else 0
    experts = {
        "num_experts": config.count(number, "num_local_experts", "num_experts", default=several),
        "experts_per_token": config.count(*tops, "top_k_experts", "moe_top_k", default=few),
        "expert_intermediate_size": wide,
        "shared_intermediate_size": beside * (wide if shared.endswith("shared_experts") else 1),
        "expert_hidden_size": config.whole("moe_latent_size")
        or config.whole("routed_expert_hidden_size"),
        "norm_topk_prob": config.flag(
            "norm_topk_prob", default=columns == "intermediate_size" or family.name == "deepseek_v4"
        ),
    }
    return experts | (_latents(config) if family.latent else {})


def _with_experts(config: ConfigJson, family: ModelFamily, layers: int) -> list[bool]:
    """Return which layers have experts, where any have; UsageError where none has."""
    key, found = "first_k_dense_replace", [True] * layers
    if family.without == "steps":
        key, step = "decoder_sparse_step", config.count("decoder_sparse_step", default=1)
        plain = config.plain_layers()
        found = [(layer + 1) % step == 0 and layer not in plain for layer in range(layers)]
    if family.without == "first":
        frequency = config.count("moe_layer_freq", default=1)
        if frequency != 1:
            raise UsageError(f'{config.path}: "moe_layer_freq" is {frequency}, not supported; 1 is')
        dense = config.whole(key)
        found = [layer >= dense for layer in range(layers)]
        if config.get(key) is None and config.get("mlp_layer_types") is not None:
            key, known = "mlp_layer_types", ("dense", "sparse")
            found = [name == "sparse" for name in config.listed(key, known, layers)]
    if layers > 1 and not any(found):
        said = config.get(key)
        raise UsageError(
            f'{config.path}: "{key}" is {said}; of {layers} layers some must have experts'
        )
    return found


def _latents(config: ConfigJson) -> dict[str, Any]:
    return {
        "num_kv_heads": config.count("num_attention_heads"),
        "head_dim": config.count("qk_nope_head_dim"),
        "kv_lora_rank": config.count("kv_lora_rank"),
        "q_lora_rank": config.whole("q_lora_rank"),
        "qk_rope_head_dim": config.count("qk_rope_head_dim"),
        "v_head_dim": config.count("v_head_dim"),
    }


def _windows(config: ConfigJson, family: ModelFamily, layers: int) -> tuple[int, list[bool]]:
    """Return the sliding window, 0 for none, and which layers attend to all tokens besides."""
    window, types = config.whole("sliding_window"), config.get("layer_types")
    none = 0, [False] * layers
    if family.full_every < 0:
        return none
    if family.name in ("qwen2", "qwen3"):
        # Their files name a window that is not used.
        first = config.whole("max_window_layers", default=28) if types is None else 0
        if first >= layers or not config.flag("use_sliding_window", default=False):
            return none
        full = [layer < first for layer in range(layers)]
    else:
        every = config.whole("sliding_window_pattern", default=family.full_every)
        full = [every > 0 and (layer + 1) % every == 0 for layer in range(layers)]
    if types is not None:
        known = ("sliding_attention", "full_attention")
        full = [name == known[1] for name in config.listed("layer_types", known, layers)]
    if not window and types is not None and not all(full):
        raise UsageError(
            f'{config.path}: "layer_types" has "sliding_attention"; add its "sliding_window"'
        )
    return (window, full) if window and not all(full) else none


def read_dtype(path: str | Path) -> str:
    """Return the dtype that a config.json, or the folder that holds one, says of its weights.

    float32 without one, as in transformers. UsageError for one that is not in DTYPE_BYTES.
    """
    return _dtype(ConfigJson(Path(path)))


def _dtype(config: ConfigJson) -> str:
    quantized = config.get("quantization_config", default=None)
    otherwise = "bfloat16" if quantized else "float32"
    name = str(config.get("dtype", "torch_dtype", default=otherwise)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = instead_of(name, DTYPE_BYTES)
        raise UsageError(f'{config.path}: "torch_dtype" is {name!r}, not supported; {known}')
    return name


def _most_tokens(config: ConfigJson) -> int:
    """Return the most tokens of a request, as vLLM 0.33 derives them (`_get_and_verify_max_len`).

    RoPE scaling multiplies them, unless they are said to be scaled; yarn says what it multiplies.
    """
    most = config.count("max_position_embeddings", "model_max_length", default=2048)
    scaling = mapping(config.get("rope_scaling", "rope_parameters"))
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind in (None, *SCALED) or factor is None or _family(config).name == "gemma3":
        return most
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    length = config.number(original or most, "original_max_position_embeddings")
    return int(min(length * config.number(factor, "factor"), MOST))


SCALED = ("longrope", "su", "llama3")
"""Kinds of RoPE scaling whose "max_position_embeddings" are the scaled ones."""


def _rope_theta(config: ConfigJson) -> float:
    # transformers 5 moved the key into a mapping.
    nested = mapping(config.values.get("rope_parameters"))
    said = config.values.get("rope_theta", nested.get("rope_theta"))
    theta = config.get("rope_theta", default=10000.0) if said is None else said
    return config.number(theta, "rope_theta")


def _name_of(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem
