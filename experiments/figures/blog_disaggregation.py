"""The blog's disaggregation figure: how long KV is under way, and latency against the rate."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.metrics import summarize
from evenflow.specs.gpu import link
from evenflow.specs.model import model
from evenflow.types import Request
from experiments.figures.panels import Panel, draw_panel
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.figures.tables import table_of
from experiments.run_file.build import build
from experiments.run_file.yaml_file import find
from sim import simulate

LATENCIES = {"p50_ttft_ms": "P50 TTFT (ms)", "p99_itl_ms": "P99 time between tokens (ms)"}
CONTEXTS = tuple(2**power for power in range(8, 16))


def make(study: Study) -> Drawing:
    """Run each system at each rate, and one request whose KV is the text's 224 MB."""
    table = table_of(study)
    moved_ms = example_ms(study)
    figure = _draw(study, table, moved_ms)
    return Drawing(figure, table, study.plan.keys.shown, {"blog-transfer": moved_ms})


def example_ms(study: Study) -> float:
    """Return the milliseconds that the example's KV crosses the link between two simulated pools.

    Each pool is one stage; nothing else is on the way.
    """
    given = study.numbers["example"]
    config = study.config(
        {
            "model": None,
            "gpu": None,
            "link": None,
            "stages": 2,
            "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 0.0},
            "kv": {"page_tokens": 16, "pages": 2 * given["tokens"]},
            "scheduler": {
                "name": "distserve",
                "kv_bytes_per_token": given["bytes_per_token"],
                "transfer_link": {"bandwidth_gb_s": given["bandwidth_gb_s"], "latency_us": 0},
            },
        }
    )
    request = Request(0, 0.0, given["tokens"], 2)
    result = simulate(build(config, [request], study.plan.beside).world)
    return float(summarize(result)["mean_transfer_ms"])


def _draw(study: Study, table: pd.DataFrame, moved_ms: float) -> Figure:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(LATENCIES))
    _draw_transfers(first, study, moved_ms)
    for axes, (metric, name) in zip(others, LATENCIES.items(), strict=True):
        words = {"xlabel": "requests/s", "ylabel": name, "yscale": "log"}
        panel = Panel(kind="lines", x="rate", y={metric: "{system}"}, hue=["system"], axes=words)
        draw_panel(axes, panel, table[table.error.isna()], study.numbers)
    others[0].legend(fontsize=8)
    run = study.plan.run.data
    others[0].set_title(f"{study.gpus} x {run['gpu']}, {run['model']}")
    grid_lines(figure.axes)
    return figure


def _draw_transfers(axes: Axes, study: Study, moved_ms: float) -> None:
    """Draw the time of a context's KV over each link, and the text's example."""
    spec = model(find(study.plan.run.data["model"], study.plan.beside))
    for name in study.numbers["links"]:
        seconds = [link(name).transfer_s(spec.kv_bytes_per_token() * tokens) for tokens in CONTEXTS]
        axes.plot(CONTEXTS, [1e3 * each for each in seconds], marker=".", label=name)
    given = study.numbers["example"]
    size = given["tokens"] * given["bytes_per_token"] / 1e6
    text = f"{size:.0f} MB at {given['bandwidth_gb_s']} GB/s: {moved_ms:.2f} ms"
    axes.plot([given["tokens"]], [moved_ms], "k*", markersize=10, label=text)
    axes.set(xlabel="context (tokens)", ylabel="transfer of its KV (ms)", yscale="log")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=7)
