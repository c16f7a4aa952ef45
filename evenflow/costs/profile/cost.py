"""Costs from a profile file: the operators measured on a device, interpolated.

Knows what a prediction needs of a file and how operators make a layer. Operators that a file lacks
are the roofline's (`fill: roofline`). Known errors: decoding rows count with their mean context.
Operators measured alone miss what they do to each other's caches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from evenflow.costs.profile.file import LayerShapes, Profile, ProfilePoint
from evenflow.costs.roofline import (
    AttentionRates,
    Rates,
    RooflineCost,
    elementwise_values,
    embedding_s,
    head_s,
)
from evenflow.costs.tables import (
    Attending,
    Attention,
    BySize,
    Curve,
    Estimate,
    LayerParts,
    Surface,
    TableCost,
    added,
    all_reduces,
    table_cost,
    unmeasured,
)
from evenflow.errors import UsageError
from evenflow.runtimes import RuntimeOverheads
from evenflow.specs.modelspec import ModelSpec, parameters
from evenflow.specs.precision import DTYPE_BYTES
from evenflow.sums import plain_sum

ENDS = ("embedding", "head", "sample")
HOST = ("cpu_message", "cpu_schedule", "cpu_prepare", "cpu_sample", "cpu_detokenise")
"""What the host does for a micro-batch, one after the other, against its rows."""


def linears(kind: ModelSpec) -> tuple[str, ...]:
    """Return the products that every token passes in a layer, as `ModelSpec.linear_shapes` does."""
    mlp = ("linear_up", "linear_down") if kind.shared_columns else ()
    query_up = ("linear_q_up",) if kind.q_lora_rank else ()
    latent = (*query_up, "linear_kv_up") if kind.kv_lora_rank else ()
    router = ("router",) if kind.num_experts else ()
    return ("linear_qkv", *latent, "linear_o", *mlp, *router)


def operators(kind: ModelSpec) -> tuple[str, ...]:
    """Return the operators of a layer without attention, each as often as the layer runs it."""
    mlp = ("activation",) if kind.shared_columns else ()
    experts = ("experts",) if kind.num_experts else ()
    return (*linears(kind), "norm", "norm", "rope", *mlp, "kv_write", *experts)


def attentions(kind: ModelSpec) -> tuple[str, str]:
    """Return the attention of a layer: of a chunk, and of decodes."""
    within = "_window" if kind.sliding_window else ""
    return f"attention_prefill{within}", f"attention_decode{within}"


def operator_counts(model: ModelSpec) -> Counter[str]:
    """Return how often the layers of a model run each operator."""
    counts: Counter[str] = Counter()
    for kind, layers in model.kinds().items():
        counts.update(layers * (*operators(kind), *attentions(kind)))
    return counts


BEYOND = 10**12
"""Tokens of context that no request has."""

MEMORY_BYTES_PER_S = 2e13
"""No memory is faster, caches of CPUs included."""

GPU_BYTES_PER_S = 8e9
GPU_FLOPS_PER_S = 1e12
"""No GPU reads a matrix of megabytes, or computes with it, more slowly: a thousandth of fast ones,
so that milliseconds taken for seconds are noticed."""


def profile_cost(
    profile: Profile,
    model: ModelSpec,
    layers_per_stage: Sequence[int],
    tensor_parallel: int = 1,
    fill: RooflineCost | None = None,
    *,
    name: str = "profile",
    with_all_reduces: bool = True,
) -> TableCost:
    """Return the costs that a profile gives for a model on stages of `layers_per_stage` layers.

    `fill` estimates the operators that the file lacks; without it a UsageError lists them.
    UsageError also when the file is for other layer shapes or another dtype, or has too few points.
    `name` is the file's, for messages. Without all-reduces it is what a shard computes alone.
    """
    check_fits(profile, model, name)
    check_units(profile, model, name)
    if fill is None:
        _check_complete(profile, model, tensor_parallel, name)
    reduces = with_all_reduces and tensor_parallel > 1

    def parts_of(kind: ModelSpec) -> StageParts:
        return StageParts(profile, kind, tensor_parallel, fill, name, reduces=reduces)

    model.require_plain("costs: profile")
    return table_cost(model, layers_per_stage, parts_of)


def hop_of(profile: Profile) -> tuple[float, float] | None:
    """Return the seconds, and the seconds a byte, from one stage to the next; None if not measured.

    The straight line with the least relative errors through the points of `transfer`, at least two
    sizes. Known error: links are not straight where protocols change with the size.
    """
    points = profile.of("transfer")
    return None if len(points) < 2 else _line(points)


def host_of(profile: Profile) -> RuntimeOverheads:
    """Return the CPU time around a micro-batch; nothing of what was not measured.

    Lines as in `hop_of` through the points of each of HOST, added up. Points of `cpu_prompt`, of a
    micro-batch of one prompt alone, give the time for a prompt.
    """
    lines = [_line(points) for name in HOST if (points := profile.of(name))]
    schedule_s, per_row_s = (plain_sum(each) for each in zip((0.0, 0.0), *lines, strict=True))
    prompts = profile.of("cpu_prompt")
    if not prompts:
        return RuntimeOverheads(schedule_s, per_row_s=per_row_s)
    alone_s, per_token_s = _line(prompts)
    return RuntimeOverheads(
        schedule_s,
        per_row_s=per_row_s,
        per_new_request_s=max(alone_s - schedule_s - per_row_s, 0.0),
        per_prompt_token_s=per_token_s,
    )


def _line(points: Sequence[ProfilePoint]) -> tuple[float, float]:
    """Return intercept (s) and slope (s per unit) of the line with the least relative errors.

    It fits the points' means, as a median leaves out repeats that take much longer.
    """
    sizes = np.array([point.size_bytes or point.tokens or 0 for point in points], dtype=float)
    seconds = np.array([point.mean_s for point in points])
    per_unit_s = 0.0
    if len(points) > 1:
        per_unit_s = max(float(np.polyfit(sizes, seconds, 1, w=1 / seconds)[0]), 0.0)
    latency_s = float(np.average(seconds - per_unit_s * sizes, weights=seconds**-2.0))
    return max(latency_s, 0.0), per_unit_s


def missing_operators(profile: Profile, model: ModelSpec, tensor_parallel: int = 1) -> list[str]:
    """Return the operators that a prediction needs and the file lacks, in order."""
    needed = [*operator_counts(model), *ENDS]
    if profile.of("model_prefill", tensor_parallel):
        needed = [each for each in needed if each.startswith("attention") or each in ENDS]
    if tensor_parallel > 1:
        needed.append("all_reduce")
    return [operator for operator in needed if not profile.of(operator, tensor_parallel)]


def _check_complete(profile: Profile, model: ModelSpec, tensor_parallel: int, name: str) -> None:
    missing = missing_operators(profile, model, tensor_parallel)
    if missing:
        ranks = f" for {tensor_parallel} ranks" if tensor_parallel > 1 else ""
        raise UsageError(
            f"{name}: lacks {', '.join(missing)}{ranks}; measure them, or say "
            '"fill: roofline" to estimate them'
        )


def check_fits(profile: Profile, model: ModelSpec, name: str) -> None:
    """Raise a UsageError when a profile is for other layer shapes or another dtype."""
    measured, plain_kv = profile.header, model.kv_value_bytes == model.dtype_bytes
    if model.quantization != measured.shapes.quantization or not plain_kv:
        own = (model.quantization or "its own dtype") if plain_kv else f"{model.kv_dtype} KV"
        raise UsageError(
            f"{name}: measured in {measured.shapes.quantization or measured.dtype}, and the model "
            f"is in {own}; use costs: roofline or silicon"
        )
    differences = profile.header.shapes.unlike(LayerShapes.of(model))
    if differences:
        raise UsageError(
            f"{name}: measured for other layer shapes than {model.name}'s: {'; '.join(differences)}"
        )
    if DTYPE_BYTES[profile.header.dtype] != model.dtype_bytes:
        raise UsageError(
            f"{name}: measured in {profile.header.dtype}, but {model.name} has "
            f"{model.dtype_bytes} bytes a parameter"
        )


def check_units(profile: Profile, model: ModelSpec, name: str) -> None:
    """Raise a UsageError when linear operators cannot take the seconds that a profile says.

    A product reads its matrix at most as fast as the fastest memory. With megabytes of it, it is at
    least as fast as the slowest GPU, unless a CPU was measured. Times in another unit are off by a
    factor of 1000.
    """
    for ranks in sorted({point.ranks for point in profile.points}):
        for operator, count in _parameters(model, ranks).items():
            for point in profile.of(operator, ranks)[:1]:
                _check_unit(profile, point, count, model.dtype_bytes, name)


def _parameters(model: ModelSpec, ranks: int) -> dict[str, int]:
    """Return the parameters that a token passes in each product, and in all of a model's layers."""
    found, whole = dict[str, int](), 0
    for kind, layers in model.kinds().items():
        shapes = kind.linear_shapes(ranks)
        found |= zip(linears(kind), (parameters((shape,)) for shape in shapes), strict=True)
        routed = kind.experts_per_token * parameters(kind.expert_shapes(ranks))
        whole += layers * (parameters(shapes) + routed)
    return found | {"model_prefill": whole}


