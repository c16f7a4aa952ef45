"""The HTML page of one run, or of several side by side: it needs nothing else.

Puts words, table and figures together; the figures are plain Plotly dicts. Does not know how a run
was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.report.data import (
    binned,
    chunks_of,
    cumulative,
    pipelines,
    present,
    replicas,
    shares,
    shares_by_stage,
    shares_over_time,
    span_s,
    steady,
    used_share,
)
from evenflow.report.page import (
    PlotlyFigure,
    beside,
    compact,
    figure,
    page,
    plotly_library,
    section,
)
from evenflow.report.style import DECODE, PARTS, PREFILL, blend, colour, dash, faint
from evenflow.report.tables import html_table
from evenflow.report.words import (
    ALIKE,
    CAUSE_WORDS,
    LEAST_SHARE,
    about,
    cause_label,
    figures_of,
    headline,
    metrics,
    slo,
    table,
    verdict,
)
from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.outcome import Outcome
from evenflow.results.run import Floats, Ints, RunResult

WINDOW_BATCHES, MARGIN_BATCHES = 60, 20
"""Micro-batches a Gantt shows at first, and how many more on each side can be scrolled to."""

MARKS = 200
"""Marks of processes that the page shows."""

DRAWN = 4
"""Replicas of a deployment whose stages are drawn."""

OF_REPLICAS = (
    *("completed", "served_requests_per_s", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p99_tpot_ms", "busy_share", "preemptions"),
)
"""Columns of the table of replicas."""

WHOLE_BINS, ZOOM_BATCHES, RUN_BINS, QUEUE_BINS = 150, 150, 180, 120

CAPTIONS = {
    "Summary": f"The best of a row, and all within {100 * ALIKE:.0f} % of it, are in bold. Mean "
    "and P99 (99 of 100 are at or below it) are defined as in vLLM's benchmark.",
    "Where the stage time goes": "Each bar is the time of all stages together. Grey is computing; "
    "each colour is idle time (a pipeline bubble) with one cause. Less colour is better.",
    "Tokens in each micro-batch": "Micro-batches that hold equally many tokens take about equally "
    "long, and stages then need not wait for each other: a flat top is good, a ragged one makes "
    "bubbles. Left: the whole run, mean of neighbouring micro-batches. Right: consecutive ones in "
    "the steady state, a bar each. All schedulers have the same axes; ± is the standard deviation "
    "over the run.",
    "Stages at work": f"First the whole run in {RUN_BINS} parts: how much of each a stage "
    "computes, and why it idles. Then the middle of the steady state: a block is one micro-batch "
    "on one stage, from decode only (blue) to prefill only (orange); a slim bar is idle time, "
    "coloured by cause. Drag to zoom, double-click to reset, use the strip below to move; hover "
    "for the numbers. The micro-batches are in timeline.json.gz too, which ui.perfetto.dev opens.",
    "Latency": "For each time on the x axis, the share of requests that were at least as fast. A "
    "line further left is better. Mind the scale: where latencies differ more than tenfold it is "
    "logarithmic. A dashed upright line is a limit of the SLO.",
    "Requests in the system": "Waiting requests have arrived and have no token yet; generating "
    f"ones have their first token and not their last: the most at once in each of "
    f"{QUEUE_BINS} parts of the run. A waiting curve that keeps rising means the "
    "pipeline is overloaded.",
    "Appendix: the replicas": "What each pipeline served by itself: the router divides the "
    f"requests among them. The first {DRAWN} of a deployment are drawn below; the folders "
    "replica-0, replica-1, ... have the tables of all.",
    "KV cache": "Share of KV-cache pages held by requests when a micro-batch was scheduled: the "
    "line is the mean, the band the range. At 100 % requests must wait or are preempted.",
}


def write_report(
    path: str | Path,
    runs: Mapping[str, Outcome],
    title: str,
    provenance: Mapping[str, Any],
    more: Sequence[str] = (),
) -> None:
    """Write a self-contained page about `runs` (by name, in the order shown) to `path`.

    Equal input gives equal bytes. `more` is HTML below the summary.
    """
    Path(path).write_text(render(runs, title, provenance, plotly_library(), more), encoding="utf-8")


def render(
    runs: Mapping[str, Outcome],
    title: str,
    provenance: Mapping[str, Any],
    plotly_js: str,
    more: Sequence[str] = (),
) -> str:
    """Return the page as HTML, with the given Plotly library inside."""
    first, *others = verdict(runs)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    told = [title, *about(runs)]
    parts = [f'<p class="caption">{"<br>".join(map(escape, told))}</p>']
    parts.append(f'<div class="verdict"><p>{first}</p><ul>{points}</ul></div>')
    parts += [_section("Summary"), table(runs), *more, *_marks(runs)]
    if all(len(run.result.scheduled_s) for run in runs.values()):
        parts += _figures(runs)
    else:
        parts.append("<p>A run computed no micro-batch: there is nothing to draw.</p>")
    return page(headline(runs) or title, parts, provenance, plotly_js)


def _figures(runs: Mapping[str, Outcome]) -> list[str]:
    """Return the figures of the runs; what replicas did by themselves comes last."""
    lines = pipelines(runs)
    if drawn := pipelines(replicas(runs, DRAWN)):
        appendix = [*_replica_table(replicas(runs)), *_work(drawn), *_kv(drawn)]
        return [*_stage_time(runs), *_requests(runs), *appendix]
    return [*_stage_time(lines), *_work(lines), *_requests(runs), *_kv(lines)]


def _stage_time(runs: Mapping[str, Outcome]) -> list[str]:
    return [
        _section("Where the stage time goes"),
        _cause_key(runs, {"computing": PARTS["computing"]}),
        figure("causes", causes(runs)),
        f"<details><summary>What the causes mean</summary>{_cause_list()}</details>",
        "<details ontoggle=\"Plotly.Plots.resize('causes-by-stage')\">"
        "<summary>The same, stage by stage</summary>",
        figure("causes-by-stage", causes_by_stage(runs)),
        "</details>",
    ]


def _work(lines: Mapping[str, Outcome]) -> list[str]:
    blocks = {"prefill only": 1.0, "half prefill, half decode": 0.5, "decode only": 0.0}
    colours = {words: blend(share) for words, share in blocks.items()}
    return [
        _section("Tokens in each micro-batch"),
        _key({"prefill tokens": _swatch(PREFILL), "decode tokens": _swatch(DECODE)}),
        beside("two", tokens(lines)),
        _section("Stages at work"),
        _cause_key(lines, {"computing": PARTS["computing"], **colours}),
        *_stages_at_work(lines),
    ]


def _requests(runs: Mapping[str, Outcome]) -> list[str]:
    return [
        _section("Latency"),
        _line_key(runs),
        beside("three", latency(runs)),
        _section("Requests in the system"),
        _line_key(runs),
        beside("two", queues(runs)),
    ]


def _marks(runs: Mapping[str, Outcome]) -> Iterator[str]:
    """What processes did to each run: the first MARKS of it."""
    seen: set[object] = set()  # replicas have the same
    for name, run in runs.items():
        marks = run.result.marks
        if marks and marks not in seen:
            seen.add(marks)
            rows = "".join(
                f"<tr><td>{mark.time_s:,.3f}</td><td>{escape(mark.kind)}</td>"
                f"<td>{escape(mark.text)}</td></tr>"
                for mark in marks[:MARKS]
            )
            more = f" The first {MARKS} of {len(marks):,}." if len(marks) > MARKS else ""
            yield section("Marks", f"What processes did to {escape(name)}, by seconds.{more}")
            yield f"<table><tr><th>s</th><th>kind</th><th>what</th></tr>{rows}</table>"


def _kv(lines: Mapping[str, Outcome]) -> list[str]:
    return [_section("KV cache"), _line_key(lines), figure("kv", kv_usage(lines))]


def _replica_table(parts: Mapping[str, Outcome]) -> list[str]:
    """Return a row for each replica."""
    shown = [metric for metric in metrics() if metric.key in OF_REPLICAS]
    rows = [
        [name, *(metric.cell(figures_of(run).get(metric.key)) for metric in shown)]
        for name, run in parts.items()
    ]
    table = html_table(["replica", *(metric.words for metric in shown)], rows, sorts=True)
    return [_section("Appendix: the replicas"), table]


def _section(heading: str) -> str:
    return section(heading, CAPTIONS[heading])


def _cause_list() -> str:
    entries = [
        f"<dt>{_swatch(PARTS[cause])}{label}</dt><dd>{meaning}</dd>"
        for cause, (label, meaning) in CAUSE_WORDS.items()
    ]
    return f"<dl>{''.join(entries)}</dl>"


def _cause_key(runs: Mapping[str, Outcome], others: Mapping[str, str]) -> str:
    """A legend shared by figures below it: `others` (words: colour), then the causes that occur."""
    found = [shares(run) for run in runs.values()]
    occurring = [cause for cause in CAUSES if any(each[cause] > 0 for each in found)]
    colours = {**others, **{cause_label(cause): PARTS[cause] for cause in occurring}}
    return _key({words: _swatch(shade) for words, shade in colours.items()})


def _line_key(runs: Mapping[str, Outcome]) -> str:
    """A legend of the lines of runs below it."""
    return _key({escape(name): _stroke(index) for index, name in enumerate(runs)})


def _key(marks: Mapping[str, str]) -> str:
    entries = " ".join(f"<span>{mark}{words}</span>" for words, mark in marks.items())
    return f'<p class="key">{entries}</p>'


def _swatch(shade: str) -> str:
    return f'<i style="background:{shade}"></i>'


def _stroke(index: int) -> str:
    look = f'stroke="{colour(index)}" stroke-width="3" stroke-dasharray="{dash(index)}"'
    return f'<svg width="36" height="4"><path d="M0 2H36" {look}/></svg>'


def _stages_at_work(runs: Mapping[str, Outcome]) -> Iterator[str]:
    longest_s = max(span_s(run.result) for run in runs.values())
    for index, (name, run) in enumerate(runs.items()):
        head = f"<b>{escape(name)}</b>"
        yield figure(f"whole-{index}", whole_run(run, longest_s), f"{head}: the whole run")
        yield figure(f"occupancy-{index}", occupancy(run), f"{head}: in the steady state")


def causes(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw where the stage time went: busy, and idle by cause, one bar a run."""
    names = [escape(name) for name in runs]
    parts = np.array([list(shares(run).values()) for run in runs.values()])
    return _stacked(names, parts, 100 + 46 * len(names))


