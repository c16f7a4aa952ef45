"""Runs side by side, how sure their comparison is, and what makes it unfair, or weak.

Student's intervals take replications as independent draws of nearly normal values. Every command
that compares takes its sentences on what is unfair from here. Knows numbers, summaries and where
they come from; not how the runs were made.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenflow.errors import UsageError
from evenflow.report.shown import Aside, Table
from evenflow.report.tables import number, percent
from evenflow.report.words import (
    NOT_FAIR,
    listed,
    metrics,
    overload,
    refusals,
    rows_left_out,
    slo_words,
    sure_numbers,
    too_short,
)
from evenflow.results.load import student_quantile
from evenflow.results.outcome import Outcome, Served

LEVEL = 0.95

NUMBER = re.compile(r"[\d.,]+")

FEW = 50
"""Of fewer requests nearly nothing follows for others."""

SATURATED = 0.95
"""Stages that compute for more of the time may be within 5 % of what they can do."""

PREFIXES_ALONE = (
    "the trace says what prompts have in common, and each computes it; kv.prefix_cache: true "
    "shares it, as vLLM, SGLang and TensorRT-LLM do by default"
)

TOLD_SHARE = 0.1
"""A run says so when more of its predicted time was extrapolated or filled in."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` replications, and the half-width of its interval; NaN for n = 1."""

    mean: float
    half_width: float
    n: int

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def is_above_zero(self) -> bool:
        return self.mean - self.half_width > 0

    @property
    def is_below_zero(self) -> bool:
        return self.mean + self.half_width < 0


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of one or more values with its confidence interval at LEVEL.

    The half-width is t * s / sqrt(n). t is the (1 + LEVEL) / 2 quantile of Student's distribution
    with n - 1 degrees of freedom. s is the sample standard deviation.
    """
    mean, square = _mean_and_error(values)
    return _interval(mean, square, len(values) - 1, len(values))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the square of its standard error; NaN of one value."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    return mean, spread / (n - 1) / n if n > 1 else math.nan


def _interval(mean: float, square: float, degrees: int, n: int) -> Interval:
    if math.isnan(square):
        return Interval(mean, math.nan, n)
    return Interval(mean, student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(square), n)


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the mean of `values` less `others`, pair by pair, with its confidence interval.

    Under common random numbers (pairs with the same arrivals) what arrivals do to both cancels. So
    it is far narrower than the two intervals side by side.
    """
    return interval([a - b for a, b in zip(values, others, strict=True)])


def unpaired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the mean of `values` less that of `others`, independent draws, with its interval.

    Welch's: the squares of the two standard errors add up. The degrees of freedom are Welch and
    Satterthwaite's, rounded down. `n` is the smaller number of values.
    """
    (mean, square), (other, other_square) = _mean_and_error(values), _mean_and_error(others)
    both, n, m = square + other_square, len(values), len(others)
    degrees = 1
    if both > 0:  # NaN of one value
        degrees = max(int(both**2 / (square**2 / (n - 1) + other_square**2 / (m - 1))), 1)
    return _interval(mean - other, both, degrees, min(n, m))


def with_width(mean: Interval) -> str:
    """Return a mean and, where there is one, the half-width of its interval."""
    width = "" if math.isnan(mean.half_width) else f" ± {number(mean.half_width, 2)}"
    return f"{number(mean.mean)}{width}"


def signed(gap: Interval) -> str:
    """Return a difference with its sign and half-width."""
    return f"{'+' if gap.mean >= 0 else ''}{with_width(gap)}"


class Side(NamedTuple):
    """A run of a comparison: its summary and, where it is known, its provenance."""

    summary: Mapping[str, Any]
    provenance: Mapping[str, Any] = {}

    def key(self, name: str) -> Any:
        """Return a key of the run's configuration, such as `kv.prefix_cache`; None if unknown."""
        value: Any = self.provenance.get("config", {})
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


Sides = Mapping[str, Side]


def doubts(sides: Sides) -> list[str]:
    """Return what makes a comparison of these runs, by name, unfair or weak; empty for one run."""
    return [line for rule in RULES for line in rule(sides)] if len(sides) > 1 else []


def alone(name: str, side: Side) -> list[str]:
    """Return what makes a run unfair or weak to compare with a measurement."""
    served = Served.of(side.summary)
    return [*([str(served)] if served.is_unfair else []), *weak(name, side)]


def weak(name: str, side: Side) -> list[str]:
    """Return sentences on why one run is weak evidence: few requests, extrapolated costs."""
    return [line for rule in (_few, _extrapolated) for line in rule({name: side})]


def alike(lines: Sequence[str]) -> list[str]:
    """Merge lines that differ only in numbers: return the first, with a count."""
    forms = [NUMBER.sub("", line) for line in lines]
    first = dict(zip(reversed(forms), reversed(lines), strict=True))
    return [
        f"{first[form]} ({count} times)" if count > 1 else first[form]
        for form, count in Counter(forms).items()
    ]


def marked(lines: Iterable[str]) -> list[str]:
    """Return lines with the words NOT FAIR in front, as they stand among other sentences."""
    return [f"{NOT_FAIR}{line}" for line in lines]


def require_served(served: Mapping[str, Served], *, allowed: bool) -> None:
    """Raise UsageError where one of the runs, by name, refused too much for an answer."""
    for name, each in served.items():
        if each.is_no_answer and not allowed:
            whose = f"with {name}, " if len(served) > 1 else ""
            raise UsageError(
                f"{whose}{each}: what holds of the others is no answer; give a larger "
                "max_model_len or more KV pages, a model that takes longer requests, a trace of "
                "shorter ones, or --allow-refused (allow_refused in Python)"
            )


