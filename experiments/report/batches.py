"""The report's figures of micro-batches: their tokens over time, and the stages' occupancy.

Plain Plotly dicts (data and layout). Does not know the page around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from evenflow.results.bubbles import CAUSES
from evenflow.results.run import Floats, Ints, RunResult
from experiments.report.data import Run, chunks_of, span_s, steady
from experiments.report.style import (
    CAUSE_COLOURS,
    DECODE,
    PREFILL,
    Figure,
    axis,
    blend,
    compact,
    heading,
    layout,
    on,
)
from experiments.report.words import cause_label

WINDOW_BATCHES, MARGIN_BATCHES = 60, 60
"""Micro-batches a Gantt shows at first, and how many more on each side can be scrolled to."""

WHOLE_BINS, ZOOM_BATCHES = 250, 200


def tokens(runs: Mapping[str, Run]) -> Figure:
    """Draw prefill and decode tokens of the micro-batches: the whole run, and a stretch of it."""
    rows = len(runs)
    page = layout(190 * rows + 90, rows=rows, columns=2)
    page |= {"barmode": "stack", "bargap": 0}
    page["legend"] |= {"y": 1 + 30 / (190 * rows)}
    page["grid"]["ygap"] = 0.35
    longest_s = max(span_s(run.result) for run in runs.values())
    data: list[Figure] = []
    for row, (name, run) in enumerate(runs.items()):
        result, whole, close = run.result, 2 * row + 1, 2 * row + 2
        count = len(result.scheduled_s)
        bins = chunks_of(count, WHOLE_BINS)
        times = np.append(result.scheduled_s[bins[:-1]], span_s(result))
        near = steady(run, ZOOM_BATCHES)
        each = np.arange(near.start, near.stop + 1)
        data += _token_bars(result, bins, times, whole, legend=row == 0)
        data += _token_bars(result, each, each, close, legend=False)
        page["annotations"].append(heading(whole, _spread(name, result)))
        page[axis("y", whole)]["title"] = {"text": "tokens"}
        for panel in (whole, close):
            page[axis("y", panel)] |= {"rangemode": "tozero"}
        page[axis("y", close)] |= {"matches": on(whole)["yaxis"]}
        page[axis("x", whole)] |= {"range": [0, longest_s]}
    page[axis("x", 2 * rows - 1)]["title"] = {"text": "whole run: time (s)"}
    page[axis("x", 2 * rows)]["title"] = {"text": "steady state: micro-batch number"}
    return {"data": data, "layout": page}


def _spread(name: str, result: RunResult) -> str:
    tokens = result.prefill_tokens + result.decode_tokens
    return f"<b>{escape(name)}</b>: {tokens.mean():,.0f} tokens on average, ± {tokens.std():,.0f}"


def _token_bars(
    result: RunResult, edges: Ints, places: Floats | Ints, panel: int, legend: bool
) -> list[Figure]:
    """Stacked bars: mean tokens of micro-batches [edges[i], edges[i+1]), from places[i] on."""
    counts = np.diff(edges)
    if not counts.all() or not len(counts):
        return []
    bars = []
    for label, colour, column in (
        ("decode tokens", DECODE, result.decode_tokens),
        ("prefill tokens", PREFILL, result.prefill_tokens),
    ):
        mean = np.add.reduceat(column[: edges[-1]], edges[:-1]) / counts
        bars.append(
            {
                "type": "bar",
                "name": label,
                "legendgroup": label,
                "showlegend": legend,
                "x": compact(places[:-1], 9),
                "y": compact(mean),
                "width": compact(np.diff(places), 9),
                "offset": 0,
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": "%{y:.0f} " + label + "<extra></extra>",
            }
            | on(panel)
        )
    return bars


def occupancy(name: str, run: Run) -> Figure:
    """Draw what each stage computes, and why it idles, in the middle of the steady state."""
    result = run.result
    shown = steady(run, WINDOW_BATCHES + 2 * MARGIN_BATCHES)
    near = steady(run, WINDOW_BATCHES)
    window = [float(result.start_s[near].min()), float(result.end_s[near].max())]
    start, stop = float(result.start_s[shown].min()), float(result.end_s[shown].max())
    page = layout(155 + 34 * result.depth)
    page |= {"barmode": "overlay", "bargap": 0.1, "hovermode": "closest"}
    page["xaxis"] |= {
        "title": {"text": "time (s)"},
        "range": window,
        "rangeslider": {"visible": True, "thickness": 0.14, "range": [start, stop]},
    }
    page["annotations"].append(heading(1, f"<b>{escape(name)}</b>"))
    page |= {"showlegend": False}
    page["margin"] |= {"t": 40, "b": 45}
    page["yaxis"] |= {
        "autorange": "reversed",
        "fixedrange": True,
        "tickvals": list(range(result.depth)),
        "ticktext": [f"stage {stage}" for stage in range(result.depth)],
    }
    return {"data": [_busy(result, shown), *_idle(run, start, stop)], "layout": page}


def _busy(result: RunResult, shown: slice) -> Figure:
    prefill, decode = result.prefill_tokens[shown], result.decode_tokens[shown]
    share = prefill / np.maximum(prefill + decode, 1)
    colours = [blend(round(part, 1)) for part in share.tolist()]
    batch = np.arange(shown.start, shown.stop)
    about = np.stack([batch, prefill, decode], axis=1)
    depth = result.depth
    return {
        "type": "bar",
        "orientation": "h",
        "name": "computing",
        "base": compact(result.start_s[shown].T.ravel(), 9),
        "x": compact((result.end_s - result.start_s)[shown].T.ravel()),
        "y": np.repeat(np.arange(depth), len(batch)).tolist(),
        "customdata": np.tile(about, (depth, 1)).tolist(),
        "marker": {"color": colours * depth, "line": {"width": 0.7, "color": "white"}},
        "hovertemplate": "micro-batch %{customdata[0]}: %{customdata[1]} prefill + "
        "%{customdata[2]} decode tokens, %{x:.4f} s<extra>stage %{y}</extra>",
    }


def _idle(run: Run, start: float, stop: float) -> list[Figure]:
    """Idle intervals inside [start, stop] as slim bars, a trace a cause."""
    bubbles = run.bubbles
    begin = np.maximum(np.asarray(bubbles.start_s), start)
    length = np.minimum(np.asarray(bubbles.end_s), stop) - begin
    bars = []
    for cause, key in enumerate(CAUSES):
        inside = (length > 0) & (np.asarray(bubbles.cause) == cause)
        if not inside.any():
            continue
        label = cause_label(key)
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "width": 0.36,
                "base": compact(begin[inside], 9),
                "x": compact(length[inside]),
                "y": np.asarray(bubbles.stage)[inside].tolist(),
                "marker": {"color": CAUSE_COLOURS[key], "line": {"width": 0}},
                "hovertemplate": f"idle: {label}, %{{x:.4f}} s<extra>stage %{{y}}</extra>",
            }
        )
    return bars
