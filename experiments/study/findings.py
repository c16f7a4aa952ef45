"""What a sweep found: its points as tables, which are best, and what each parameter does.

Knows numbers. Does not know how they are written or drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments.report.tables import is_number
from experiments.run_file.yaml_file import Patch
from experiments.study.intervals import Interval, interval
from experiments.study.searches import Optuna, Score, identity, optuna, proposed
from experiments.study.slo import missed, pareto_front
from experiments.study.sweep_file import (
    Sweep,
    SweepConfig,
    chosen_patches,
    default_patch,
    known_patches,
)
from experiments.study.trials import Case, Search, Simulator, Trial, run

SHOWN = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "total_token_throughput")
"""The metrics of gLLM's sensitivity figure."""

FEW_VALUES = 12
"""A parameter with more values than this is drawn as single points on a scale of numbers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All points of a sweep; `default` is the position of the run as it is, if there is one.

    `default_is_extra`: it is no point of the grid or the draws, and was simulated besides.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    default: int | None
    default_is_extra: bool = False

    @property
    def metrics(self) -> list[str]:
        """All metrics of all points, in the order of their first appearance."""
        records = [record for trial in self.trials for record in trial.records]
        return list(dict.fromkeys(name for record in records for name in record.values))

    @property
    def points(self) -> pd.DataFrame:
        """A row for each point and replication, in that order, as points.csv has them."""
        return point_cells(self).infer_objects()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each point, as summary.csv has them: means, intervals, the place it took."""
        return summary_cells(self).infer_objects()


def run_sweep(sweep: Sweep, simulator: Simulator) -> Findings:
    """Simulate all points of a sweep that the store does not have.

    The findings depend on the sweep only, not on who simulates nor on what was there before.
    """
    known = known_patches(sweep)
    tried = run(sweep.study, simulator, _search(sweep, known))
    trials = list({identity(trial.labels): trial for trial in tried}.values())
    default = default_patch(sweep)
    if default is None:
        return Findings(sweep, trials, None)
    chosen = chosen_patches(sweep, default) or [trial.labels for trial in tried[len(known) :]]
    where = [identity(trial.labels) for trial in trials].index(identity(default))
    return Findings(sweep, trials, where, identity(default) not in map(identity, chosen))


def _search(sweep: Sweep, known: Sequence[Patch]) -> Search:
    """Ask for the points known beforehand, then for those that Optuna proposes."""
    config, method = sweep.config, sweep.config.method
    if known:
        yield [Case(patch, patch) for patch in known]
    if isinstance(method, Optuna):

        def propose(asked: Any) -> Case:
            values = {name: proposed(asked, name, each) for name, each in config.parameters.items()}
            return Case(values, values)

        goals = [objective.goal for objective in config.objectives]
        yield from optuna(method, goals, propose, lambda trial: _score(config, trial))


def _score(config: SweepConfig, trial: Trial) -> Score:
    values = [trial.mean(objective.metric) for objective in config.objectives]
    excess = {
        name: max(each.excess(trial.mean(name)) for each in bounds.of(name))
        for name, bounds in config.limits.items()
    }
    return values, excess


def eligible(config: SweepConfig, trial: Trial) -> bool:
    """Say whether all replications were completed, and the means are within the limits."""
    means = {metric: trial.mean(metric) for metric in config.metrics}
    if trial.errors or any(map(math.isnan, means.values())):
        return False
    return all(condition.holds(means) for condition in config.conditions)


def ranked(findings: Findings) -> list[int]:
    """Return the positions of the points that count, the best first.

    Of several objectives, the Pareto front in order of the first objective.
    """
    config = findings.sweep.config
    costs = {i: _costs(config, t) for i, t in enumerate(findings.trials) if eligible(config, t)}
    able = list(costs)
    if len(config.objectives) > 1:
        front = pareto_front(list(costs.values()))
        able = [index for index, kept in zip(costs, front, strict=True) if kept]
    return sorted(able, key=lambda index: (costs[index], index))


def nearest(findings: Findings) -> list[int]:
    """Return the positions of the completed points, those first that miss their limits least."""
    off = {}
    for index, trial in enumerate(findings.trials):
        if not trial.errors:
            limits = findings.sweep.config.conditions
            shares = [each.excess_share(trial.mean(each.metric)) for each in limits]
            off[index] = missed(shares)
    return sorted(off, key=lambda index: (off[index], index))


def _costs(config: SweepConfig, trial: Trial) -> tuple[float, ...]:
    return tuple(each.cost(trial.mean(each.metric)) for each in config.objectives)


def point_cells(findings: Findings) -> pd.DataFrame:
    """Return a row for each point and replication, in that order; NaN: no such metric.

    Cells are objects, so that numbers are written as the runs gave them.
    """
    rows = [
        {
            "point": index,
            "replication": replication,
            **part._asdict(),
            **{name: cell(value) for name, value in trial.labels.items()},
            "status": "completed" if record.error is None else "failed",
            "error": record.error or "",
            "key": record.key,
            **{name: record.values.get(name, math.nan) for name in findings.metrics},
        }
        for index, trial in enumerate(findings.trials)
        for replication, (part, record) in enumerate(zip(trial.parts, trial.records, strict=True))
    ]
    return pd.DataFrame(rows, dtype=object)


