"""A sweep from its file to its folder: simulate it, find what is best, and say and draw that.

The points become tables, the best of them a ranking, and each parameter an effect on the metrics.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_object_dtype

from evenflow.config.provenance import code_version, wall_clock
from evenflow.config.yaml_file import Patch
from evenflow.errors import DoesNotFitError, UsageError
from evenflow.report import plots
from evenflow.report.page import (
    figure,
    in_words,
    page,
    parallel,
    picture,
    plotly_library,
    section,
)
from evenflow.report.tables import html_table, is_number, number, write_json, write_table
from evenflow.report.words import arrivals_words, metric_words
from evenflow.study.fair import Interval, interval, signed, with_width
from evenflow.study.points import HEADER, Store, code_digest
from evenflow.study.searches import Optuna, Score, identity, optuna, proposed
from evenflow.study.slo import missed, pareto_front, shares_beyond
from evenflow.study.sweep_file import Sweep, SweepConfig, check
from evenflow.study.trials import STORE, Case, How, Search, Simulator, Trial, run, unfair

SHOWN = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "total_token_throughput")
"""The metrics of gLLM's sensitivity figure."""

FEW_VALUES = 12
"""A parameter with more values than this is drawn as single points on a scale of numbers."""

BEST = 5
"""How many points the table of the best lists; of a Pareto front, all."""

SHORT = {"token_budget": "budget", "stages": "PP", "tensor_parallel": "TP"}
"""Names of keys where they are set, in tables."""

COLUMNS = 4
LINE = 36
"""Letters that stand side by side below a panel."""

NEUTRAL = "#9AA5B1"
ALL_POINTS = (
    "A line is a point, the best in blue; hover for its values. An axis whose numbers span more "
    "than tenfold is logarithmic. A click on a head of the table sorts by it."
)

CAPTIONS = {
    "pareto_front": (
        "Pareto front",
        "A point is on the front if no other is as good in everything and better in something. The "
        "table has its parameters.",
    ),
    "sensitivity": (
        "Sensitivity around the default",
        "One parameter changes, the others are as in the run itself; 1 is the value there. Bars "
        "are 95 % intervals of the ratio over replications that share their requests.",
    ),
    "main_effects": (
        "Effect of each parameter",
        "The mean over all points with a value, whatever the others. A parameter that matters has "
        "a steep line. Bars are 95 % intervals over replications; as all points share their "
        "requests, the differences between values are known better than that. Where each point has "
        "a value of its own, the points are drawn.",
    ),
}
"""What stands over and under each picture of the page, in the page's order."""


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
    def base(self) -> Trial | None:
        """The run as it is, if there is one."""
        return None if self.default is None else self.trials[self.default]

    @property
    def done(self) -> list[Trial]:
        """The points that were completed."""
        return [trial for trial in self.trials if not trial.errors]

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
    known = sweep.known
    tried = run(sweep.study, simulator, _search(sweep, known))
    trials = list({identity(trial.labels): trial for trial in tried}.values())
    default = sweep.default
    if default is None:
        return Findings(sweep, trials, None)
    chosen = sweep.chosen or [trial.labels for trial in tried[len(known) :]]
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
    costs = {
        index: tuple(each.cost(trial.mean(each.metric)) for each in config.objectives)
        for index, trial in enumerate(findings.trials)
        if eligible(config, trial)
    }
    able = list(costs)
    if len(config.objectives) > 1:
        front = pareto_front(list(costs.values()))
        able = [index for index, kept in zip(costs, front, strict=True) if kept]
    return sorted(able, key=lambda index: (costs[index], index))


