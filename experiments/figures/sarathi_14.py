"""Sarathi-Serve's figure 14: prefill in chunks over prefill in one piece; and a token too many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.costs import prefill_work
from experiments.figures.iterations import Seconds, in_chunks, iteration, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines

COLORS = ("#d9730d", "#8a4fb0", "#0b5fa5", "#3f8f3f", "0.6")


def make(study: Study) -> Drawing:
    """Predict each prompt whole, and in chunks one after the other."""
    seconds, numbers = iteration(world_of(study)), study.numbers
    tiles = numbers["tiles"]
    sizes = [*numbers["chunk_tokens"], tiles["chunk"], tiles["one_more"]]
    table = pd.DataFrame(
        {
            "prompt_tokens": prompt,
            "chunk_tokens": chunk,
            "whole_ms": 1e3 * seconds(prefill_work(prompt)),
            "chunked_ms": 1e3 * _chunked_s(seconds, prompt, chunk),
        }
        for prompt, chunk in product(numbers["prompt_tokens"], dict.fromkeys(sizes))
    )
    table["ratio"] = table.chunked_ms / table.whole_ms
    claims = _claims(table, tiles) if study.plan.run.data["model"] == "Yi-34B" else {}
    return Drawing(_draw(table, numbers["chunk_tokens"], tiles), table, claims=claims)


def _claims(table: pd.DataFrame, tiles: dict[str, int]) -> dict[str, float]:
    times = table.pivot(index="prompt_tokens", columns="chunk_tokens", values="chunked_ms")
    tile_ratio = times[tiles["one_more"]] / times[tiles["chunk"]]
    in_512 = table[table.chunk_tokens == 512].ratio
    found = {"sarathi-tile": float(tile_ratio.max())}
    return found | ({"sarathi-chunk-overhead": float(in_512.max())} if len(in_512) else {})


def _chunked_s(seconds: Seconds, prompt_tokens: int, chunk_tokens: int) -> float:
    return sum(seconds(chunk) for chunk in in_chunks(prompt_tokens, chunk_tokens))


def _draw(table: pd.DataFrame, chunks: Sequence[int], tiles: dict[str, int]) -> Figure:
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, table, chunks)
    _bars(right, table, list(tiles.values()))
    left.set_title("chunk sizes of whole tiles")
    right.set_title("a token more than whole tiles")
    grid_lines(figure.axes)
    return figure


def _bars(axes: Axes, table: pd.DataFrame, chunks: Sequence[int]) -> None:
    width = 0.8 / (len(chunks) + 1)
    prompts = list(table.prompt_tokens.unique())
    for index, chunk in enumerate(chunks):
        ratios = table[table.chunk_tokens == chunk].ratio
        places = [place + width * (index - (len(chunks) - 1) / 2) for place in range(len(prompts))]
        bars = axes.bar(
            places, ratios, width, color=COLORS[index % len(COLORS)], label=f"chunks of {chunk}"
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="0.4", lw=0.8)
    axes.set_xticks(range(len(prompts)), [str(tokens) for tokens in prompts])
    axes.set(xlabel="prompt tokens", ylabel="prefill time over one piece", ylim=(0, 2))
    axes.legend(fontsize=8, loc="upper right")
