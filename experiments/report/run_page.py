"""The HTML page of one run, or of several side by side: it needs nothing else.

Puts words, table and figures together; the figures are plain Plotly dicts. Does not know how a run
was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.run import Floats, Ints, RunResult
from experiments.outcome import Outcome
from experiments.report.data import (
    binned,
    chunks_of,
    cumulative,
    pipelines,
    present,
    shares,
    shares_by_stage,
    span_s,
    steady,
    used_share,
)
from experiments.report.page import figure, page, plotly_library, section
from experiments.report.style import (
    DECODE,
    PARTS,
    PREFILL,
    Drawing,
    blend,
    colour,
    compact,
    faint,
)
from experiments.report.words import ALIKE, CAUSE_WORDS, cause_label, table, verdict

WINDOW_BATCHES, MARGIN_BATCHES = 60, 60
"""Micro-batches a Gantt shows at first, and how many more on each side can be scrolled to."""

WHOLE_BINS, ZOOM_BATCHES = 250, 200
CAPTIONS = {
    "Summary": f"The best of a row, and all within {100 * ALIKE:.0f} % of it, are in bold. Mean "
    "and P99 (99 of 100 are at or below it) are defined as in vLLM's benchmark.",
    "Where the stage time goes": "Each bar is the time of all stages together. Grey is computing; "
    "each colour is idle time (a pipeline bubble) with one cause. Less colour is better.",
    "Tokens in each micro-batch": "Micro-batches that hold equally many tokens take about equally "
    "long, and stages then need not wait for each other: a flat top is good, a ragged one makes "
    "bubbles. Left: the whole run, mean of neighbouring micro-batches. Right: consecutive ones in "
    "the steady state, a bar each. Every scheduler has its own scale; ± is the standard deviation "
    "over the run.",
    "Stages at work": "A block is one micro-batch on one stage, from decode only (blue) to prefill "
    "only (orange). A slim bar is idle time, coloured by cause. Drag to zoom, double-click to "
    "reset, use the strip below to move; hover for the numbers. All show the middle of the steady "
    "state.",
    "Latency": "For each time on the x axis, the share of requests that were at least as fast. A "
    "line further left is better. Mind the scale: where latencies differ more than tenfold it is "
    "logarithmic.",
    "Requests in the system": "Waiting requests have arrived and have no token yet; generating "
    "ones have their first token and not their last. A left curve that keeps rising means the "
    "pipeline is overloaded.",
    "KV cache": "Share of KV-cache pages held by requests when a micro-batch was scheduled: the "
    "line is the mean, the band the range. At 100 % requests must wait or are preempted.",
}


def write_report(
    path: str | Path, runs: Mapping[str, Outcome], title: str, provenance: Mapping[str, Any]
) -> None:
    """Write a self-contained page about `runs` (by name, in the order shown) to `path`.

    Equal input gives equal bytes. Raises UsageError when plotly is not installed.
    """
    Path(path).write_text(render(runs, title, provenance, plotly_library()), encoding="utf-8")


def render(
    runs: Mapping[str, Outcome], title: str, provenance: Mapping[str, Any], plotly_js: str
) -> str:
    """Return the page as HTML, with the given Plotly library inside."""
    first, *others = verdict(runs)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    setups = dict.fromkeys(str(run.result.provenance.get("setup", "")) for run in runs.values())
    parts = [f'<p class="caption">{escape(setup)}</p>' for setup in setups if setup]
    parts.append(f'<div class="verdict"><p>{first}</p><ul>{points}</ul></div>')
    parts += [_section("Summary"), table(runs)]
    if all(len(run.result.scheduled_s) for run in runs.values()):
        parts += _figures(runs)
    else:
        parts.append("<p>A run computed no micro-batch: there is nothing to draw.</p>")
    return page(title, parts, provenance, plotly_js)


def _figures(runs: Mapping[str, Outcome]) -> list[str]:
    lines = pipelines(runs)
    blocks = {"prefill only": 1.0, "half prefill, half decode": 0.5, "decode only": 0.0}
    return [
        _section("Where the stage time goes"),
        _cause_key(lines, {"computing": PARTS["computing"]}),
        figure("causes", causes(lines)),
        f"<details><summary>What the causes mean</summary>{_cause_list()}</details>",
        # Drawn while hidden, its labels have no size: draw again once it is shown.
        "<details ontoggle=\"Plotly.redraw('causes-by-stage')\">"
        "<summary>The same, stage by stage</summary>",
        figure("causes-by-stage", causes_by_stage(lines)),
        "</details>",
        _section("Tokens in each micro-batch"),
        figure("tokens", tokens(lines)),
        _section("Stages at work"),
        _cause_key(lines, {words: blend(share) for words, share in blocks.items()}),
        *(figure(f"occupancy-{i}", occupancy(*named)) for i, named in enumerate(lines.items())),
        _section("Latency"),
        figure("latency", latency(runs)),
        _section("Requests in the system"),
        figure("queues", queues(runs)),
        _section("KV cache"),
        figure("kv", kv_usage(lines)),
    ]


def _section(heading: str) -> str:
    return section(heading, CAPTIONS[heading])


def _cause_list() -> str:
    entries = [
        f"<dt>{_swatch(PARTS[cause], label)}</dt><dd>{meaning}</dd>"
        for cause, (label, meaning) in CAUSE_WORDS.items()
    ]
    return f"<dl>{''.join(entries)}</dl>"


def _cause_key(runs: Mapping[str, Outcome], others: Mapping[str, str]) -> str:
    """A legend shared by figures below it: `others` (words: colour), then the causes that occur."""
    occurring = [cause for cause in CAUSES if any(shares(run)[cause] > 0 for run in runs.values())]
    colours = {**others, **{cause_label(cause): PARTS[cause] for cause in occurring}}
    entries = " ".join(_swatch(shade, words) for words, shade in colours.items())
    return f'<p class="key">{entries}</p>'


def _swatch(shade: str, words: str) -> str:
    return f'<span><i style="background:{shade}"></i>{words}</span>'


def causes(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw where the stage time went: busy, and idle by cause, one bar a run."""
    names = [escape(name) for name in runs]
    parts = np.array([list(shares(run).values()) for run in runs.values()])
    return _stacked(names, parts, 100 + 46 * len(names))


