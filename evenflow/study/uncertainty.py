"""Errors of a prediction: the run with other seeds, slower or faster kernels and hosts.

How much slower or faster follows from the stated errors of the costs.

Knows what errors were stated, and how to put them together; not what is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.config.build import model_of
from evenflow.config.costs import MEASURED_COSTS
from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Document, Patch
from evenflow.errors import UsageError
from evenflow.report.page import Addition
from evenflow.report.shown import Shown, Table
from evenflow.report.tables import number, percent, write_table
from evenflow.report.words import metric_words
from evenflow.results.load import student_quantile
from evenflow.specs.gpu import gpus
from evenflow.study.nearness import LEVEL, Likeness, deviation, likeness
from evenflow.study.trials import How, Simulator, Study, Trial, Variant

if TYPE_CHECKING:
    from pandas import DataFrame

Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

TABLES = {
    "dense": 0.055,
    "quantised dense": 0.081,
    "mixture": 0.131,
    "latent": 0.069,
    "speculating": 0.188,
}
"""The standard deviation of log(simulated / measured) of TPOT with measured operators, by kind of
model. It is P90 of its size over 1.645, on the even rows of the entries `closed-*` of `evenflow
reproduce` (88, 96, 121, 20 and 25 rows). The odd rows took no part. `speculating`: models with
latent attention that propose tokens."""

COSTS = (-1.711, -1.039, -0.633, -0.303, 0.0, 0.303, 0.633, 1.039, 1.711)
"""The error of the costs in nine runs, in standard deviations. They are the middles of nine equally
likely parts of a normal distribution, scaled to a variance of 1."""

HOST = tuple(COSTS[place] for place in (1, 6, 8, 4, 5, 3, 0, 2, 7))
"""The error of the host in the same runs: the same values, in an order uncorrelated with COSTS and
its squares."""

METRICS = (
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "p99")),
    *("request_throughput", "output_throughput", "total_token_throughput"),
)


@dataclass(frozen=True, slots=True)
class Stated:
    """The standard deviation of the log of a prediction, and its source.

    The host's time has an equal and independent one. Its constants are fitted to runs that the
    costs predict this well.
    """

    share: float
    source: str


def stated(config: RunConfig, beside: Path) -> Stated:
    """Return the stated error of a run's costs."""
    kind, layers = config.costs.kind, kind_of_model(config, beside)
    if kind not in ("roofline", *MEASURED_COSTS) or not layers or config.gpu is None:
        known = {"affine": "are given, and taken as exact", "profile": "have no stated error"}
        return Stated(0.0, f"costs {kind} {known.get(kind, 'have no stated error')}")
    share = TABLES[layers]
    words = f"{share:.1%} of {layers} models on measured GPUs"
    if kind != "roofline":
        return Stated(share, words)
    measured = all(spec.p95_error for spec in config.gpus)
    p95 = max(each.p95_error for each in (config.gpus if measured else gpus()))
    more = "" if measured else ", not known and taken as that of the worst GPU"
    against = f"{p95:.1%} (P95) of the roofline of {config.gpu_words} against operators{more}"
    return Stated(math.hypot(share, p95 / 1.96), f"{words}; {against}")


def kind_of_model(config: RunConfig, beside: Path) -> str:
    """Return the kind of a run's model, a key of TABLES; "" without a model."""
    model = model_of(config, beside)
    if model is None:
        return ""
    if model.kv_lora_rank:
        return "latent" if config.speculative is None else "speculating"
    if model.num_experts:
        return "mixture"
    return "quantised dense" if model.quantization else "dense"


def factors(config: RunConfig, error: Stated, index: int) -> Patch:
    """Return the patch that makes a run's costs and host as wrong as in run `index` of the nine."""
    return {
        "scale.costs": config.scale.costs * math.exp(COSTS[index] * error.share),
        "scale.host": config.scale.host * math.exp(HOST[index] * error.share),
    }


def cases(config: RunConfig, error: Stated) -> Iterator[Variant]:
    """Yield the nine runs that tell the interval."""
    for index in range(len(COSTS)):
        seed = {"workload.seed": config.workload.seed + index}
        yield Variant({"run": index}, {**seed, **factors(config, error, index)})