def nearest(findings: Findings) -> list[int]:
    """Return the positions of the completed points, those first that miss their limits least."""
    limits, trials = findings.sweep.config.conditions, enumerate(findings.trials)
    off = {i: missed(shares_beyond(limits, trial.mean)) for i, trial in trials if not trial.errors}
    return sorted(off, key=lambda index: (off[index], index))


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
            **record.values,
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
    config, base = findings.sweep.config, findings.base
    records = [record for trial in findings.trials for record in trial.records]
    metrics = dict.fromkeys(name for record in records for name in record.values)
    rows = []
    for index, trial in enumerate(findings.trials):
        row = {
            "point": index,
            "is_default": "yes" if trial is base else "no",
            **{name: cell(value) for name, value in trial.labels.items()},
            "replications": len(trial.records),
            "failed_replications": len(trial.errors),
            "counts": "yes" if eligible(config, trial) else "no",
            "place": places.get(index, math.nan),
        }
        gains = {f"{m}_vs_default": trial.above(base, m) for m in config.metrics if base}
        for name, mean in (gains | {name: trial.interval(name) for name in metrics}).items():
            row |= {name: mean.mean, f"{name}_ci95": mean.half_width}
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)


def cell(value: Any) -> Any:
    """Return a parameter's value as it stands in a table: numbers and texts as they are."""
    if isinstance(value, str) or is_number(value):
        return value
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Panel:
    """A parameter, its values in order, and for each metric its mean at each of them.

    `default` is the position of the run's own value. `scattered`: each point has its own value
    and there is nothing to average over.
    """

    parameter: str
    values: list[Any]
    default: int | None
    means: Mapping[str, Sequence[Interval]]
    scattered: bool = False


def sensitivity(findings: Findings) -> list[Panel]:
    """Return a panel a parameter: metrics relative to the default, all other parameters as there.

    Ratios are taken within a replication. A parameter of which no other value was simulated beside
    the default is left out; without a default there are no panels, nor of points drawn or searched
    for, of which hardly any differ in one parameter only.
    """
    config, base = findings.sweep.config, findings.base
    if config.method.kind not in ("grid", "one_at_a_time") or base is None or base.errors:
        return []
    panels = []
    for name in base.labels:
        near = [trial for trial in findings.done if _differs_only_in(name, trial, base)]
        near = _in_order(near, name)
        ratios = {
            metric: [trial.relative(base, metric) for trial in near]
            for metric in dict.fromkeys([*SHOWN, *config.metrics])
        }
        values = [trial.labels[name] for trial in near]
        if len(near) > 1:
            panels.append(Panel(name, values, near.index(base), ratios))
    return panels


def _differs_only_in(name: str, trial: Trial, base: Trial) -> bool:
    return identity({**trial.labels, name: None}) == identity({**base.labels, name: None})


def main_effects(findings: Findings, metric: str) -> list[Panel]:
    """Return a panel a parameter: the metric's mean over all points with a value.

    Points are averaged within a replication first: the interval is that of the replications. Of
    a parameter with many values, each point by itself, without its interval.
    """
    return [_main_effect(findings, name, metric) for name in findings.sweep.config.parameters]


def _main_effect(findings: Findings, name: str, metric: str) -> Panel:
    ordered = _in_order(_compared(findings, name), name)
    groups: dict[str, list[Trial]] = {}
    for trial in ordered:
        groups.setdefault(identity({name: trial.labels[name]}), []).append(trial)
    scattered = len(groups) > FEW_VALUES and all(is_number(t.labels[name]) for t in ordered)
    parts = [[trial] for trial in ordered] if scattered else list(groups.values())
    values = [part[0].labels[name] for part in parts]
    means = [interval(_by_replication(part, metric)) for part in parts]
    if scattered:  # points, which are drawn without their intervals
        means = [replace(each, half_width=math.nan) for each in means]
    own = None if findings.base is None else identity({name: findings.base.labels[name]})
    default = next((i for i, v in enumerate(values) if identity({name: v}) == own), None)
    return Panel(name, values, default, {metric: means}, scattered)


def _compared(findings: Findings, name: str) -> list[Trial]:
    """Return the points whose means by a parameter's value are fair: all, where they are balanced.

    One at a time, those that differ in nothing else; the run as it is only if the method chose it.
    """
    done, base = findings.done, findings.base
    if base is None:
        return done
    if findings.sweep.config.method.kind == "one_at_a_time":
        return [trial for trial in done if _differs_only_in(name, trial, base)]
    return [trial for trial in done if trial is not base or not findings.default_is_extra]


