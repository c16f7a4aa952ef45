"""What a sweep found, in words and rows of text: for the terminal and for the report alike."""

from __future__ import annotations

import math

from experiments.report.words import metric_words
from experiments.study.intervals import Interval, interval
from experiments.study.sweep import Findings, ranked
from experiments.study.trials import Trial
from experiments.sweep.effects import label

BEST = 5
"""How many points the table of the best lists; of a Pareto front, all."""


def headline(findings: Findings) -> str:
    """Say in a sentence what the best point gains over the default, or that none counts."""
    config, order = findings.sweep.config, ranked(findings)
    counts = f"{len(findings.trials)} points, {config.replications} replications each"
    if not order:
        return f"No point was completed within the limits ({counts})."
    if len(config.objectives) > 1:
        return f"{len(order)} points are on the Pareto front ({counts})."
    metric = config.objectives[0].metric
    best = findings.trials[order[0]]
    found = f"{metric_words(metric)}: {number(best.mean(metric))} at best"
    if findings.default is None or findings.trials[findings.default].errors:
        return f"{found} ({counts})."
    if order[0] == findings.default:
        return f"{found}, which is the default ({counts})."
    base = findings.trials[findings.default]
    gain = best.above(base, metric)
    share = gain.mean / base.mean(metric) if base.mean(metric) else math.nan
    return f"{found}, {signed(gain)} ({share:+.1%}) against the default ({counts})."


def best_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the best points: parameters, what decides, against the default.

    The column `against the best` tells points that differ from the first from those that may not.
    """
    config, order = findings.sweep.config, ranked(findings)
    several = len(config.objectives) > 1
    shown = order if several else order[:BEST]
    if findings.default is not None and findings.default not in shown:
        shown = [*shown, findings.default]
    heads = ["point", *short_names(list(config.parameters))]
    heads += [metric_words(metric) for metric in config.metrics]
    heads += [] if several or not order else ["against the best"]
    rows = []
    for index in shown:
        trial = findings.trials[index]
        row = [f"{index}, default" if index == findings.default else str(index)]
        row += [label(value) for value in trial.labels.values()]
        row += [_mean(trial, metric) for metric in config.metrics]
        if not several and order:
            metric = config.objectives[0].metric
            row.append(_against(trial, findings.trials[order[0]], metric))
        rows.append(row)
    return heads, rows


def without_unit(metric: str) -> str:
    """Return the words for a metric without its unit, for ratios."""
    return metric_words(metric).partition(" (")[0]


def short_names(dotted: list[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key where others end alike."""
    last = [name.rpartition(".")[2] for name in dotted]
    pairs = zip(dotted, last, strict=True)
    return [short if last.count(short) == 1 else name for name, short in pairs]


def _mean(trial: Trial, metric: str) -> str:
    return "failed" if trial.errors else with_width(interval(trial.values(metric)))


def _against(trial: Trial, best: Trial, metric: str) -> str:
    if trial is best or trial.errors:
        return ""
    found = trial.above(best, metric)
    if math.isnan(found.half_width) or found.is_above_zero or found.is_below_zero:
        return signed(found)
    return f"{signed(found)}: alike"


def with_width(found: Interval) -> str:
    """Return a mean and, where there is one, the half-width of its interval."""
    width = "" if math.isnan(found.half_width) else f" ± {number(found.half_width, 2)}"
    return f"{number(found.mean)}{width}"


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, and never with an exponent above 0."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def signed(found: Interval) -> str:
    """Return a difference with its sign and half-width."""
    return f"{'+' if found.mean >= 0 else ''}{with_width(found)}"


def failures(findings: Findings) -> list[list[str]]:
    """Return a row a failed point: its position, its parameters, and its first error."""
    return [
        [str(index), *(label(value) for value in trial.labels.values()), trial.errors[0]]
        for index, trial in enumerate(findings.trials)
        if trial.errors
    ]
