"""The tables of single micro-batches: costs by size, part and layout, without a run.

Knows a figure's micro-batches and which of their costs it shows. The picture and the claims are in
the figure's YAML.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from evenflow.costs import RooflineCost, decode_work, estimates, prefill_work
from evenflow.costs.estimates import REFERENCE, joined
from evenflow.experiments.figures.cases import ServedModel, layout_of, pairs, served
from evenflow.experiments.figures.iterations import (
    in_chunks,
    iteration,
    parts_of,
    prompts,
    roofline_of,
    world_of,
)
from evenflow.experiments.figures.panels import draw
from evenflow.experiments.figures.study import FigureStudy
from evenflow.schedulers.td_pipe import saturating_rows, spatial_intensity, temporal_intensity
from evenflow.sums import plain_sum


def throughput(study: FigureStudy) -> pd.DataFrame:
    """Predict an iteration of whole prompts, and one of decodes, of each batch size."""
    seconds, length = iteration(world_of(study)), int(study.numbers["length"])
    return pd.DataFrame(
        {
            "batch_size": size,
            "prefill_tokens_per_s": size * length / seconds(prompts(size, length)),
            "decode_tokens_per_s": size / seconds(decode_work(size, size * length)),
        }
        for size in study.numbers["batch_sizes"]
    )


def intensities(study: FigureStudy) -> pd.DataFrame:
    """Return TD-Pipe's intensities by the rows of a decode batch, and by the prefills that fit."""
    numbers, world = study.numbers, world_of(study)
    known, context = estimates(world.costs), int(numbers["decode_context"])
    decode_s, prefill_s = known["decode_s"], known["prefill_s"](int(numbers["prefill_tokens"]))
    peak = saturating_rows(decode_s)
    return pd.DataFrame(
        {
            "rows": rows,
            "prefills": count,
            "spatial": spatial_intensity(rows, context, peak, decode_s),
            **{
                name: temporal_intensity(
                    [prefill_s] * count, decode_s(rows, rows * context), world.depth, waits
                )
                for name, waits in (("temporal", 1), ("reading", world.depth - 1))
            },
        }
        for rows in numbers["rows"]
        for count in numbers["prefills"]
    )


def by_part(study: FigureStudy) -> pd.DataFrame:
    """Take one prompt of each length apart, and decodes of each batch size."""
    cost, numbers = roofline_of(study), study.numbers
    context = int(numbers["decode_context"])
    works = [("prefill", tokens, prefill_work(tokens)) for tokens in numbers["prompt_tokens"]]
    works += [("decode", n, decode_work(n, n * context)) for n in numbers["batch_sizes"]]
    table = pd.DataFrame(
        {
            "phase": phase,
            "tokens": tokens,
            **{f"{part}_ms": 1e3 * s for part, s in parts_of(cost, work)._asdict().items()},
            "total_ms": 1e3 * plain_sum(cost.times(work)),
        }
        for phase, tokens, work in works
    )
    return table.assign(linear_share=table.linear_ms / table.total_ms)


def intensity(study: FigureStudy) -> pd.DataFrame:
    """Count operations and bytes, and the share of both peaks that the predicted time means."""
    cost = roofline_of(study)
    tokens = {*study.numbers["tokens"], *_batches(study).values()}
    return pd.DataFrame(_intensity(cost, count) for count in sorted(tokens))


def _batches(study: FigureStudy) -> dict[str, int]:
    """Return the tokens of typical micro-batches, by their words."""
    numbers = study.numbers
    return {
        "decode-only batch": int(numbers["decode_batch"]),
        "Sarathi-Serve's batch": int(numbers["token_budget"]),
        "prefill-only batch": int(numbers["prompt_tokens"]),
    }


def draw_intensity(study: FigureStudy, table: pd.DataFrame) -> Figure:
    """Draw the figure's `plot`, and in it the GPU's ridge and typical micro-batches."""
    figure = draw(study.plan.keys.plot, table, study.numbers)
    axes, spec = figure.axes[0], roofline_of(study).deployment.gpu
    ridge = spec.fp16_tflops * 1e3 / spec.memory_bandwidth_gb_s
    axes.axhline(ridge, color="0.4", ls="--", lw=1)
    words = f"{spec.name}: {ridge:.0f} operations a byte"
    axes.annotate(words, (1, ridge), fontsize=8, va="bottom")
    by_tokens, colors = table.set_index("tokens").operations_per_byte, ("C1", "C4", "C2")
    for (kind, count), color in zip(_batches(study).items(), colors, strict=True):
        axes.plot(
            [count], [by_tokens[count]], "D", ms=8, zorder=3, color=color, label=f"{kind}, {count}"
        )
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _intensity(cost: RooflineCost, tokens: int) -> dict[str, float]:
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


