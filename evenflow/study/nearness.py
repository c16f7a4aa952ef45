"""How far predictions were off for measured runs like a run: of its engine, GPU, model and ranks.

Knows the table `errors.csv`, made of measured runs by `tools.interval_errors`; simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

from evenflow.config.parts import RuntimeConfig
from evenflow.config.run import RunConfig
from evenflow.results.student import student_quantile
from evenflow.specs.tables import read_rows

LEVEL = 0.9

KEPT: Mapping[str, Sequence[str]] = {
    "the engine, GPU, kind of model and ranks": ("engine", "gpu", "model", "ranks"),
    "the engine, GPU and kind of model, with other ranks": ("engine", "gpu", "model"),
    "the engine and kind of model, on another GPU": ("engine", "model"),
    "the engine, with another kind of model": ("engine",),
    "other engines": (),
}
"""The distances of what was measured, near to far, and the facts that are the same."""

ENGINES = {"vllm_v1": "vllm", "vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
"""The engines of policies that are one engine's own."""


class Likeness(NamedTuple):
    """What of a run its errors follow from; `ranks` are the GPUs of a stage."""

    engine: str
    gpu: str
    model: str
    ranks: int


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """Measured runs that are alike: how many, and ln(measured / simulated) of a latency."""

    engine: str
    gpu: str
    model: str
    ranks: int
    metric: str
    runs: int
    mean: float
    sd: float

    def agrees(self, like: Likeness, kept: Sequence[str]) -> bool:
        return all(getattr(self, name) == getattr(like, name) for name in kept)


class Deviation(NamedTuple):
    """ln(measured / simulated) as it is to be expected: a 90 % interval, and what that rests on."""

    low: float
    high: float
    distance: str
    runs: int

    @property
    def words(self) -> str:
        """What was measured, and how near that is."""
        return f"{self.runs} measured runs of {self.distance}"


def likeness(config: RunConfig, model: str) -> Likeness:
    """Return what a run's errors follow from; `model` is its kind."""
    runtime = config.runtime
    named = runtime.like or "" if isinstance(runtime, RuntimeConfig) else runtime
    engine = named.partition("-")[0] if "-" in named else ENGINES.get(config.scheduler.name, "")
    gpu = config.gpus[0].name if config.gpus else ""
    return Likeness(engine, gpu, model, config.stage_gpus)


@cache
def measured_sets() -> tuple[MeasuredSet, ...]:
    """Return the measured runs of `errors.csv`."""
    return tuple(MeasuredSet(**row) for row in read_rows("errors", MeasuredSet))


def deviation(
    like: Likeness, metric: str, sets: Iterable[MeasuredSet] | None = None
) -> Deviation | None:
    """Return how far a latency of a run may be off, by the nearest sets that were measured.

    Of one set with its facts, Student's interval of a further run. Else the sets nearest to it are
    draws of one kind: their runs' variance, and that between all sets at this distance. None for a
    metric that was not measured.
    """
    known = [each for each in (measured_sets() if sets is None else sets) if each.metric == metric]
    for distance, kept in KEPT.items():
        found = [each for each in known if each.agrees(like, kept)]
        if found:
            return _of_sets(found, known, distance)
    return None


def _of_sets(found: list[MeasuredSet], known: list[MeasuredSet], distance: str) -> Deviation:
    runs, kept = sum(each.runs for each in found), KEPT[distance]
    mean = math.fsum(each.mean for each in found) / len(found)
    within = math.fsum(each.runs * each.sd**2 for each in found) / runs
    if len(kept) == len(Likeness._fields):
        half = student_quantile((1 + LEVEL) / 2, max(runs - 1, 1)) * math.sqrt(
            within * (1 + 1 / runs)
        )
    else:
        spread = within + between(known, kept) * (1 + 1 / len(found))
        half = student_quantile((1 + LEVEL) / 2, len(known) - 1) * math.sqrt(spread)
    return Deviation(mean - half, mean + half, distance, runs)


def between(known: list[MeasuredSet], kept: Sequence[str]) -> float:
    """Return the variance of the means of sets that have the facts `kept` in common."""

    def facts(each: MeasuredSet) -> tuple[object, ...]:
        return tuple(getattr(each, name) for name in kept)

    squares = freedom = 0.0
    for _, group in groupby(sorted(known, key=facts), facts):
        means = [each.mean for each in group]
        middle = math.fsum(means) / len(means)
        squares += math.fsum((mean - middle) ** 2 for mean in means)
        freedom += len(means) - 1
    return squares / freedom if freedom else 0.0
