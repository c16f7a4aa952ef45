"""Sarathi-Serve's figure 5: arithmetic intensity of the linear operators against the tokens."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from evenflow.costs import RooflineCost, prefill_work
from experiments.figures.iterations import parts_of, roofline_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines


def make(study: Study) -> Drawing:
    """Count operations and bytes, and the share of both peaks that the predicted time means."""
    cost, numbers = roofline_of(study), study.numbers
    kinds = {
        "decode-only batch": int(numbers["decode_batch"]),
        "Sarathi-Serve's batch": int(numbers["token_budget"]),
        "prefill-only batch": int(numbers["prompt_tokens"]),
    }
    tokens = sorted({*numbers["tokens"], *kinds.values()})
    table = pd.DataFrame(_row(cost, count) for count in tokens)
    return Drawing(_draw(table, kinds, cost), table)


def _row(cost: RooflineCost, tokens: int) -> dict[str, float]:
    """Operations are those asked for; tiles filled with padding only show in the time."""
    model, gpu = cost.deployment.model, cost.deployment.gpu
    shapes = model.linear_shapes(cost.deployment.tensor_parallel)
    operations = sum(2 * tokens * inputs * outputs for inputs, outputs in shapes)
    values = sum(i * o + tokens * (i + o) for i, o in shapes)
    layer_s = parts_of(cost, prefill_work(tokens)).linear / model.num_layers
    moved_bytes = values * model.dtype_bytes
    return {
        "tokens": tokens,
        "operations_per_byte": operations / moved_bytes,
        "share_of_peak_flops": operations / layer_s / (gpu.fp16_tflops * 1e12),
        "share_of_peak_bandwidth": moved_bytes / layer_s / (gpu.memory_bandwidth_gb_s * 1e9),
    }


def _draw(table: pd.DataFrame, kinds: dict[str, int], cost: RooflineCost) -> Figure:
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    spec = cost.deployment.gpu
    ridge = spec.fp16_tflops * 1e3 / spec.memory_bandwidth_gb_s
    left.plot(table.tokens, table.operations_per_byte, color="#0b5fa5", marker="o", ms=3)
    left.axhline(ridge, color="0.4", ls="--", lw=1)
    left.annotate(
        f"{spec.name}: {ridge:.0f} operations a byte", (1, ridge), fontsize=8, va="bottom"
    )
    by_tokens = table.set_index("tokens").operations_per_byte
    for (kind, tokens), color in zip(kinds.items(), ("#d9730d", "#8a4fb0", "#3f8f3f"), strict=True):
        left.plot([tokens], [by_tokens[tokens]], "D", ms=8, color=color, label=f"{kind}, {tokens}")
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="operations / byte")
    left.legend(fontsize=8, loc="lower right")
    right.plot(table.tokens, table.share_of_peak_flops, color="#d9730d", label="arithmetic")
    right.plot(table.tokens, table.share_of_peak_bandwidth, color="#3f8f3f", label="bandwidth")
    right.set(xscale="log", xlabel="tokens", ylabel="share of the peak", ylim=(0, 1))
    right.legend(fontsize=8)
    grid_lines(figure.axes)
    return figure
