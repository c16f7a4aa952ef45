"""Read the kind of each layer, in models where they differ, from a config.json.

Knows the keys of the families in `READERS`. Matrices are those of transformers 5.23, and of Kimi-K3
of its published layout. What a layer says here replaces what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from evenflow.errors import UsageError, is_count
from evenflow.specs.config_json import ConfigJson
from evenflow.specs.mixer import Matrix, Mixer

Layer = dict[str, Any]
"""Fields of a ModelSpec that differ from layer to layer."""

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INDEX_SCALE_BYTES = 4
"""A float32 scale beside an indexer's key of 8 bits, as vLLM's and SGLang's caches have it."""

NO_EXPERTS: Layer = {
    "num_experts": 0,
    "experts_per_token": 0,
    "expert_intermediate_size": 0,
    "shared_intermediate_size": 0,
}
NO_MLP: Layer = NO_EXPERTS | {"intermediate_size": 0}


def unlike_layers(experts: Sequence[bool], full: Sequence[bool]) -> list[Layer]:
    """Return in what layers of a mixture, or with a window, differ from those of its experts.

    `experts`: whether each has any; `full`: whether each attends to all tokens.
    """
    whole: Layer = {"sliding_window": 0}
    pairs = zip(experts, full, strict=True)
    return [({} if has else NO_EXPERTS) | (whole if is_full else {}) for has, is_full in pairs]


def layers_of(family: str, config: ConfigJson, layers: int) -> list[Layer]:
    """Return the fields in which layers of a model differ; UsageError where unknown."""
    try:
        found = READERS[family](config, layers)
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise UsageError(f"{config.path}: the layers cannot be read, for {error}") from None
    if len(found) != layers:
        raise UsageError(f"{config.path}: says {len(found)} layers one by one, and has {layers}")
    return found


def _of(said: dict[str, Any], key: str) -> int:
    """Return a whole number above 0 of a mapping."""
    if not is_count(said[key]):
        raise TypeError(f'"{key}" is {said[key]!r}; a whole number, 1 or above, is right')
    return int(said[key])


def _dense(columns: int) -> Layer:
    return NO_MLP | {"intermediate_size": columns}


def _qwen(config: ConfigJson, layers: int) -> list[Layer]:
    """Gated attention in some layers, a gated delta rule in the others (Qwen3-Next, 3.5, 3.6)."""
    hidden, kernel = config.count("hidden_size"), config.count("linear_conv_kernel_dim")
    keys = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
    heads, size = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    values, mixed = heads * size, 2 * keys + heads * size
    state = values * config.count("linear_key_head_dim")
    width = STATE_BYTES.get(str(config.get("mamba_ssm_dtype", default="float32")), 4)
    delta = Mixer(
        "gated_delta",
        (
            Matrix(hidden, mixed + values, "outputs"),
            Matrix(hidden, 2 * heads, "outputs"),
            Matrix(values, hidden, "inputs"),
        ),
        vectors=mixed * kernel + 2 * heads + size,
        state_bytes=state * width + mixed * (kernel - 1) * 2,
    )
    every = config.whole("full_attention_interval", 4)
    otherwise = ["linear_attention", "full_attention"]
    types = config.get("layer_types") or [otherwise[(i + 1) % every == 0] for i in range(layers)]
    return [
        {"mixer": delta, "qk_norm": False} if kind != "full_attention" else {} for kind in types
    ]


def _indexed(config: ConfigJson, layers: int) -> list[Layer]:
    """Latent attention to those tokens that an indexer picks (DeepSeek-V3.2, GLM-5).

    In layers of GLM-5.2 and later that share another's picks, there is no indexer.
    """
    hidden, heads = config.count("hidden_size"), config.count("index_n_heads")
    size, latent = config.count("index_head_dim"), config.count("q_lora_rank")
    indexer = Mixer(
        "indexer",
        (Matrix(latent, heads * size), Matrix(hidden, size), Matrix(hidden, heads)),
        vectors=2 * size,
        beside=True,
        index_bytes=size + INDEX_SCALE_BYTES,
    )
    types = config.get("indexer_types") or ["full"] * layers
    return [{"mixer": indexer} if kind == "full" else {} for kind in types]


