"""What a sweep found: its points as tables, which of them count, and which are best."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import pandas as pd

from evenflow.report.tables import is_number
from evenflow.study.fair import interval
from evenflow.study.searches import identity
from evenflow.study.slo import missed, pareto_front, shares_beyond
from evenflow.study.sweep_file import Sweep, SweepConfig
from evenflow.study.trials import Trial
from evenflow.study.unseen import Check


@dataclass(frozen=True, repr=False)
class Findings:
    """All points of a sweep; `default` is the position of the run as it is, if there is one.

    `default_is_extra`: it is no point of the grid or the draws, and was simulated besides.
    `allow_refused`: points count however many of their requests are refused. `checks`: the best
    point and the default on requests that the sweep has not seen.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    default: int | None
    default_is_extra: bool = False
    allow_refused: bool = False
    checks: Sequence[Check] = ()

    @property
    def config(self) -> SweepConfig:
        return self.sweep.config

    @property
    def base(self) -> Trial | None:
        """The run as it is; None where there is none, or it gives no answer."""
        if self.default is None or self.default not in self.answered:
            return None
        return self.trials[self.default]

    @property
    def best(self) -> Trial | None:
        """The first of the points that count."""
        return self.trials[self.ranked[0]] if self.ranked else None

    @cached_property
    def keys(self) -> pd.DataFrame:
        """A row for each point: its parameters, as texts that are equal where values are."""
        names = list(self.config.parameters)
        labels = [trial.labels for trial in self.trials]
        rows = [[identity({name: each[name]}) for name in names] for each in labels]
        return pd.DataFrame(rows, columns=names)

    def values(self, metric: str) -> pd.DataFrame:
        """Return a row for each point, a column for each replication; NaN where it has none."""
        return pd.DataFrame([trial.values(metric) for trial in self.trials])

    @cached_property
    def answered(self) -> list[int]:
        """The positions of the points that were completed, and served enough of their requests."""
        return [i for i, trial in enumerate(self.trials) if answers(trial, self.allow_refused)]

    @cached_property
    def counting(self) -> list[int]:
        """The positions of the points that answer, with means within the limits."""
        return [index for index in self.answered if within_limits(self.config, self.trials[index])]

    @cached_property
    def ranked(self) -> list[int]:
        """The positions of the points that count, the best first.

        Of several objectives, the Pareto front in order of the first objective.
        """
        goals = self.config.objectives
        costs = {
            index: tuple(goal.cost(self.trials[index].mean(goal.metric)) for goal in goals)
            for index in self.counting
        }
        if len(goals) > 1:
            costs = dict(compress(costs.items(), pareto_front(list(costs.values()))))
        return sorted(costs, key=lambda index: (costs[index], index))

    @cached_property
    def nearest(self) -> list[int]:
        """The positions of the points that answer, by how far they miss limits, least first."""
        limits, trials = self.config.conditions, self.trials
        off = {index: missed(shares_beyond(limits, trials[index].mean)) for index in self.answered}
        return sorted(off, key=lambda index: off[index])


def answers(trial: Trial, allow_refused: bool) -> bool:
    """Say whether all replications were completed, and served enough of their requests, or any."""
    enough = trial.served.share > 0 if allow_refused else not trial.served.is_no_answer
    return enough and not trial.errors


def within_limits(config: SweepConfig, trial: Trial) -> bool:
    """Say whether the means of all metrics that decide are known, and within the limits."""
    means = {metric: trial.mean(metric) for metric in config.metrics}
    known = not any(map(math.isnan, means.values()))
    return known and all(condition.holds(means) for condition in config.conditions)


def spread(values: pd.DataFrame) -> pd.DataFrame:
    """Return the `mean` of each row and the `half_width` of its interval; NaN where one is NaN."""
    rows = [interval(row) for row in values.to_numpy().tolist()]
    return pd.DataFrame(rows, values.index, ["mean", "half_width", "n"])


def point_cells(findings: Findings) -> pd.DataFrame:
    """Return a row for each point and replication, in that order; NaN: no such metric.

    Cells are objects, so that numbers are written as the runs gave them.
    """
    rows = [
        {"point": index, "replication": replication, **row}
        for index, trial in enumerate(findings.trials)
        for replication, row in enumerate(trial_rows(trial))
    ]
    table = pd.DataFrame(rows, dtype=object)
    return table.where(table.notna(), math.nan)


def trial_rows(trial: Trial) -> list[dict[str, Any]]:
    """Return a row for each replication of a point."""
    return [
        {
            **part._asdict(),
            **{name: cell(value) for name, value in trial.labels.items()},
            "status": "completed" if record.error is None else "failed",
            "error": record.error or "",
            "key": record.key,
            **record.values,
        }
        for part, record in zip(trial.parts, trial.records, strict=True)
    ]


def summary_cells(findings: Findings) -> pd.DataFrame:
    """Return a row for each point: means, half-widths of their intervals, and the place it took.

    `*_ci95` is the half-width of the 95 % interval; `*_vs_default` the mean paired difference.
    """
    trials, default = findings.trials, findings.default
    places = {position: place for place, position in enumerate(findings.ranked, 1)}
    rows = [
        {
            "point": index,
            "is_default": "yes" if index == default else "no",
            **{name: cell(value) for name, value in trial.labels.items()},
            "replications": len(trial.records),
            "failed_replications": len(trial.errors),
            "counts": "yes" if index in findings.counting else "no",
            "place": places.get(index, math.nan),
        }
        for index, trial in enumerate(trials)
    ]
    columns = {}
    if default is not None:
        for name in findings.config.metrics:
            values = findings.values(name)
            base = math.nan if findings.base is None else values.loc[default]
            columns[f"{name}_vs_default"] = values - base
    metrics = (name for trial in trials for record in trial.records for name in record.values)
    columns |= {name: findings.values(name) for name in dict.fromkeys(metrics)}
    spreads = {name: spread(values) for name, values in columns.items()}
    means = {
        name + end: each[column]
        for name, each in spreads.items()
        for end, column in (("", "mean"), ("_ci95", "half_width"))
    }
    return pd.concat([pd.DataFrame(rows, dtype=object), pd.DataFrame(means)], axis=1)


def cell(value: Any) -> Any:
    """Return a parameter's value as it stands in a table: numbers and texts as they are."""
    if isinstance(value, str) or is_number(value):
        return value
    return json.dumps(value, separators=(",", ":"))
