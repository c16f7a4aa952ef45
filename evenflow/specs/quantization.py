"""Read the formats of weights, keys and values that a checkpoint states.

That is `quantization_config` of a config.json, or `quantization` of an hf_quant_config.json. One
format for all layers is read, and another one of a mixture's experts. Attention and the MLPs beside
experts may be left out of it. What is not read is refused with the format that stands in for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, is_count
from evenflow.specs.precision import FORMATS

INTEGERS = {"4": "int4_wo", "8": "int8_wo"}
"""Bits of integer weights, which are widened as they are read -> format."""

MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4_wo",
    "W4A16_AWQ": "int4_wo",
    "MXFP8": "mxfp8",
}
"""`quant_algo` -> format."""

WEIGHT_ONLY = {
    "fp8": "fp8_wo",
    "fp8_block": "fp8_wo",
    "mxfp8": "fp8_wo",
    "nvfp4": "nvfp4_wo",
    "mxfp4": "mxfp4_wo",
}
"""A format of floats -> that of weights in it whose inputs stay in 16 bits."""

STAND_INS = (
    (r'load_in_8bit": true', "int8_wo"),
    (r'load_in_4bit": true|bits": [1-4]\b|int[1-4](?!\d)|w4a\d+_awq', "int4_wo"),
    (r"mxfp4|e8m0", "mxfp4"),
    (r"fp4", "nvfp4"),
    (r"fp8|float8", "fp8"),
    (r'bits": [5-8]\b|int8', "int8_wo"),
)
"""What a quantisation that is not read says -> the format whose memory is nearest."""

PLAIN = "bfloat16"
"""What stands in where no width is said."""

MODULES = {
    "attention": re.compile(r"(self|linear)_attn(\.([qkvo]|qkv)_proj)?[.*$]*$"),
    "mlp": re.compile(r"(mlp|shared_experts?)(\.(gate|up|down|gate_up)_proj)?[.*$]*$"),
}
"""The matrices of a layer as the lists of what is left out name them, one of them or all."""

LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Keys of the lists of what stays in the model's own dtype, by method."""

ROUTED = re.compile(r"\bexperts\b")
APART = re.compile(r"experts?\b|lm_head")
"""Names of experts, and of modules whose format may differ: experts, shared ones, the head."""

PROBES = {
    "attention": ("model.layers.0.self_attn.q_proj",),
    "mlp": ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts.0.down_proj"),
}


class _UnreadError(Exception):
    """Unread part of a quantisation, in words, and the format that stands in, if known."""

    def __init__(self, words: str, stand_in: str = "") -> None:
        super().__init__(words)
        self.stand_in = stand_in


def mapping(value: object) -> dict[str, Any]:
    """Return a mapping as it is, and an empty one for all else."""
    return value if isinstance(value, dict) else {}


def weights_format(said: object, experts: int, where: Path) -> str:
    """Return the format of the layers' matrices, "" where there is none.

    UsageError for what is not read: it names the `dtype` of a run that stands in.
    """
    if not said:
        return ""
    given = said if isinstance(said, dict) else {"quant_method": said}
    method = given.get("quant_method", "modelopt" if "quant_algo" in given else None)
    try:
        read = METHODS.get(method) if isinstance(method, str) else None
        if read is None:
            raise _UnreadError(f"only {', '.join(METHODS)} are read")
        found = read(_beside_experts(given) if experts else given)
    except _UnreadError as error:
        stand_in, words = error.stand_in or _nearest(given), " ".join(str(error).split())
        raise UsageError(
            f'{where}: "quantization_config" of {method!r}: {words}; dtype: {stand_in} in the run '
            "stands in for it"
        ) from None
    return found


def expert_format(said: object) -> str:
    """Return the format of a mixture's experts where modelopt gives them another than the rest."""
    layers = mapping(mapping(said).get("quantized_layers"))
    said_of = {
        str(mapping(each).get("quant_algo")) for name, each in layers.items() if ROUTED.search(name)
    }
    return MODELOPT.get(said_of.pop(), "") if len(said_of) == 1 else ""