def summary_cells(findings: Findings) -> pd.DataFrame:
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
            "place": places.get(index, math.nan),
            **_against_default(findings, trial),
            **{k: v for name in findings.metrics for k, v in _pair(name, trial.interval(name))},
        }
        for index, trial in enumerate(findings.trials)
    ]
    return pd.DataFrame(rows, dtype=object)


def _against_default(findings: Findings, trial: Trial) -> dict[str, float]:
    if findings.default is None:
        return {}
    base = findings.trials[findings.default]
    pairs = [
        _pair(f"{metric}_vs_default", trial.above(base, metric))
        for metric in findings.sweep.config.metrics
    ]
    return {name: value for pair in pairs for name, value in pair}


def _pair(name: str, mean: Interval) -> tuple[tuple[str, float], tuple[str, float]]:
    return (name, mean.mean), (f"{name}_ci95", mean.half_width)


def cell(value: Any) -> Any:
    """Return a parameter's value as it stands in a table: numbers and texts as they are."""
    if isinstance(value, str) or is_number(value):
        return value
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Panel:
    """A parameter, its values in order, and for each metric its mean at each of them.

    `default` is the position of the run's own value. `scattered`: each point has its own value
    and there is nothing to average over; `log`: the values span more than a factor of ten.
    """

    parameter: str
    values: list[Any]
    default: int | None
    means: Mapping[str, Sequence[Interval]]
    scattered: bool = False
    log: bool = False


def sensitivity(findings: Findings) -> list[Panel]:
    """Return a panel a parameter: metrics relative to the default, all other parameters as there.

    Ratios are taken within a replication. A parameter of which no other value was simulated beside
    the default is left out; without a default there are no panels, nor of points drawn or searched
    for, of which hardly any differ in one parameter only.
    """
    chosen = findings.sweep.config.method.kind in ("grid", "one_at_a_time")
    if not chosen or findings.default is None or findings.trials[findings.default].errors:
        return []
    base = findings.trials[findings.default]
    metrics = list(dict.fromkeys([*SHOWN, *findings.sweep.config.metrics]))
    panels = []
    for name in base.labels:
        slice_ = [t for t in findings.trials if not t.errors and _differs_only_in(name, t, base)]
        slice_ = _in_order(slice_, name)
        if len(slice_) < 2:
            continue
        ratios = {metric: [trial.relative(base, metric) for trial in slice_] for metric in metrics}
        values = [trial.labels[name] for trial in slice_]
        panels.append(Panel(name, values, slice_.index(base), ratios))
    return panels


def _differs_only_in(name: str, trial: Trial, base: Trial) -> bool:
    return identity({**trial.labels, name: None}) == identity({**base.labels, name: None})


def main_effects(findings: Findings, metric: str) -> list[Panel]:
    """Return a panel a parameter: the metric's mean over all points with a value.

    Points are averaged within a replication first: the interval is that of the replications. Of
    a parameter with many values, each point by itself.
    """
    return [
        _main_effect(findings, _compared(findings, name), name, metric)
        for name in findings.sweep.config.parameters
    ]


def _compared(findings: Findings, name: str) -> list[Trial]:
    """Return the points whose means by a parameter's value are fair: all, where they are balanced.

    One at a time, those that differ in nothing else; the run as it is only if the method chose it.
    """
    done = [trial for trial in findings.trials if not trial.errors]
    if findings.default is None:
        return done
    base = findings.trials[findings.default]
    if findings.sweep.config.method.kind == "one_at_a_time":
        return [trial for trial in done if _differs_only_in(name, trial, base)]
    return [trial for trial in done if trial is not base or not findings.default_is_extra]


def _main_effect(findings: Findings, trials: Sequence[Trial], name: str, metric: str) -> Panel:
    ordered = _in_order(trials, name)
    groups: dict[str, list[Trial]] = {}
    for trial in ordered:
        groups.setdefault(identity({name: trial.labels[name]}), []).append(trial)
    scattered = len(groups) > FEW_VALUES and all(is_number(t.labels[name]) for t in ordered)
    parts = [[trial] for trial in ordered] if scattered else list(groups.values())
    means = [interval(_by_replication(part, metric)) for part in parts]
    values = [part[0].labels[name] for part in parts]
    default = None
    if findings.default is not None:
        own = identity({name: findings.trials[findings.default].labels[name]})
        default = next((i for i, v in enumerate(values) if identity({name: v}) == own), None)
    if scattered:  # points, which are drawn without their intervals
        means = [replace(each, half_width=math.nan) for each in means]
    spread = scattered and values[0] > 0 and values[-1] > 10 * values[0]
    return Panel(name, values, default, {metric: means}, scattered, spread)


def _by_replication(trials: Sequence[Trial], metric: str) -> list[float]:
    columns = zip(*(trial.values(metric) for trial in trials), strict=True)
    return [math.fsum(column) / len(trials) for column in columns]


def _in_order(trials: Sequence[Trial], name: str) -> list[Trial]:
    """Sort by a parameter where its values are numbers; else keep the order of the points."""
    if all(is_number(trial.labels[name]) for trial in trials):
        return sorted(trials, key=lambda trial: trial.labels[name])
    return list(trials)