def _by_replication(trials: Sequence[Trial], metric: str) -> list[float]:
    columns = zip(*(trial.values(metric) for trial in trials), strict=True)
    return [math.fsum(column) / len(trials) for column in columns]


def _in_order(trials: Sequence[Trial], name: str) -> list[Trial]:
    """Sort by a parameter where its values are numbers; else keep the order of the points."""
    if all(is_number(trial.labels[name]) for trial in trials):
        return sorted(trials, key=lambda trial: trial.labels[name])
    return list(trials)


def sweep(asked: Sweep, how: How) -> Findings:
    """Simulate all points of a sweep, checked first; return what was found.

    UsageError for a mistake in the file, before anything is simulated.
    """
    started = time.perf_counter()
    check(asked)
    with how.simulator("points", asked.num_simulations) as who:
        findings = run_sweep(asked, who)

    def write(folder: Path) -> None:
        write_findings(folder, findings, Path(asked.document.name).name)
        clock = wall_clock(time.perf_counter() - started)
        write_json(folder / "wall_clock.json", clock | {"executor": how.executor})

    how.write(write)
    return findings


def dry_run(asked: Sweep, how: How) -> list[str]:
    """Return what a sweep would simulate, in sentences; simulates nothing and writes nothing.

    UsageError for a mistake in the file, as `sweep`.
    """
    check(asked)
    known, method = asked.known, asked.config.method
    count, repeated = len(known), asked.config.replications
    more = (
        f", and up to {method.trials} that the search asks for"
        if isinstance(method, Optuna)
        else ""
    )
    stored = 0
    if how.out is not None and how.resume and (how.out / STORE / HEADER).exists():
        store = Store(how.out / STORE)
        keys = {point.key for point in asked.study.points(known)}
        stored = sum(store.get(key) is not None for key in keys)
    lost: dict[str, list[int]] = {}
    for index, patch in enumerate(known):
        if why := _does_not_fit(asked, patch):
            lost.setdefault(why, []).append(index)
    done = f", of which {stored} are done" if stored else ""
    return [
        f"{count} points{more}, {_each(repeated)}: {asked.num_simulations} simulations{done}",
        f"{count - sum(map(len, lost.values()))} of the {count} fit in memory",
        *(
            f"{len(places)} not, such as point {places[0]} "
            f"({setting(known[places[0]], asked.config.tied)}): {why}"
            for why, places in lost.items()
        ),
    ]


def _each(replications: int) -> str:
    if replications == 1:
        return "1 replication each, which says nothing of chance"
    return f"{replications} replications each"


def _does_not_fit(asked: Sweep, patch: Patch) -> str:
    try:
        asked.study.build(patch)
    except DoesNotFitError as error:
        return str(error)
    except UsageError:  # a point that is recorded as failed, for another reason
        pass
    return ""


def write_findings(folder: Path, findings: Findings, title: str) -> None:
    """Write the tables, the pictures, the page and sweep.json.

    points.parquet is there where pyarrow is installed.
    """
    cells = point_cells(findings)
    write_table(folder / "points.csv", cells)
    write_table(folder / "summary.csv", summary_cells(findings))
    if find_spec("pyarrow") is not None:
        frame = findings.points
        for name in frame.columns[frame.dtypes.map(is_object_dtype)]:  # numbers and texts
            frame[name] = cells[name].fillna("").astype(str)
        write_table(folder / "points.parquet", frame)
    drawn = {name: plots.save(each, folder / name) for name, each in pictures(findings).items()}
    source = facts(findings)
    (folder / "report.html").write_text(_page(findings, title, drawn, source), encoding="utf-8")
    write_json(folder / "sweep.json", source)


