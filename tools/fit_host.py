"""Fit the constants of `runtime` to a stated part of the measured runs; report the rest apart.

`python -m tools.calibrate host ENTRY... --part WORD` takes entries of `evenflow reproduce`, fits on
their runs whose names end with one of the words (`even`: every other run, from the first), and
simulates all. Least squares of the logarithm of simulated / measured, each metric in units of its
goal; a metric without a goal is left out. The constants are those of `--start`, with the values
from which they are searched.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from evenflow.results.metrics import summarize
from evenflow.results.run import Floats
from evenflow.runtimes import RuntimeOverheads
from evenflow.world import World
from experiments.report.tables import markdown_table, percent
from experiments.reproduce.catalogue import chosen, data_folder
from experiments.reproduce.reproduce import Case, cases_of
from experiments.run_file.build import load_workload
from experiments.run_file.run import with_
from experiments.runs import Job
from sim import simulate

STEP = 0.1
"""Share by which a constant moves for a slope: less drowns in the luck of single requests."""


class Run(NamedTuple):
    """A measured run, and its world without CPU time."""

    case: Case
    world: World

    def errors(self, overheads: RuntimeOverheads) -> dict[str, float]:
        """Return log(simulated / measured) of each metric that has a goal."""
        found = summarize(simulate(replace(self.world, overheads=overheads)))
        measured = self.case.measured.metrics
        return {
            metric: float(np.log(found[metric] / measured[metric]))
            for metric, goal in self.case.entry.keys.metrics.items()
            if goal is not None and metric in measured
        }


def read(names: Sequence[str], data: Path, every: int) -> list[Run]:
    """Return every so many of the runs of these entries of the catalogue."""
    with TemporaryDirectory() as scratch:
        cases = [case for e in chosen(names) for case in cases_of(e, data, Path(scratch))]
        return [Run(case, _world(case)) for case in cases[::every]]


def _world(case: Case) -> World:
    config = with_(case.config, {"runtime": "ideal"})
    world = Job(config, load_workload(config, Path()), Path()).built().world
    assert isinstance(world, World)
    return world


def fit(
    runs: Sequence[Run],
    start: Mapping[str, float],
    fixed: Mapping[str, Any],
    *,
    rounds: int,
    loss: str = "linear",
) -> RuntimeOverheads:
    """Return the CPU time that comes nearest to what was measured; `start` is searched from.

    `loss` is scipy's: `soft_l1` counts what is far beyond its goal by its size, not its square.
    """
    from scipy.optimize import least_squares

    scales = np.array(list(start.values()))

    def overheads(point: Floats) -> RuntimeOverheads:
        found = dict(zip(start, (np.maximum(point, 0.0) * scales).tolist(), strict=True))
        return RuntimeOverheads(**found, **fixed)

    def off(point: Floats) -> Floats:
        given = overheads(point)
        goals = [run.case.entry.keys.metrics for run in runs]
        return np.array(
            [
                error / (goal[metric] or 1.0)
                for run, goal in zip(runs, goals, strict=True)
                for metric, error in run.errors(given).items()
            ]
        )

    how: dict[str, Any] = {"diff_step": STEP, "max_nfev": rounds, "loss": loss}
    best = least_squares(off, np.ones(len(scales)), bounds=(0.0, np.inf), **how)
    return overheads(best.x)


def report(runs: Sequence[Run], overheads: RuntimeOverheads) -> str:
    """Return a table of the errors by metric: mean, median and P90 of their size, worst."""
    found = [run.errors(overheads) for run in runs]
    rows = []
    for metric in found[0] if found else ():
        errors = np.exp([each[metric] for each in found]) - 1
        sizes = np.abs(errors)
        values = (errors.mean(), np.median(sizes), np.quantile(sizes, 0.9), sizes.max())
        rows.append([metric, str(len(errors)), *map(percent, values)])
    return markdown_table(["metric", "runs", "mean error", "median off", "P90 off", "worst"], rows)


def run_command(given: argparse.Namespace) -> None:
    """Fit on the part, print the constants, and the errors of the part and of the rest."""
    runs = read(given.names, data_folder(given.data), given.every)
    part = [run for index, run in enumerate(runs) if _is_in(run, index, given.part)]
    start = {name: float(value) for name, _, value in (each.partition("=") for each in given.start)}
    overheads = fit(part, start, {"holds": given.holds}, rounds=given.rounds, loss=given.loss)
    constants = ", ".join(f"{name}: {getattr(overheads, name):.3g}" for name in start)
    print(f"runtime: {{{constants}, holds: {given.holds}}}  # {len(start)} fitted")
    rest = [run for run in runs if run not in part]
    for words, some in (("fitted on", part), ("the rest", rest)):
        print(f"\n{words}\n\n{report(some, overheads)}")


def _is_in(run: Run, index: int, part: Sequence[str]) -> bool:
    return ("even" in part and index % 2 == 0) or run.case.measured.label.endswith(tuple(part))


def add_to(sources: Any) -> None:
    """Add the command `host` to those of `tools.calibrate`."""
    host = sources.add_parser("host", help="the constants of runtime, from measured runs")
    host.add_argument("names", nargs="+", help="entries of evenflow reproduce")
    host.add_argument("--part", nargs="+", required=True, help="ends of names, or even")
    host.add_argument("--start", nargs="+", required=True, help="constants as KEY=SECONDS")
    host.add_argument("--holds", default="engine", choices=("engine", "stage0", "nothing"))
    host.add_argument("--every", type=int, default=1, help="look at every so many runs")
    host.add_argument("--rounds", type=int, default=8, help="steps of the search at most")
    host.add_argument("--loss", default="linear", choices=("linear", "soft_l1"))
    host.add_argument("--data", type=Path)
    host.set_defaults(run=run_command)
