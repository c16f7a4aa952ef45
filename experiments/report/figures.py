"""The report's figures of requests, memory and idle time, as plain Plotly dicts.

A figure is data and layout, ready for JSON. Does not know the page around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import numpy as np

from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.run import Floats
from experiments.report.data import (
    Run,
    binned,
    cumulative,
    present,
    shares,
    shares_by_stage,
    span_s,
    used_share,
)
from experiments.report.style import (
    BUSY,
    CAUSE_COLOURS,
    Figure,
    axis,
    colour,
    compact,
    faint,
    heading,
    layout,
    line,
)
from experiments.report.words import cause_label


def latency(runs: Mapping[str, Run]) -> Figure:
    """Draw the share of requests served within a time: TTFT, TPOT and E2EL side by side."""
    metrics = [request_metrics(run.result) for run in runs.values()]
    panels: tuple[tuple[str, Callable[[Any], Floats]], ...] = (
        ("time to first token (s)", lambda own: own.ttft_s),
        ("time per output token (ms)", lambda own: own.tpot_s * 1000.0),
        ("end-to-end latency (s)", lambda own: own.e2el_s),
    )
    data = []
    page = layout(360, columns=3)
    for panel, (title, column) in enumerate(panels, start=1):
        for index, (name, own) in enumerate(zip(runs, metrics, strict=True)):
            values, share = cumulative(column(own))
            data.append(line(name, index, values, 100 * share, panel))
        everything = np.concatenate([column(own) for own in metrics])
        page[axis("x", panel)] |= {"title": {"text": title}} | _scale(everything)
        page[axis("y", panel)] |= {"range": [0, 101]}
    page["yaxis"]["title"] = {"text": "share of requests (%)"}
    return {"data": data, "layout": page}


def _scale(values: Floats) -> Figure:
    """Return a logarithmic axis where values span more than a factor of ten, else a plain one."""
    known = values[values > 0]
    if not len(known) or known.max() <= 10 * known.min():
        return {"rangemode": "tozero"}
    ticks = "D2" if known.max() <= 300 * known.min() else 1  # 1, 2, 5, 10, ... or powers of ten
    return {"type": "log", "dtick": ticks, "tickformat": "~g"}


def kv_usage(runs: Mapping[str, Run]) -> Figure:
    """Draw the used share of the KV pages over time: mean of each bin, and its range."""
    stop = max(span_s(run.result) for run in runs.values())
    data: list[Figure] = []
    for index, (name, run) in enumerate(runs.items()):
        if not len(run.result.scheduled_s):
            continue
        ours = binned(run.result.scheduled_s, 100 * used_share(run.result), span_s(run.result))
        for side, fill in ((ours.low, {}), (ours.high, {"fill": "tonexty"})):
            band = line(name, index, ours.middle_s, side, 1) | {"hoverinfo": "skip"} | fill
            band |= {"line": {"width": 0}, "fillcolor": faint(colour(index)), "showlegend": False}
            data.append(band)
        data.append(line(name, index, ours.middle_s, ours.mean, 1))
    page = layout(300)
    page["xaxis"] |= {"title": {"text": "time (s)"}, "range": [0, stop]}
    page["yaxis"] |= {"title": {"text": "KV pages used (%)"}, "range": [0, 101]}
    return {"data": data, "layout": page}


def queues(runs: Mapping[str, Run]) -> Figure:
    """Draw how many requests wait for their first token, and how many generate, over time."""
    page = layout(320, columns=2)
    page["legend"]["y"] = 1.08
    data = []
    for index, (name, run) in enumerate(runs.items()):
        result = run.result
        at = np.linspace(0.0, span_s(result), 400)
        served = ~np.isnan(result.first_token_s)
        waiting = present(result.arrival_s[served], result.first_token_s[served], at)
        running = present(result.first_token_s, result.completion_s, at)
        for panel, count in ((1, waiting), (2, running)):
            data.append(line(name, index, at, count, panel))
    for panel, title in ((1, "waiting for a first token"), (2, "generating")):
        page[axis("x", panel)] |= {"title": {"text": "time (s)"}, "rangemode": "tozero"}
        page[axis("y", panel)] |= {"title": {"text": "requests"}, "rangemode": "tozero"}
        page["annotations"].append(heading(panel, title))
    return {"data": data, "layout": page}


def causes(runs: Mapping[str, Run]) -> Figure:
    """Draw where the stage time went: busy, and idle by cause, one bar a run."""
    names = [escape(name) for name in runs]
    columns = [np.concatenate([[busy], idle]) for busy, idle in map(shares, runs.values())]
    return _stacked(names, np.array(columns), 100 + 46 * len(names))


def causes_by_stage(runs: Mapping[str, Run]) -> Figure:
    """Draw the same for every stage of every run."""
    labels, rows = [], []
    for name, run in runs.items():
        busy, idle = shares_by_stage(run)
        labels += [f"{escape(name)}, stage {stage}" for stage in range(run.result.depth)]
        rows += list(np.column_stack([busy, idle]))
    return _stacked(labels, np.array(rows), 90 + 30 * len(labels))


def _stacked(labels: list[str], parts: Floats, height: int) -> Figure:
    names = ["busy", *(cause_label(cause) for cause in CAUSES)]
    colours = [BUSY, *(CAUSE_COLOURS[cause] for cause in CAUSES)]
    data = []
    for column, (name, shade) in enumerate(zip(names, colours, strict=True)):
        percent = 100 * parts[:, column]
        if percent.max() <= 0:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": compact(percent),
                "text": [f"{value:.1f}" if value >= 3 else "" for value in percent],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "marker": {"color": shade, "line": {"width": 0}},
                "hovertemplate": f"{name}: %{{x:.2f}} %<extra>%{{y}}</extra>",
            }
        )
    page = layout(height)
    page |= {"barmode": "stack", "bargap": 0.25, "showlegend": False}
    page["margin"] |= {"t": 30}
    page["xaxis"] |= {"title": {"text": "share of stage time (%)"}, "range": [0, 100]}
    page["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return {"data": data, "layout": page}