def causes_by_stage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw where the time of every stage of every run went."""
    depths = {escape(name): run.result.depth for name, run in runs.items()}
    names = [f"{name}, stage {stage}" for name, depth in depths.items() for stage in range(depth)]
    parts = np.concatenate([shares_by_stage(run) for run in runs.values()])
    return _stacked(names, parts, 90 + 30 * len(names))


def _stacked(names: list[str], parts: Floats, height: int) -> dict[str, Any]:
    drawing = PlotlyFigure(height, barmode="stack", bargap=0.25, margin={"l": 10})
    drawing.axis("x", "share of stage time (%)", range=[0, 100])
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


def tokens(runs: Mapping[str, Outcome]) -> list[str]:
    """Draw prefill and decode tokens of the micro-batches: the whole run, and a stretch of it.

    All wholes have the same axes, and all stretches the same height.
    """
    longest_s = max(span_s(run.result) for run in runs.values())
    wholes, stretches = [], []
    for run in runs.values():
        result, near = run.result, steady(run, ZOOM_BATCHES)
        bins = chunks_of(len(result.scheduled_s), WHOLE_BINS)
        times = np.append(result.scheduled_s[bins[:-1]], span_s(result))
        wholes.append(_token_bars(result, bins, times))
        wholes[-1].axis("x", "whole run: time (s)", range=[0, longest_s])
        batches = np.arange(near.start, near.stop + 1)
        stretches.append(_token_bars(result, batches, batches))
        stretches[-1].axis("x", "steady state: micro-batch number")
    for column in (wholes, stretches):
        top = max((_height(drawing) for drawing in column), default=1.0)
        for drawing in column:
            drawing.axis("y", "tokens", range=[0, 1.05 * top or 1.0])
    parts = []
    for row, (name, run) in enumerate(runs.items()):
        count = run.result.prefill_tokens + run.result.decode_tokens
        spread = f"{count.mean():,.0f} tokens on average, ± {count.std():,.0f}"
        parts += [
            figure(f"tokens-{row}", wholes[row].figure, f"<b>{escape(name)}</b>: {spread}"),
            figure(f"tokens-{row}-steady", stretches[row].figure, "&nbsp;"),
        ]
    return parts


def _height(drawing: PlotlyFigure) -> float:
    """Return how high the highest of the stacked bars are."""
    return float(np.max(np.sum([bars["y"] for bars in drawing.data], axis=0), initial=0.0))


def _token_bars(result: RunResult, edges: Ints, places: Floats | Ints) -> PlotlyFigure:
    """Stacked bars: mean tokens of micro-batches [edges[i], edges[i+1]), from places[i] on."""
    drawing = PlotlyFigure(210, barmode="stack", bargap=0)
    counts = np.diff(edges)
    if not counts.all() or not len(counts):
        return drawing
    for label, shade, column in (
        ("decode tokens", DECODE, result.decode_tokens),
        ("prefill tokens", PREFILL, result.prefill_tokens),
    ):
        mean = np.add.reduceat(column[: edges[-1]], edges[:-1]) / counts
        drawing.bars(
            label, shade, compact(places[:-1], 9), compact(mean),
            width=compact(np.diff(places), 9),
            offset=0,
            hovertemplate="%{y:.0f} " + label + "<extra></extra>",
        )  # fmt: skip
    return drawing


def whole_run(run: Outcome, longest_s: float) -> dict[str, Any]:
    """Draw what each stage's time goes to over the whole run: shares of short parts of it."""
    depth = run.result.depth
    drawing = PlotlyFigure(120 + 34 * depth, hovermode=False)
    slider = {"visible": True, "thickness": 0.14}
    drawing.axis("x", "time (s)", range=[0, longest_s], rangeslider=slider)
    _stage_axis(drawing, depth, scale=100, range=[100 * depth - 50, -50])
    edges = np.linspace(0.0, span_s(run.result), RUN_BINS + 1)
    for stage, parts in enumerate(shares_over_time(run, edges)):
        tops = 100 * stage + 42 - 84 * np.cumsum(parts, axis=1)
        drawing.level(np.full(len(parts), 100 * stage + 42), edges, "")
        for shade, share, top in zip(PARTS.values(), parts.T, tops.T, strict=True):
            if share.max() > LEAST_SHARE:
                drawing.level(top, edges, shade)
    return drawing.figure