def _beside_experts(said: dict[str, Any]) -> dict[str, Any]:
    """Return what a quantisation says without experts and head, where those have formats apart."""
    layers = mapping(said.get("quantized_layers"))
    if not expert_format(said):
        return said
    kept = {name: each for name, each in layers.items() if not APART.search(name)}
    return said | {"quantized_layers": kept or layers}


def kv_format(said: object, where: Path) -> str:
    """Return the format of keys and values that a checkpoint asks for, "" for its own dtype.

    UsageError for what is not read: it names the `kv_dtype` of a run that stands in.
    """
    given = mapping(said)
    algorithm, scheme = given.get("kv_cache_quant_algo"), given.get("kv_cache_scheme")
    if "FP8" in (str(algorithm).upper(), str(scheme).upper()):
        return "fp8"
    key, value = "kv_cache_quant_algo", algorithm
    if algorithm is None or str(algorithm).upper() == "NONE":
        key, value = "kv_cache_scheme", scheme
        if scheme is None:
            return ""
        if (mapping(scheme).get("type"), mapping(scheme).get("num_bits")) == ("float", 8):
            return "fp8"
    raise UsageError(
        f'{where}: "{key}" is {value!r}, not supported; 8-bit floats are, and kv_dtype: fp8 in the '
        "run stands in for it"
    )


def plain_parts(said: object, layers: int) -> dict[str, bool]:
    """Return which parts of most layers the quantisation leaves out, as fields of a ModelSpec."""
    given, untargeted = mapping(said), _untargeted(mapping(said))
    if expert_format(given):
        return {}
    return {
        f"plain_{part}": part in untargeted or 2 * _layers_left_out(given, part, layers) > layers
        for part in MODULES
    }


def _layers_left_out(said: dict[str, Any], part: str, layers: int) -> int:
    """Return the number of layers that leave a part out by name; all, where no number is given."""
    lists = map(said.get, LEFT_OUT)
    names = [str(name) for names in lists if isinstance(names, list) for name in names]
    found = [name for name in names if MODULES[part].search(name) and "vis" not in name]
    numbers = {number[0] if (number := re.findall(r"\d+", name)) else "" for name in found}
    return layers if "" in numbers else len(numbers)


