"""Limits on numbers of a run's summary, objectives, prices.

A limit is at most, or at least for numbers of which more is better. Knows no search.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
from pydantic import Field

from evenflow.config.pools import runs_of_pools, system
from evenflow.config.run import RunConfig
from evenflow.errors import UsageError, instead_of
from evenflow.keys import Keys
from evenflow.report.tables import is_metric
from evenflow.report.words import LOAD, arrivals_words, metric_words
from evenflow.results.metrics import Limit, meets, request_metrics
from evenflow.results.outcome import Outcome
from evenflow.results.run import RunResult
from evenflow.schedulers import POOLED
from evenflow.study.early import Allowed, most_beyond
from evenflow.sums import plain_sum

LATENCY = re.compile(r"(mean|median|std|p(\d+(?:\.\d+)?))_(ttft|tpot|itl|e2el|queue)_ms")
OF_GPUS = ("output_throughput_per_gpu", "output_speed_per_user")
LARGER_IS_BETTER = ("completed", "request_goodput", "attainment", "gap_attainment", *OF_GPUS)
OF_LIMITS = ("attainment", "request_goodput")
Limits = tuple[tuple[str, float], ...]
"""Limits in ms by latency (ttft, tpot, itl, e2el, queue), in a form that a point can hold."""

EXAMPLE = "--slo p99_itl_ms=200"
S_PER_HOUR = 3600

INPUT, OUTPUT = "total_input_tokens", "total_output_tokens"
KINDS = {"tokens": (INPUT, OUTPUT), "input_tokens": (INPUT,), "output_tokens": (OUTPUT,)}
"""Tokens that may be charged, and the numbers of a summary that they are."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A limit on one number of a run's summary, in that number's unit.

    `least`: whether the number may not be below the limit, or may not be above it. None: whichever
    is the better.
    """

    metric: str
    limit: float
    least: bool | None = None

    @property
    def at_least(self) -> bool:
        """Whether the number may not be below the limit; otherwise it may not be above it."""
        return larger_is_better(self.metric) if self.least is None else self.least

    @property
    def words(self) -> str:
        """The limit without its metric: at most 5."""
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g}"

    def excess(self, value: float) -> float:
        """Return by how much a value is beyond the limit; 0 or less where it is kept."""
        return self.limit - value if self.at_least else value - self.limit

    def excess_share(self, value: float) -> float:
        """Return the excess as a share of the limit; of a limit of 0, plainly."""
        size = abs(self.limit) or 1.0
        share = value / size - self.limit / size
        return -share if self.at_least else share

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Say whether a run keeps the limit: not without a number, nor one that served nothing."""
        value = values.get(self.metric)
        if value is None or values.get("completed") == 0:
            return False
        return math.isfinite(value) and self.excess(value) <= 0

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.limit:g}"


def shares_beyond(limits: Iterable[Condition], mean: Callable[[str], float]) -> list[float]:
    """Return the relative excess over each limit, 0 or less where it is kept.

    `mean` returns the number of a metric, such as a trial's mean.
    """
    return [each.excess_share(mean(each.metric)) for each in limits]


def missed(shares: Iterable[float]) -> float:
    """Return the sum of the shares by which limits are missed; inf where one is not known."""
    known = list(shares)
    return (
        math.inf if any(map(math.isnan, known)) else plain_sum(max(share, 0.0) for share in known)
    )


KEEPS_UP = Condition("overloaded", 0)
"""No run that is overloaded keeps an SLO: its latencies follow from how long it is."""


def larger_is_better(metric: str) -> bool:
    """Say whether more of a number of the summary is better."""
    return metric in LARGER_IS_BETTER or metric.endswith("_throughput")


class Objective(Keys):
    """A key of the summary, and whether less or more of it is better."""

    metric: Annotated[str, Field(min_length=1)] = Field(examples=["mean_ttft_ms"])
    """A key of `evenflow metrics`."""
    goal: Literal["minimize", "maximize"] = "minimize"
    """Whether less or more of it is better."""

    def cost(self, value: float) -> float:
        """Return a number that is smaller where the value is better."""
        return value if self.goal == "minimize" else -value


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