def _stage_axis(drawing: PlotlyFigure, depth: int, scale: int = 1, **keys: Any) -> None:
    names = [f"stage {stage}" for stage in range(depth)]
    stages = [scale * stage for stage in range(depth)]
    drawing.axis("y", fixedrange=True, tickvals=stages, ticktext=names, showgrid=False, **keys)


def occupancy(run: Outcome) -> dict[str, Any]:
    """Draw what each stage computes, and why it idles, in the middle of the steady state."""
    result = run.result
    shown = steady(run, WINDOW_BATCHES + 2 * MARGIN_BATCHES)
    start, stop = _span(result, shown)
    drawing = PlotlyFigure(
        120 + 34 * result.depth, barmode="overlay", bargap=0.1, hovermode="closest"
    )
    slider = {"visible": True, "thickness": 0.14, "range": [start, stop]}
    window = list(_span(result, steady(run, WINDOW_BATCHES)))
    drawing.axis("x", "time (s)", range=window, rangeslider=slider)
    _stage_axis(drawing, result.depth, autorange="reversed")
    _busy(drawing, result, shown)
    _idle(drawing, run, start, stop)
    return drawing.figure


def _span(result: RunResult, batches: slice) -> tuple[float, float]:
    return float(result.start_s[batches].min()), float(result.end_s[batches].max())