def linear_operators(study: FigureStudy) -> pd.DataFrame:
    """Predict the linear operators of all layers on each number of GPUs."""
    rows = []
    for ranks in study.numbers["tensor_parallel"]:
        cost = roofline_of(study, {"tensor_parallel": ranks})
        for tokens in study.numbers["tokens"]:
            linear_s = parts_of(cost, prefill_work(tokens)).linear
            rows.append({"tensor_parallel": ranks, "tokens": tokens, "linear_ms": 1e3 * linear_s})
    return pd.DataFrame(rows)


def coalescing(study: FigureStudy) -> pd.DataFrame:
    """Predict the time between tokens of decodes that a prompt joins, over that without it."""
    return pd.DataFrame(row for one in served(study) for row in _joined_rows(study, one))


def _joined_rows(study: FigureStudy, one: ServedModel) -> Iterator[dict[str, Any]]:
    """The chunk is the largest of the prompt that fills the budget beside the decodes."""
    seconds, numbers = iteration(world_of(study, one.keys)), study.numbers
    for batch, context, prompt in product(
        numbers["decode_batches"], numbers["decode_contexts"], numbers["prompt_tokens"]
    ):
        decodes = decode_work(batch, batch * context)
        alone_s = seconds(decodes)
        pieces = in_chunks(prompt, max(1, one.budgets["strict"] - batch))
        chunked_s = max(seconds(joined(decodes, piece)) for piece in pieces)
        yield {
            "deployment": one.label,
            "decode_batch": batch,
            "decode_context": context,
            "prompt_tokens": prompt,
            "decode_only_ms": 1e3 * alone_s,
            "chunked_ratio": chunked_s / alone_s,
            "full_ratio": seconds(joined(decodes, prefill_work(prompt))) / alone_s,
        }


def chunks(study: FigureStudy) -> pd.DataFrame:
    """Predict each prompt whole, and in chunks one after the other; and chunks a token too long."""
    seconds, numbers = iteration(world_of(study)), study.numbers
    sizes = [*numbers["chunk_tokens"], *numbers["tiles"].values()]
    table = pd.DataFrame(
        {
            "prompt_tokens": prompt,
            "chunk_tokens": chunk,
            "whole_ms": 1e3 * seconds(prefill_work(prompt)),
            "chunked_ms": 1e3 * plain_sum(map(seconds, in_chunks(prompt, chunk))),
        }
        for prompt, chunk in product(numbers["prompt_tokens"], dict.fromkeys(sizes))
    )
    return table.assign(ratio=table.chunked_ms / table.whole_ms)


def reference(study: FigureStudy) -> pd.DataFrame:
    """Predict the reference iteration on every deployment, all stages one after the other."""
    return pd.DataFrame(_reference_row(study, one) for one in served(study))


def _reference_row(study: FigureStudy, one: ServedModel) -> dict[str, object]:
    parts = parts_of(roofline_of(study, one.keys), REFERENCE)
    total_s = iteration(world_of(study, one.keys))(REFERENCE)
    return {
        "deployment": one.label,
        **{f"{name}_s": seconds for name, seconds in parts._asdict().items()},
        "layout": layout_of(study, one.keys),
        "link_and_cpu_s": total_s - plain_sum(parts),
        "total_s": total_s,
        "strict_slo_s": one.slo_s["strict"],
        "strict_over_iteration": one.slo_s["strict"] / total_s,
    }


FREE = {
    "link": {"bandwidth_gb_s": 1e12, "latency_us": 0.0},
    "nodes": None,
    "machine": None,
    "costs": {"all_reduce": None},
}
"""Keys of a run with free messages between its GPUs."""


def communication(study: FigureStudy) -> pd.DataFrame:
    """Time a prompt on 1, 2, 4 ... GPUs: in all, and the part that free messages would save."""
    rows = []
    lengths = sorted({study.numbers["tokens"], *study.numbers["all_tokens"]})
    for (pair, keys), count in product(pairs(study).items(), study.gpu_counts):
        ranks = {"tensor_parallel": count}
        costs = world_of(study, keys, ranks).costs
        free = world_of(study, keys, FREE, ranks, noted=False).costs
        for tokens in lengths:
            work = prefill_work(tokens)
            total_s, free_s = plain_sum(costs.times(work)), plain_sum(free.times(work))
            times = {"total_ms": 1e3 * total_s, "communication_ms": 1e3 * (total_s - free_s)}
            rows.append({"pair": pair, "gpus": count, "tokens": tokens, **times})
    table = pd.DataFrame(rows)
    alone_ms = table.groupby(["pair", "tokens"]).total_ms.transform("first")
    return table.assign(
        share=table.communication_ms / table.total_ms, speedup=alone_ms / table.total_ms
    )