def facts(findings: Findings) -> dict[str, Any]:
    """Return where the findings come from, the same for every executor."""
    asked = findings.sweep
    records = [record for trial in findings.trials for record in trial.records]
    several = len(asked.config.objectives) > 1
    return {
        **code_version(),
        "code_sha256": code_digest(),
        "sweep": asked.config.model_dump(mode="json") | {"run": asked.run.data},
        "points": len(findings.trials),
        "simulations": len({record.key for record in records}),
        "failed": sum(record.error is not None for record in records),
        "host": platform.node(),
        "default": findings.default,
        "best": [] if several else ranked(findings)[:1],
        "pareto_front": ranked(findings) if several else [],
    }


def _page(
    findings: Findings, title: str, drawn: Mapping[str, str], source: Mapping[str, Any]
) -> str:
    parts = [
        f'<p class="caption">{"<br>".join(map(escape, _about(findings)))}</p>',
        f'<div class="verdict"><p>{escape(" ".join(told(findings)))}</p></div>',
        "<h2>Best points</h2>",
        html_table(*best_table(findings)),
    ]
    for name, caption in CAPTIONS.items():
        if name in drawn:
            parts += [section(*caption), picture(drawn[name])]
    parts += _all_points(findings)
    if lost := failures(findings):
        parts.append(f"<h2>{len(lost)} points failed</h2>")
        parts.append(html_table(["point", *findings.sweep.config.parameters, "error"], lost))
    return page(title, parts, source, plotly_library())


def _about(findings: Findings) -> list[str]:
    """Return lines: the setup of the first point shown, trace and arrivals, the limits."""
    asked = findings.sweep
    point = findings.trials[(ranked(findings) or nearest(findings) or [0])[0]]
    config = asked.study.config(point.labels)
    workload = config.workload
    arrivals = arrivals_words(workload.arrivals.model_dump())
    lines = [config.setup(), f"{workload.trace}, {arrivals}"]
    limits = [f"{metric_words(each.metric)} {each.words}" for each in asked.config.conditions]
    return [*lines, *([f"limits: {', '.join(limits)}"] if limits else [])]


def _all_points(findings: Findings) -> list[str]:
    """Return all points that were completed as parallel coordinates, and as a table that sorts."""
    config, order = findings.sweep.config, ranked(findings)
    done = [index for index, trial in enumerate(findings.trials) if not trial.errors]
    if not done:
        return []
    trials = [findings.trials[index] for index in done]
    metrics = list(dict.fromkeys([*config.metrics, "gpus"]))
    heads = [*short_names(list(config.parameters)), *map(metric_words, metrics)]
    cells = [
        [
            *(v if is_number(v) else label(v) for v in trial.labels.values()),
            *(trial.mean(metric) for metric in metrics),
        ]
        for trial in trials
    ]
    columns = dict(zip(heads, zip(*cells, strict=True), strict=True))
    best = [done.index(index) for index in (order if len(config.objectives) > 1 else order[:1])]
    rows = [[str(index), *map(in_words, row)] for index, row in zip(done, cells, strict=True)]
    return [
        section("All points", ALL_POINTS),
        figure("parallel", parallel(columns, [f"point {index}" for index in done], best)),
        html_table(["point", *heads], rows, sorts=True),
    ]


def told(findings: Findings) -> list[str]:
    """Return the sentences on what was found."""
    said, order, base = [headline(findings), *edges(findings)], ranked(findings), findings.base
    if order and base is not None:
        said += unfair({"the best point": findings.trials[order[0]], "the default": base})
    return said


def headline(findings: Findings) -> str:
    """Say in a sentence what the best point gains over the default, or that none counts."""
    config, order = findings.sweep.config, ranked(findings)
    counts = f"{len(findings.trials)} points, {_each(config.replications)}"
    if beyond := sum(trial.overload is not None for trial in findings.trials):
        counts += f", {beyond} overloaded"
    if not order:
        return f"No point was completed within the limits ({counts}){_nearest_words(findings)}."
    if len(config.objectives) > 1:
        return f"{len(order)} points are on the Pareto front ({counts})."
    metric = config.objectives[0].metric
    best = findings.trials[order[0]]
    said = f"{metric_words(metric)}: {number(best.mean(metric))} at best"
    if (base := findings.base) is None or base.errors:
        return f"{said} ({counts})."
    if best is base:
        return f"{said}, which is the default ({counts})."
    gain = best.above(base, metric)
    share = gain.mean / base.mean(metric) if base.mean(metric) else math.nan
    return f"{said}, {signed(gain)} ({share:+.1%}) against the default ({counts})."


