"""What a sweep found in words and cells, for a terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any

import pandas as pd

from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import is_number, number
from evenflow.report.words import metric_words, refusals, too_short
from evenflow.study.fair import interval, marked, paired_difference, signed, with_width
from evenflow.study.sweep_findings import Findings, cell, point_cells, summary_cells
from evenflow.study.trials import Trial, unfair
from evenflow.study.unseen import verdict

BEST = 5
"""How many points the table of the best lists; of a Pareto front, all."""

SHORT = {"token_budget": "budget", "stages": "PP", "tensor_parallel": "TP"}
"""Names of keys where they are set, in tables."""


@dataclass(frozen=True, repr=False)
class Swept(Findings, Shown):
    """The findings of a sweep in words; where files have JSON, tables have `sarathi budget=64`."""

    def told(self) -> Iterator[str | Table]:
        point = self.trials[(self.ranked or [0])[0]]
        yield self.sweep.study.config(point.labels).setup()
        yield Table(*best_table(self), of_words=True)
        yield from told(self)
        if lost := failures(self):
            yield Aside(
                f"{len(lost)} of {len(self.trials)} points failed, the first of them point "
                f"{lost[0][0]}: {lost[0][-1]}"
            )

    @property
    def is_failure(self) -> bool:
        return all(trial.errors for trial in self.trials)

    @cached_property
    def points(self) -> pd.DataFrame:
        """A row for each point and replication, in that order, as points.csv has them."""
        return self._in_words(point_cells(self))

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each point, as summary.csv has them: means, intervals, the place it took."""
        return self._in_words(summary_cells(self))

    def _in_words(self, cells: pd.DataFrame) -> pd.DataFrame:
        for name in self.config.parameters:
            given = [self.trials[point].labels[name] for point in cells["point"]]
            cells[name] = [label(v) if isinstance(v, Mapping) else cell(v) for v in given]
        return cells.infer_objects()


def told(found: Findings) -> list[str]:
    """Return the sentences on what was found: what it rests on first."""
    best, base = found.best, found.base
    if best is None:
        return [headline(found), *_lost_default(found)]
    trials = {"the best point": best} | ({} if base is None else {"the default": base})
    lost = [f"{line}." for line in refusals({name: each.served for name, each in trials.items()})]
    said = [*lost, headline(found), *_lost_default(found), *edges(found)]
    if beyond := best.overload:
        said.append(f"The best point is overloaded: {beyond}.")
    if short := too_short(best.load):
        said.append(f"Of the best point {short}.")
    said += [verdict(each, found.sweep, allow_refused=found.allow_refused) for each in found.checks]
    return [*said, *marked(_same_rows(found)), *unfair(trials)]


def _same_rows(found: Findings) -> list[str]:
    """Say so where all replications have the same requests, which intervals then say nothing of."""
    config, sweep = found.trials[0].config, found.config
    asked = sweep.replications > 1 and sweep.replicate == "seeds"
    if config is None or not asked or config.workload.is_drawn:
        return []
    return [
        f"all replications have the same rows of trace {config.workload.trace}: intervals are of "
        "the arrivals alone; replicate: windows is right"
    ]


def _lost_default(found: Findings) -> list[str]:
    """Say why nothing is compared with the default, where it gives no answer."""
    if found.default is None or found.base is not None:
        return []
    lost = found.trials[found.default]
    why = lost.errors[0] if lost.errors else str(lost.served)
    return [f"The default gives no answer: {why}."]


def headline(found: Findings) -> str:
    """Say in a sentence what the best point gains over the default, or that none counts."""
    config, best, base = found.config, found.best, found.base
    counts = _counts(found)
    if not found.answered and _num_refusing(found):
        what = "any request" if found.allow_refused else "nine tenths of its requests"
        return f"No point serves {what} ({counts})."
    if best is None:
        return f"No point was completed within the limits ({counts}){_nearest_words(found)}."
    if len(config.objectives) > 1:
        return f"{len(found.ranked)} points are on the Pareto front ({counts})."
    metric = config.objectives[0].metric
    said = f"{metric_words(metric)}: {number(best.mean(metric))} at best"
    if base is None:
        return f"{said} ({counts})."
    if best is base:
        return f"{said}, which is the default ({counts})."
    gain, before = paired_difference(best.values(metric), base.values(metric)), base.mean(metric)
    if math.isnan(gain.mean):
        return f"{said} ({counts})."
    share = f" ({gain.mean / before:+.1%})" if before else ""
    return f"{said}, {signed(gain)}{share} against the default ({counts})."


def _counts(found: Findings) -> str:
    counts = f"{len(found.trials)} points, {replications_words(found.config.replications)}"
    if beyond := sum(trial.overload is not None for trial in found.trials):
        counts += f", {beyond} overloaded"
    if lost := _num_refusing(found):
        part = "all" if found.allow_refused else "more than 10 %"
        counts += f", {lost} of them no answer: {part} of the requests are refused"
    return counts


def _num_refusing(found: Findings) -> int:
    return sum(not trial.errors for trial in found.trials) - len(found.answered)


def replications_words(count: int) -> str:
    """Return how often each point is simulated."""
    if count == 1:
        return "1 replication each, which says nothing of chance"
    return f"{count} replications each"