def parse_slo(
    given: Mapping[str, float] | str | Sequence[str], max_median_queue_s: float | None = None
) -> list[Condition]:
    """Return the conditions of limits by metric, of `metric=limit` texts, of a scheduling delay.

    The delay in seconds. UsageError for another form, a limit that is not a number above 0, and a
    metric given twice.
    """
    if isinstance(given, Mapping):
        given = [f"{metric}={limit}" for metric, limit in given.items()]
    conditions = list(map(_condition, [given] if isinstance(given, str) else given))
    if max_median_queue_s is not None:
        if not 0 < max_median_queue_s < math.inf:
            raise UsageError(
                f"--max-median-queue-s {max_median_queue_s:g}: should be seconds, above 0"
            )
        conditions.append(Condition("median_queue_ms", 1e3 * max_median_queue_s))
    if not conditions:
        raise UsageError(f"--slo: no limit is given; give at least one, like {EXAMPLE}")
    counts = Counter(condition.metric for condition in conditions)
    for metric, count in counts.items():
        if count > 1:
            raise UsageError(f"--slo {metric}: limited twice; give one limit")
    return conditions


def _condition(text: str) -> Condition:
    metric, _, number = (part.strip() for part in text.partition("="))
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not metric or not 0 < limit < math.inf:
        raise UsageError(f"--slo {text}: should be METRIC=LIMIT, a limit above 0, like {EXAMPLE}")
    return Condition(metric, limit)


def check_slo(slo: Sequence[Condition], outcome: Outcome, config: RunConfig) -> None:
    """Raise UsageError for a metric of a limit that `outcome`, one run, lacks."""
    known = service_levels(outcome, **dict(levels_of(slo, config)))
    numbers = [key for key, value in known.items() if is_metric(value)]
    for metric in (each.metric for each in slo if each is not KEEPS_UP):
        if metric not in numbers:
            hint = f"a run has no such number; {instead_of(metric, numbers)}"
            if metric in OF_LIMITS:
                hint = (
                    "needs limits of requests: give the run the key goodput, such as "
                    "goodput: {ttft: 1000}"
                )
            raise UsageError(f"--slo {metric}: {hint}")


def allowed(slo: Iterable[Condition], requests: int) -> tuple[Allowed, ...]:
    """Return what the limits of an SLO on percentiles allow of a number of requests.

    Percentiles of ITL are of gaps, not of requests.
    """
    found = [(each, LATENCY.fullmatch(each.metric)) for each in slo if not each.at_least]
    return tuple(
        Allowed(each.metric, match[3], each.limit, most_beyond(float(match[2]), requests))
        for each, match in found
        if match is not None and match[2] is not None and match[3] != "itl"
    )


def request_limits(slo: Sequence[Condition], goodput_ms: Mapping[Limit, float] | None) -> Limits:
    """Return the limits in ms that each request, and each gap between tokens, is held to.

    They are the run's `goodput`, or else the strictest limit of each latency in the SLO, whatever
    its statistic.
    """
    limits = {str(name): limit_ms for name, limit_ms in (goodput_ms or {}).items()}
    for condition in slo:
        found = LATENCY.fullmatch(condition.metric)
        if found is not None and found[1] != "std" and (found[3] == "itl" or not goodput_ms):
            limits[found[3]] = min(condition.limit, limits.get(found[3], math.inf))
    return tuple(sorted(limits.items()))


def levels_of(slo: Sequence[Condition], config: RunConfig) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of `service_levels` for all that an SLO limits."""
    metrics = tuple(dict.fromkeys(each.metric for each in slo))
    return (("metrics", metrics), ("limits", request_limits(slo, config.goodput)))


def service_levels(outcome: Outcome, *, metrics: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Return a run's summary with any other percentile among `metrics`, and what its SLO needs.

    `attainment` is the share of all requests within the limits, `request_goodput` those a second.
    `gap_attainment` is the share of gaps between tokens within the limit on ITL.
    """
    values = dict(outcome.summary)
    if outcome.result.marks is not None:
        values["marks"] = len(outcome.result.marks)
    if not set(OF_GPUS).isdisjoint(metrics):
        values |= _per_gpu_and_user(outcome, _num_gpus(outcome))
    result = outcome.result
    for metric in metrics:
        found = LATENCY.fullmatch(metric)
        if metric not in values and found is not None and found[2] is not None:
            if not 0 <= float(found[2]) <= 100:
                raise UsageError(f"{metric}: a percentile is from 0 to 100")
            values[metric] = _percentile_ms(result, found[3], float(found[2]))
    by_request = {cast("Limit", name): ms for name, ms in limits if name in get_args(Limit)}
    if by_request:
        good = meets(result, by_request)
        values["attainment"] = float(good.mean())
        values["request_goodput"] = _per_s(float(good.sum()), values["duration"])
    if "itl" in dict(limits):
        within = result.gap_s * 1e3 <= dict(limits)["itl"]
        average = float(np.average(within, weights=result.gap_count)) if len(within) else None
        values["gap_attainment"] = average
    return values