def best_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the best points: where they differ, what decides.

    The column `against the best` tells points that differ from the first from those that may not.
    """
    config, order = findings.sweep.config, ranked(findings)
    several = len(config.objectives) > 1
    shown = order if several else order[:BEST]
    shown = shown or nearest(findings)[:BEST]
    if findings.default is not None and findings.default not in shown:
        shown = [*shown, findings.default]
    metrics = [*config.metrics]
    if "gpus" not in metrics and len({findings.trials[index].mean("gpus") for index in shown}) > 1:
        metrics.append("gpus")
    trials = [findings.trials[index] for index in shown]
    varied = [
        name
        for name in config.parameters
        if len({identity({name: trial.labels[name]}) for trial in trials}) > 1
    ]
    heads = ["point", *(["setting"] if varied else []), *map(metric_words, metrics)]
    heads += [] if several or not order else ["against the best"]
    rows = []
    for index in shown:
        trial = findings.trials[index]
        marks = {"default": index == findings.default, "overloaded": trial.overload is not None}
        row = [", ".join([str(index), *(mark for mark, applies in marks.items() if applies)])]
        row += (
            [setting({name: trial.labels[name] for name in varied}, config.tied)] if varied else []
        )
        row += ["failed" if trial.errors else with_width(trial.interval(each)) for each in metrics]
        if not several and order:
            row.append(_against(trial, findings.trials[order[0]], config.objectives[0].metric))
        rows.append(row)
    return heads, rows


def _nearest_words(findings: Findings) -> str:
    """Return how far the nearest point is from the limit that it misses most; "" without one."""
    for index in nearest(findings)[:1]:
        trial = findings.trials[index]
        limits = findings.sweep.config.conditions
        worst = max(limits, key=lambda each: each.excess_share(trial.mean(each.metric)))
        value = number(trial.mean(worst.metric), 3)
        return f"; the nearest is point {index}: {worst.metric} is {value}, not {worst.limit:g}"
    return ""


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


def edges(findings: Findings) -> list[str]:
    """Return a sentence where the best point lies on the edge of what was tried; else nothing.

    Of a parameter of three values or more, all numbers: the best may lie beyond.
    """
    if len(findings.sweep.config.objectives) > 1 or not (order := ranked(findings)):
        return []
    best, beyond = findings.trials[order[0]], {}
    for name in findings.sweep.config.parameters:
        tried = {trial.labels[name] for trial in findings.trials if is_number(trial.labels[name])}
        if len(tried) > 2 and best.labels[name] in (
            ends := {min(tried): "least", max(tried): "most"}
        ):
            beyond[name] = ends[best.labels[name]]
    words = [f"{setting({name: best.labels[name]})} is the {end}" for name, end in beyond.items()]
    return [f"The best is on the edge of what was tried: {', '.join(words)}."] if words else []


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


def _against(trial: Trial, best: Trial, metric: str) -> str:
    if trial is best or trial.errors:
        return ""
    gap = trial.above(best, metric)
    if math.isnan(gap.half_width) or gap.is_above_zero or gap.is_below_zero:
        return signed(gap)
    return f"{signed(gap)}: alike"


def failures(findings: Findings) -> list[list[str]]:
    """Return a row a failed point: its position, its parameters, and its first error."""
    return [
        [str(index), *(label(value) for value in trial.labels.values()), trial.errors[0]]
        for index, trial in enumerate(findings.trials)
        if trial.errors
    ]


def pictures(findings: Findings) -> dict[str, Figure]:
    """Draw main_effects, and sensitivity and pareto_front where there is one."""
    config = findings.sweep.config
    rows = [main_effects(findings, metric) for metric in config.metrics]
    drawn = {"main_effects": _draw_main_effects(rows)}
    if around := sensitivity(findings):
        drawn["sensitivity"] = _draw_sensitivity(around)
    if len(config.objectives) > 1 and ranked(findings):
        drawn["pareto_front"] = _draw_front(findings)
    return drawn


def _draw_sensitivity(around: Sequence[Panel]) -> Figure:
    """Draw a panel a parameter: metrics relative to the default, as gLLM's figure 16."""
    figure, grid = plots.panels(len(around), 3.0, 3.4, columns=COLUMNS, sharey=True)
    for axes, panel in zip(grid, around, strict=True):
        axes.axhline(1.0, color=NEUTRAL, linewidth=0.8)
        for index, metric in enumerate(panel.means):
            _draw_means(axes, panel, metric, index, metric_words(metric).partition(" (")[0])
        _finish(axes, panel)
    grid[0].set_ylabel("relative to the default")
    handles, labels = grid[0].get_legend_handles_labels()
    fit = min(2 * len(around), len(labels))  # two are as wide as a panel
    figure.legend(handles, labels, loc="outside upper left", ncols=fit, frameon=False, fontsize=9)
    return figure