def _busy(drawing: PlotlyFigure, result: RunResult, shown: slice) -> None:
    prefill, decode = result.prefill_tokens[shown], result.decode_tokens[shown]
    share = np.round(prefill / np.maximum(prefill + decode, 1), 1).tolist()
    about = np.stack([np.arange(shown.start, shown.stop), prefill, decode], axis=1)
    drawing.bars(
        "computing",
        share * result.depth,
        compact((result.end_s - result.start_s)[shown].T.ravel()),
        np.repeat(np.arange(result.depth), len(about)).tolist(),
        edge=0.7,
        orientation="h",
        base=compact(result.start_s[shown].T.ravel(), 8),
        customdata=np.tile(about, (result.depth, 1)).tolist(),
        hovertemplate="micro-batch %{customdata[0]}: %{customdata[1]} prefill + "
        "%{customdata[2]} decode tokens, %{x:.4f} s<extra>stage %{y}</extra>",
    )


def _idle(drawing: PlotlyFigure, run: Outcome, start: float, stop: float) -> None:
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
                base=compact(begin[inside], 8),
                hovertemplate=f"idle: {label}, %{{x:.4f}} s<extra>stage %{{y}}</extra>",
            )


def latency(runs: Mapping[str, Outcome]) -> list[str]:
    """Draw the share of requests served within a time: TTFT, TPOT and E2EL side by side."""
    latencies = {name: request_metrics(run.result) for name, run in runs.items()}
    shown: dict[str, tuple[str, float, Callable[[Any], Floats]]] = {
        "ttft": ("time to first token (s)", 1.0, lambda own: own.ttft_s),
        "tpot": ("time per output token (ms)", 1000.0, lambda own: own.tpot_s),
        "e2el": ("end-to-end latency (s)", 1.0, lambda own: own.e2el_s),
    }
    limits = slo(runs)
    parts = []
    for key, (title, scale, column) in shown.items():
        drawing = PlotlyFigure(290)
        for index, (name, own) in enumerate(latencies.items()):
            values, share = cumulative(scale * column(own))
            drawing.line(name, index, values, 100 * share)
        everything = scale * np.concatenate([column(own) for own in latencies.values()])
        drawing.axis("x", title, **_scale(everything))
        drawing.axis("y", "share of requests (%)", range=[0, 101])
        if key in limits:
            drawing.limit(scale * limits[key] / 1000.0, f"SLO {limits[key]:g} ms")
        parts.append(figure(f"latency-{key}", drawing.figure))
    return parts