def causes_by_stage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw the same for every stage of every run."""
    depths = {escape(name): run.result.depth for name, run in runs.items()}
    names = [f"{name}, stage {stage}" for name, depth in depths.items() for stage in range(depth)]
    parts = np.concatenate([shares_by_stage(run) for run in runs.values()])
    return _stacked(names, parts, 90 + 30 * len(names))


def _stacked(names: list[str], parts: Floats, height: int) -> dict[str, Any]:
    drawing = Drawing(height, barmode="stack", bargap=0.25, showlegend=False, margin={"t": 30})
    drawing.axis("x", title="share of stage time (%)", range=[0, 100])
    drawing.axis("y", autorange="reversed", automargin=True)
    for (part, shade), percent in zip(PARTS.items(), 100 * parts.T, strict=True):
        label = cause_label(part)
        if percent.max() > 0:
            drawing.bars(
                label, shade, compact(percent), names,
                orientation="h",
                text=[f"{value:.1f}" if value >= 3 else "" for value in percent],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertemplate=f"{label}: %{{x:.2f}} %<extra>%{{y}}</extra>",
            )  # fmt: skip
    return drawing.figure


def tokens(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw prefill and decode tokens of the micro-batches: the whole run, and a stretch of it."""
    rows = len(runs)
    drawing = Drawing(190 * rows + 90, rows, 2, barmode="stack", bargap=0, grid={"ygap": 0.35})
    drawing.set(legend={"y": 1 + 30 / (190 * rows)})
    longest_s = max(span_s(run.result) for run in runs.values())
    for row, (name, run) in enumerate(runs.items()):
        result, whole, close = run.result, 2 * row + 1, 2 * row + 2
        bins = chunks_of(len(result.scheduled_s), WHOLE_BINS)
        times = np.append(result.scheduled_s[bins[:-1]], span_s(result))
        near = steady(run, ZOOM_BATCHES)
        batches = np.arange(near.start, near.stop + 1)
        _token_bars(drawing, result, bins, times, whole)
        _token_bars(drawing, result, batches, batches, close)
        count = result.prefill_tokens + result.decode_tokens
        spread = f"{count.mean():,.0f} tokens on average, ± {count.std():,.0f}"
        drawing.head(whole, f"<b>{escape(name)}</b>: {spread}")
        drawing.axis("x", whole, range=[0, longest_s])
        drawing.axis("y", whole, "tokens", rangemode="tozero")
        drawing.axis("y", close, rangemode="tozero", matches=f"y{whole if whole > 1 else ''}")
    drawing.axis("x", 2 * rows - 1, "whole run: time (s)")
    drawing.axis("x", 2 * rows, "steady state: micro-batch number")
    return drawing.figure


