"""How far a profile's predictions are from new measurements: random micro-batches off its grid.

Knows a subject to run and the curves of a profile; no command line and no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.costs.base import StageCost
from evenflow.costs.profile.cost import ENDS, Parts, operator_counts
from evenflow.costs.profile.file import Profile, read_profile, write_profile
from evenflow.specs.model import ModelSpec
from profiler.shapes import Shape
from profiler.timed_runs import (
    PER_ROW,
    STAGE,
    Progress,
    Stopwatch,
    Subject,
    TimedRun,
    by_marks,
    point,
    stage_s,
    time_run,
    undisturbed,
)


class Errors(NamedTuple):
    """How far predictions of one operator are off, over the micro-batches that have it.

    Shares of the mean (Swanson's) of the runs that nothing disturbed: absolute relative errors
    (median and P95) and the signed mean; beside them the machine's own spread: how far
    single runs, the disturbed ones too, lie from their median (median and P95), and how far the
    medians of the first and the second half of them lie apart (P95). `share`: of the stages' time.
    """

    operator: str
    batches: int
    share: float
    median: float
    p95: float
    bias: float
    spread_median: float
    spread_p95: float
    halves_p95: float


def take(
    subject: Subject,
    shapes: Sequence[Shape],
    stopwatch: Stopwatch,
    *,
    repeats: int,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> dict[Shape, list[TimedRun]]:
    """Run each shape `repeats` times marked and as often not, in rounds of random order.

    One round before them warms up.
    """
    by_shape: dict[Shape, list[TimedRun]] = {shape: [] for shape in shapes}
    spent_s = 0.0
    distinct = list(by_shape)
    for done in range(repeats + 1):
        for index in rng.permutation(len(distinct)):
            shape = distinct[index]
            for marked in (True, False):
                run = time_run(subject, shape, stopwatch, rng, marked=marked)
                spent_s += run.wall_s
                if done:
                    by_shape[shape].append(run)
        if progress is not None:
            progress((done + 1) / (repeats + 1), spent_s / (done + 1) * (repeats - done))
    return by_shape


def errors(
    by_shape: Mapping[Shape, Sequence[TimedRun]],
    profile: Profile,
    spec: ModelSpec,
    cost: StageCost,
    *,
    ranks: int,
) -> list[Errors]:
    """Compare runs with predictions, per operator and for whole stages (the last of the list).

    `cost` is the profile's on one stage of all layers of the model. Stages are those of the runs
    without marks, so that what the marks of a profile cost counts as its error.
    """
    counts = operator_counts(spec)
    predictors = _predictors(Parts(profile, spec, ranks, None, spec.name), (*counts, *ENDS))
    pairs: dict[str, list[_Pair]] = {}
    for shape, runs in by_shape.items():
        marked, whole = by_marks(runs)
        for operator, predict in predictors.items():
            if operator in marked[0].seconds:
                predicted_s = counts.get(operator, 1) * predict(shape)
                pair = _pair(predicted_s, marked, itemgetter(operator))
                pairs.setdefault(operator, []).append(pair)
        pairs.setdefault(STAGE, []).append(_pair(cost.times(shape.work())[0], whole, stage_s))
    total_s = sum(pair.measured_s for pair in pairs[STAGE])
    pairs[STAGE] = pairs.pop(STAGE)  # to the end
    return [_errors(operator, pairs[operator], total_s) for operator in pairs]


def record_errors(path: Path, rows: Sequence[Errors]) -> None:
    """Write into a profile how far its predictions of whole stages were found to be off."""
    checked, stage = read_profile(path), rows[-1]
    words = (
        f"whole stages off by {stage.median:.1%} (median) and {stage.p95:.1%} (P95) over "
        f"{stage.batches} random micro-batches; single runs spread by {stage.spread_median:.1%} "
        f"and {stage.spread_p95:.1%}"
    )
    write_profile(path, replace(checked, header=replace(checked.header, checked=words)))


def errors_table(rows: Sequence[Errors]) -> str:
    """Return the errors as text, a line an operator."""
    lines = [
        f"{'':24}{'micro-':>8}{'share of':>10}{'error':>16}{'':8}{'spread':>18}{'halves':>8}",
        f"{'':24}{'batches':>8}{'time':>10}{'median':>8}{'P95':>8}{'bias':>8}"
        f"{'median':>10}{'P95':>8}{'P95':>8}",
    ]
    lines += [
        f"{row.operator:24}{row.batches:8}{row.share:10.1%}{row.median:8.1%}{row.p95:8.1%}"
        f"{row.bias:+8.1%}{row.spread_median:10.1%}{row.spread_p95:8.1%}{row.halves_p95:8.1%}"
        for row in rows
    ]
    return "\n".join(lines)


class _Pair(NamedTuple):
    """Seconds of one micro-batch: predicted, measured undisturbed, and of every run."""

    predicted_s: float
    measured_s: float
    runs_s: list[float]


def _pair(
    predicted_s: float, runs: Sequence[TimedRun], read: Callable[[dict[str, float]], float]
) -> _Pair:
    quiet = [read(run.seconds) for run in undisturbed(runs)]
    measured_s = point((STAGE, None, None, None), quiet).mean_s
    return _Pair(predicted_s, measured_s, [read(run.seconds) for run in runs])


def _errors(operator: str, pairs: Sequence[_Pair], total_s: float) -> Errors:
    means = np.array([pair.measured_s for pair in pairs])
    relative = np.array([pair.predicted_s for pair in pairs]) / means - 1
    all_runs = [np.array(pair.runs_s) for pair in pairs]
    runs = np.concatenate([np.abs(times / np.median(times) - 1) for times in all_runs])
    halves = [_between_halves(pair.runs_s) for pair in pairs]
    return Errors(
        operator,
        len(pairs),
        float(means.sum() / total_s),
        float(np.median(np.abs(relative))),
        float(np.percentile(np.abs(relative), 95)),
        float(relative.mean()),
        float(np.median(runs)),
        float(np.percentile(runs, 95)),
        float(np.percentile(halves, 95)),
    )


def _between_halves(times: Sequence[float]) -> float:
    half = len(times) // 2
    if half == 0:
        return 0.0
    first, second = np.median(times[:half]), np.median(times[half:])
    return float(abs(first / second - 1))


def _predictors(parts: Parts, operators: Sequence[str]) -> dict[str, Callable[[Shape], float]]:
    """Return what predicts the seconds of each operator that the profile has, of one layer."""
    there = [operator for operator in operators if parts.profile.of(operator, parts.ranks)]
    return {operator: _predictor(parts, operator) for operator in there}


def _predictor(parts: Parts, operator: str) -> Callable[[Shape], float]:
    if operator.startswith("attention_prefill"):
        prefill = parts.attention(operator)
        return lambda shape: sum(prefill(*chunk)[0] for chunk in shape.chunks)
    if operator.startswith("attention_decode"):
        decode = parts.attention(operator)
        return lambda shape: decode(len(shape.decodes), sum(shape.decodes))[0]
    along = parts.by_tokens(operator)
    if operator in PER_ROW:
        return lambda shape: along(shape.rows).seconds
    return lambda shape: along(shape.tokens).seconds
