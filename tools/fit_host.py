"""Fit the constants of `runtime` to a stated part of the measured runs; report the rest apart.

`python -m tools.calibrate host ENTRY... --part WORD` takes entries of `evenflow reproduce`, fits on
their runs whose names end with one of the words (`even`: every other run, from the first), and
simulates all. The search is that of `evenflow calibrate`, for the constants of `--find` alone; what
it comes near to are the metrics that have a goal, each in units of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evenflow.results.run import Floats
from experiments.report.tables import markdown_table, percent
from experiments.reproduce import Case, cases_of, chosen, data_folder
from experiments.reproduce.calibrate import CONSTANTS, Fit, nearest_of
from experiments.study.trials import Case as Tried
from experiments.study.trials import How, Study

GOAL = 0.05
"""A deviation of a metric with this goal counts as it is; one with twice the goal, half."""


class Goals:
    """The metrics of a measured run that have a goal."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.patch = dict(case.config.document().data)

    def errors(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return log(simulated / measured) of each metric that has a goal."""
        measured, goals = self.case.measured.metrics, self.case.entry.keys.metrics
        known = [metric for metric, goal in goals.items() if goal and metric in measured]
        return {metric: float(np.log(values[metric] / measured[metric])) for metric in known}

    def deviations(self, values: Mapping[str, Any]) -> Floats:
        """Return the errors, in units of their goals."""
        goals = self.case.entry.keys.metrics
        errors = self.errors(values).items()
        return np.array([error * GOAL / (goals[metric] or GOAL) for metric, error in errors])


def report(errors: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the errors by metric: mean, median and P90 of their size, worst."""
    rows = []
    for metric in errors[0] if errors else ():
        own = np.exp([each[metric] for each in errors]) - 1
        sizes = np.abs(own)
        values = (own.mean(), np.median(sizes), np.quantile(sizes, 0.9), sizes.max())
        rows.append([metric, str(len(own)), *map(percent, values)])
    return markdown_table(["metric", "runs", "mean error", "median off", "P90 off", "worst"], rows)


def run_command(given: argparse.Namespace) -> None:
    """Fit on the part, print the constants, and the errors of the part and of the rest."""
    data = data_folder(given.data)
    with TemporaryDirectory() as scratch:
        cases = [case for e in chosen(given.names) for case in cases_of(e, data, Path(scratch))]
        runs = [Goals(case) for case in cases[:: given.every]]
        part = [run for index, run in enumerate(runs) if _is_in(run, index, given.part)]
        study = Study(runs[0].case.config, Path())
        left_out = [index for index, name in enumerate(CONSTANTS) if name not in given.find]
        fit = nearest_of(study, [Fit(part, {"holds": given.holds}, left_out)], How())
        runtime = fit.runtime(fit.best.units)
        with How().simulator("host", len(runs)) as simulator:
            tried = [Tried({}, {**run.patch, "runtime": runtime}) for run in runs]
            trials = simulator.trials(study, tried)
    known = [each for each in fit.constants() if each.ends is not None and each.name in given.find]
    words = "".join(f"{each.name}: {each.value:.3g}, " for each in known)
    print(f"runtime: {{{words}holds: {given.holds}}}  # {len(known)} of {len(given.find)} told")
    for each in known:
        least, most = each.ends or (0.0, 0.0)
        print(f"# {each.name}: {least:.3g} to {most:.3g}")
    errors = [run.errors(trial.records[0].values) for run, trial in zip(runs, trials, strict=True)]
    for words, is_part in (("fitted on", True), ("the rest", False)):
        some = [each for run, each in zip(runs, errors, strict=True) if (run in part) == is_part]
        print(f"\n{words}\n\n{report(some)}")


def _is_in(run: Goals, index: int, part: Sequence[str]) -> bool:
    return ("even" in part and index % 2 == 0) or run.case.measured.label.endswith(tuple(part))


def add_to(sources: Any) -> None:
    """Add the command `host` to those of `tools.calibrate`."""
    host = sources.add_parser("host", help="the constants of runtime, from measured runs")
    host.add_argument("names", nargs="+", help="entries of evenflow reproduce")
    host.add_argument("--part", nargs="+", required=True, help="ends of names, or even")
    host.add_argument("--find", nargs="+", required=True, choices=CONSTANTS, help="constants")
    host.add_argument("--holds", default="engine", choices=("engine", "stage0", "nothing"))
    host.add_argument("--every", type=int, default=1, help="look at every so many runs")
    host.add_argument("--data", type=Path)
    host.set_defaults(run=run_command)
