"""Errors of predictions for measured runs like a run: of its engine, GPU, model and ranks.

Knows the table `errors.csv`, made of measured runs by `tools.interval_errors`; simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import evenflow.specs
from evenflow.config.parts import RuntimeConfig
from evenflow.config.run import RunConfig
from evenflow.results.load import student_quantile

if TYPE_CHECKING:
    from pandas import DataFrame, Series

LEVEL = 0.9
ERRORS = Path(evenflow.specs.__file__).with_name("errors.csv")

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
    """Traits of a run from which its errors follow; `ranks` are the GPUs of a stage."""

    engine: str
    gpu: str
    model: str
    ranks: int


class Deviation(NamedTuple):
    """ln(measured / simulated) as it is to be expected: a 90 % interval, and what that rests on."""

    low: float
    high: float
    distance: str
    runs: int

    @property
    def words(self) -> str:
        """Number of the measured runs, and how near they are."""
        return f"{self.runs} measured runs of {self.distance}"


def likeness(config: RunConfig, model: str) -> Likeness:
    """Return what a run's errors follow from; `model` is its kind."""
    runtime = config.cpu_time
    named = runtime.like or "" if isinstance(runtime, RuntimeConfig) else runtime
    engine = named.partition("-")[0] if "-" in named else ENGINES.get(config.scheduler.name, "")
    gpu = config.gpus[0].name if config.gpus else ""
    return Likeness(engine, gpu, model, config.stage_gpus)


@cache
def measured_sets() -> DataFrame:
    """Return `errors.csv`: a row for measured runs that are alike, and for a latency.

    Columns: the fields of Likeness, `metric`, the number of `runs`, the `mean` and deviation `sd`
    of ln(measured / simulated).
    """
    from pandas import read_csv

    return read_csv(ERRORS, keep_default_na=False)


def alike(sets: DataFrame, like: Likeness, kept: Sequence[str]) -> Series[bool]:
    """Return a mask [sets]: whether a set equals a run in the facts `kept`."""
    return (sets[list(kept)] == [getattr(like, name) for name in kept]).all(axis=1)


def deviation(like: Likeness, metric: str, sets: DataFrame | None = None) -> Deviation | None:
    """Return the expected error of a latency of a run, from the nearest measured sets of runs.

    With a set of the same facts: Student's prediction interval of one more run. Otherwise the
    nearest sets count as draws of one distribution, with the variance within their runs and that
    between all sets at this distance. None for a metric that was not measured.
    """
    known = measured_sets() if sets is None else sets
    known = known[known["metric"] == metric]
    if known.empty:
        return None
    for distance, kept in KEPT.items():
        found = known[alike(known, like, kept)]
        if len(found):
            low, high = _interval(found, known, kept)
            return Deviation(low, high, distance, int(found["runs"].sum()))
    return None


def _interval(found: DataFrame, known: DataFrame, kept: Sequence[str]) -> tuple[float, float]:
    runs, middle = int(found["runs"].sum()), float(found["mean"].mean())
    variance = float((found["runs"] * found["sd"] ** 2).sum()) / runs
    if len(kept) == len(Likeness._fields):
        variance, degrees = variance * (1 + 1 / runs), max(runs - 1, 1)
    else:
        variance += _between(known, kept) * (1 + 1 / len(found))
        degrees = len(known) - 1
    half = student_quantile((1 + LEVEL) / 2, degrees) * math.sqrt(variance)
    return middle - half, middle + half


def _between(known: DataFrame, kept: Sequence[str]) -> float:
    """Return the variance of the means of sets that have the facts `kept` in common."""
    means = known.assign(all="").groupby([*kept] or ["all"])["mean"]
    freedom = len(known) - means.ngroups
    squares = float(((known["mean"] - means.transform("mean")) ** 2).sum())
    return squares / freedom if freedom else 0.0
