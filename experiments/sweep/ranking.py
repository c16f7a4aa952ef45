"""Which points of a sweep are best: under its limits, by one objective or by several.

Pure functions of the findings; draws and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.study.intervals import Interval, interval, paired_difference
from experiments.sweep.config import SweepConfig
from experiments.sweep.run import Findings
from experiments.sweep.trials import Trial


def eligible(config: SweepConfig, trial: Trial) -> bool:
    """Say whether all replications were completed, and the means are within the limits."""
    if trial.errors or any(math.isnan(trial.mean(metric)) for metric in config.metrics):
        return False
    return all(bounds.excess(trial.mean(name)) <= 0 for name, bounds in config.limits.items())


def ranked(findings: Findings) -> list[int]:
    """Return the positions of the points that count, the best first.

    Of several objectives, the Pareto front in order of the first objective.
    """
    config = findings.sweep.config
    able = [i for i, trial in enumerate(findings.trials) if eligible(config, trial)]
    costs = [_costs(config, findings.trials[index]) for index in able]
    if len(config.objectives) > 1:
        able = [index for index, kept in zip(able, pareto_front(costs), strict=True) if kept]
    return sorted(able, key=lambda index: (_costs(config, findings.trials[index]), index))


def _costs(config: SweepConfig, trial: Trial) -> tuple[float, ...]:
    return tuple(each.cost(trial.mean(each.metric)) for each in config.objectives)


def pareto_front(costs: Sequence[Sequence[float]]) -> list[bool]:
    """Say of each point whether no other is as cheap in everything and cheaper in something.

    Equal points are all on the front.
    """
    front: list[Sequence[float]] = []
    # In this order nothing that comes later can be better than what came before.
    for point in sorted(set(map(tuple, costs))):
        if not any(all(a <= b for a, b in zip(best, point, strict=True)) for best in front):
            front.append(point)
    kept = set(map(tuple, front))
    return [tuple(point) in kept for point in costs]


def difference(trial: Trial, other: Trial, metric: str) -> Interval:
    """Return by how much a metric of one point is above that of another, pair by pair."""
    return paired_difference(trial.values(metric), other.values(metric))


def relative(trial: Trial, other: Trial, metric: str) -> Interval:
    """Return a metric of one point as a multiple of another's, pair by pair; NaN over zero."""
    pairs = zip(trial.values(metric), other.values(metric), strict=True)
    return interval([value / base if base else math.nan for value, base in pairs])