def _nearest_words(found: Findings) -> str:
    """Return how far the nearest point is from the limit that it misses most; "" without one."""
    limits = found.config.conditions
    if not limits or not found.nearest:
        return ""
    trial = found.trials[found.nearest[0]]
    worst = max(limits, key=lambda each: each.excess_share(trial.mean(each.metric)))
    value = number(trial.mean(worst.metric), 3)
    where = f"; the nearest is point {found.nearest[0]}"
    return f"{where}: {worst.metric} is {value}, not {worst.limit:g}"


def edges(found: Findings) -> list[str]:
    """Return a sentence where the best point lies on the edge of what was tried; else nothing.

    Of a parameter of three values or more, all numbers: the best may lie beyond.
    """
    if len(found.config.objectives) > 1 or found.best is None:
        return []
    best, beyond = found.best.labels, {}
    for name in found.config.parameters:
        tried = {trial.labels[name] for trial in found.trials if is_number(trial.labels[name])}
        if len(tried) > 2 and best[name] in (ends := {min(tried): "least", max(tried): "most"}):
            beyond[name] = ends[best[name]]
    words = [f"{setting({name: best[name]})} is the {end}" for name, end in beyond.items()]
    return [f"The best is on the edge of what was tried: {', '.join(words)}."] if words else []


def best_table(found: Findings, beside: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the best points: where they differ, what decides, what is `beside`.

    The column `against the best` marks whether a point surely differs from the first.
    """
    config, order = found.config, found.ranked
    shown = order if len(config.objectives) > 1 else order[:BEST]
    shown = shown or found.nearest[:BEST]
    if found.default is not None and found.default not in shown:
        shown = [*shown, found.default]
    metrics = list(dict.fromkeys([*config.metrics, *beside]))
    if "gpus" not in metrics and len({found.trials[index].mean("gpus") for index in shown}) > 1:
        metrics.append("gpus")
    varied = [name for name in config.parameters if found.keys[name].loc[shown].nunique() > 1]
    against = found.best if len(config.objectives) == 1 else None
    heads = ["point", *(["setting"] if varied else []), *map(metric_words, metrics)]
    heads += [] if against is None else ["against the best"]
    rows = []
    for index in shown:
        trial = found.trials[index]
        row = [", ".join([str(index), *marks(found, index)])]
        if varied:
            row.append(setting({name: trial.labels[name] for name in varied}, config.tied))
        if index in found.answered:
            row += [with_width(interval(trial.values(metric))) for metric in metrics]
        else:
            row += ["failed" if trial.errors else "no answer"] * len(metrics)
        if against is not None:
            known = index in found.answered and trial is not against
            row.append(_against(trial, against, config.objectives[0].metric) if known else "")
        rows.append(row)
    return heads, rows


def marks(found: Findings, index: int) -> list[str]:
    """Return the marks of a point in a table: default, overloaded, too short, requests lost."""
    trial = found.trials[index]
    served = trial.served
    marks = {
        "default": index == found.default,
        "overloaded": trial.overload is not None,
        "too short": too_short(trial.load) is not None,
        f"{served.completed:,} of {served.asked:,} requests": served.failed > 0,
    }
    return [mark for mark, applies in marks.items() if applies]


def _against(trial: Trial, best: Trial, metric: str) -> str:
    gap = paired_difference(trial.values(metric), best.values(metric))
    if math.isnan(gap.mean):
        return ""
    apart = math.isnan(gap.half_width) or gap.is_above_zero or gap.is_below_zero
    return signed(gap) if apart else f"{signed(gap)}: alike"


def failures(found: Findings) -> list[list[str]]:
    """Return a row a failed point: its position, its parameters, and its first error."""
    return [
        [str(index), *(label(value) for value in trial.labels.values()), trial.errors[0]]
        for index, trial in enumerate(found.trials)
        if trial.errors
    ]


def setting(labels: Mapping[str, Any], tied: Container[str] = ()) -> str:
    """Return what is set, in short: budget=2048, or sarathi budget=2048; tied keys one by one."""
    keys = [value if name in tied else {name: value} for name, value in labels.items()]
    labels = {name: value for each in keys for name, value in each.items()}
    return ", ".join(starmap(_set, zip(short_names(list(labels)), labels.values(), strict=True)))


def _set(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{SHORT.get(name, name)}={label(value)}"
    if list(value) == ["count"]:
        return f"{name}={label(value['count'])}"
    return label(value) if value.keys() & {"name", "kind"} else f"{name} {label(value)}"


def label(value: Any) -> str:
    """Return a parameter's value as axes and tables show it, a mapping as `setting` does."""
    if isinstance(value, Mapping):
        named = [str(value[key]) for key in ("name", "kind") if key in value]
        others = {key: each for key, each in value.items() if key not in ("name", "kind")}
        return " ".join([*named, *filter(None, [setting(others)])])
    return f"{value:g}" if is_number(value) else str(cell(value))


def short_names(dotted: list[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key where others end alike."""
    last = [name.rpartition(".")[2] for name in dotted]
    pairs = zip(dotted, last, strict=True)
    return [short if last.count(short) == 1 else name for name, short in pairs]
