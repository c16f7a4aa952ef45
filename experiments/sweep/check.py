"""Find a sweep's mistakes before its first run. Knows what is a mistake and what is a result.

A value that no run accepts is a mistake. A deployment that does not fit and a policy that breaks
its promise are results: such points are recorded as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from evenflow.errors import DoesNotFitError, PolicyError, UsageError, instead_of
from experiments.run_file.build import build
from experiments.run_file.yaml_file import KeyPath
from experiments.runs import Job, run_job
from experiments.study.points import Point, workload_of
from experiments.sweep.config import Assignment, Optuna, Sweep
from experiments.sweep.run import known_assignments
from experiments.sweep.space import distinct, values_of
from experiments.sweep.trials import points_of

TRIED = 32
"""How many points with one value are tried, at most, for one that accepts it."""

DRY_REQUESTS = 20
"""A run of the first few requests gives the names of its metrics."""


def check(sweep: Sweep) -> None:
    """Raise UsageError naming the place of what is wrong in a sweep, where that can be known."""
    known = known_assignments(sweep)
    points_of(sweep, known)
    if isinstance(sweep.config.method, Optuna):
        known = known or [
            {name: values_of(each)[0] for name, each in sweep.config.parameters.items()}
        ]
    right = _first_right(sweep, known, "")
    for name, parameter in sweep.config.parameters.items():
        place = f"{sweep.document.place(('parameters', name))}: {name}: "
        for value in values_of(parameter):
            with_value = distinct({**each, name: value} for each in known[:TRIED])
            _first_right(sweep, with_value, place)
    _check_metrics(sweep, right)
    _check_replications(sweep, right)


def _first_right(sweep: Sweep, candidates: Sequence[Assignment], place: str) -> Assignment:
    """Return the first of some assignments that is no mistake; raise what is wrong with them."""
    mistake: UsageError | None = None
    for assignment in islice(candidates, TRIED):
        point = points_of(sweep, [assignment])[0]
        try:
            build(point.config, workload_of(point).requests, point.beside)
        except (DoesNotFitError, PolicyError):
            return assignment
        except UsageError as error:
            mistake = mistake or error
        else:
            return assignment
    assert mistake is not None  # there is at least one candidate
    raise UsageError(f"{place}{mistake}")


def _check_metrics(sweep: Sweep, assignment: Assignment) -> None:
    summary = _dry_summary(points_of(sweep, [assignment])[0])
    paths: list[tuple[str, KeyPath]] = [
        (objective.metric, ("objectives", index, "metric"))
        for index, objective in enumerate(sweep.config.objectives)
    ]
    paths += [(name, ("limits", name)) for name in sweep.config.limits]
    for metric, path in paths:
        if summary and metric not in summary:
            place = sweep.document.place(path)
            raise UsageError(f'{place}: unknown metric "{metric}"; {instead_of(metric, summary)}')


def _dry_summary(point: Point) -> dict[str, Any]:
    """Return the summary of a run of few requests, and nothing of one that fails."""
    workload = workload_of(point)
    few = replace(workload, requests=workload.requests[:DRY_REQUESTS])
    try:
        return run_job(Job(point.config, few, point.beside)).summary
    except UsageError:
        return {}


def _check_replications(sweep: Sweep, assignment: Assignment) -> None:
    points = points_of(sweep, [assignment])[:2]
    config = points[0].config
    draws_more = config.speculative is not None or "predictor" in config.scheduler.params
    if len(points) < 2 or draws_more:
        return
    first, second = (workload_of(point).requests for point in points)
    if first == second:
        raise UsageError(
            f"{sweep.document.place(('replications',))}: replications: all would be alike, as the "
            f"seed draws nothing of trace {config.workload.trace} with "
            f"{config.workload.arrivals.kind} arrivals; give random arrivals, such as poisson, or "
            "replicate: windows, or replications: 1"
        )