def _check_unit(
    profile: Profile, point: ProfilePoint, passed: int, dtype_bytes: int, name: str
) -> None:
    size_bytes, seconds = passed * dtype_bytes, point.median_s
    flops = 2 * passed * (point.tokens or 0)
    slowest_s = size_bytes / GPU_BYTES_PER_S + flops / GPU_FLOPS_PER_S
    on_cpu = profile.header.device_kind == "cpu"
    too_slow = not on_cpu and size_bytes > 2**20 and seconds > slowest_s
    if size_bytes > seconds * MEMORY_BYTES_PER_S or too_slow:
        raise UsageError(
            f"{name}: {point.operator} of {point.tokens} tokens takes {seconds:g} s, which means "
            f"{size_bytes / seconds:.3g} bytes a second of weights: times in another unit?"
        )


def check_device(profile: Profile, gpu_name: str, name: str) -> None:
    """Raise a UsageError unless the profile's device is the GPU of that name (`A100-80G`: an A100).

    The first part of the name must be a word of the device's name, as drivers write it.
    """
    words = re.split(r"[^0-9a-z]+", profile.header.device.lower())
    if gpu_name.split("-", maxsplit=1)[0].lower() not in words:
        raise UsageError(
            f'{name}: measured on "{profile.header.device}", but the run\'s gpu is {gpu_name}; '
            "profile that GPU, or change gpu"
        )


