"""Write the HTML report of one run, or of several side by side: a page that needs nothing else.

Puts words, table and figures together. Does not know how a run was made, nor compute anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.results.bubbles import CAUSES
from experiments.report import batches as report_batches
from experiments.report import figures as report_figures
from experiments.report.data import Run, pipelines, shares
from experiments.report.page import figure, page, plotly_library, section
from experiments.report.style import BUSY, CAUSE_COLOURS, blend
from experiments.report.words import ALIKE, CAUSE_WORDS, cause_label, table, verdict

__all__ = ["Run", "write_report"]


def write_report(
    path: str | Path, runs: Mapping[str, Run], title: str, provenance: Mapping[str, Any]
) -> None:
    """Write a self-contained page about `runs` (by name, in the order shown) to `path`.

    Equal input gives equal bytes. Raises UsageError when plotly is not installed.
    """
    Path(path).write_text(render(runs, title, provenance, plotly_library()), encoding="utf-8")


def render(
    runs: Mapping[str, Run], title: str, provenance: Mapping[str, Any], plotly_js: str
) -> str:
    """Return the page as HTML, with the given Plotly library inside."""
    first, *others = verdict(runs)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    parts = [
        f'<div class="verdict"><p>{first}</p><ul>{points}</ul></div>',
        "<h2>Summary</h2>",
        f'<p class="caption">The best of a row, and all within {100 * ALIKE:.0f} % of it, are in '
        "bold. Mean and P99 (99 of 100 are at or below it) are defined as in vLLM's benchmark.</p>",
        table(runs),
        *_sections(runs),
    ]
    return page(title, parts, provenance, plotly_js)


def _sections(runs: Mapping[str, Run]) -> list[str]:
    if not all(len(run.result.scheduled_s) for run in runs.values()):
        return ["<p>A run computed no micro-batch: there is nothing to draw.</p>"]
    lines = pipelines(runs)
    gantts = [
        figure(f"occupancy-{index}", report_batches.occupancy(name, run))
        for index, (name, run) in enumerate(lines.items())
    ]
    return [
        section("Where the stage time goes", CAUSES_CAPTION),
        _cause_key(lines, (BUSY, "computing")),
        figure("causes", report_figures.causes(lines)),
        f"<details><summary>What the causes mean</summary>{_cause_list()}</details>",
        # Drawn while hidden, its labels have no size: draw again once it is shown.
        "<details ontoggle=\"Plotly.redraw('causes-by-stage')\">"
        "<summary>The same, stage by stage</summary>",
        figure("causes-by-stage", report_figures.causes_by_stage(lines)),
        "</details>",
        section("Tokens in each micro-batch", TOKENS_CAPTION),
        figure("tokens", report_batches.tokens(lines)),
        section("Stages at work", OCCUPANCY_CAPTION),
        _cause_key(lines, *BLOCK_COLOURS),
        *gantts,
        section("Latency", LATENCY_CAPTION),
        figure("latency", report_figures.latency(runs)),
        section("Requests in the system", QUEUES_CAPTION),
        figure("queues", report_figures.queues(runs)),
        section("KV cache", KV_CAPTION),
        figure("kv", report_figures.kv_usage(lines)),
    ]


BLOCK_COLOURS = (
    (blend(1.0), "prefill only"),
    (blend(0.5), "half prefill, half decode"),
    (blend(0.0), "decode only"),
)
CAUSES_CAPTION = (
    "Each bar is the time of all stages together. Grey is computing; each colour is idle time (a "
    "pipeline bubble) with one cause. Less colour is better."
)
TOKENS_CAPTION = (
    "Micro-batches that hold equally many tokens take about equally long, and stages then need not "
    "wait for each other: a flat top is good, a ragged one makes bubbles. Left: the whole run, "
    "mean of neighbouring micro-batches. Right: consecutive ones in the steady state, a bar each. "
    "Every scheduler has its own scale; ± is the standard deviation over the run."
)
OCCUPANCY_CAPTION = (
    "A block is one micro-batch on one stage, from decode only (blue) to prefill only (orange). "
    "A slim bar is idle time, coloured by cause. Drag to zoom, double-click to reset, use the "
    "strip below to move; hover for the numbers. All show the middle of the steady state."
)
LATENCY_CAPTION = (
    "For each time on the x axis, the share of requests that were at least as fast. A line "
    "further left is better. Mind the scale: where latencies differ "
    "more than tenfold it is logarithmic."
)
QUEUES_CAPTION = (
    "Waiting requests have arrived and have no token yet; generating ones have their first token "
    "and not their last. A left curve that keeps rising means the pipeline is overloaded."
)
KV_CAPTION = (
    "Share of KV-cache pages held by requests when a micro-batch was scheduled: the line is the "
    "mean, the band the range. At 100 % requests must wait or are preempted."
)


def _cause_list() -> str:
    entries = [
        f"<dt>{_swatch(CAUSE_COLOURS[cause], label)}</dt><dd>{meaning}</dd>"
        for cause, (label, meaning) in CAUSE_WORDS.items()
    ]
    return f"<dl>{''.join(entries)}</dl>"


def _cause_key(runs: Mapping[str, Run], *others: tuple[str, str]) -> str:
    """A legend shared by figures below it: `others` (colour, label), then the causes that occur."""
    seen = sum(shares(run)[1] for run in runs.values())
    occurring = [
        (CAUSE_COLOURS[cause], cause_label(cause))
        for cause, share in zip(CAUSES, np.atleast_1d(seen), strict=True)
        if share > 0
    ]
    entries = [_swatch(colour, label) for colour, label in (*others, *occurring)]
    return f'<p class="key">{" ".join(entries)}</p>'


def _swatch(colour: str, label: str) -> str:
    return f'<span><i style="background:{colour}"></i>{label}</span>'
