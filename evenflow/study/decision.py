"""The answer of `plan` or `capacity` as a record: a deployment, its margins and their basis.

The JSON and the page hold the same. Knows trials and limits; no search and no HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from evenflow.config.costs import MEASURED_COSTS
from evenflow.config.run import RunConfig
from evenflow.report.shown import Table
from evenflow.report.tables import number, percent
from evenflow.report.words import arrivals_words, listed, metric_words
from evenflow.runtimes import runtimes
from evenflow.schedulers import POOLED
from evenflow.study.deployments import launch_lines, most_tokens
from evenflow.study.rates import Probe, RateFound, TriedRate, bracket
from evenflow.study.slo import Condition
from evenflow.study.trials import Trial
from evenflow.study.uncertainty import Prediction

SHARES = ("attainment", "gap_attainment")
"""Numbers that are 1 at most."""

TIMES = {
    "replay": "times as recorded",
    "offline": "all at once",
    "closed": "each when another one is done",
}
"""When requests arrive, by the kind of arrivals; others are drawn."""


@dataclass(frozen=True, slots=True)
class Margin:
    """A limit and its number, with the 90 % interval of that and the rates where it breaks.

    None where an end or a rate is not known.
    """

    condition: Condition
    value: float
    ends: tuple[float, float] | None = None
    kept_up_to: float | None = None
    missed_from: float | None = None
    missed_value: float | None = None

    @property
    def left(self) -> float:
        """The share of the limit that is left; below 0 where it is missed."""
        return -self.condition.excess_share(self.value)

    @property
    def words(self) -> str:
        """The number, and the share of its limit that is left, or how many times that it is."""
        return f"{number(self.value, 3)} {self.left_words}"

    @property
    def left_words(self) -> str:
        return f"x{number(1 - self.left, 3)}" if self.left < -1 else percent(self.left, 0)

    @property
    def sentence(self) -> str:
        """The number in a sentence: TTFT P99 (ms) 911 of 1000 (9% left)."""
        beyond = "over" if self.left < 0 else "left"
        share = percent(abs(self.left), 0, sign=False)
        room = f"{share} {beyond}" if self.left >= -1 else self.left_words
        words, limit = metric_words(self.condition.metric), self.condition.limit
        return f"{words} {number(self.value, 3)} of {limit:g} ({room})"

    @property
    def verdict(self) -> str:
        if not self.left >= 0:
            return "missed"
        if self.ends is None:
            return "kept"
        beyond = any(self.condition.excess(end) > 0 for end in self.ends)
        return "may be missed" if beyond else "kept"

    @property
    def facts(self) -> dict[str, Any]:
        low, high = self.ends or (None, None)
        return {
            "metric": self.condition.metric,
            "limit": self.condition.limit,
            "at_least": self.condition.at_least,
            "value": self.value,
            "low_90": low,
            "high_90": high,
            "margin": self.left,
            "verdict": self.verdict,
            "kept_up_to_requests_per_s": self.kept_up_to,
            "missed_from_requests_per_s": self.missed_from,
            "missed_value": self.missed_value,
        }


class Basis(NamedTuple):
    """An input of an answer, and its evidence: measured, fitted or guessed."""

    part: str
    what: str
    how: str


ALTERNATIVES, NEAREST = "The nearest alternatives", "What is nearest"
CHANGES, OTHER_RATES = "With one change", "At other rates"
"""Headings of a decision's tables."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A deployment that is proposed or was asked for, and all that a decision on it needs.

    `sentences`: the answer first. `breaks`: what would break it. `alternatives`: tables by heading.
    `unchosen`: parts of the deployment that are defaults. `rate`: requests/s at which margins and
    price are, None for arrivals without one; `tried`: rates that were simulated.
    """

    sentences: Sequence[str]
    config: RunConfig
    rate: float | None
    margins: Sequence[Margin]
    breaks: Sequence[str]
    price: Mapping[str, float | None]
    alternatives: Mapping[str, Table]
    basis: Sequence[Basis]
    launch: Sequence[str]
    tried: Sequence[TriedRate] = ()

    @property
    def unchosen(self) -> list[str]:
        parts = self.config.setup_parts()
        return [part for part in parts if part.endswith("(default)")]

    @property
    def facts(self) -> dict[str, Any]:
        """Its fields in JSON files; the alternatives are in separate tables."""
        return {
            "sentences": list(self.sentences),
            "setup": self.config.setup(),
            "requests_per_s": self.rate,
            "margins": [margin.facts for margin in self.margins],
            "what_would_break_it": list(self.breaks),
            "price": dict(self.price),
            "rests_on": [part._asdict() for part in self.basis],
            "nobody_chose": self.unchosen,
            "launch": list(self.launch),
        }


def margins(
    slo: Iterable[Condition],
    value: Callable[[str], float],
    prediction: Prediction | None,
    searches: Sequence[Sequence[Probe]],
) -> list[Margin]:
    """Return the margin of each limit; `value` gives the number that it limits.

    The rates are means over the searches, one of each replication.
    """
    ranges = {} if prediction is None else prediction.ranges
    found = []
    for each in slo:
        ends = None
        if (of := ranges.get(each.metric)) is not None:
            ends = (of.low, min(of.high, 1.0) if each.metric in SHARES else of.high)
        breaking = zip(*(_breaking(each, rates) for rates in searches), strict=True)
        found.append(Margin(each, value(each.metric), ends, *map(_mean, breaking)))
    return found


def _breaking(
    condition: Condition, probes: Sequence[Probe]
) -> tuple[float | None, float | None, float | None]:
    """Return the highest rate that keeps a limit, the lowest that misses it, and its value there.

    A run that ended early says nothing of other limits than the one that it missed.
    """
    metric = condition.metric
    low, high = bracket(
        [
            replace(each, failed=(metric,) if metric in each.failed else ())
            for each in probes
            if isinstance(each, TriedRate) or metric in each.failed
        ]
    )
    kept_up_to, missed_from = (None if each is None else each.rate for each in (low, high))
    value = high.trial.mean(metric) if isinstance(high, TriedRate) else None
    return kept_up_to, missed_from, value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def breaks(margins: Sequence[Margin], end: RateFound | None) -> Iterator[str]:
    """Yield what would break an answer: more traffic, or costs that are off by their error."""
    if end is not None:
        yield from _traffic(margins, end)
    near = [_metric(each.condition.metric) for each in margins if each.verdict == "may be missed"]
    if near:
        yield (
            f"Costs that are off by their stated error: the 90 % interval of {listed(near)} "
            "reaches beyond its limit."
        )
    elif any(each.ends for each in margins) and all(each.verdict == "kept" for each in margins):
        yield "Costs that are off by their stated error break no limit (90 % intervals)."


def _traffic(margins: Sequence[Margin], end: RateFound) -> Iterator[str]:
    if end.status == "never":
        yield "Less traffic does not help: no rate was found at which all limits hold."
        return
    if end.status == "too_short":
        yield "More traffic: the run is too short to tell which limit breaks first."
        return
    if end.fails_at is None:
        yield f"More traffic: all limits hold at {end.rate:.4g} requests/s, the highest tried."
        return
    at = {
        each.condition.metric: f" ({number(each.missed_value, 3)} of {each.condition.limit:g})"
        for each in margins
        if each.missed_value is not None
    }
    told = [f"{_metric(metric)}{at.get(metric, '')}" for metric in end.failed]
    verb = "breaks" if len(told) == 1 else "break"
    yield (
        f"More traffic: from {end.fails_at:.4g} requests/s on, {listed(told)} {verb} first; all "
        f"limits hold up to {end.rate:.4g} requests/s."
    )


def _metric(metric: str) -> str:
    return {"overloaded": "the queue grows"}.get(metric, metric_words(metric).partition(" (")[0])


def basis(config: RunConfig, trial: Trial, prediction: Prediction | None) -> Iterator[Basis]:
    """Yield the basis of a prediction, part by part."""
    yield _kernels(config, trial, prediction)
    yield _cpu_time(config)
    placed = takewhile(lambda part: not part.startswith("CPU time"), config.setup_parts())
    yield Basis("GPUs and links", ", ".join(placed), "given, or marked (default)")
    workload = config.workload
    arrivals = arrivals_words(workload.arrivals.model_dump())
    count = f"{trial.served.asked // len(trial.records):,} requests"
    seeds = f", {len(trial.records)} replications" if len(trial.records) > 1 else ""
    how = "drawn from a public sample" if workload.is_drawn else "lengths as recorded"
    times = TIMES.get(workload.arrivals.kind, "times drawn")
    yield Basis("traffic", f"{workload.trace}, {count}, {arrivals}{seeds}", f"{how}, {times}")
    guessed = config.kv.pages == "auto"
    pages = "what the GPU's memory leaves" if guessed else f"{config.kv.pages} pages"
    yield Basis("KV cache", pages, "estimated" if guessed else "given")


def _kernels(config: RunConfig, trial: Trial, prediction: Prediction | None) -> Basis:
    kind, what = config.costs.kind, f"costs {config.costs.kind}"
    how = "measured" if kind in ("profile", *MEASURED_COSTS) else "guessed"
    if kind == "roofline" and config.gpus:
        specs = list(dict.fromkeys(config.gpus))
        how = "fitted" if all(spec.p95_error for spec in specs) else "guessed"
        what = "; ".join(f"roofline of {spec.name}: {spec.source}" for spec in specs)
    share = trial.records[0].cost_source.get("extrapolated_share", 0.0)
    if share > 0:
        how += f"; {percent(share, 0, sign=False)} of the time rests on no measurement"
    if prediction is not None:
        how += f"; stated error, one standard deviation: {prediction.error.source}"
        if prediction.measured:
            how += f"; TPOT and TTFT {prediction.measured}"
    return Basis("time of kernels", what, how)


def _cpu_time(config: RunConfig) -> Basis:
    named = config.cpu_time
    if not isinstance(named, str):
        return Basis("CPU time", "constants of the run", "given")
    if named == "profile":
        return Basis("CPU time", "the profile's", "measured")
    how = "guessed" if named == "ideal" else "fitted" if "-" in named else "published"
    return Basis("CPU time", f"{named}: {runtimes()[named].source}", how)


def launch(
    config: RunConfig, beside: Path, layers: Sequence[int] = (), missed: Collection[str] = ()
) -> list[str]:
    """Return how to start a deployment; nothing for systems of pools and without a model."""
    if config.scheduler.name in POOLED or config.model is None:
        return []
    return launch_lines(config, layers, most_tokens(config, beside), missed)