def _draw_main_effects(rows: Sequence[Sequence[Panel]]) -> Figure:
    """Draw a row a metric and a panel a parameter: the mean over all points with a value."""
    width = len(rows[0])
    figure, grid = plots.panels(len(rows) * width, 3.1, 2.9, columns=width, sharey="row")
    for index, row in enumerate(rows):
        (metric,) = row[0].means
        words = metric_words(metric)
        cells = grid[index * width : (index + 1) * width]
        for axes, panel in zip(cells, row, strict=True):
            _draw_means(axes, panel, metric, index, words)
            _finish(axes, panel)
        cells[0].set_ylabel(words)
    return figure


def _draw_front(findings: Findings) -> Figure:
    """Draw all points by the first two objectives; those on the Pareto front in colour."""
    x, y = (objective.metric for objective in findings.sweep.config.objectives[:2])
    figure, (axes,) = plots.panels(1, 6.4, 4.4)
    done = [index for index, trial in enumerate(findings.trials) if not trial.errors]
    points = [(findings.trials[i].mean(x), findings.trials[i].mean(y)) for i in done]
    default = [done.index(i) for i in done if i == findings.default]
    plots.front(axes, points, [done.index(i) for i in ranked(findings)], default)
    axes.set(xlabel=metric_words(x), ylabel=metric_words(y))
    return figure


def _draw_means(axes: Axes, panel: Panel, metric: str, index: int, words: str) -> None:
    at = panel.values if panel.scattered else range(len(panel.values))
    means, reach = zip(*((own.mean, own.half_width) for own in panel.means[metric]), strict=True)
    joined = not panel.scattered and all(map(is_number, panel.values))
    plots.whiskers(axes, at, means, reach, index, joined=joined, label=words)


def _finish(axes: Axes, panel: Panel) -> None:
    if panel.scattered:
        if 0 < panel.values[0] < panel.values[-1] / 10:
            axes.set_xscale("log")
            plots.plain_decades(axes.xaxis)
    else:
        room = max(LINE // len(panel.values), 7)
        labels = [fill(label(value), room, break_long_words=False) for value in panel.values]
        crowded = any(len(line) > room for text in labels for line in text.split("\n"))
        turned: dict[str, Any] = {"ha": "right", "rotation": 30} if crowded else {}
        axes.set_xticks(range(len(labels)), labels, **turned)
        axes.margins(x=0.08)
        if panel.default is not None:
            axes.axvline(panel.default, color=NEUTRAL, linewidth=0.9, linestyle=":")
    axes.set_xlabel(short_names([panel.parameter])[0])
    plots.finish(axes, grid="y")