class StageParts(LayerParts):
    """Estimates for a layer, embedding and LM head, from the profile or from `fill`."""

    def __init__(
        self,
        profile: Profile,
        model: ModelSpec,
        ranks: int,
        fill: RooflineCost | None,
        name: str,
        *,
        reduces: bool = False,
    ) -> None:
        self.profile = profile
        self.model = model
        self.ranks = ranks
        self.fill = None if fill is None else estimated_operators(fill, model)
        self.fill_attention = None if fill is None else estimated_attention(fill, model)
        self.name = name
        self.reduces = reduces

    def attending(self) -> Attending:
        """Return attention of a layer."""
        prefill, decode = map(self.attention, attentions(self.model))
        return Attending(prefill, decode)

    def by_tokens(self, operator: str) -> BySize:
        """Return an operator against tokens."""
        if not self.profile.of(operator, self.ranks):
            assert self.fill is not None  # check_complete has refused
            return self.fill[operator]
        return self._curve(operator).estimate

    def summed(self, operators: Sequence[str]) -> list[BySize]:
        """Return seconds by tokens, one estimate for all operators measured at the same tokens."""
        alike: dict[tuple[int, ...], list[Curve]] = {}
        filled = []
        for operator in operators:
            if self.profile.of(operator, self.ranks):
                curve = self._curve(operator)
                alike.setdefault((curve.tile, *curve.sizes), []).append(curve)
            else:
                filled.append(self.by_tokens(operator))
        return [*(Curve.sum(curves).estimate for curves in alike.values()), *filled]

    def _curve(self, operator: str) -> Curve:
        tiled = operator.startswith("linear_") or operator in ("router", "model_prefill")
        tile = self.profile.header.tile_tokens if tiled else 1
        points = self.profile.of(operator, self.ranks)
        if len(points) < 2:
            raise UsageError(f"{self.name}: {operator} has 1 point; it needs at least 2 sizes")
        sizes = [point.tokens or point.size_bytes or 0 for point in points]
        return Curve(sizes, [point.mean_s for point in points], tile)

    def attention(self, operator: str) -> Attention:
        """Return attention by (tokens, context); contexts above a window's count as the window."""
        points = self.profile.of(operator, self.ranks)
        decoding = operator.startswith("attention_decode")
        windowed = operator.endswith("_window")
        most = self.model.sliding_window - 1 if windowed else BEYOND
        if not points:
            assert self.fill_attention is not None  # check_complete has refused
            return self.fill_attention[operator]
        times: dict[tuple[int, float], list[float]] = {}
        for point in points:
            tokens, context = point.tokens or 0, point.context_tokens or 0
            key = tokens, min(context / tokens if decoding else context, most)
            times.setdefault(key, []).append(point.mean_s)
        seconds = {key: fmean(each) for key, each in times.items()}
        seconds |= {(key[0], BEYOND): each for key, each in seconds.items() if key[1] == most}
        for axis, size in enumerate(("tokens", "context_tokens")):
            if len({key[axis] for key in seconds}) < 2:
                raise UsageError(f"{self.name}: {operator} needs at least 2 values of {size}")
        surface = Surface(seconds)
        if not windowed:
            return surface.decode if decoding else surface.prefill
        if decoding:
            return lambda rows, context: surface.decode(rows, min(context, rows * most))
        return lambda tokens, context: surface.prefill(tokens, min(context, most))

    def all_reduces(self) -> BySize:
        """Return what a layer spends in all-reduces, against tokens."""
        if self.profile.of("all_reduce", self.ranks):
            count = 1 if self.model.parallel_attention else 2
            return all_reduces(self.model, self._curve("all_reduce").estimate, count)
        return self.by_tokens("all_reduce")

    def layer(self) -> BySize:
        """Return a layer without attention: its operators, and the rest of a measured layer."""
        known = self.profile.of
        if known("model_prefill", self.ranks) and not known("linear_qkv", self.ranks):
            return self.whole_layer()
        parts = self.summed(operators(self.model))
        beyond = self._beyond_operators(parts)
        total = added([*parts, *([self.all_reduces()] if self.reduces else ())])

        def seconds(tokens: int) -> Estimate:
            estimate = total(tokens)
            return Estimate(max(estimate.seconds + beyond(tokens), 0.0), estimate.unmeasured_s)

        return seconds

    def _beyond_operators(self, parts: Sequence[BySize]) -> Callable[[int], float]:
        if not self.profile.of("layer", self.ranks):
            return lambda tokens: 0.0
        whole = self._curve("layer")
        prefill = self.attention(attentions(self.model)[0])
        rest = [
            whole(tokens)
            - plain_sum(part(tokens).seconds for part in parts)
            - prefill(tokens, 0)[0]
            for tokens in whole.sizes
        ]
        difference, last = Curve(whole.sizes, rest), whole.sizes[-1]
        return lambda tokens: difference(min(tokens, last))

    def whole_layer(self) -> BySize:
        """Return a layer without attention, from times of the whole model.

        What a prompt takes less embedding, head and attention, divided by the number of layers.
        """
        whole, embedding = self.by_tokens("model_prefill"), self.embedding()
        head, prefill = self.head(), self.attention(attentions(self.model)[0])
        count = self.model.num_layers

        def seconds(tokens: int) -> Estimate:
            total = whole(tokens)
            ends_s = embedding(tokens).seconds + head(1).seconds
            rest_s = (total.seconds - ends_s) / count - prefill(tokens, 0)[0]
            return Estimate(max(rest_s, 0.0), max(rest_s, 0.0) if total.unmeasured_s else 0.0)

        return seconds

    def embedding(self) -> BySize:
        return self.by_tokens("embedding")

    def head(self) -> BySize:
        """Return final norm, LM head and sampling against rows."""
        return added(self.summed(("head", "sample")))