def _groups(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups = mapping(said.get("config_groups")).items()
    return {name: group for name, group in groups if mapping(mapping(group).get("weights"))}


def _untargeted(said: dict[str, Any]) -> list[str]:
    """Return the parts of a layer that no group of `config_groups` targets."""
    listed = [group.get("targets") for group in _groups(said).values()]
    targets = [each for names in listed if isinstance(names, list) for each in names]
    return [part for part in PROBES if targets and not _any_targets(targets, PROBES[part])]


def _any_targets(targets: Iterable[object], modules: Iterable[str]) -> bool:
    def hits(target: str, module: str) -> bool:
        if not target.startswith("re:"):
            return target[:1].isupper() or target in module
        try:
            return re.match(re.sub(r"\d+", "0", target[3:]), module) is not None
        except re.error:
            return False

    return any(hits(str(target), module) for target in targets for module in modules)


# -- a function a method --------------------------------------------------------------------------


def _fp8(said: dict[str, Any]) -> str:
    block = said.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise _UnreadError(f"blocks of {block}, where [128, 128] are read", "fp8_block")
    return "fp8_block" if block else "fp8"


def _modelopt(said: dict[str, Any]) -> str:
    algorithm = said.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = mapping(said.get("quantized_layers"))
        if not layers:
            raise _UnreadError('MIXED_PRECISION has no "quantized_layers"')
        return _one({name: _modelopt(mapping(layer)) for name, layer in layers.items()})
    if algorithm is None:
        return ""
    if str(algorithm) not in MODELOPT:
        raise _UnreadError(f'"quant_algo" {algorithm!r} is none of {", ".join(MODELOPT)}')
    return MODELOPT[str(algorithm)]


def _integers(said: dict[str, Any]) -> str:
    """Read awq, gptq and auto-round: 4 or 8 bits, widened as they are read."""
    per_layer = [key for key in ("dynamic", "extra_config") if said.get(key)]
    if per_layer:
        raise _UnreadError(f'"{per_layer[0]}" has formats by layer')
    kind, inputs = str(said.get("data_type", "int")), said.get("act_bits") or 16
    bits = said.get("bits")
    if str(bits) not in INTEGERS or not kind.startswith("int") or inputs != 16:
        raise _UnreadError(f"{bits!r} bits of {kind}, where 4 or 8 bits of int are read")
    return _integer(bits, said.get("group_size"))


def _integer(bits: object, group_size: object) -> str:
    """Return the format of integers that are widened as they are read."""
    is_fine = str(bits) == "4" and is_count(group_size, 32)
    return "int4_wo_32" if is_fine else INTEGERS[str(bits)]


def _compressed(said: dict[str, Any]) -> str:
    groups = _groups(said)
    found = _one({name: _group(each, said) for name, each in groups.items()})
    structure = mapping(said.get("sparsity_config")).get("sparsity_structure")
    if structure not in (None, "unstructured", "0:0"):
        raise _UnreadError(f"weights of sparsity {structure!r}", found)
    if not groups:
        raise _UnreadError('"config_groups" has no weights')
    return found


def _one(formats: dict[str, str]) -> str:
    """Return the one format of all groups; _UnreadError names the first that differs."""
    (name, first), *others = formats.items() or [("", "")]
    for other, found in others:
        if found != first:
            bits = {each: FORMATS[each].bits if each else 16 for each in formats.values()}
            widest = max(bits, key=bits.__getitem__)
            words = f'"{other}" is {found or "16 bits"} beside "{name}" in {first or "16 bits"}; '
            words += "one format is read"
            raise _UnreadError(words, widest)
    return first


def _group(group: dict[str, Any], said: dict[str, Any]) -> str:
    """Return the format of a group; weight-only where its inputs are not quantised."""
    weights, inputs = mapping(group.get("weights")), mapping(group.get("input_activations"))
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    of_inputs = (inputs.get("type", "int"), inputs.get("num_bits")) if inputs else None
    words = f"weights in {bits} bits of {kind}"
    if of_inputs:
        words += f" with inputs in {of_inputs[1]} bits of {of_inputs[0]}"
    if kind == "int" and not of_inputs and str(bits) in INTEGERS:
        return _integer(bits, weights.get("group_size"))
    if (kind, bits) == ("int", 8) and of_inputs == ("int", 8):
        return "int8"
    layout = str(group.get("format") or said.get("format"))
    found = _float(bits, weights, layout) if kind == "float" else ""
    if not found or of_inputs not in (None, ("float", bits)):
        raise _UnreadError(words, found or ("fp8" if (kind, bits) == ("float", 8) else ""))
    return found if of_inputs else WEIGHT_ONLY[found]


def _float(bits: object, weights: dict[str, Any], layout: str) -> str:
    """Return the format of float weights by what shares a scale, "" for what is not known."""
    block, size = weights.get("block_structure"), weights.get("group_size")
    if bits == 8 and weights.get("strategy") == "block":
        return "fp8_block" if block in (None, [128, 128], "128x128") else ""
    if bits == 8 and weights.get("strategy") == "group":
        return "mxfp8" if size == 32 else ""
    if bits == 8:
        return "fp8"
    size = size or (32 if "mxfp4" in layout else 16)
    return {"16": "nvfp4", "32": "mxfp4"}.get(str(size), "") if bits == 4 else ""


METHODS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda _: "mxfp4",
    "mxfp8": lambda _: "mxfp8",
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": _integers,
    "gptq": _integers,
    "auto-round": _integers,
    "compressed-tensors": _compressed,
}
"""The methods of `quantization_config` that are read, by vLLM's names."""


def _nearest(said: dict[str, Any]) -> str:
    """Return the format of FORMATS nearest in memory to one that is not read."""
    text = json.dumps(said, default=str).lower()
    return next((dtype for pattern, dtype in STAND_INS if re.search(pattern, text)), PLAIN)