def _token_bars(
    drawing: Drawing, result: RunResult, edges: Ints, places: Floats | Ints, panel: int
) -> None:
    """Stacked bars: mean tokens of micro-batches [edges[i], edges[i+1]), from places[i] on."""
    counts = np.diff(edges)
    if not counts.all() or not len(counts):
        return
    for label, shade, column in (
        ("decode tokens", DECODE, result.decode_tokens),
        ("prefill tokens", PREFILL, result.prefill_tokens),
    ):
        mean = np.add.reduceat(column[: edges[-1]], edges[:-1]) / counts
        drawing.bars(
            label, shade, compact(places[:-1], 9), compact(mean),
            panel=panel,
            legendgroup=label,
            showlegend=panel == 1,
            width=compact(np.diff(places), 9),
            offset=0,
            hovertemplate="%{y:.0f} " + label + "<extra></extra>",
        )  # fmt: skip


def occupancy(name: str, run: Outcome) -> dict[str, Any]:
    """Draw what each stage computes, and why it idles, in the middle of the steady state."""
    result = run.result
    shown = steady(run, WINDOW_BATCHES + 2 * MARGIN_BATCHES)
    start, stop = _span(result, shown)
    drawing = Drawing(155 + 34 * result.depth, barmode="overlay", bargap=0.1, hovermode="closest")
    drawing.set(showlegend=False, margin={"t": 40, "b": 45})
    slider = {"visible": True, "thickness": 0.14, "range": [start, stop]}
    window = list(_span(result, steady(run, WINDOW_BATCHES)))
    drawing.axis("x", title="time (s)", range=window, rangeslider=slider)
    stages = list(range(result.depth))
    names = [f"stage {stage}" for stage in stages]
    drawing.axis("y", autorange="reversed", fixedrange=True, tickvals=stages, ticktext=names)
    drawing.head(1, f"<b>{escape(name)}</b>")
    _busy(drawing, result, shown)
    _idle(drawing, run, start, stop)
    return drawing.figure


def _span(result: RunResult, batches: slice) -> tuple[float, float]:
    return float(result.start_s[batches].min()), float(result.end_s[batches].max())


def _busy(drawing: Drawing, result: RunResult, shown: slice) -> None:
    prefill, decode = result.prefill_tokens[shown], result.decode_tokens[shown]
    share = prefill / np.maximum(prefill + decode, 1)
    colours = [blend(round(part, 1)) for part in share.tolist()]
    about = np.stack([np.arange(shown.start, shown.stop), prefill, decode], axis=1)
    drawing.bars(
        "computing",
        colours * result.depth,
        compact((result.end_s - result.start_s)[shown].T.ravel()),
        np.repeat(np.arange(result.depth), len(about)).tolist(),
        edge=0.7,
        orientation="h",
        base=compact(result.start_s[shown].T.ravel(), 9),
        customdata=np.tile(about, (result.depth, 1)).tolist(),
        hovertemplate="micro-batch %{customdata[0]}: %{customdata[1]} prefill + "
        "%{customdata[2]} decode tokens, %{x:.4f} s<extra>stage %{y}</extra>",
    )


