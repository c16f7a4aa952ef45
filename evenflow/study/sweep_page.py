"""The folder of a sweep: its tables, its pictures, the page, and where the findings come from."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from evenflow.config.provenance import code_version
from evenflow.report import plots
from evenflow.report.page import figure, in_words, page, parallel, picture, plotly_library, section
from evenflow.report.tables import html_table, is_number, write_json, write_rows, write_table
from evenflow.report.words import metric_words
from evenflow.study.points import code_digest
from evenflow.study.slo import question_words
from evenflow.study.sweep_pictures import pictures
from evenflow.study.swept import Swept, as_json, label, short_names, trial_rows

HEADINGS = {
    "pareto_front": "Pareto front",
    "sensitivity": "Sensitivity around the default",
    "main_effects": "Effect of each parameter",
}
"""The heading of each picture of the page, in the page's order."""

LATENCIES = ("mean_ttft_ms", "mean_tpot_ms")
"""Metrics in tables beside the deciding ones; the table of all points has the GPUs, too."""


def write_findings(folder: Path, found: Swept, title: str) -> None:
    """Write the tables, the pictures, the page and sweep.json.

    check.csv is there where unseen parts were simulated.
    """
    write_table(folder / "points.csv", found.point_cells(as_json))
    write_table(folder / "summary.csv", found.summary_cells(as_json))
    if found.checks:
        rows = (
            {"unseen": check.kind, "point": name, **row}
            for check in found.checks
            for name, trial in (("best", check.best), ("default", check.default))
            for row in trial_rows(trial, as_json)
        )
        write_rows(folder / "check.csv", rows)
    drawn = {name: plots.save(each, folder / name) for name, each in pictures(found).items()}
    source = facts(found)
    text = page(title, list(_parts(found, drawn)), source, plotly_library())
    (folder / "report.html").write_text(text, encoding="utf-8")
    write_json(folder / "sweep.json", source)


def facts(found: Swept) -> dict[str, Any]:
    """Return where the findings come from, the same for every executor."""
    records = [record for trial in found.trials for record in trial.records]
    several = len(found.config.objectives) > 1
    return {
        **code_version(),
        "code_sha256": code_digest(),
        "sweep": _written(found.config.model_dump() | {"run": found.sweep.run.data}),
        "points": len(found.trials),
        "simulations": len({record.key for record in records}),
        "failed": sum(record.error is not None for record in records),
        "host": platform.node(),
        "default": found.default,
        "best": [] if several else found.ranked[:1],
        "pareto_front": found.ranked if several else [],
        **({"allow_refused": True} if found.allow_refused else {}),
        **({"check": {each.kind: each.facts for each in found.checks}} if found.checks else {}),
    }


def _written(value: Any) -> Any:
    """Return keys for JSON, which has no infinity: `.inf`, as a run file says it and reads it."""
    if isinstance(value, Mapping):
        return {key: _written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_written, value))
    return ".inf" if value == math.inf else value


def _parts(found: Swept, drawn: Mapping[str, str]) -> Iterator[str]:
    first = found.trials[(found.ranked or found.nearest or [0])[0]]
    about = question_words(found.sweep.study.config(first.labels), found.config.conditions)
    yield f'<p class="caption">{"<br>".join(map(escape, about))}</p>'
    yield f'<div class="verdict"><p>{escape(" ".join(found.sentences()))}</p></div>'
    yield "<h2>Best points</h2>"
    yield html_table(*found.best_table(LATENCIES))
    for name, heading in HEADINGS.items():
        if name in drawn:
            yield section(heading)
            yield picture(drawn[name])
    yield from _all_points(found)
    if lost := found.failures:
        yield f"<h2>{len(lost)} points failed</h2>"
        yield html_table(["point", *found.config.parameters, "error"], lost)


def _all_points(found: Swept) -> Iterator[str]:
    """Yield all points that were completed as parallel coordinates, and as a table that sorts."""
    metrics = list(dict.fromkeys([*found.config.metrics, *LATENCIES, "gpus"]))
    heads = [*short_names(list(found.config.parameters)), *map(metric_words, metrics)]
    cells = {
        index: [
            *(v if is_number(v) else label(v) for v in trial.labels.values()),
            *map(trial.mean, metrics),
        ]
        for index, trial in enumerate(found.trials)
        if not trial.errors
    }
    if not cells:
        return
    columns = dict(zip(heads, zip(*cells.values(), strict=True), strict=True))
    shown = found.ranked if len(found.config.objectives) > 1 else found.ranked[:1]
    best = list(map(list(cells).index, shown))
    yield section("All points")
    yield figure("parallel", parallel(columns, [f"point {index}" for index in cells], best))
    rows = [[found.name(index), *map(in_words, row)] for index, row in cells.items()]
    yield html_table(["point", *heads], rows, sorts=True)
