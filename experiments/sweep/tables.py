"""Write what a sweep found as tables: a row a run, a row a point. Decides nothing."""

from __future__ import annotations

import json
import math
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import evenflow
from experiments.provenance import SCHEMA_VERSION, checkout_commit
from experiments.report.tables import write_table
from experiments.study.intervals import Interval, interval
from experiments.study.points import code_digest
from experiments.study.sweep import Findings, eligible, ranked
from experiments.study.trials import Trial

Columns = dict[str, list[Any]]


def write_tables(folder: Path, findings: Findings) -> None:
    """Write points.csv, summary.csv and, where pyarrow is installed, points.parquet."""
    points = point_columns(findings)
    write_table(folder / "points.csv", points)
    write_table(folder / "summary.csv", summary_columns(findings))
    if find_spec("pyarrow") is not None:
        _write_parquet(folder / "points.parquet", points)


def point_columns(findings: Findings) -> Columns:
    """Return a row for each point and replication, in that order; an empty cell: no such metric."""
    rows = [
        {
            "point": index,
            "replication": replication,
            **trial.parts[replication]._asdict(),
            **{name: cell(value) for name, value in trial.labels.items()},
            "status": "completed" if record.error is None else "failed",
            "error": record.error or "",
            "key": record.key,
            **{name: _blank_nan(record.values.get(name, "")) for name in findings.metrics},
        }
        for index, trial in enumerate(findings.trials)
        for replication, record in enumerate(trial.records)
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def summary_columns(findings: Findings) -> Columns:
    """Return a row for each point: means, half-widths of their intervals, and the place it took.

    `*_ci95` is the half-width of the 95 % interval; `*_vs_default` the mean paired difference.
    """
    places = {position: place for place, position in enumerate(ranked(findings), 1)}
    rows = [
        {
            "point": index,
            "is_default": "yes" if index == findings.default else "no",
            **{name: cell(value) for name, value in trial.labels.items()},
            "replications": len(trial.records),
            "failed_replications": len(trial.errors),
            "counts": "yes" if eligible(findings.sweep.config, trial) else "no",
            "place": places.get(index, ""),
            **_against_default(findings, trial),
            **_means(findings, trial),
        }
        for index, trial in enumerate(findings.trials)
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _means(findings: Findings, trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in findings.metrics:
        found |= _pair(metric, interval(trial.values(metric)))
    return found


def _against_default(findings: Findings, trial: Trial) -> dict[str, Any]:
    if findings.default is None:
        return {}
    found: dict[str, Any] = {}
    for metric in findings.sweep.config.metrics:
        against = trial.above(findings.trials[findings.default], metric)
        found |= _pair(f"{metric}_vs_default", against)
    return found


def _pair(name: str, found: Interval) -> dict[str, Any]:
    return {name: _blank_nan(found.mean), f"{name}_ci95": _blank_nan(found.half_width)}


def _blank_nan(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def cell(value: Any) -> Any:
    """Return a parameter's value as it stands in a table: numbers and texts as they are."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return json.dumps(value, separators=(",", ":"))


def _write_parquet(path: Path, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: _of_one_type(column) for name, column in columns.items()}), path)


def _of_one_type(column: list[Any]) -> list[Any]:
    """Return numbers with null for an empty cell; a column that also holds texts, as texts."""
    numbers = [None if value == "" else value for value in column]
    if all(value is None or isinstance(value, int | float) for value in numbers):
        whole = all(value is None or isinstance(value, int) for value in numbers)
        return numbers if whole else [None if v is None else float(v) for v in numbers]
    return [str(value) for value in column]


def facts(findings: Findings) -> dict[str, Any]:
    """Return where the findings come from, the same for every executor."""
    sweep = findings.sweep
    records = [record for trial in findings.trials for record in trial.records]
    return {
        "schema_version": SCHEMA_VERSION,
        "evenflow_version": evenflow.__version__,
        "git_commit": checkout_commit(),
        "code_sha256": code_digest(),
        "sweep": sweep.config.model_dump(mode="json") | {"run": sweep.run.data},
        "points": len(findings.trials),
        "simulations": len({record.key for record in records}),
        "failed": sum(record.error is not None for record in records),
        "host": platform.node(),
        "default": findings.default,
        "best": ranked(findings)[:1] if len(sweep.config.objectives) == 1 else [],
        "pareto_front": ranked(findings) if len(sweep.config.objectives) > 1 else [],
    }