def _scale(values: Floats) -> dict[str, Any]:
    """Return a logarithmic axis where values span more than a factor of ten, else a plain one."""
    known = values[values > 0]
    if not len(known) or known.max() <= 10 * known.min():
        return {"rangemode": "tozero"}
    ticks = "D2" if known.max() <= 300 * known.min() else 1  # 1, 2, 5, 10, ... or powers of ten
    return {"type": "log", "dtick": ticks, "tickformat": "~g"}


def queues(runs: Mapping[str, Outcome]) -> list[str]:
    """Draw how many requests wait for their first token, and how many generate, over time."""
    left, right = PlotlyFigure(280), PlotlyFigure(280)
    for index, (name, run) in enumerate(runs.items()):
        result = run.result
        served = ~np.isnan(result.first_token_s)
        waiting = result.arrival_s[served], result.first_token_s[served]
        for drawing, (enter_s, leave_s) in (
            (left, waiting),
            (right, (result.first_token_s, result.completion_s)),
        ):
            at = np.sort(np.concatenate([enter_s, leave_s]))
            at = at[~np.isnan(at)]
            if len(at):
                most = binned(at, present(enter_s, leave_s, at), span_s(result), QUEUE_BINS)
                drawing.line(name, index, most.middle_s, most.high)
    for drawing in (left, right):
        drawing.axis("x", "time (s)", rangemode="tozero")
        drawing.axis("y", "requests", rangemode="tozero")
    heads = {"waiting for a first token": left, "generating": right}
    return [
        figure(f"queue-{i}", drawing.figure, head)
        for i, (head, drawing) in enumerate(heads.items())
    ]


def kv_usage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw the used share of the KV pages over time: mean of each bin, and its range."""
    drawing = PlotlyFigure(280)
    drawing.axis("x", "time (s)", range=[0, max(span_s(r.result) for r in runs.values())])
    drawing.axis("y", "KV pages used (%)", range=[0, 101])
    for index, (name, run) in enumerate(runs.items()):
        if not len(run.result.scheduled_s):
            continue
        used = 100 * used_share(run.result)
        bins = binned(run.result.scheduled_s, used, span_s(run.result), QUEUE_BINS)
        for edge, fill in ((bins.low, "none"), (bins.high, "tonexty")):
            drawing.line(
                name, index, bins.middle_s, edge,
                hoverinfo="skip",
                line={"width": 0},
                fill=fill,
                fillcolor=faint(colour(index)),
            )  # fmt: skip
        drawing.line(name, index, bins.middle_s, bins.mean)
    return drawing.figure
