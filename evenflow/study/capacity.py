"""The capacity of a deployment: the largest request rate that keeps its SLO, and its cost.

All rates see the same requests and the same draws of arrivals, stretched (common random numbers).
Each replication has a search: of another seed, and of the next rows of a trace file. The answer's
files, words and picture are here too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evenflow.config.build import load_workload
from evenflow.config.run import RunConfig, with_
from evenflow.errors import UsageError
from evenflow.report.shown import Shown, Table
from evenflow.report.tables import is_metric, number, write_json, write_table
from evenflow.report.words import listed, metric_words, refusals, too_short
from evenflow.results.outcome import Served
from evenflow.study import rates
from evenflow.study.decision import OTHER_RATES, DecisionRecord, basis, breaks, launch, margins
from evenflow.study.fair import Interval, interval, left_out, marked, require_served, weak
from evenflow.study.searches import side_by_side
from evenflow.study.slo import (
    KEEPS_UP,
    S_PER_HOUR,
    Condition,
    check_slo,
    costs,
    levels_of,
    service_levels,
)
from evenflow.study.trials import (
    How,
    Simulator,
    Study,
    Trial,
    Variant,
    dry_run,
    replications,
    run,
    why_alike,
)
from evenflow.study.uncertainty import METRICS, Prediction, predicted

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (
    "attainment",
    "gap_attainment",
    "request_goodput",
    "served_requests_per_s",
    "request_throughput",
    "total_token_throughput",
    "median_queue_ms",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "busy_share",
    "preemptions",
)
"""Numbers at the capacity, shown beside the limited ones."""

BESIDE = ("mean_ttft_ms", "mean_tpot_ms", "served_requests_per_s", "attainment", "busy_share")
"""Columns of the table of rates beside the limited numbers."""

CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Rates of the curve, as multiples of the capacity."""


SHARES = (0.9, 0.75, 0.5)
"""Shares of the capacity at which all limits are checked over whole intervals."""


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """Question of a capacity: a configuration, its SLO, the precision, and the number of seeds.

    `tolerance` is a share of the capacity (0.02: 2 %). Seeds count up from the configuration's.
    `beside` is the folder of the configuration's file; `per_hour` the deployment's price in
    dollars. `allow_refused`: answer though too many requests are refused.
    """

    config: RunConfig
    slo: tuple[Condition, ...]
    beside: Path = field(default_factory=Path)
    tolerance: float = 0.02
    replications: int = 1
    per_hour: float | None = None
    allow_refused: bool = False

    def __post_init__(self) -> None:
        if not rates.LEAST_TOLERANCE <= self.tolerance < 1:
            raise UsageError(
                f"--tolerance {self.tolerance:g}: should be a share of the rate, from "
                f"{rates.LEAST_TOLERANCE:g} to below 1, like 0.02"
            )
        if self.replications < 1:
            raise UsageError(f"--replications {self.replications}: should be at least 1")

    @property
    def study(self) -> Study:
        """The configuration, and its summary with what the SLO needs."""
        more = levels_of(self.slo, self.config)
        return Study(self.config, self.beside, measure=service_levels, more=more)


