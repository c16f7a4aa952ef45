"""Measure microseconds per predicted micro-batch on four stages.

Run it from the repository: `python -m benchmarks.bench_costs`.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from itertools import cycle
from typing import Any

from evenflow.core.batch import Span
from evenflow.costs import AffineCost, RooflineCost, StageCost, Work, decode_work, prefill_work
from evenflow.costs.profile.cost import profile_cost
from evenflow.costs.profile.file import OPERATORS, Header, LayerShapes, Profile, ProfilePoint
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec, in_precision

CALLS = 200_000


def mixed_work(rows: int) -> Work:
    """Return a micro-batch of two prompt chunks and `rows` decodes."""
    return Work((Span(0, 384), Span(512, 1024)), 896, rows, rows * 1500, rows + 2)


WORKS = {
    "decode": [decode_work(rows, rows * 1500) for rows in range(1, 257)],
    "mixed": [mixed_work(rows) for rows in range(1, 257)],
    "prefill": [prefill_work(tokens, 256) for tokens in range(1, 2049)],
}


def grid_profile(spec: ModelSpec, layer_s: Callable[[Work], float]) -> Profile:
    """Return a profile as dense as a measured one, `layer_s` as the seconds of attention."""
    lengths = sorted({1, 2, 4, 8, *range(16, 2049, 16), *range(129, 2049, 128)})
    found = [
        _point(operator, tokens, None, 1e-4 + 1e-6 * tokens)
        for operator, sizes in OPERATORS.items()
        if sizes == ("tokens",) and operator not in ("layer", "model_prefill")
        for tokens in lengths
    ]
    for tokens in (16, 64, 128, 256, 512, 1024, 2048):
        for context in (0, 256, 1024, 4096, 16384):
            seconds = layer_s(prefill_work(tokens, context))
            found.append(_point("attention_prefill", tokens, context, seconds))
    for rows in (1, 4, 16, 64, 128, 256):
        for context in (128, 512, 1024, 2048, 4096):
            seconds = layer_s(decode_work(rows, rows * context))
            found.append(_point("attention_decode", rows, rows * context, seconds))
    shapes = LayerShapes.of(spec)
    words = ("NVIDIA L20", "other", "", "", "bfloat16", "unknown", 0, "", 128, "benchmark")
    return Profile(Header(*words, spec.name, shapes), tuple(found))


def _point(operator: str, tokens: int, context: int | None, seconds: float) -> ProfilePoint:
    return ProfilePoint(operator, tokens, context, None, 1, seconds, seconds, seconds, 1)


def silicon(name: str, dtype: str | None = None, **deployed: Any) -> dict[str, StageCost]:
    """Return the costs of measured operators, nothing where the package is not installed."""
    from evenflow.costs.silicon.cost import silicon_cost, silicon_source

    spec = in_precision(model(name), dtype, None)
    deployment = Deployment(spec, gpu("H200"), split_layers(spec.num_layers, 4), **deployed)
    try:
        return {f"silicon, {name}": silicon_cost(deployment, silicon_source(deployment))}
    except UsageError as reason:
        print(f"silicon, {name}: left out: {reason}")
        return {}


def microseconds(cost: StageCost, works: list[Work]) -> float:
    """Return the best of five means over CALLS calls, sizes taken in turn."""
    next_work = cycle(works).__next__
    loop = "for _ in range(calls): times(next_work())"
    names = {"times": cost.times, "next_work": next_work, "calls": CALLS}
    return min(timeit.repeat(loop, globals=names, number=1, repeat=5)) / CALLS * 1e6


def main() -> None:
    """Print one line per cost model and kind of micro-batch."""
    spec = model("Qwen2.5-32B")
    deployment = Deployment(spec, gpu("L20"), split_layers(spec.num_layers, 4))
    layers, roofline = deployment.layers_per_stage, RooflineCost(deployment)
    profile = grid_profile(spec, lambda work: roofline.times(work)[0] / layers[0])
    costs: dict[str, StageCost] = {
        "affine": AffineCost(0.005, 2e-5, 4),
        "roofline": roofline,
        "profile": profile_cost(profile, spec, layers),
    }
    costs |= silicon("Qwen2.5-32B") | silicon("DeepSeek-V3", dtype="fp8_block", tensor_parallel=8)
    for name, cost in costs.items():
        for kind, works in WORKS.items():
            print(f"{name:22} {kind:8} {microseconds(cost, works):6.2f} us")


if __name__ == "__main__":
    main()
