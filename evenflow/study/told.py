"""The results of runs, in sentences and a table: what was refused, what runs on what, numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenflow.report.shown import Aside, Table
from evenflow.report.words import metrics, overload, refusals, rows_left_out, too_short
from evenflow.results.outcome import Outcome
from evenflow.study.fair import TOLD_SHARE, Side, doubts, marked


def runs_told(outcomes: Sequence[Outcome]) -> Iterator[str | Table]:
    """Yield what was refused, what runs on what, the runs side by side, what makes it unfair."""
    yield from refusals({run.label: run.served for run in outcomes})
    yield from dict.fromkeys(run.result.provenance["setup"] for run in outcomes)
    yield from _side_by_side({run.label: run.summary for run in outcomes})
    yield from marked(
        doubts({run.label: Side(run.summary, run.result.provenance) for run in outcomes})
    )
    yield from left_out(outcomes[0].result.provenance)


def _side_by_side(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str | Table]:
    rows = []
    for metric in metrics():
        if any(metric.key in summary for summary in summaries.values()):
            values = (summary.get(metric.key) for summary in summaries.values())
            rows.append([metric.words, *map(metric.cell, values)])
    yield Table(["", *summaries], rows)
    for name, summary in summaries.items():
        if told := overload(summary):
            yield f"OVERLOADED, {name}: {told}"
        if told := too_short(summary):
            yield f"{name}: {told}"


def left_out(provenance: Mapping[str, Any]) -> Iterator[Aside]:
    """Yield what a run left out, by its provenance: rows of the trace, measurements."""
    yield from map(Aside, rows_left_out(provenance.get("trace", {})))
    share = provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
    if share > TOLD_SHARE:
        yield Aside(f"costs: {100 * share:.0f} % of the predicted time rests on no measurement")
