"""The HTML page of one run, or of several side by side: it needs nothing else.

Puts words, table and figures together; the figures are plain Plotly dicts. Does not know how a run
was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.report import data, words
from evenflow.report.data import timeline_data
from evenflow.report.page import (
    Figure,
    PlotlyFigure,
    compact,
    figure,
    page,
    plotly_library,
    section,
    timeline,
)
from evenflow.report.style import DECODE, PARTS, PREFILL, blend, colour, dash, faint
from evenflow.report.tables import html_table
from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.outcome import Outcome
from evenflow.results.run import Floats, Ints, RunResult

TIMELINE_BATCHES = 400
"""Micro-batches that a report's timeline shows one by one."""

MARKS = 200
"""Marks of processes that the page shows."""

DRAWN = 4
"""Replicas of a deployment whose stages are drawn."""

OF_REPLICAS = (
    *("completed", "served_requests_per_s", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p99_tpot_ms", "busy_share", "preemptions"),
)
"""Columns of the table of replicas."""

WHOLE_BINS, ZOOM_BATCHES, QUEUE_BINS, MOST_GAPS = 150, 150, 120, 1000

Drawn = tuple[str, Figure, str]
"""A figure with its name in front, and the HTML that stands over it."""

MIXES = {"prefill only": 1.0, "half prefill, half decode": 0.5, "decode only": 0.0}
BLOCKS = {label: blend(share) for label, share in MIXES.items()}
"""The colours of micro-batches by what they hold."""


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
    first, *others = words.verdict(runs)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    told = [title, *words.about(runs)]
    parts = [f'<p class="caption">{"<br>".join(map(escape, told))}</p>']
    parts.append(f'<div class="verdict"><p>{first}</p><ul>{points}</ul></div>')
    parts += [section("Summary", alike=100 * words.ALIKE), words.table(runs), *more, *_marks(runs)]
    if all(map(_computed, runs.values())):
        parts += _figures(runs)
    else:
        parts.append("<p>A run computed no micro-batch: there is nothing to draw.</p>")
    return page(words.headline(runs) or title, parts, provenance, plotly_js)


def _computed(run: Outcome) -> bool:
    """Say whether a run computed any micro-batch."""
    return len(run.result.scheduled_s) > 0


def _figures(runs: Mapping[str, Outcome]) -> list[str]:
    """Return the figures of the runs; single replicas come last."""
    lines = data.pipelines(runs)
    if parts := data.replicas(runs):
        drawn = data.pipelines(data.replicas(runs, DRAWN))
        appendix = [*_replica_table(parts), *_work(drawn), *_kv(drawn)]
        return [*_stage_time(runs), *_requests(runs), *appendix]
    return [*_stage_time(lines), *_work(lines), *_requests(runs), *_kv(lines)]


def _stage_time(runs: Mapping[str, Outcome]) -> list[str]:
    return [
        section("Where the stage time goes"),
        _cause_key(runs, {"computing": PARTS["computing"]}),
        figure("causes", causes(runs)),
        f"<details><summary>What the causes mean</summary>{cause_list()}</details>",
        "<details ontoggle=\"Plotly.Plots.resize('causes-by-stage')\">"
        "<summary>The same, stage by stage</summary>",
        figure("causes-by-stage", causes_by_stage(runs)),
        "</details>",
    ]


def _work(lines: Mapping[str, Outcome]) -> list[str]:
    return [
        section("Tokens in each micro-batch"),
        key({"prefill tokens": swatch(PREFILL), "decode tokens": swatch(DECODE)}),
        _beside(tokens(lines)),
        section("Stages at work", batches=TIMELINE_BATCHES),
        _cause_key(lines, {"computing": PARTS["computing"]} | BLOCKS),
        *(
            timeline(
                f"timeline-{n}", timeline_data(run, TIMELINE_BATCHES), f"<b>{escape(name)}</b>"
            )
            for n, (name, run) in enumerate(lines.items())
        ),
    ]


def _requests(runs: Mapping[str, Outcome]) -> list[str]:
    return [
        section("Latency"),
        _line_key(runs),
        _beside(latency(runs, words.slo(runs))),
        section("Requests in the system", bins=QUEUE_BINS),
        _line_key(runs),
        _beside(queues(runs)),
    ]


def _marks(runs: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the first MARKS events of processes in each run."""
    seen: set[object] = set()  # replicas have the same
    for name, run in runs.items():
        marks = run.result.marks
        if marks and marks not in seen:
            seen.add(marks)
            rows = [[f"{each.time_s:,.3f}", each.kind, each.text] for each in marks[:MARKS]]
            more = f" The first {MARKS} of {len(marks):,}." if len(marks) > MARKS else ""
            yield section("Marks", f"What processes did to {escape(name)}, by seconds.{more}")
            yield html_table(["s", "kind", "what"], rows)


def _kv(lines: Mapping[str, Outcome]) -> list[str]:
    return [section("KV cache"), _line_key(lines), figure("kv", kv_usage(lines))]


def _replica_table(parts: Mapping[str, Outcome]) -> list[str]:
    shown = [metric for metric in words.metrics() if metric.key in OF_REPLICAS]
    rows = [
        [name, *(metric.cell(words.figures_of(run).get(metric.key)) for metric in shown)]
        for name, run in parts.items()
    ]
    heads = ["replica", *(metric.words for metric in shown)]
    return [section("Appendix: the replicas", drawn=DRAWN), html_table(heads, rows, sorts=True)]


def _beside(drawn: Sequence[Drawn]) -> str:
    """Return figures side by side, two in a row, fewer where it is narrow."""
    return f'<div class="row two">{"".join(figure(*each) for each in drawn)}</div>'


def cause_list() -> str:
    entries = [
        f"<dt>{swatch(PARTS[cause])}{label}</dt><dd>{meaning}</dd>"
        for cause, (label, meaning) in words.CAUSE_WORDS.items()
    ]
    return f"<dl>{''.join(entries)}</dl>"


def _cause_key(runs: Mapping[str, Outcome], others: Mapping[str, str]) -> str:
    """A legend shared by figures below it: `others` (words: colour), then the causes that occur."""
    found = [data.shares(run) for run in runs.values()]
    occurring = [cause for cause in CAUSES if any(each[cause] > 0 for each in found)]
    colours = {**others, **{words.cause_label(cause): PARTS[cause] for cause in occurring}}
    return key({label: swatch(shade) for label, shade in colours.items()})


def _line_key(runs: Mapping[str, Outcome]) -> str:
    """A legend of the lines of runs below it."""
    looks = (
        f'stroke="{colour(index)}" stroke-width="3" stroke-dasharray="{dash(index)}"'
        for index in range(len(runs))
    )
    lines = (f'<svg width="36" height="4"><path d="M0 2H36" {look}/></svg>' for look in looks)
    return key(dict(zip(map(escape, runs), lines, strict=True)))


def key(marks: Mapping[str, str]) -> str:
    entries = " ".join(f"<span>{mark}{label}</span>" for label, mark in marks.items())
    return f'<p class="key">{entries}</p>'


def swatch(shade: str) -> str:
    return f'<i style="background:{shade}"></i>'


def causes(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw where the stage time went: busy, and idle by cause, one bar a run."""
    names = [escape(name) for name in runs]
    parts = np.array([list(data.shares(run).values()) for run in runs.values()])
    return _stacked(names, parts, 100 + 46 * len(names))


def causes_by_stage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw where the time of every stage of every run went."""
    depths = {escape(name): run.result.depth for name, run in runs.items()}
    names = [f"{name}, stage {stage}" for name, depth in depths.items() for stage in range(depth)]
    parts = np.concatenate([data.shares_by_stage(run) for run in runs.values()])
    return _stacked(names, parts, 90 + 30 * len(names))


def _stacked(names: list[str], parts: Floats, height: int) -> dict[str, Any]:
    drawing = PlotlyFigure(height, barmode="stack", bargap=0.25, margin={"l": 10})
    drawing.axis("x", "share of stage time (%)", range=[0, 100])
    drawing.axis("y", autorange="reversed", automargin=True)
    for (part, shade), percent in zip(PARTS.items(), 100 * parts.T, strict=True):
        label = words.cause_label(part)
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


def tokens(runs: Mapping[str, Outcome]) -> list[Drawn]:
    """Draw prefill and decode tokens of the micro-batches: the whole run, and a stretch of it.

    All wholes have the same axes, and all stretches the same height.
    """
    longest_s = max(data.span_s(run.result) for run in runs.values())
    wholes, stretches = [], []
    for run in runs.values():
        result, near = run.result, data.steady(run, ZOOM_BATCHES)
        bins = data.chunks_of(len(result.scheduled_s), WHOLE_BINS)
        times = np.append(result.scheduled_s[bins[:-1]], data.span_s(result))
        wholes.append(_token_bars(result, bins, times))
        wholes[-1].axis("x", "whole run: time (s)", range=[0, longest_s])
        batches = np.arange(near.start, near.stop + 1)
        stretches.append(_token_bars(result, batches, batches))
        stretches[-1].axis("x", "steady state: micro-batch number")
    for column in (wholes, stretches):
        heights = (np.sum([bars["y"] for bars in each.data], axis=0) for each in column)
        top = max((float(np.max(height, initial=0.0)) for height in heights), default=1.0)
        for drawing in column:
            drawing.axis("y", "tokens", range=[0, 1.05 * top or 1.0])
    parts: list[Drawn] = []
    for row, (name, run) in enumerate(runs.items()):
        count = run.result.prefill_tokens + run.result.decode_tokens
        spread = f"{count.mean():,.0f} tokens on average, ± {count.std():,.0f}"
        parts += [
            (f"tokens-{row}", wholes[row].figure, f"<b>{escape(name)}</b>: {spread}"),
            (f"tokens-{row}-steady", stretches[row].figure, "&nbsp;"),
        ]
    return parts


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


def latency(runs: Mapping[str, Outcome], limits_ms: Mapping[str, float]) -> list[Drawn]:
    """Draw the share of requests, of ITL of gaps, served within a time, and limits on it."""
    latencies = {name: request_metrics(run.result) for name, run in runs.items()}
    times_s: dict[str, tuple[str, float, list[Floats]]] = {
        "ttft": ("time to first token (s)", 1.0, [own.ttft_s for own in latencies.values()]),
        "tpot": ("time per output token (ms)", 1e3, [own.tpot_s for own in latencies.values()]),
        "itl": ("inter-token latency (ms)", 1e3, [_gaps(run.result) for run in runs.values()]),
        "e2el": ("end-to-end latency (s)", 1.0, [own.e2el_s for own in latencies.values()]),
    }
    parts: list[Drawn] = []
    for key, (title, scale, columns) in times_s.items():
        drawing = PlotlyFigure(290)
        for index, (name, column) in enumerate(zip(runs, columns, strict=True)):
            values, share = data.cumulative(scale * column)
            drawing.line(name, index, values, 100 * share)
        drawing.axis("x", title, **_scale(scale * np.concatenate(columns)))
        drawing.axis("y", f"share of {'gaps' if key == 'itl' else 'requests'} (%)", range=[0, 101])
        if key in limits_ms:
            limit_ms = limits_ms[key]
            drawing.limit(scale * limit_ms / 1000.0, f"SLO {limit_ms:g} ms")
        parts.append((f"latency-{key}", drawing.figure, ""))
    return parts


def _gaps(result: RunResult) -> Floats:
    """Return MOST_GAPS or fewer gaps between tokens (s), evenly over their order."""
    order = np.argsort(result.gap_s, kind="stable")
    stops = np.cumsum(result.gap_count[order])
    count = int(stops[-1]) if len(stops) else 0
    ranks = np.linspace(0, count - 1, min(count, MOST_GAPS)).astype(np.int64)
    return result.gap_s[order][np.searchsorted(stops, ranks, side="right")]


def _scale(values: Floats) -> dict[str, Any]:
    """Return a logarithmic axis where values span more than a factor of ten, else a plain one."""
    known = values[values > 0]
    if not len(known) or known.max() <= 10 * known.min():
        return {"rangemode": "tozero"}
    ticks = "D2" if known.max() <= 300 * known.min() else 1  # 1, 2, 5, 10, ... or powers of ten
    return {"type": "log", "dtick": ticks, "tickformat": "~g"}


def queues(runs: Mapping[str, Outcome]) -> list[Drawn]:
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
                most = data.binned(
                    at, data.present(enter_s, leave_s, at), data.span_s(result), QUEUE_BINS
                )
                drawing.line(name, index, most.middle_s, most.high)
    for drawing in (left, right):
        drawing.axis("x", "time (s)", rangemode="tozero")
        drawing.axis("y", "requests", rangemode="tozero")
    heads = {"waiting for a first token": left, "generating": right}
    return [(f"queue-{i}", drawing.figure, head) for i, (head, drawing) in enumerate(heads.items())]


def kv_usage(runs: Mapping[str, Outcome]) -> dict[str, Any]:
    """Draw the used share of the KV pages over time: mean of each bin, and its range."""
    drawing = PlotlyFigure(280)
    drawing.axis("x", "time (s)", range=[0, max(data.span_s(r.result) for r in runs.values())])
    drawing.axis("y", "KV pages used (%)", range=[0, 101])
    for index, (name, run) in enumerate(runs.items()):
        if not len(run.result.scheduled_s):
            continue
        used = 100 * data.used_share(run.result)
        bins = data.binned(run.result.scheduled_s, used, data.span_s(run.result), QUEUE_BINS)
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
