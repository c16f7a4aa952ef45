"""The folder of a sweep: its tables, its pictures, the page, and where the findings come from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pandas.api.types import is_object_dtype

from evenflow.config.provenance import code_version
from evenflow.report import plots
from evenflow.report.page import (
    figure,
    in_words,
    page,
    parallel,
    picture,
    plotly_library,
    section,
)
from evenflow.report.tables import html_table, is_number, write_json, write_rows, write_table
from evenflow.report.words import arrivals_words, metric_words
from evenflow.study.points import code_digest
from evenflow.study.sweep_findings import Findings, point_cells, summary_cells, trial_rows
from evenflow.study.sweep_plots import pictures
from evenflow.study.sweep_words import best_table, failures, label, marks, short_names, told
from evenflow.study.unseen import facts as check_facts

ALL_POINTS = (
    "A line is a point, the best in blue; hover for its values. An axis whose numbers span more "
    "than tenfold is logarithmic. A click on a head of the table sorts by it."
)

CAPTIONS = {
    "pareto_front": (
        "Pareto front",
        "A point is on the front if no other is as good in everything and better in something. The "
        "table has its parameters.",
    ),
    "sensitivity": (
        "Sensitivity around the default",
        "One parameter changes, the others are as in the run itself; 1 is the value there. Bars "
        "are 95 % intervals of the ratio over replications that share their requests.",
    ),
    "main_effects": (
        "Effect of each parameter",
        "The mean over all points with a value, whatever the others. A parameter that matters has "
        "a steep line. Bars are 95 % intervals over replications; as all points share their "
        "requests, the differences between values are known better than that. Where each point has "
        "a value of its own, the points are drawn.",
    ),
}
"""What stands over and under each picture of the page, in the page's order."""

LATENCIES = ("mean_ttft_ms", "mean_tpot_ms")
"""What the tables have beside the metrics that decide; that of all points has the GPUs, too."""


def write_findings(folder: Path, found: Findings, title: str) -> None:
    """Write the tables, the pictures, the page and sweep.json.

    points.parquet is there where pyarrow is installed, check.csv where unseen parts were simulated.
    """
    cells = point_cells(found)
    write_table(folder / "points.csv", cells)
    write_table(folder / "summary.csv", summary_cells(found))
    if find_spec("pyarrow") is not None:
        frame = cells.infer_objects()
        for name in frame.columns[frame.dtypes.map(is_object_dtype)]:  # numbers and texts
            frame[name] = cells[name].fillna("").astype(str)
        write_table(folder / "points.parquet", frame)
    if found.checks:
        write_rows(folder / "check.csv", check_rows(found))
    drawn = {name: plots.save(each, folder / name) for name, each in pictures(found).items()}
    source = facts(found)
    (folder / "report.html").write_text(_page(found, title, drawn, source), encoding="utf-8")
    write_json(folder / "sweep.json", source)


def check_rows(found: Findings) -> list[dict[str, Any]]:
    """Return a row for each unseen part, of the best point and of the default."""
    return [
        {"unseen": each.kind, "point": name, **row}
        for each in found.checks
        for name, trial in (("best", each.best), ("default", each.default))
        for row in trial_rows(trial)
    ]


def facts(found: Findings) -> dict[str, Any]:
    """Return where the findings come from, the same for every executor."""
    asked = found.sweep
    records = [record for trial in found.trials for record in trial.records]
    several = len(asked.config.objectives) > 1
    return {
        **code_version(),
        "code_sha256": code_digest(),
        "sweep": asked.config.model_dump(mode="json") | {"run": asked.run.data},
        "points": len(found.trials),
        "simulations": len({record.key for record in records}),
        "failed": sum(record.error is not None for record in records),
        "host": platform.node(),
        "default": found.default,
        "best": [] if several else found.ranked[:1],
        "pareto_front": found.ranked if several else [],
        **({"allow_refused": True} if found.allow_refused else {}),
        **({"check": check_facts(found.checks, asked)} if found.checks else {}),
    }


def _page(found: Findings, title: str, drawn: Mapping[str, str], source: Mapping[str, Any]) -> str:
    parts = [
        f'<p class="caption">{"<br>".join(map(escape, _about(found)))}</p>',
        f'<div class="verdict"><p>{escape(" ".join(told(found)))}</p></div>',
        "<h2>Best points</h2>",
        html_table(*best_table(found, LATENCIES)),
    ]
    for name, caption in CAPTIONS.items():
        if name in drawn:
            parts += [section(*caption), picture(drawn[name])]
    parts += _all_points(found)
    if lost := failures(found):
        parts.append(f"<h2>{len(lost)} points failed</h2>")
        parts.append(html_table(["point", *found.config.parameters, "error"], lost))
    return page(title, parts, source, plotly_library())


def _about(found: Findings) -> list[str]:
    """Return lines: the setup of the first point shown, trace and arrivals, the limits."""
    asked = found.sweep
    config = asked.study.config(found.trials[(found.ranked or found.nearest or [0])[0]].labels)
    workload = config.workload
    arrivals = arrivals_words(workload.arrivals.model_dump())
    lines = [config.setup(), f"{workload.trace}, {arrivals}"]
    limits = [f"{metric_words(each.metric)} {each.words}" for each in asked.config.conditions]
    return [*lines, *([f"limits: {', '.join(limits)}"] if limits else [])]


def _all_points(found: Findings) -> list[str]:
    """Return all points that were completed as parallel coordinates, and as a table that sorts."""
    config, order = found.config, found.ranked
    done = [index for index, trial in enumerate(found.trials) if not trial.errors]
    if not done:
        return []
    metrics = list(dict.fromkeys([*config.metrics, *LATENCIES, "gpus"]))
    heads = [*short_names(list(config.parameters)), *map(metric_words, metrics)]
    cells = [
        [
            *(v if is_number(v) else label(v) for v in found.trials[index].labels.values()),
            *(found.trials[index].mean(metric) for metric in metrics),
        ]
        for index in done
    ]
    columns = dict(zip(heads, zip(*cells, strict=True), strict=True))
    best = [done.index(index) for index in (order if len(config.objectives) > 1 else order[:1])]
    rows = [
        [", ".join([str(index), *marks(found, index)]), *map(in_words, row)]
        for index, row in zip(done, cells, strict=True)
    ]
    return [
        section("All points", ALL_POINTS),
        figure("parallel", parallel(columns, [f"point {index}" for index in done], best)),
        html_table(["point", *heads], rows, sorts=True),
    ]