@dataclass(frozen=True, slots=True, repr=False)
class Capacity(Shown):
    """The answer: how the search of each replication ended, and every rate that was simulated.

    `curve` are the rates at multiples of the capacity, and `measured` all, by replication and rate.
    `provenance` says where they come from. Where a page is written, `prediction` says how far the
    numbers at the capacity may be off, and at the rate `safe` every limit holds over its interval.
    """

    question: CapacityQuestion
    searches: tuple[rates.RateFound, ...]
    measured: tuple[rates.TriedRate, ...]
    curve: tuple[float, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    prediction: Prediction | None = None
    safe: float | None = None

    @property
    def points(self) -> pd.DataFrame:
        """A row for each replication and rate simulated, as in rates.csv.

        `misses` are the metrics whose limits are not kept there.
        """
        return self.cells.infer_objects()

    @property
    def cells(self) -> pd.DataFrame:
        """The rows of `points` as objects: numbers are written as the runs gave them."""
        import pandas as pd

        keys = [key for key, value in self.measured[0].values.items() if is_metric(value)]
        rows = [
            {
                "replication": _replication(run),
                "rate": run.rate,
                "misses": " ".join(run.failed),
                **{key: run.values.get(key, math.nan) for key in keys},
            }
            for run in self.measured
        ]
        return pd.DataFrame(rows, dtype=object)

    @property
    def served(self) -> Served:
        """Number of requests that were completed at the capacity, or else at the lowest rate."""
        runs = [at for at, _ in self.at_knee()] or [self.lowest]
        return Served.of_all(run.trial.served for run in runs)

    @property
    def lowest(self) -> rates.TriedRate:
        """Measurement at the lowest rate."""
        return min(self.measured, key=lambda each: each.rate)

    def enough_requests(self, searches: Iterable[rates.RateFound]) -> int:
        """Return the number of requests beyond which the run's length matters little."""
        return math.ceil(max(each.enough_requests for each in searches) / (self.served.share or 1))

    @property
    def status(self) -> rates.Status:
        """`found` if every search found a rate; otherwise how the first other one ended."""
        return next((each.status for each in self.searches if each.status != "found"), "found")

    @property
    def rate(self) -> Interval | None:
        """The capacity in requests/s over the replications; None unless all found one."""
        found = [each.rate for each in self.searches if each.rate is not None]
        return interval(found) if len(found) == len(self.searches) else None

    @property
    def contradictions(self) -> list[rates.TriedRate]:
        """The rates that pass above one that fails, or fail below one that passes: noise."""
        return [
            each
            for each in self.measured
            for end in (self.searches[_replication(each)],)
            if end.rate is not None and end.fails_at is not None
            if (each.rate < end.rate if each.failed else each.rate > end.fails_at)
        ]

    def told(self) -> Iterator[str | Table]:
        yield from sentences(self)
        yield from self._safe_in_words()
        yield self.question.config.setup()
        if self.rate is not None:
            heads = ("metric", "limit", "at capacity", "just above")
            yield Table(heads, knee_rows(self), of_words=True)
        yield from left_out(self.provenance)

    @property
    def decision(self) -> DecisionRecord:
        """The deployment as a record for JSON and the page."""
        question = self.question
        runs = [at.trial for at, _ in self.at_knee()] or [self.lowest.trial]

        def value(metric: str) -> float:
            return fmean(run.mean(metric) for run in runs)

        doubted = self.contradictions
        sure = _by_replication(each for each in self.measured if each not in doubted)
        of_each = margins(self.limits, value, self.prediction, sure)
        return DecisionRecord(
            sentences=sentences(self),
            config=question.config,
            rate=self.lowest.rate if self.rate is None else self.rate.mean,
            margins=of_each,
            breaks=[*breaks(of_each, self.end), *self._safe_in_words()],
            price=facts(self).get("per_dollar", {}),
            alternatives={OTHER_RATES: curve_table(self)},
            basis=list(basis(question.config, runs[0], self.prediction)),
            launch=launch(question.config, question.beside),
            tried=self.on_curve,
        )

    @property
    def limits(self) -> list[Condition]:
        """The limits that were asked for."""
        return [each for each in self.question.slo if each is not KEEPS_UP]

    def _safe_in_words(self) -> Iterator[str]:
        if self.safe is not None:
            yield f"With the costs' stated error all limits hold at {self.safe:.4g} requests/s."
        elif self.prediction is not None:
            share = f"{SHARES[-1]:g} of the capacity"
            yield f"With the costs' stated error a limit may be missed even at {share}."

    @property
    def end(self) -> rates.RateFound:
        """The result of all searches: the means of their rates, and every limit that fails."""
        ends = self.searches
        failed = tuple(dict.fromkeys(chain.from_iterable(each.failed for each in ends)))
        fails_at = fmean(each.fails_at for each in ends if each.fails_at is not None)
        mean = None if self.rate is None else self.rate.mean
        return rates.RateFound(self.status, mean, fails_at, failed, self.enough_requests(ends))

    @property
    def on_curve(self) -> tuple[rates.TriedRate, ...]:
        """Measurements at multiples of the capacity; at all rates, where none was found."""
        return tuple(run for run in self.measured if not self.curve or run.rate in self.curve)

    def at_knee(self) -> list[tuple[rates.TriedRate, rates.TriedRate]]:
        """Return, for each search that found a rate, the runs at it and at the next that fails."""
        runs = {(_replication(each), each.rate): each for each in self.measured}
        return [
            (runs[index, each.rate], runs[index, each.fails_at])
            for index, each in enumerate(self.searches)
            if each.rate is not None and each.fails_at is not None
        ]


def capacity(question: CapacityQuestion, how: How) -> Capacity:
    """Return the largest rate that keeps the SLO and at which the queue does not grow.

    UsageError as for `capacity_of`, and for a search that ran out of requests before it found a
    rate that fails.
    """
    asked = replace(question, slo=(*question.slo, KEEPS_UP))
    with how.simulator("rates simulated", None, "evenflow.study.decision_page") as who:
        answer = capacity_of(asked, who)
        _check_long_enough(question, answer)
        if how.out is not None and answer.rate is not None:
            answer = _with_intervals(answer, answer.rate.mean, who)
        how.write(lambda folder: _write(folder, answer))
    return answer


def _with_intervals(capacity: Capacity, rate: float, who: Simulator) -> Capacity:
    """Return a capacity with its intervals, and the highest of SHARES at which all limits hold."""
    for share in (1.0, *SHARES):
        found = _predicted(capacity, rates.rounded(share * rate), who)
        if capacity.prediction is None:
            capacity = replace(capacity, prediction=found)
        of_each = margins(capacity.limits, found.base.mean, found, [])
        if all(each.verdict == "kept" for each in of_each):
            return replace(capacity, safe=rates.rounded(share * rate))
    return capacity


def _predicted(capacity: Capacity, rate: float, who: Simulator) -> Prediction:
    question, config = capacity.question, capacity.question.config
    start = _own_rate(config, question.beside)
    at_rate = with_(config, rates.rate_patch(config.workload.arrivals, rate, start))
    metrics = [*METRICS, *(each.metric for each in question.slo)]
    return predicted(replace(question.study, run=at_rate), who, metrics)


def _check_long_enough(question: CapacityQuestion, answer: Capacity) -> None:
    for end in answer.searches:
        if end.status == "too_short":
            ran = max(each.rate for each in answer.measured if not each.failed)
            is_limited = any(each.metric.endswith("_queue_ms") for each in question.slo)
            other = "" if is_limited else ", or also limit the queue (--max-median-queue-s 2)"
            raise UsageError(
                "workload.requests: too few to find a capacity: "
                f"{' and '.join(map(str, question.slo))} still holds at {ran:g} requests/s, where "
                "all requests arrive before one is served; give more, like "
                f"{answer.enough_requests([end])}{other}"
            )


def capacity_of(
    question: CapacityQuestion, simulator: Simulator, curve: Sequence[float] = CURVE
) -> Capacity:
    """Return the largest rate that keeps the SLO, and the metrics at `curve` times that rate.

    Raises UsageError for a mistake in the configuration, arrivals without a rate, a metric that a
    run lacks, and a run that fails. The result does not depend on the executor.
    """
    provenance = _prove(question)
    parts = replications(question.replications)(question.config)
    configs = [with_(question.config, part.patch) for part in parts]
    starts = [_own_rate(config, question.beside) for config in configs]
    cases = [
        partial(_case, config, start, index)
        for index, (config, start) in enumerate(zip(configs, starts, strict=True))
    ]
    probe, width = partial(_measure, question), 2 if len(cases) == 1 else 1
    searches = [
        rates.bisect(start, question.tolerance, case, probe, width=width)
        for case, start in zip(cases, starts, strict=True)
    ]
    trials = run(question.study, simulator, side_by_side(searches))
    measured = _measured(question, trials)
    ends = tuple(map(rates.rate_found, _by_replication(measured)))
    answer = Capacity(question, ends, measured, provenance=provenance)
    if answer.rate is None:
        return answer
    wanted = tuple(rates.rounded(factor * answer.rate.mean) for factor in curve)
    trials += simulator.trials(question.study, [case(rate) for case in cases for rate in wanted])
    return replace(answer, measured=_measured(question, trials), curve=wanted)


def _case(config: RunConfig, start: float, replication: int, rate: float) -> Variant:
    """Return one replication at `rate` requests/s, from `start`, the rate of its workload."""
    workload = {f"workload.{key}": getattr(config.workload, key) for key in ("seed", "skip")}
    patch = {**workload, **rates.rate_patch(config.workload.arrivals, rate, start)}
    return Variant({"replication": replication, "rate": rate}, patch)


def _own_rate(config: RunConfig, beside: Path) -> float:
    return rates.own_rate(config.workload.arrivals, load_workload(config, beside).requests)


def _measured(question: CapacityQuestion, trials: Iterable[Trial]) -> tuple[rates.TriedRate, ...]:
    """Return each rate of each replication once, by replication and rate."""
    runs = [_measure(question, trial) for trial in trials]
    by_place = {(_replication(each), each.rate): each for each in runs}
    return tuple(by_place[place] for place in sorted(by_place))


def _replication(run: rates.TriedRate) -> int:
    return int(run.trial.labels["replication"])


def _by_replication(measured: Iterable[rates.TriedRate]) -> list[list[rates.TriedRate]]:
    """Return sorted rates as one list for each replication."""
    return [list(runs) for _, runs in groupby(measured, _replication)]


def _measure(question: CapacityQuestion, trial: Trial) -> rates.TriedRate:
    rate = trial.labels["rate"]
    for error in trial.errors:
        raise UsageError(f"at {rate:g} requests/s: {error}")
    require_served({"": trial.served}, allowed=question.allow_refused)
    return rates.tried(trial, rate, question.slo)


def _prove(question: CapacityQuestion) -> Mapping[str, Any]:
    """Find mistakes before the first long run, by a run of the two smallest requests.

    Return where results come from.
    """
    config = question.config
    if why := why_alike(config, question.beside, question.replications):
        raise UsageError(f"--replications {question.replications}: {why}")
    workload = load_workload(config, question.beside)
    rates.own_rate(config.workload.arrivals, workload.requests)
    outcome = dry_run(config, workload, question.beside)
    check_slo(question.slo, outcome, config)
    for each in question.slo:
        if "_throughput" in each.metric or each.metric == "request_goodput":
            raise UsageError(
                f"--slo {each.metric}: grows with the rate, so that no rate is the largest to keep "
                "it; limit a latency, or attainment"
            )
    return outcome.result.provenance


def _write(folder: Path, capacity: Capacity) -> None:
    """Write capacity.json, rates.csv, the page, and its picture as capacity.png and .svg."""
    from evenflow.report import plots
    from evenflow.study.decision_page import draw, write_page

    told, decision, rate = facts(capacity), capacity.decision, capacity.rate
    told |= {"safe_requests_per_s": capacity.safe, "decision": decision.facts}
    told |= {"provenance": capacity.provenance}
    write_json(folder / "capacity.json", told)
    write_table(folder / "rates.csv", capacity.cells)
    question, served = capacity.question, capacity.measured[0].trial.served
    of = f" of {served.asked}" if served.failed else ""
    seeds = f"{question.replications} seed{'s' if question.replications > 1 else ''}"
    found = "no rate" if rate is None else f"{rate.mean:.3g} requests/s"
    size = f"{served.completed}{of} requests, {seeds}"
    title = f"{question.config.scheduler.name}: {found} ({size})"
    svg = plots.save(draw(decision.tried, question.slo, rate, title), folder / "capacity")
    write_page(folder, decision, capacity.provenance, svg)


def facts(capacity: Capacity) -> dict[str, Any]:
    """Return the content of capacity.json without its provenance."""
    question, searches = capacity.question, capacity.searches
    rate = capacity.rate
    told: dict[str, Any] = {
        "status": capacity.status,
        "capacity_requests_per_s": None if rate is None else rate.mean,
        "interval_95": None if rate is None or rate.n < 2 else list(rate.ends),
        "slo": [str(condition) for condition in question.slo],
        "tolerance": question.tolerance,
        "replications": question.replications,
        "rates": [found.rate for found in searches],
        "fails_at": [found.fails_at for found in searches],
        "limited_by": dict(Counter(metric for found in searches for metric in found.failed)),
        "contradictions": [
            {"replication": _replication(each), "rate": each.rate, "passes": not each.failed}
            for each in capacity.contradictions
        ],
        "enough_requests": capacity.enough_requests(searches),
    }
    if capacity.served.failed:
        told |= capacity.served.facts
    if rate is None:
        alone = capacity.lowest.values
        told["at_lowest_rate"] = {each.metric: alone[each.metric] for each in question.slo}
    else:
        told["at_capacity"] = _at_capacity(capacity)
        if question.per_hour is not None:
            told["per_dollar"] = _per_dollar(capacity, rate.mean, question.per_hour)
    return told


def _at_capacity(capacity: Capacity) -> dict[str, Any]:
    runs = [at for at, _ in capacity.at_knee()]
    metrics = dict.fromkeys((*(each.metric for each in capacity.question.slo), *SHOWN))
    known = [metric for metric in metrics if all(metric in run.values for run in runs)]
    return {metric: interval([run.trial.mean(metric) for run in runs]).mean for metric in known}


def _per_dollar(capacity: Capacity, rate: float, per_hour: float) -> dict[str, float | None]:
    """Return the cost of a rate: `per_hour` dollars buy its completed requests of an hour."""
    rate *= capacity.served.share
    return {
        "dollars_per_hour": per_hour,
        "requests_per_s_per_dollar_per_hour": rate / per_hour,
        "requests_per_dollar": S_PER_HOUR * rate / per_hour,
        **costs(per_hour, rate, [at.values for at, _ in capacity.at_knee()]),
    }


def knee_rows(capacity: Capacity) -> list[tuple[str, ...]]:
    """Return a row for each condition: its limit, and its value at the capacity and just above.

    A last one has the completed requests, where they are not all.
    """
    rows: list[tuple[str, ...]] = []
    sides = list(zip(*capacity.at_knee(), strict=True))
    for each in capacity.question.slo:
        values = (fmean(run.trial.mean(each.metric) for run in runs) for runs in sides)
        rows.append((each.metric, each.words, *map(number, values)))
    if (served := capacity.served).failed:
        counts = (f"{sum(run.trial.served.completed for run in runs):,}" for runs in sides)
        rows.append(("completed", f"{served.asked:,} asked", *counts))
    return rows


def curve_table(capacity: Capacity) -> Table:
    """Return a row for each rate of the curve: means over replications."""
    metrics = [each.metric for each in capacity.limits]
    metrics += [each for each in BESIDE if each not in metrics]
    means = rates.measured(capacity.on_curve).reindex(columns=metrics).astype(float)
    means = means.groupby(level=0).mean()
    rows = [[number(at), *(number(value, 3) for value in row)] for at, *row in means.itertuples()]
    return Table(["requests/s", *map(metric_words, metrics)], rows)


def sentences(capacity: Capacity) -> list[str]:
    """Return the answer in sentences: the rate, what limits it, its cost, its doubts."""
    told, lost = facts(capacity), refusals({"": capacity.served})
    if capacity.rate is None:
        return [*lost, _never(capacity)]
    rate, question = capacity.rate, capacity.question
    low, high = rate.ends
    spread = f" (95 %: {low:.4g} to {high:.4g})" if rate.n > 1 else ""
    seeds = "1 seed" if rate.n == 1 else f"{rate.n} seeds"
    limits = ", ".join(f"{name} ({n} of {rate.n})" for name, n in told["limited_by"].items())
    share = capacity.served.share
    served = "" if share == 1 else f" offered, {share * rate.mean:.4g} of them served"
    said = [
        *lost,
        f"capacity: {rate.mean:.4g} requests/s{served}{spread}, within {question.tolerance:.1%}, "
        f"{seeds}",
        f"what fails first above it: {limits}",
    ]
    if "per_dollar" in told:
        cost = told["per_dollar"]
        said.append(
            f"{cost['requests_per_s_per_dollar_per_hour']:.4g} requests/s for a dollar an hour; "
            f"{cost['dollars_per_million_tokens']:.4g} dollars for a million tokens, "
            f"{cost['dollars_per_million_output_tokens']:.4g} for a million of output"
        )
    return said + _doubts(capacity, told)


def _never(capacity: Capacity) -> str:
    found = next(each for each in capacity.searches if each.status == "never")
    alone = capacity.lowest.values
    missed = [each for each in capacity.question.slo if each.metric in found.failed]
    at = f"no rate keeps the SLO: at {found.fails_at:g} requests/s, where requests hardly meet,"
    if none := [each.metric for each in missed if alone[each.metric] is None]:
        return f"{at} there is no {listed(none)}: no completed request has one"
    values = [
        f"{each.metric} is {number(alone[each.metric])}, not {each.limit:g}" for each in missed
    ]
    return (
        f"{at} {', '.join(values)}; this deployment does not serve one request in time: try a "
        "smaller budget, more tensor parallelism, or evenflow plan"
    )


def _doubts(capacity: Capacity, told: Mapping[str, Any]) -> list[str]:
    doubts = [weak("the run at this rate", at.trial.side) for at, _ in capacity.at_knee()]
    doubts += [[short] for at, _ in capacity.at_knee() if (short := too_short(at.values))]
    said = marked(dict.fromkeys(chain.from_iterable(doubts)))
    asked = min(at.trial.served.asked for at, _ in capacity.at_knee())
    if asked < told["enough_requests"]:
        said.append(
            f"run length matters here: {asked} requests are few beside those in the system at "
            f"once; with workload.requests={told['enough_requests']} the capacity may be smaller"
        )
    noisy = sorted({each.rate for each in capacity.contradictions})
    if noisy:
        named = ", ".join(f"{rate:g}" for rate in noisy)
        said.append(f"not monotone: the verdict is the other way at {named} requests/s")
    return said
