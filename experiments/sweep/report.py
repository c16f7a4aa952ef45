"""Write the HTML report of a sweep: the best points, the front, what each parameter does.

Puts words, tables and figures together. Does not simulate, nor compute anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments.report.page import figure, page, plotly_library, section
from experiments.report.style import Figure, axis, colour, compact, heading, layout, on
from experiments.report.words import metric_words
from experiments.study.sweep import Findings, ranked
from experiments.sweep.effects import Panel, label, main_effects, sensitivity
from experiments.sweep.words import best_table, failures, headline, without_unit

COLUMNS = 3

FRONT_CAPTION = (
    "A point is on the front if no other is as good in everything and better in something. Hover "
    "for its parameters."
)
SENSITIVITY_CAPTION = (
    "One parameter changes, the others are as in the run itself; 1 is the value there. Bars are "
    "95 % intervals of the ratio over replications that share their requests."
)
EFFECTS_CAPTION = (
    "The mean over all points with a value, whatever the others. A parameter that matters "
    "has a steep line. Bars are 95 % intervals over replications; as all points share their "
    "requests, the differences between values are known better than that. Where each point has a "
    "value of its own, the points are drawn."
)


def write_report(path: Path, findings: Findings, title: str, provenance: Mapping[str, Any]) -> None:
    """Write a self-contained page about a sweep; UsageError when plotly is not installed."""
    parts = [
        f'<div class="verdict"><p>{escape(headline(findings))}</p></div>',
        "<h2>Best points</h2>",
        _table(*best_table(findings)),
    ]
    if len(findings.sweep.config.objectives) > 1:
        parts += [section("Pareto front", FRONT_CAPTION), figure("front", front(findings))]
    panels = sensitivity(findings)
    if panels:
        parts.append(section("Sensitivity around the default", SENSITIVITY_CAPTION))
        parts.append(
            figure("sensitivity", panels_figure(panels, "relative to the default", without_unit))
        )
    parts.append(section("Effect of each parameter", EFFECTS_CAPTION))
    for index, metric in enumerate(findings.sweep.config.metrics):
        drawn = panels_figure(main_effects(findings, metric), metric_words(metric))
        parts.append(figure(f"effects-{index}", drawn))
    lost = failures(findings)
    if lost:
        parts.append(f"<h2>{len(lost)} points failed</h2>")
        parts.append(_table(["point", *findings.sweep.config.parameters, "error"], lost))
    path.write_text(page(title, parts, provenance, plotly_library()), encoding="utf-8")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows
    )
    return f'<table class="narrow"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def front(findings: Findings) -> Figure:
    """Draw all points by the first two objectives, those on the Pareto front joined."""
    x, y = (objective.metric for objective in findings.sweep.config.objectives[:2])
    done = [index for index, trial in enumerate(findings.trials) if not trial.errors]
    kinds = [
        ("all points", done, "markers", "#C3CAD3"),
        ("Pareto front", ranked(findings), "lines+markers", colour(0)),
        ("default", [i for i in done if i == findings.default], "markers", colour(1)),
    ]
    data = []
    for name, indices, mode, shade in kinds:
        trials = [findings.trials[index] for index in indices]
        data.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": name,
                "x": compact([trial.mean(x) for trial in trials]),
                "y": compact([trial.mean(y) for trial in trials]),
                "text": [_named(trial.labels) for trial in trials],
                "marker": {"color": shade, "size": 9},
                "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
            }
        )
    made = layout(440)
    made["xaxis"] |= {"title": {"text": metric_words(x)}}
    made["yaxis"] |= {"title": {"text": metric_words(y)}}
    return {"data": data, "layout": made}


def _named(assignment: Mapping[str, Any]) -> str:
    return "<br>".join(escape(f"{name}: {label(value)}") for name, value in assignment.items())


def panels_figure(
    panels: Sequence[Panel], words: str, name: Callable[[str], str] = metric_words
) -> Figure:
    """Draw a panel a parameter; each series has the same colour in all of them.

    `name` gives the words for a metric.
    """
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    made = layout(90 + 300 * rows, rows, columns)
    made["grid"] |= {"ygap": 0.3}
    data: list[Figure] = []
    for number, panel in enumerate(panels, 1):
        made["annotations"].append(heading(number, escape(panel.parameter)))
        across = made[axis("x", number)]
        if panel.scattered:
            across |= {"type": "log" if panel.log else "linear"}
        else:
            across |= {"type": "category"}
        left = (number - 1) % columns == 0
        made[axis("y", number)] |= {
            "title": {"text": words if left else ""},
            "showticklabels": left,
        }
        made[axis("y", number)] |= {"matches": "y"} if number > 1 else {}
        data += [_trace(panel, index, number, name) for index in range(len(panel.series))]
    made["showlegend"] = len(panels[0].series) > 1
    made["legend"] |= {"y": 1 + 0.09 / rows}
    return {"data": data, "layout": made}


def _trace(panel: Panel, index: int, number: int, name: Callable[[str], str]) -> Figure:
    series = panel.series[index]
    x: list[Any] = panel.values if panel.scattered else list(map(label, panel.values))
    shown = [None if math.isnan(value) else value for value in series.mean]
    return {
        "type": "scatter",
        "mode": "markers" if panel.scattered else "lines+markers",
        "name": name(series.metric),
        "legendgroup": series.metric,
        "showlegend": number == 1,
        "x": x,
        "y": shown,
        "error_y": {
            "type": "data",
            "array": [0 if math.isnan(value) else value for value in series.half_width],
            "thickness": 1.2,
            "width": 3,
        },
        "line": {"color": colour(index), "width": 2},
        "hovertemplate": "%{x}: %{y:.4g}<extra>" + escape(name(series.metric)) + "</extra>",
    } | on(number)
