"""The blog's chunking figure: the time between tokens while a long prompt is computed."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.errors import UsageError
from evenflow.results.run import RunResult
from evenflow.types import Request
from experiments.figures.layers import Keys
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.run_file.build import build
from sim import simulate

SHOWN = (
    "system",
    "chunk_tokens",
    "steps",
    "chunk_ms",
    "prompt_ms",
    "longest_gap_ms",
    "usual_gap_ms",
)
COLORS = ("#d9730d", "#8a4fb0", "#0b5fa5")
USUAL_STEPS = 100
"""Output tokens that every decoding request has when the prompt arrives, about."""


def make(study: Study) -> Drawing:
    """Simulate the prompt under each system, and in chunks of every size."""
    if study.plan.run.data["stages"] != 1:
        raise UsageError("stages: this figure is of one stage; give more GPUs as tensor_parallel")
    numbers = study.numbers
    labels = list(study.plan.keys.systems)
    results = {
        label: _simulated(study, study.system(label), label == labels[-1]) for label in labels
    }
    rows = [{"system": label, **_row(numbers, result)} for label, result in results.items()]
    for chunk in numbers["all_chunks"]:
        result = _simulated(study, study.system(labels[-1]), True, chunk)
        rows.append({"system": f"{labels[-1]} of {chunk}", **_row(numbers, result)})
    table = pd.DataFrame(rows)
    return Drawing(_draw(study, results, table), table, SHOWN)


def _simulated(study: Study, keys: Keys, chunked: bool, chunk: int | None = None) -> RunResult:
    """Run the decoding requests and the prompt; a budget has room for them beside a chunk."""
    numbers = study.numbers
    decodes, chunk = numbers["decodes"], chunk or numbers["chunk_tokens"]
    budget = {"scheduler": {"token_budget": chunk + decodes}} if chunked else {}
    config = study.config(keys, budget)
    prompt, short = numbers["prompt_tokens"], numbers["decode_prompt_tokens"]
    many = [Request(number, 0.0, short, 4 * USUAL_STEPS) for number in range(decodes)]
    alone = simulate(build(config, many, study.plan.beside).world)
    arrival_s = float(alone.returned_s[alone.decode_tokens == decodes][USUAL_STEPS])
    requests = [*many, Request(decodes, arrival_s, prompt, 2)]
    return simulate(build(config, requests, study.plan.beside).world)


def steps_of_prompt(result: RunResult) -> slice:
    """Return which micro-batches compute the request that arrived last."""
    after = result.scheduled_s >= result.arrival_s.max()
    found = np.flatnonzero(after & (result.prefill_tokens > 0))
    return slice(int(found[0]), int(found[-1]) + 1)


def _row(numbers: dict[str, int], result: RunResult) -> dict[str, float]:
    part = steps_of_prompt(result)
    took_ms = 1e3 * (result.end_s - result.start_s)[part, 0]
    gaps_ms = 1e3 * np.diff(result.returned_s[result.decode_tokens > 0])
    return {
        "chunk_tokens": int(result.prefill_tokens[part].max()),
        "steps": part.stop - part.start,
        "chunk_ms": float(took_ms.mean()),
        "prompt_ms": float(took_ms.sum()),
        "longest_gap_ms": float(gaps_ms[USUAL_STEPS // 2 :].max()),
        "usual_gap_ms": float(np.median(gaps_ms)),
    }


def _draw(study: Study, results: dict[str, RunResult], table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    grid = figure.subplot_mosaic([[label, "chunks"] for label in results], width_ratios=[1.5, 1])
    for (label, result), color in zip(results.items(), COLORS, strict=False):
        _draw_gaps(grid[label], label, result, color)
        grid[label].set_ylim(0, 1.15 * table.longest_gap_ms.max())
    grid[list(results)[-1]].set_xlabel("time since the prompt arrived (ms)")
    axes = grid["chunks"]
    rows = table[len(results) :]
    axes.plot(rows.chunk_tokens, rows.prompt_ms, marker="s", color=COLORS[0], label="whole prompt")
    axes.plot(
        rows.chunk_tokens,
        rows.longest_gap_ms,
        marker="o",
        color=COLORS[2],
        label="longest gap between tokens",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rows.chunk_tokens), [str(tokens) for tokens in rows.chunk_tokens])
    axes.set(xlabel="chunk (tokens)", ylabel="ms", ylim=(0, None), title="in chunks of any size")
    axes.legend(fontsize=8)
    grid_lines(figure.axes)
    return figure


def _draw_gaps(axes: Axes, label: str, result: RunResult, color: str) -> None:
    arrival_s, returned_s = result.arrival_s.max(), result.returned_s[result.decode_tokens > 0]
    at_ms, gap_ms = 1e3 * (returned_s[1:] - arrival_s), 1e3 * np.diff(returned_s)
    shown = (at_ms > -150) & (at_ms < 450)
    axes.vlines(at_ms[shown], 0, gap_ms[shown], color=color, lw=2)
    axes.plot(at_ms[shown], gap_ms[shown], ".", color=color)
    part = steps_of_prompt(result)
    count = part.stop - part.start
    mean_ms = 1e3 * float((result.end_s - result.start_s)[part, 0].mean())
    text = f"{label}: {count} x {mean_ms:.0f} ms" if count > 1 else f"{label}: {mean_ms:.0f} ms"
    axes.set_title(text, loc="left", fontsize=10)
    axes.set_ylabel("gap (ms)", fontsize=9)