def _compressed(config: ConfigJson, layers: int) -> list[Layer]:
    """A window, and beyond it entries of several tokens each (DeepSeek-V4), of four picked."""
    hidden, size = config.count("hidden_size"), config.count("head_dim")
    heads, latent = config.count("num_attention_heads"), config.count("q_lora_rank")
    groups, rank = config.count("o_groups"), config.count("o_lora_rank")
    index, indexers = config.count("index_head_dim"), config.count("index_n_heads")
    streams = config.count("hc_mult")
    wide = (2 + streams) * streams
    own = (
        Matrix(hidden, latent + size),
        Matrix(latent, heads * size, "outputs"),
        Matrix(heads * size // groups, groups * rank, "outputs"),
        Matrix(groups * rank, hidden, "inputs"),
        Matrix(streams * hidden, 2 * wide),
    )
    vectors, window = latent + size + heads + 2 * wide + 6, config.count("sliding_window") * size
    small = 1 + (config.count("qk_rope_head_dim") + ENTRY_SCALES_BYTES) / size

    def mixer(ratio: int) -> Mixer:
        if not ratio:
            return Mixer("window", own, vectors, window_values=window, small_bytes=small)
        wider = 2 if ratio == PICKED else 1
        made = (*own, Matrix(hidden, 2 * wider * size))
        more = vectors + ratio * wider * size + size
        pending = COMPRESSED_BYTES * wider**2 * ratio
        kept = Mixer(
            "compressed",
            made,
            more,
            kv_values=size / ratio,
            window_values=window,
            pending_bytes=pending * size,
            small_bytes=small,
        )
        if ratio != PICKED:
            return kept
        picks = (
            Matrix(latent, indexers * index),
            Matrix(hidden, indexers),
            Matrix(hidden, 4 * index),
        )
        return replace(
            kept,
            name="compressed_indexer",
            matrices=made + picks,
            vectors=more + ratio * 2 * index + index,
            index_bytes=(index + INDEX_SCALE_BYTES) / ratio,
            pending_bytes=pending * (size + index),
        )

    ratios = config.listed("compress_ratios", (0, PICKED, 128), layers)
    mixers = {ratio: mixer(ratio) for ratio in sorted(set(ratios))}
    return [{"mixer": mixers[ratio]} for ratio in ratios]


PICKED = 4
"""Tokens of an entry where an indexer picks among them; each is in two of them."""

ENTRY_SCALES_BYTES = 8
"""Of an entry of 8 bits, as vLLM keeps it; what is rotated stays in 16 bits."""

COMPRESSED_BYTES = 2 * 4
"""Of a channel of a token that is to be compressed: its value and its score, in float32."""


def _kimi(config: ConfigJson, layers: int) -> list[Layer]:
    """A delta rule with a gate a channel, or latent attention with a gate (Kimi-K3, Linear).

    Experts work on latents of the hidden state where `routed_expert_hidden_size` says so.
    """
    hidden, said = config.count("hidden_size"), config.get("linear_attn_config") or {}
    heads, size, kernel = (
        _of(said, key) for key in ("num_heads", "head_dim", "short_conv_kernel_size")
    )
    wide, latent = heads * size, config.whole("routed_expert_hidden_size")
    around = (Matrix(hidden, latent), Matrix(latent, hidden)) if latent else ()
    gated = config.flag("mla_use_output_gate", default=False)
    gate = (
        (Matrix(hidden, wide, "outputs"),)
        if gated
        else (Matrix(hidden, size), Matrix(size, wide, "outputs"))
    )
    delta = (
        Matrix(hidden, 3 * wide, "outputs"),
        *gate,
        Matrix(hidden, size + heads),
        Matrix(size, wide, "outputs"),
        Matrix(wide, hidden, "inputs"),
    )
    values = config.count("num_attention_heads") * config.count("v_head_dim")
    latents = (Matrix(hidden, values, "outputs"),) if gated else ()
    state = wide * size * 4 + 3 * wide * (kernel - 1) * 2
    vectors = 3 * wide * kernel + wide + heads + size
    linear, full = set(said["kda_layers"]), _dense(config.count("intermediate_size"))
    dense = config.whole("first_k_dense_replace")

    def layer(index: int) -> Layer:
        is_dense = index < dense
        more = () if is_dense else around
        if index + 1 in linear:
            mixer = Mixer("kimi_delta", delta + more, vectors, state_bytes=state)
        else:
            mixer = Mixer("gate", latents + more, beside=True)
        return {"mixer": mixer} | (full if is_dense else {})

    return [layer(index) for index in range(layers)]


NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron(config: ConfigJson, layers: int) -> list[Layer]:
    """Layers that are one thing each: Mamba-2, attention, an MLP or experts (Nemotron-H, 3)."""
    hidden, heads = config.count("hidden_size"), config.count("mamba_num_heads")
    inner, groups = heads * config.count("mamba_head_dim"), config.count("n_groups")
    state, kernel = config.count("ssm_state_size"), config.count("conv_kernel")
    mixed, latent = inner + 2 * groups * state, config.whole("moe_latent_size")
    width = STATE_BYTES.get(str(config.get("mamba_ssm_cache_dtype", default="float32")), 4)
    mamba = Mixer(
        "mamba",
        (Matrix(hidden, inner + mixed + heads, "outputs"), Matrix(inner, hidden, "inputs")),
        vectors=mixed * (kernel + 1) + 3 * heads + inner,
        state_bytes=inner * state * width + mixed * (kernel - 1) * 2,
    )
    around = (Matrix(hidden, latent), Matrix(latent, hidden)) if latent else ()
    kinds: dict[str, Layer] = {
        "mamba": NO_MLP | {"mixer": mamba},
        "attention": NO_MLP | {"mixer": Mixer("", beside=True)},
        "mlp": _dense(config.whole("intermediate_size")) | {"mixer": Mixer("no attention")},
        "moe": {"mixer": Mixer("no attention", around)},
    }
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [kinds[NEMOTRON[letter]] for letter in pattern]
    return [kinds[kind] for kind in config.listed("layers_block_type", kinds, layers)]


def _minimax(config: ConfigJson, layers: int) -> list[Layer]:
    """Attention to blocks of tokens that an indexer picks, after dense layers (MiniMax-M3)."""
    said, hidden = config.get("sparse_attention_config") or {}, config.count("hidden_size")
    heads, size = _of(said, "sparse_num_index_heads"), _of(said, "sparse_index_dim")
    indexer = Mixer(
        "indexer",
        (Matrix(hidden, heads * size, "outputs"), Matrix(hidden, size)),
        vectors=2 * size,
        beside=True,
        index_bytes=2 * size,
    )
    dense = _dense(config.count("dense_intermediate_size"))
    experts = config.listed("moe_layer_freq", (0, 1), layers)
    sparse = said["sparse_attention_freq"]
    return [
        ({} if has else dense) | ({"mixer": indexer} if sparse[layer : layer + 1] == [1] else {})
        for layer, has in enumerate(experts)
    ]


SLIDING = ("sliding_attention", "full_attention")


def _gemma(config: ConfigJson, layers: int) -> list[Layer]:
    """Windows, and full attention with other heads, whose values may be its keys (Gemma 4)."""
    heads = config.whole("num_global_key_value_heads") or config.count("num_key_value_heads")
    whole = {
        "head_dim": config.whole("global_head_dim") or config.count("head_dim"),
        "num_kv_heads": heads,
        "values_are_keys": config.flag("attention_k_eq_v", default=False),
    }
    window = {"sliding_window": config.count("sliding_window")}
    kinds = config.listed("layer_types", SLIDING, layers)
    return [whole if kind == "full_attention" else window for kind in kinds]


def _llama4(config: ConfigJson, layers: int) -> list[Layer]:
    """Attention within chunks but in every fourth layer; experts in every n-th (Llama 4)."""
    step = config.count("interleave_moe_layer_step", default=1)
    dense = _dense(config.count("intermediate_size_mlp"))
    chunk = {"sliding_window": config.count("attention_chunk_size", default=8192)}
    return [
        ({} if (layer + 1) % step == 0 else dense) | ({} if (layer + 1) % 4 == 0 else chunk)
        for layer in range(layers)
    ]


def _step(config: ConfigJson, layers: int) -> list[Layer]:
    """Windows with more heads than full attention, and a gate a head (Step-3.5, 3.7)."""
    other, hidden = config.get("attention_other_setting") or {}, config.count("hidden_size")
    heads = {
        "full_attention": config.count("num_attention_heads"),
        "sliding_attention": _of(
            {"num_attention_heads": config.count("num_attention_heads")} | other,
            "num_attention_heads",
        ),
    }
    kinds: dict[str, Layer] = {
        name: {
            "num_heads": count,
            "mixer": Mixer("gate", (Matrix(hidden, count, "outputs"),), beside=True),
        }
        for name, count in heads.items()
    }
    kinds["sliding_attention"]["sliding_window"] = config.count("sliding_window")
    listed = str(config.get("moe_layers_enum", default=""))
    dense, plain = config.whole("first_k_dense_replace"), _dense(config.count("intermediate_size"))
    experts = {int(each) for each in listed.split(",") if each.strip().isdigit()}
    experts = experts or {*range(dense, layers)}
    types = config.listed("layer_types", SLIDING, layers)
    return [kinds[kind] | ({} if i in experts else plain) for i, kind in enumerate(types)]


def _mimo(config: ConfigJson, layers: int) -> list[Layer]:
    """Windows with other KV heads than full attention, and dense layers (MiMo-V2)."""
    size = {"v_head_dim": config.count("v_head_dim")}
    window = {
        "sliding_window": config.count("sliding_window"),
        "num_kv_heads": config.count("swa_num_key_value_heads"),
    }
    dense = _dense(config.count("intermediate_size"))
    windowed = config.listed("hybrid_layer_pattern", (0, 1), layers)
    experts = config.listed("moe_layer_freq", (0, 1), layers)
    return [
        size | (window if is_window else {}) | ({} if has else dense)
        for is_window, has in zip(windowed, experts, strict=True)
    ]


def _blocks(config: ConfigJson, layers: int) -> list[Layer]:
    """Layers of which attention, the MLP or both were cut (Nemotron-NAS)."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")

    def layer(block: dict[str, Any]) -> Layer:
        attention, mlp = block["attention"], block["ffn"]
        columns = 0 if mlp["no_op"] else round(2 * float(mlp["ffn_mult"]) * hidden / 3)
        found = _dense(-(-columns // 256) * 256)
        if attention["no_op"]:
            return found | {"mixer": Mixer("no attention")}
        found["num_kv_heads"] = heads // _of(attention, "n_heads_in_group")
        return found if columns else found | {"mixer": Mixer("", beside=True)}

    return [layer(block) for block in config.listed("block_configs", None, layers)]


READERS: dict[str, Callable[[ConfigJson, int], list[Layer]]] = {
    "qwen3_5": _qwen,
    "deepseek_v32": _indexed,
    "deepseek_v4": _compressed,
    "kimi_linear": _kimi,
    "nemotron_h": _nemotron,
    "minimax_m3": _minimax,
    "gemma4": _gemma,
    "llama4": _llama4,
    "step3": _step,
    "mimo_v2": _mimo,
    "nemotron_nas": _blocks,
}
"""Family -> what reads its layers."""