def _per_s(count: float, duration_s: float | None) -> float | None:
    """Return a rate; None of a run that completed nothing, 0 of one that took no time."""
    return None if duration_s is None else count * (1 / duration_s) if duration_s else 0.0


def _percentile_ms(result: RunResult, name: str, percent: float) -> float | None:
    if name == "itl":
        pooled_s = np.repeat(result.gap_s, result.gap_count)
    else:
        pooled_s = getattr(request_metrics(result), f"{name}_s")
        pooled_s = pooled_s[np.isfinite(pooled_s) & np.isfinite(result.completion_s)]
    return 1e3 * float(np.percentile(pooled_s, percent)) if len(pooled_s) else None


def with_cost(outcome: Outcome, *, price: float | None) -> dict[str, Any]:
    """Return a run's summary with its GPUs and their yield; at a `price`, also its cost.

    `price`: dollars of a GPU an hour.
    """
    gpus, own = _num_gpus(outcome), outcome.summary
    per_hour = None if price is None else gpus * price
    paid = costs(per_hour, completed_per_s(own), [own])
    return own | {"gpus": gpus} | _per_gpu_and_user(outcome, gpus) | paid


def _per_gpu_and_user(outcome: Outcome, gpus: int) -> dict[str, float | None]:
    """Return the output tokens a second of a GPU, and of a user's request: 1 / mean TPOT."""
    throughput, tpot_ms = (outcome.summary[key] for key in ("output_throughput", "mean_tpot_ms"))
    return {
        "output_throughput_per_gpu": None if throughput is None else throughput / gpus,
        "output_speed_per_user": 1e3 / tpot_ms if tpot_ms else None,
    }


def _num_gpus(outcome: Outcome) -> int:
    config = RunConfig.model_validate(outcome.result.provenance["config"])
    return num_gpus(config)


def costs(
    per_hour: float | None, per_s: float, runs: Sequence[Mapping[str, Any]]
) -> dict[str, float | None]:
    """Return dollars an hour, and for a million tokens served; {} without a price.

    `per_s` requests are completed a second, of the mean sizes in `runs`. Input tokens are priced as
    if they paid for everything; so are output tokens.
    """
    if per_hour is None:
        return {}
    millions = S_PER_HOUR * per_s / 1e6
    found: dict[str, float | None] = {"dollars_per_hour": per_hour}
    for kind, keys in KINDS.items():
        done = [run for run in runs if run.get("completed")]
        tokens = [sum(run[key] for key in keys) / run["completed"] for run in done]
        size = millions * fmean(tokens) if tokens else 0.0
        found[f"dollars_per_million_{kind}"] = per_hour / size if size else None
    return found


def completed_per_s(values: Mapping[str, Any]) -> float:
    """Return the requests completed a second: as they arrive if it keeps up, else over the run."""
    if values.get("overloaded") != 0:
        return values["request_throughput"] or 0.0
    return float(values[LOAD[0]] * values["completed"] / (values["completed"] + values["failed"]))


def checked_price(price: float) -> float:
    """Return the price of a GPU; UsageError unless it is above 0."""
    if not 0 < price < math.inf:
        raise UsageError(f"--price {price:g}: should be dollars of a GPU an hour, above 0")
    return price


def question_words(config: RunConfig, limits: Iterable[Condition]) -> Iterator[str]:
    """Yield what was simulated, in lines: the setup, trace and arrivals, the limits."""
    yield config.setup()
    yield f"{config.workload.trace}, {arrivals_words(config.workload.arrivals.model_dump())}"
    if said := [f"{metric_words(each.metric)} {each.words}" for each in limits]:
        yield f"limits: {', '.join(said)}"


def num_gpus(config: RunConfig) -> int:
    """Return the GPUs of all replicas, or of the runs that a policy's pools are."""
    if config.scheduler.name in POOLED:
        runs = runs_of_pools(config, system(config.scheduler)).values()
        return sum(run.pipeline_gpus for run in runs)
    return config.pipeline_gpus * config.num_replicas
