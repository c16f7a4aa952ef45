"""Write the HTML report of one run, or of several side by side: a page that needs nothing else.

Puts words, table and figures together. Does not know how a run was made, nor compute anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.bubbles import CAUSES
from evenflow.errors import UsageError
from experiments import report_batches, report_figures
from experiments.report_data import Run, pipelines, shares
from experiments.report_style import BUSY, CAUSE_COLOURS, WIDTH, Figure, blend
from experiments.report_words import ALIKE, CAUSE_WORDS, cause_label, table, verdict

__all__ = ["Run", "write_report"]

STYLE = f"""
body {{ font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933;
  max-width: {WIDTH}px; margin: 32px auto 64px; padding: 0 16px; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 12px; }}
h2 {{ font-size: 20px; margin: 40px 0 4px; }}
.verdict {{ background: #f3f6f9; border-left: 4px solid #0072B2; padding: 12px 18px; }}
.verdict p {{ font-size: 18px; margin: 4px 0; }}
.verdict ul {{ margin: 6px 0; padding-left: 22px; }}
.caption {{ color: #52606d; font-size: 14px; margin: 0 0 6px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; table-layout: fixed; }}
thead th:first-child {{ width: 38%; }}
th, td {{ padding: 5px 10px; text-align: right; border-bottom: 1px solid #e4e7eb; }}
tbody th {{ text-align: left; font-weight: 500; }}
th small {{ display: block; color: #7b8794; font-weight: 400; font-size: 12.5px; }}
.unit {{ color: #7b8794; font-weight: 400; }}
td {{ font-variant-numeric: tabular-nums; }}
td.best {{ font-weight: 700; background: #eaf4ee; }}
.key {{ font-size: 13.5px; margin: 8px 0 0; }}
.key span {{ margin-right: 16px; white-space: nowrap; }}
i {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; font-size: 14px; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; }}
pre {{ background: #f3f6f9; padding: 12px; overflow-x: auto; font-size: 13px; }}
summary {{ cursor: pointer; font-weight: 600; margin-top: 12px; }}
"""

CONFIG = '{displaylogo:false,modeBarButtonsToRemove:["select2d","lasso2d","autoScale2d"]}'


def write_report(
    path: str | Path, runs: Mapping[str, Run], title: str, provenance: Mapping[str, Any]
) -> None:
    """Write a self-contained page about `runs` (by name, in the order shown) to `path`.

    Equal input gives equal bytes. Raises UsageError when plotly is not installed.
    """
    Path(path).write_text(render(runs, title, provenance, _plotly_js()), encoding="utf-8")


def render(
    runs: Mapping[str, Run], title: str, provenance: Mapping[str, Any], plotly_js: str
) -> str:
    """Return the page as HTML, with the given Plotly library inside."""
    first, *others = verdict(runs)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    facts = json.dumps(provenance, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title>\n<style>{STYLE}</style>\n<script>{plotly_js}</script></head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<div class="verdict"><p>{first}</p><ul>{points}</ul></div>',
        "<h2>Summary</h2>",
        f'<p class="caption">The best of a row, and all within {100 * ALIKE:.0f} % of it, are in '
        "bold. Mean and P99 (99 of 100 are at or below it) are defined as in vLLM's benchmark.</p>",
        table(runs),
        *_sections(runs),
        f"<details><summary>Configuration and provenance</summary><pre>{escape(facts)}</pre>"
        "</details>\n</body></html>\n",
    ]
    return "\n".join(parts)


def _sections(runs: Mapping[str, Run]) -> list[str]:
    if not all(len(run.result.scheduled_s) for run in runs.values()):
        return ["<p>A run computed no micro-batch: there is nothing to draw.</p>"]
    lines = pipelines(runs)
    gantts = [
        _figure(f"occupancy-{index}", report_batches.occupancy(name, run))
        for index, (name, run) in enumerate(lines.items())
    ]
    return [
        _section("Where the stage time goes", CAUSES_CAPTION),
        _cause_key(lines, (BUSY, "computing")),
        _figure("causes", report_figures.causes(lines)),
        f"<details><summary>What the causes mean</summary>{_cause_list()}</details>",
        # Drawn while hidden, its labels have no size: draw again once it is shown.
        "<details ontoggle=\"Plotly.redraw('causes-by-stage')\">"
        "<summary>The same, stage by stage</summary>",
        _figure("causes-by-stage", report_figures.causes_by_stage(lines)),
        "</details>",
        _section("Tokens in each micro-batch", TOKENS_CAPTION),
        _figure("tokens", report_batches.tokens(lines)),
        _section("Stages at work", OCCUPANCY_CAPTION),
        _cause_key(lines, *BLOCK_COLOURS),
        *gantts,
        _section("Latency", LATENCY_CAPTION),
        _figure("latency", report_figures.latency(runs)),
        _section("Requests in the system", QUEUES_CAPTION),
        _figure("queues", report_figures.queues(runs)),
        _section("KV cache", KV_CAPTION),
        _figure("kv", report_figures.kv_usage(lines)),
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


def _section(heading: str, caption: str) -> str:
    return f'<h2>{heading}</h2>\n<p class="caption">{caption}</p>'


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


def _figure(name: str, figure: Figure) -> str:
    """A fixed id and an escaped "<" keep the page deterministic and whole."""
    drawn = json.dumps(figure, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<div id="{name}"></div>\n<script>(f=>Plotly.newPlot("{name}",f.data,f.layout,'
        f"{CONFIG}))({drawn})</script>"
    )


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            "the report needs plotly, which is not installed: install evenflow[report]"
        ) from error
    return str(get_plotlyjs())