def estimated_operators(roofline: RooflineCost, kind: ModelSpec) -> Mapping[str, BySize]:
    """Return the operators of layers of a kind, save attention, by the formulas of `roofline`.

    `all_reduce` is what a layer spends in them, against tokens. The GPU's overhead per layer is
    left out: it belongs to whole layers. `sample` costs nothing: the head includes it.
    """
    deployment, tile = roofline.deployment, roofline.tile_tokens
    ranks, rates = deployment.tensor_parallel, Rates.of(deployment.gpu)

    def product(shape: tuple[int, int]) -> Callable[[int], float]:
        return partial(roofline.product_s, shape=shape, model=kind)

    def moving(values: float) -> Callable[[int], float]:
        return lambda tokens: tokens * values * kind.dtype_bytes / rates.bytes_per_s

    formulas: dict[str, Callable[[int], float]] = {
        **dict(zip(linears(kind), map(product, kind.linear_shapes(ranks)), strict=True)),
        **{name: moving(values) for name, values in elementwise_values(kind, ranks).items()},
        "experts": roofline.experts_s,
        "embedding": partial(embedding_s, model=kind, rates=rates),
        "head": lambda rows: head_s(rows, kind, ranks, tile, rates),
        "sample": lambda rows: 0.0,
        "all_reduce": partial(roofline.all_reduce_s, kind=kind),
    }
    return {name: unmeasured(seconds_at) for name, seconds_at in formulas.items()}


def estimated_attention(roofline: RooflineCost, kind: ModelSpec) -> Mapping[str, Attention]:
    """Return the attention of a layer of a kind by the formulas of `roofline`."""
    deployment = roofline.deployment
    rates = AttentionRates.of(kind, deployment.tensor_parallel, Rates.of(deployment.gpu))
    prefill, decode = attentions(kind)
    return {
        prefill: lambda tokens, start: (rates.prefill_s(start, start + tokens), False),
        decode: lambda rows, context: (rates.decode_s(rows, context), False),
    }
