"""What each parameter does to a metric: the numbers behind a sweep's figures.

Knows findings. Does not know how a figure looks, nor any plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.study.intervals import interval
from experiments.study.searches import identity, is_number
from experiments.study.sweep import Findings
from experiments.study.trials import Trial
from experiments.sweep.tables import cell

SHOWN = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "total_token_throughput")
"""The metrics of gLLM's sensitivity figure."""

FEW_VALUES = 12
"""A parameter with more values than this is drawn as single points on a scale of numbers."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric at each value of a parameter: mean and half-width of its interval, NaN if none."""

    metric: str
    mean: list[float]
    half_width: list[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """A parameter, its values in order, and a series for each metric.

    `default` is the position of the run's own value. `scattered`: each point has its own value
    and there is nothing to average over; `log`: the values span more than a factor of ten.
    """

    parameter: str
    values: list[Any]
    default: int | None
    series: list[Series]
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
        series = []
        for metric in metrics:
            ratios = [trial.relative(base, metric) for trial in slice_]
            series.append(Series(metric, [r.mean for r in ratios], [r.half_width for r in ratios]))
        values = [trial.labels[name] for trial in slice_]
        panels.append(Panel(name, values, slice_.index(base), series))
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
    widths = [math.nan if scattered else each.half_width for each in means]
    series = Series(metric, [each.mean for each in means], widths)
    spread = scattered and values[0] > 0 and values[-1] > 10 * values[0]
    return Panel(name, values, default, [series], scattered, spread)


def _by_replication(trials: Sequence[Trial], metric: str) -> list[float]:
    columns = zip(*(trial.values(metric) for trial in trials), strict=True)
    return [math.fsum(column) / len(trials) for column in columns]


def _in_order(trials: Sequence[Trial], name: str) -> list[Trial]:
    """Sort by a parameter where its values are numbers; else keep the order of the points."""
    if all(is_number(trial.labels[name]) for trial in trials):
        return sorted(trials, key=lambda trial: trial.labels[name])
    return list(trials)


def label(value: Any) -> str:
    """Return a parameter's value as an axis shows it."""
    return f"{value:g}" if is_number(value) else str(cell(value))
