"""Findings of a sweep: its points as tables, which count, which are best, and that in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import is_number, number
from evenflow.report.words import metric_words, refusals, too_short
from evenflow.study.fair import interval, marked, paired_difference, signed, with_width
from evenflow.study.searches import identity
from evenflow.study.slo import missed, pareto_front, shares_beyond
from evenflow.study.sweep_file import Sweep, SweepConfig
from evenflow.study.trials import Trial, unfair
from evenflow.study.unseen import Check

if TYPE_CHECKING:
    import pandas as pd

BEST = 5
"""How many points the table of the best lists; of a Pareto front, all."""

SHORT = {"token_budget": "budget", "stages": "PP", "tensor_parallel": "TP"}
"""Names of keys where they are set, in tables."""


@dataclass(frozen=True, repr=False)
class Swept(Shown):
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
        return self.trials[self.default] if self.default in self.answered else None

    @property
    def best(self) -> Trial | None:
        """The first of the points that count."""
        return self.trials[self.ranked[0]] if self.ranked else None

    @cached_property
    def keys(self) -> pd.DataFrame:
        """A row for each point: its parameters, as texts that are equal where values are."""
        import pandas as pd

        rows = [{k: identity({k: v}) for k, v in trial.labels.items()} for trial in self.trials]
        return pd.DataFrame(rows, columns=list(self.config.parameters))

    def values(self, metric: str) -> pd.DataFrame:
        """Return a row for each point, a column for each replication; NaN where it has none."""
        import pandas as pd

        return pd.DataFrame([trial.values(metric) for trial in self.trials])

    @cached_property
    def answered(self) -> list[int]:
        """The positions of the points that were completed, and served enough of their requests."""
        return [i for i, trial in enumerate(self.trials) if answers(trial, self.allow_refused)]

    @cached_property
    def counting(self) -> list[int]:
        """The positions of the points that answer, with known means within the limits."""
        return [index for index in self.answered if self._counts(self.trials[index])]

    def _counts(self, trial: Trial) -> bool:
        means = {metric: trial.mean(metric) for metric in self.config.metrics}
        known = not any(map(math.isnan, means.values()))
        return known and all(limit.holds(means) for limit in self.config.conditions)

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
        limits = self.config.conditions
        off = {i: missed(shares_beyond(limits, self.trials[i].mean)) for i in self.answered}
        return sorted(off, key=lambda index: off[index])

    @cached_property
    def points(self) -> pd.DataFrame:
        """A row for each point and replication, in that order, as points.csv has them.

        Where the file has JSON, it has words: `sarathi budget=64`.
        """
        return self.point_cells(as_words).infer_objects()

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each point, as summary.csv has them: means, intervals, the place it took."""
        return self.summary_cells(as_words).infer_objects()

    def point_cells(self, cell: Callable[[Any], Any]) -> pd.DataFrame:
        """Return the rows of points.csv; NaN for a missing metric; `cell` formats a parameter.

        Cells are objects, so that numbers are written as the runs gave them.
        """
        import pandas as pd

        rows = [
            {"point": index, "replication": replication, **row}
            for index, trial in enumerate(self.trials)
            for replication, row in enumerate(trial_rows(trial, cell))
        ]
        table = pd.DataFrame(rows, dtype=object)
        return table.where(table.notna(), math.nan)

    def summary_cells(self, cell: Callable[[Any], Any]) -> pd.DataFrame:
        """Return the rows of summary.csv: means, half-widths of their intervals, the place taken.

        `*_ci95` is the half-width of the 95 % interval; `*_vs_default` the mean paired difference.
        """
        import pandas as pd

        places = {position: place for place, position in enumerate(self.ranked, 1)}
        rows = [
            {
                "point": index,
                "is_default": "yes" if index == self.default else "no",
                **{name: cell(value) for name, value in trial.labels.items()},
                "replications": len(trial.records),
                "failed_replications": len(trial.errors),
                "counts": "yes" if index in self.counting else "no",
                "place": places.get(index, math.nan),
            }
            for index, trial in enumerate(self.trials)
        ]
        runs = {}
        if self.default is not None:
            for name in self.config.metrics:
                values = self.values(name)
                base = math.nan if self.base is None else values.loc[self.default]
                runs[f"{name}_vs_default"] = values - base
        metrics = (name for trial in self.trials for rec in trial.records for name in rec.values)
        runs |= {name: self.values(name) for name in dict.fromkeys(metrics)}
        columns = [
            spread(values).set_axis([name, f"{name}_ci95"], axis=1) for name, values in runs.items()
        ]
        return pd.concat([pd.DataFrame(rows, dtype=object), *columns], axis=1)

    @property
    def failures(self) -> list[list[str]]:
        """A row a failed point: its position, its parameters, and its first error."""
        return [
            [str(index), *map(label, trial.labels.values()), trial.errors[0]]
            for index, trial in enumerate(self.trials)
            if trial.errors
        ]

    @property
    def is_failure(self) -> bool:
        return all(trial.errors for trial in self.trials)

    def told(self) -> Iterator[str | Table]:
        point = self.trials[(self.ranked or [0])[0]]
        yield self.sweep.study.config(point.labels).setup()
        yield Table(*self.best_table(), of_words=True)
        yield from self.sentences()
        if lost := self.failures:
            yield Aside(
                f"{len(lost)} of {len(self.trials)} points failed, the first of them point "
                f"{lost[0][0]}: {lost[0][-1]}"
            )

    def sentences(self) -> Iterator[str]:
        """Yield what was found in sentences: what it rests on first."""
        best, base = self.best, self.base
        trials = {"the best point": best, "the default": base}
        known = {name: trial for name, trial in trials.items() if trial is not None}
        if best is not None:
            lost = refusals({name: trial.served for name, trial in known.items()})
            yield from (f"{line}." for line in lost)
        yield self.headline()
        if self.default is not None and base is None:
            lost_default = self.trials[self.default]
            why = next(iter(lost_default.errors), str(lost_default.served))
            yield f"The default gives no answer: {why}."
        if best is None:
            return
        yield from self._edges()
        if beyond := best.overload:
            yield f"The best point is overloaded: {beyond}."
        if short := too_short(best.load):
            yield f"Of the best point {short}."
        for check in self.checks:
            yield check.verdict(allow_refused=self.allow_refused)
        yield from marked(self._same_rows())
        yield from unfair(known)

    def _same_rows(self) -> Iterator[str]:
        """Warn where all replications have the same requests, of which intervals say nothing."""
        config, sweep = self.trials[0].config, self.config
        asked = sweep.replications > 1 and sweep.replicate == "seeds"
        if config is not None and asked and not config.workload.is_drawn:
            yield (
                f"all replications have the same rows of trace {config.workload.trace}: intervals "
                "are of the arrivals alone; replicate: windows is right"
            )

    def headline(self) -> str:
        """Say in a sentence what the best point gains over the default, or that none counts."""
        config, best, base, counts = self.config, self.best, self.base, self._counts_words()
        if not self.answered and self._num_refusing:
            what = "any request" if self.allow_refused else "nine tenths of its requests"
            return f"No point serves {what} ({counts})."
        if best is None:
            return f"No point was completed within the limits ({counts}){self._nearest_words()}."
        if len(config.objectives) > 1:
            return f"Points on the Pareto front: {len(self.ranked)} ({counts})."
        metric = config.objectives[0].metric
        said = f"{metric_words(metric)}: {number(best.mean(metric))} at best"
        if best is base:
            return f"{said}, which is the default ({counts})."
        if base is not None:
            gain = paired_difference(best.values(metric), base.values(metric))
            before = base.mean(metric)
            if not math.isnan(gain.mean):
                share = f" ({gain.mean / before:+.1%})" if before else ""
                said += f", {signed(gain)}{share} against the default"
        return f"{said} ({counts})."

    def _counts_words(self) -> str:
        counts = f"{len(self.trials)} points, {replications_words(self.config.replications)}"
        if beyond := sum(trial.overload is not None for trial in self.trials):
            counts += f", {beyond} overloaded"
        if lost := self._num_refusing:
            part = "all" if self.allow_refused else "more than 10 %"
            counts += f", {lost} of them no answer: {part} of the requests are refused"
        return counts

    @property
    def _num_refusing(self) -> int:
        return sum(not trial.errors for trial in self.trials) - len(self.answered)

    def _nearest_words(self) -> str:
        """Return how far the nearest point is from the limit that it misses most; or nothing."""
        limits = self.config.conditions
        if not limits or not self.nearest:
            return ""
        trial = self.trials[self.nearest[0]]
        worst = max(limits, key=lambda each: each.excess_share(trial.mean(each.metric)))
        value = number(trial.mean(worst.metric), 3)
        where = f"; the nearest is point {self.nearest[0]}"
        return f"{where}: {worst.metric} is {value}, not {worst.limit:g}"

    def _edges(self) -> Iterator[str]:
        """Say so where the best point lies on the edge of what was tried: better may lie beyond.

        Of a parameter of three numbers or more.
        """
        if len(self.config.objectives) > 1 or self.best is None:
            return
        words = []
        for name, best in self.best.labels.items():
            tried = {each.labels[name] for each in self.trials if is_number(each.labels[name])}
            if len(tried) > 2 and best in (ends := {min(tried): "least", max(tried): "most"}):
                words.append(f"{setting({name: best})} is the {ends[best]}")
        if words:
            yield f"The best is on the edge of what was tried: {', '.join(words)}."

    def best_table(self, beside: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows of the best points: where they differ, what decides, `beside`.

        The column `against the best` marks whether a point surely differs from the first.
        """
        config, order = self.config, self.ranked
        several = len(config.objectives) > 1
        shown = (order if several else order[:BEST]) or self.nearest[:BEST]
        if self.default is not None and self.default not in shown:
            shown = [*shown, self.default]
        metrics = list(dict.fromkeys([*config.metrics, *beside]))
        if "gpus" not in metrics and len({self.trials[i].mean("gpus") for i in shown}) > 1:
            metrics.append("gpus")
        varied = [name for name in config.parameters if self.keys[name].loc[shown].nunique() > 1]
        heads = ["point", *(["setting"] if varied else []), *map(metric_words, metrics)]
        compared = self.best is not None and not several
        rows = [self._row(i, varied, metrics, against=compared) for i in shown]
        return [*heads, *(["against the best"] if compared else [])], rows

    def _row(
        self, index: int, varied: Sequence[str], metrics: Sequence[str], *, against: bool
    ) -> list[str]:
        trial, answered = self.trials[index], index in self.answered
        row = [self.name(index)]
        if varied:
            row.append(setting({name: trial.labels[name] for name in varied}, self.config.tied))
        if answered:
            row += [with_width(interval(trial.values(metric))) for metric in metrics]
        else:
            row += ["failed" if trial.errors else "no answer"] * len(metrics)
        if against:
            row.append(self._against(trial) if answered and trial is not self.best else "")
        return row

    def name(self, index: int) -> str:
        """Return a point by its position and marks, such as default or overloaded."""
        trial = self.trials[index]
        served = trial.served
        marks = {
            "default": index == self.default,
            "overloaded": trial.overload is not None,
            "too short": too_short(trial.load) is not None,
            f"{served.completed:,} of {served.asked:,} requests": served.failed > 0,
        }
        return ", ".join([str(index), *(mark for mark, applies in marks.items() if applies)])

    def _against(self, trial: Trial) -> str:
        assert self.best is not None
        metric = self.config.objectives[0].metric
        gap = paired_difference(trial.values(metric), self.best.values(metric))
        if math.isnan(gap.mean):
            return ""
        apart = math.isnan(gap.half_width) or gap.is_above_zero or gap.is_below_zero
        return signed(gap) if apart else f"{signed(gap)}: alike"


def answers(trial: Trial, allow_refused: bool) -> bool:
    """Say whether all replications were completed, and served enough of their requests, or any."""
    enough = trial.served.share > 0 if allow_refused else not trial.served.is_no_answer
    return enough and not trial.errors


def spread(values: pd.DataFrame) -> pd.DataFrame:
    """Return the `mean` of each row and the `half_width` of its interval; NaN where one is NaN."""
    import pandas as pd

    means = [interval(row) for row in values.to_numpy().tolist()]
    rows = [(mean.mean, mean.half_width) for mean in means]
    return pd.DataFrame(rows, values.index, ["mean", "half_width"])


def trial_rows(trial: Trial, cell: Callable[[Any], Any]) -> list[dict[str, Any]]:
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


def replications_words(count: int) -> str:
    """Return how often each point is simulated."""
    if count == 1:
        return "1 replication each, which says nothing of chance"
    return f"{count} replications each"


def as_json(value: Any) -> Any:
    """Return a parameter's value as files have it: numbers and texts as they are."""
    if isinstance(value, str) or is_number(value):
        return value
    return json.dumps(value, separators=(",", ":"))


def as_words(value: Any) -> Any:
    """Return a parameter's value as tables in Python have it: a mapping in words."""
    return label(value) if isinstance(value, Mapping) else as_json(value)


def label(value: Any) -> str:
    """Return a parameter's value as axes and tables show it, a mapping as `setting` does."""
    if isinstance(value, Mapping):
        named = [str(value[key]) for key in ("name", "kind") if key in value]
        others = {key: each for key, each in value.items() if key not in ("name", "kind")}
        return " ".join([*named, *filter(None, [setting(others)])])
    return f"{value:g}" if is_number(value) else str(as_json(value))


def setting(labels: Mapping[str, Any], tied: Container[str] = ()) -> str:
    """Return what is set, in short: budget=2048, or sarathi budget=2048; tied keys one by one."""
    keys: dict[str, Any] = {}
    for name, value in labels.items():
        keys |= value if name in tied else {name: value}
    return ", ".join(map(_set, short_names(list(keys)), keys.values()))


def _set(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{SHORT.get(name, name)}={label(value)}"
    if list(value) == ["count"]:
        return f"{name}={label(value['count'])}"
    return label(value) if value.keys() & {"name", "kind"} else f"{name} {label(value)}"


def short_names(dotted: list[str]) -> list[str]:
    """Return the last part of each dotted key, or the whole key where others end alike."""
    last = [name.rpartition(".")[2] for name in dotted]
    pairs = zip(dotted, last, strict=True)
    return [short if last.count(short) == 1 else name for name, short in pairs]
