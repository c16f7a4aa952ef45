"""TD-Pipe's figure 6: computation and communication of a prefill under tensor parallelism."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.costs import prefill_work
from experiments.figures.layers import Keys
from experiments.figures.pairs import pairs
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.run_file.build import build
from sim import World

SHOWN = ("pair", "gpus", "tokens", "total_ms", "communication_ms", "share", "speedup")
FREE = {
    "link": {"bandwidth_gb_s": 1e12, "latency_us": 0.0},
    "nodes": None,
    "costs": {"all_reduce": None},
}
COMPUTATION, COMMUNICATION = "#8fbf5f", "#d9730d"


def make(study: Study) -> Drawing:
    """Time one prompt on 1, 2, 4 ... GPUs, with the links as they are and with free ones."""
    table = pd.DataFrame(
        {"pair": pair, "gpus": count, "tokens": tokens, **_prefill_ms(study, keys, count, tokens)}
        for pair, keys in pairs(study).items()
        for count in study.gpu_counts
        for tokens in sorted({study.numbers["tokens"], *study.numbers["all_tokens"]})
    )
    alone = table[table.gpus == 1].set_index(["pair", "tokens"]).total_ms
    one_ms = alone.reindex(pd.MultiIndex.from_frame(table[["pair", "tokens"]])).to_numpy()
    table["share"] = table.communication_ms / table.total_ms
    table["speedup"] = one_ms / table.total_ms
    return Drawing(_draw(study, table), table, SHOWN, _claims(study, table))


def _prefill_ms(study: Study, keys: Keys, count: int, tokens: int) -> dict[str, float]:
    """Return the time of a prompt, and what of it goes when messages between GPUs are free."""
    seconds = []
    study.note_machine(study.config(keys, {"tensor_parallel": count, "scheduler": "vllm"}))
    for links in ({}, FREE):
        config = study.config(keys, links, {"tensor_parallel": count, "scheduler": "vllm"})
        world = build(config, [], study.plan.beside).world
        assert isinstance(world, World)  # vllm is one pipeline
        seconds.append(sum(world.costs.times(prefill_work(tokens))))
    return {"total_ms": 1e3 * seconds[0], "communication_ms": 1e3 * (seconds[0] - seconds[1])}


def _draw(study: Study, table: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(table.pair))
    figure = Figure(figsize=(3.4 * len(names) + 4.2, 3.9), layout="constrained")
    grid = figure.subplots(1, len(names) + 1)
    tokens = study.numbers["tokens"]
    for axes, pair in zip(grid, names, strict=False):
        _draw_bars(axes, table[(table.pair == pair) & (table.tokens == tokens)])
        axes.set_title(f"{pair}, {tokens} tokens", fontsize=10)
        axes.set_xlabel("GPUs (tensor parallel)")
    grid[0].set_ylabel("prefill (ms)")
    grid[0].legend(fontsize=8)
    for (pair, count), rows in table[table.gpus > 1].groupby(["pair", "gpus"], sort=False):
        grid[-1].plot(rows.tokens, 100 * rows.share, marker=".", label=f"{count} x {pair}")
    grid[-1].set(title="any prompt", xlabel="prompt tokens", ylabel="communication (%)")
    grid[-1].set_xscale("log", base=2)
    grid[-1].set_ylim(0, None)
    grid[-1].legend(fontsize=7)
    grid_lines(grid)
    return figure


def _draw_bars(axes: Axes, rows: pd.DataFrame) -> None:
    place = range(len(rows))
    computation = rows.total_ms - rows.communication_ms
    axes.bar(place, computation, 0.6, color=COMPUTATION, label="computation")
    axes.bar(
        place,
        rows.communication_ms,
        0.6,
        bottom=computation,
        color=COMMUNICATION,
        label="communication",
    )
    for x, total, share in zip(place, rows.total_ms, rows.share, strict=True):
        axes.text(x, total, f"{100 * share:.1f} %", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.15 * rows.total_ms.max())
    axes.set_xticks(place, [str(count) for count in rows.gpus])


def _claims(study: Study, table: pd.DataFrame) -> dict[str, Any]:
    own = table[(table.pair == "L20 + Llama-30B") & (table.tokens == study.numbers["tokens"])]
    rows = own.set_index("gpus").reindex([2, 4])
    shares = [float(share) for share in rows.share]
    speedup = float(rows.speedup[4])
    if math.isnan(speedup):
        return {}
    return {"tdpipe-tp-share-l20": {"share": shares, "speedup": speedup}}