def _idle(drawing: Drawing, run: Outcome, start: float, stop: float) -> None:
    """Idle intervals inside [start, stop] as slim bars, a trace a cause."""
    bubbles = run.idle
    begin = np.maximum(np.asarray(bubbles.start_s), start)
    length = np.minimum(np.asarray(bubbles.end_s), stop) - begin
    for number, cause in enumerate(CAUSES):
        inside = (length > 0) & (np.asarray(bubbles.cause) == number)
        label = cause_label(cause)
        if inside.any():
            drawing.bars(
                label,
                PARTS[cause],
                compact(length[inside]),
                np.asarray(bubbles.stage)[inside].tolist(),
                orientation="h",
                width=0.36,
                base=compact(begin[inside], 9),
                hovertemplate=f"idle: {label}, %{{x:.4f}} s<extra>stage %{{y}}</extra>",
            )


def latency(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw the share of requests served within a time: TTFT, TPOT and E2EL side by side."""
    metrics = {name: request_metrics(run.result) for name, run in runs.items()}
    shown: dict[str, Callable[[Any], Floats]] = {
        "time to first token (s)": lambda own: own.ttft_s,
        "time per output token (ms)": lambda own: own.tpot_s * 1000.0,
        "end-to-end latency (s)": lambda own: own.e2el_s,
    }
    drawing = Drawing(360, columns=3)
    for panel, (title, column) in enumerate(shown.items(), start=1):
        for index, (name, own) in enumerate(metrics.items()):
            values, share = cumulative(column(own))
            drawing.line(name, index, values, 100 * share, panel)
        scale = _scale(np.concatenate([column(own) for own in metrics.values()]))
        drawing.axis("x", panel, title, **scale)
        drawing.axis("y", panel, range=[0, 101])
    drawing.axis("y", title="share of requests (%)")
    return drawing.figure


def _scale(values: Floats) -> dict[str, Any]:
    """Return a logarithmic axis where values span more than a factor of ten, else a plain one."""
    known = values[values > 0]
    if not len(known) or known.max() <= 10 * known.min():
        return {"rangemode": "tozero"}
    ticks = "D2" if known.max() <= 300 * known.min() else 1  # 1, 2, 5, 10, ... or powers of ten
    return {"type": "log", "dtick": ticks, "tickformat": "~g"}


def queues(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw how many requests wait for their first token, and how many generate, over time."""
    drawing = Drawing(320, columns=2, legend={"y": 1.08})
    for index, (name, run) in enumerate(runs.items()):
        result = run.result
        at = np.linspace(0.0, span_s(result), 400)
        served = ~np.isnan(result.first_token_s)
        waiting = present(result.arrival_s[served], result.first_token_s[served], at)
        drawing.line(name, index, at, waiting, 1)
        drawing.line(name, index, at, present(result.first_token_s, result.completion_s, at), 2)
    for panel, title in ((1, "waiting for a first token"), (2, "generating")):
        drawing.axis("x", panel, "time (s)", rangemode="tozero")
        drawing.axis("y", panel, "requests", rangemode="tozero")
        drawing.head(panel, title)
    return drawing.figure


def kv_usage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw the used share of the KV pages over time: mean of each bin, and its range."""
    drawing = Drawing(300)
    drawing.axis("x", title="time (s)", range=[0, max(span_s(r.result) for r in runs.values())])
    drawing.axis("y", title="KV pages used (%)", range=[0, 101])
    for index, (name, run) in enumerate(runs.items()):
        if not len(run.result.scheduled_s):
            continue
        bins = binned(run.result.scheduled_s, 100 * used_share(run.result), span_s(run.result))
        for edge, fill in ((bins.low, "none"), (bins.high, "tonexty")):
            drawing.line(
                name, index, bins.middle_s, edge,
                hoverinfo="skip",
                showlegend=False,
                line={"width": 0},
                fill=fill,
                fillcolor=faint(colour(index)),
            )  # fmt: skip
        drawing.line(name, index, bins.middle_s, bins.mean)
    return drawing.figure