@dataclass(frozen=True, slots=True)
class MetricInterval:
    """A metric's 90 % interval, and the share of its variance that is due to each cause."""

    low: float
    high: float
    costs: float
    host: float
    seeds: float

    @property
    def half_width(self) -> float:
        """Half the interval as a share of its (geometric) middle."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.nan


def range_of(values: Sequence[float | None]) -> MetricInterval | None:
    """Return the interval that nine values tell; None where they do not, as of zeros.

    Their logs are a straight line of the two errors, which are normal, and a rest. The rest is
    taken as drawn by the seeds. The square of the half-width is Z^2 (b^2 + c^2) + t^2 s^2
    (1 + 1/9). The rest's s has six degrees of freedom.
    """
    known, n = [value for value in values if value and 0 < value < math.inf], len(COSTS)
    if len(known) < n:
        return None
    logs, design = np.log(known), np.column_stack([np.ones(n), COSTS, HOST])
    (middle, costs, host), *_ = np.linalg.lstsq(design, logs, rcond=None)
    rest = logs - design @ (middle, costs, host)
    t = student_quantile((1 + LEVEL) / 2, n - 3)
    parts = np.array([costs**2, host**2, (t / Z) ** 2 * float(rest @ rest) / (n - 3) * (1 + 1 / n)])
    half = Z * math.sqrt(float(parts.sum()))
    shares = parts / parts.sum() if half > 0 else parts
    return MetricInterval(math.exp(middle - half), math.exp(middle + half), *map(float, shares))


def widened(
    ranges: Mapping[str, MetricInterval], values: Mapping[str, Any], like: Likeness
) -> dict[str, MetricInterval]:
    """Return intervals that also hold the errors of measured runs like this one.

    `values` are the run's own: their 90 % interval by `errors.csv`, where it has the metric.
    """
    found = dict(ranges)
    for metric, each in ranges.items():
        if (known := deviation(like, metric)) is not None:
            low, high = (values[metric] * math.exp(end) for end in (known.low, known.high))
            found[metric] = replace(each, low=min(low, each.low), high=max(high, each.high))
    return found


@dataclass(frozen=True, slots=True, repr=False)
class Prediction(Shown):
    """A run as it is, and the intervals of its metrics.

    `measured` says which runs widened the intervals of TPOT and TTFT, and whether their costs were
    other ones.
    """

    error: Stated
    base: Trial
    ranges: dict[str, MetricInterval]
    measured: str = ""

    @property
    def table(self) -> DataFrame:
        """A row a metric: its value, the ends of its interval, and the causes of its width."""
        from pandas import DataFrame

        rows = [
            {
                "metric": metric,
                "value": self.base.mean(metric),
                "low_90": each.low,
                "high_90": each.high,
                "half_width": each.half_width,
                "from_costs": each.costs,
                "from_host": each.host,
                "from_seeds": each.seeds,
            }
            for metric, each in self.ranges.items()
        ]
        return DataFrame(rows)

    def told(self) -> Iterator[str | Table]:
        yield from self.addition.told()

    @property
    def addition(self) -> Addition:
        """The intervals for people, and what they rest on."""
        rows = [
            [
                metric_words(metric),
                *(number(value, 4) for value in (self.base.mean(metric), each.low, each.high)),
                percent(each.half_width, 1, sign=False),
                f"{100 * each.costs:.0f}:{100 * each.host:.0f}:{100 * each.seeds:.0f}",
            ]
            for metric, each in self.ranges.items()
        ]
        sentence = (
            "The last column: per cent of the variance. "
            f"Stated error of the costs, one standard deviation: {self.error.source}."
        )
        if self.measured:
            sentence += f" Mean TPOT and TTFT: {self.measured}."
        heads = ["90 % interval", "value", "from", "to", "±", "costs:host:seeds"]

        def write(folder: Path) -> None:
            write_table(folder / "intervals.csv", self.table)

        return Addition("How far it may be off", sentence, heads, rows, write)


def predict(document: Document, beside: Path, how: How) -> Prediction:
    """Simulate a run and the nine that tell its intervals; UsageError as for the run."""
    with how.simulator("runs of the intervals", 1 + len(COSTS)) as who:
        return predicted(Study(document, beside), who)


def predicted(study: Study, who: Simulator, metrics: Iterable[str] = METRICS) -> Prediction:
    """Simulate a study's run and the nine that tell the intervals of its metrics."""
    config = study.config({})
    error = stated(config, study.beside)
    trials = who.trials(study, [Variant({"run": "as it is"}, {}), *cases(config, error)])
    if errors := [message for trial in trials for message in trial.errors]:
        raise UsageError(errors[0])
    base, *others = ([record.values for record in trial.records] for trial in trials)
    ranges, words = ranges_of([values for each in others for values in each], metrics), ""
    if error.share:  # else the costs are given, or measured for this run
        like = likeness(config, kind_of_model(config, study.beside))
        ranges = widened(ranges, base[0], like)
        known = deviation(like, "mean_ttft_ms")
        if known is not None:
            words = f"at least as wide as {known.words} are off"
            if config.costs.kind not in MEASURED_COSTS:
                words += ", with measured costs; a roofline is farther off"
    return Prediction(error, trials[0], ranges, words)


def ranges_of(
    runs: Sequence[Mapping[str, Any]], metrics: Iterable[str] = METRICS
) -> dict[str, MetricInterval]:
    """Return the interval of each metric for which the nine runs give one; empty without runs."""
    found = {metric: range_of([run.get(metric) for run in runs]) for metric in metrics}
    return {metric: each for metric, each in found.items() if each is not None}