def _few(sides: Sides) -> Iterator[str]:
    counts = {name: int(side.summary.get("completed", FEW)) for name, side in sides.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} with {name}" for name, count in counts.items())
        yield f"not as many requests were completed: {told}"
    if min(counts.values()) < FEW:
        yield f"{min(counts.values())} requests are few: others may tell otherwise"


def _caches(sides: Sides) -> Iterator[str]:
    for words, key in (("warm", "workload.after"), ("on", "kv.prefix_cache")):
        able = [name for name, side in sides.items() if side.key(key)]
        others = [name for name in sides if name not in able]
        if able and others:
            yield f"prefix caches are {words} with {listed(able)}, and not with {listed(others)}"


def _memories(sides: Sides) -> Iterator[str]:
    placed = {name: side.provenance.get("deployment", {}) for name, side in sides.items()}
    counted = [name for name, facts in placed.items() if "memory_like" in facts]
    others = [name for name, facts in placed.items() if "layers_per_stage" in facts]
    others = [name for name in others if name not in counted]
    if counted and others:
        engine = placed[counted[0]]["memory_like"]
        yield (
            f"pages are counted as {engine} does with {listed(counted)}, and from nominal memory "
            f"with {listed(others)}; kv.like is one for all"
        )


def _cpu_times(sides: Sides) -> Iterator[str]:
    """Say which engine's CPU time a policy brought with it, where a run gives none."""
    brought: dict[str, list[str]] = {}
    for name, side in sides.items():
        named = (side.provenance.get("runtime") or {}).get("name")
        if named and not side.key("runtime"):
            brought.setdefault(named.partition("-")[0], []).append(name)
    if len(brought) > 1:
        words = [f"{engine} with {listed(names)}" for engine, names in sorted(brought.items())]
        yield f"the CPU time is {', and '.join(words)}; runtime is one for all"


def _saturated(sides: Sides) -> Iterator[str]:
    arriving = {name: side for name, side in sides.items() if "overloaded" in side.summary}
    shares = {name: side.summary.get("busy_share", 0.0) for name, side in arriving.items()}
    near = [name for name, share in shares.items() if share > SATURATED and _waits(sides[name])]
    if near:
        yield (
            f"within 5 % of saturation with {listed(near)} (stages compute "
            f"{percent(max(shares.values()), 0, sign=False)} of the time, half of the requests "
            "wait for longer than a step): latencies follow from the last per cents"
        )


def _waits(side: Side) -> bool:
    """Say whether the median request waits for longer than a step, as decodes fill the stages."""
    return bool(side.summary.get("median_queue_ms", 0.0) > side.summary.get("mean_itl_ms", 0.0))


def _extrapolated(sides: Sides) -> Iterator[str]:
    for name, side in sides.items():
        share = side.provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
        if share > TOLD_SHARE:
            told = percent(share, 0, sign=False)
            yield f"{told} of the time predicted with {name} rests on no measurement"


def _versions(sides: Sides) -> Iterator[str]:
    known = [side.provenance for side in sides.values()]
    versions = {version_of(each) for each in known if "evenflow_version" in each}
    if len(versions) > 1:
        yield f"made by other versions of evenflow: {listed(sorted(versions))}"
    runtimes = [side.key("runtime") for side in sides.values()]
    names = sorted({each for each in runtimes if isinstance(each, str)})
    engines = [name.rpartition("-")[0] for name in names if "-" in name]
    if len(set(engines)) < len(engines):
        yield f"the CPU time of other versions of an engine: {listed(names)}"


RULES = (_few, _caches, _memories, _cpu_times, _saturated, _extrapolated, _versions)


def version_of(provenance: Mapping[str, Any]) -> str:
    """Return the version and commit that made a run."""
    commit, dirty, _ = str(provenance.get("git_commit") or "none").partition("-dirty")
    return f"{provenance.get('evenflow_version')} (commit {commit[:12]}{dirty})"


def runs_told(outcomes: Sequence[Outcome]) -> Iterator[str | Table]:
    """Yield refusals, the set-up, limits, the runs as a table, and why comparing may be unfair."""
    yield from refusals({run.label: run.served for run in outcomes})
    yield from dict.fromkeys(run.result.provenance["setup"] for run in outcomes)
    yield from slo_words({run.label: run for run in outcomes})
    yield from _side_by_side({run.label: run.summary for run in outcomes})
    yield from marked(
        doubts({run.label: Side(run.summary, run.result.provenance) for run in outcomes})
    )
    yield from left_out(outcomes[0].result.provenance)


def _side_by_side(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str | Table]:
    rows = []
    known = [sure_numbers(summary) for summary in summaries.values()]
    for metric in metrics():
        if any(metric.key in summary for summary in summaries.values()):
            values = (numbers.get(metric.key) for numbers in known)
            rows.append([metric.words, *map(metric.cell, values)])
    yield Table(["", *summaries], rows)
    for name, summary in summaries.items():
        if told := overload(summary):
            yield f"OVERLOADED, {name}: {told}"
        if told := too_short(summary):
            yield f"{name}: {told}"


def left_out(provenance: Mapping[str, Any]) -> Iterator[Aside]:
    """Yield what a run left out, by its provenance: rows of the trace, measurements."""
    trace = provenance.get("trace", {})
    yield from map(Aside, rows_left_out(trace))
    if trace.get("prefixes") and not Side({}, provenance).key("kv.prefix_cache"):
        yield Aside(PREFIXES_ALONE)
    share = provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
    if share > TOLD_SHARE:
        yield Aside(f"costs: {100 * share:.0f} % of the predicted time rests on no measurement")
