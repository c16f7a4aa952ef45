"""Hold a profile against new measurements of micro-batches off its grid.

Knows how far predictions are off; measures with the means of a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.costs.base import StageCost
from evenflow.costs.profile.cost import ENDS, StageParts, operator_counts, profile_cost
from evenflow.costs.profile.file import (
    Profile,
    read_profile,
    write_profile,
)
from evenflow.errors import UsageError
from evenflow.profiler import machine
from evenflow.profiler.profile import ProfileSettings, StageOf, in_service, of_all_kinds, stopwatch
from evenflow.profiler.shapes import Limits, Shape, random_shapes
from evenflow.profiler.timed_runs import (
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
from evenflow.specs.model import of_shape
from evenflow.specs.modelspec import ModelSpec
from evenflow.sums import plain_sum


def check_profile(
    path: Path,
    stage_of: StageOf,
    *,
    batches: int = 100,
    repeats: int = 15,
    layers: int = 4,
    tensor_parallel: int = 1,
    beside: int | None = None,
    seed: int = 1,
    progress: Progress | None = None,
) -> list[Errors]:
    """Measure random micro-batches off a profile's grid and compare; the whole stage comes last.

    Of a tensor-parallel stage one shard runs, alone: its all-reduces are not compared. UsageError
    when this machine is not the one that the profile is of.
    """
    profile = read_profile(path)
    header = profile.header
    machine.require_device(header.device_kind)
    if (here := machine.device_name(header.device_kind)) != header.device:
        raise UsageError(f'{path}: measured on "{header.device}"; this is "{here}"')
    limits = _limits_of(profile, tensor_parallel, path)
    spec = _spec_of(profile, layers, limits, path)
    settings = ProfileSettings(
        header.device_kind,
        threads=header.threads,
        layers=layers,
        tensor_parallel=tensor_parallel,
        beside=beside,
    )
    machine.require_threads(header.threads, 1 + settings.neighbours)
    cost = profile_cost(
        profile, spec, [spec.num_layers], tensor_parallel, name=str(path), with_all_reduces=False
    )
    rng = np.random.default_rng(seed)
    with in_service(spec, limits, settings, stage_of):
        by_shape = take(
            stage_of(spec, limits, settings),
            random_shapes(limits, batches, rng),
            stopwatch(settings),
            repeats=repeats,
            rng=rng,
            progress=progress,
        )
    return errors(by_shape, profile, spec, cost, ranks=tensor_parallel)


def _limits_of(profile: Profile, ranks: int, path: Path) -> Limits:
    """Return the bounds of a profile's grid."""
    own = [point for point in profile.points if point.ranks == ranks]
    chunks = [point for point in own if point.operator.startswith("attention_prefill")]
    decodes = [point for point in own if point.operator.startswith("attention_decode")]
    if not chunks or not decodes:
        raise UsageError(f"{path}: no attention for {ranks} ranks; there is nothing to check")
    contexts = [(point.tokens or 0) + (point.context_tokens or 0) for point in chunks]
    return Limits(
        max(point.tokens or 0 for point in chunks),
        max(point.tokens or 0 for point in decodes),
        max(contexts),
        max(*contexts, *(point.context_tokens or 0 for point in decodes)),
    )


def _spec_of(profile: Profile, layers: int, limits: Limits, path: Path) -> ModelSpec:
    """Return a model of a profile's shapes with `layers` layers, named after the file."""
    return of_shape(
        name=str(path),
        num_layers=of_all_kinds(layers, profile.header.shapes),
        max_position_embeddings=limits.max_context,
        rope_theta=10000.0,
        dtype_bytes=4 if profile.header.dtype == "float32" else 2,
        **asdict(profile.header.shapes),
    )


class Errors(NamedTuple):
    """Errors of predictions of one operator, over the micro-batches that have it.

    Shares of the mean (Swanson's) of the undisturbed runs: absolute relative errors (median and
    P95), and the signed mean. Beside them is the machine's spread. It is of all single runs from
    their median (median and P95), and of their halves' medians (P95). `share`: of the stages' time.
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
    """Run each shape `repeats` times marked and as often not, in random rounds after a first."""
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
    without marks. What the marks of a profile cost then counts as its error.
    """
    counts = operator_counts(spec)
    parts = StageParts(profile, spec, ranks, None, spec.name)
    there = [operator for operator in (*counts, *ENDS) if profile.of(operator, ranks)]
    predictors = {operator: _predictor(parts, operator) for operator in there}
    pairs: dict[str, list[_Pair]] = {}
    for shape, runs in by_shape.items():
        marked, whole = by_marks(runs)
        for operator, predict in predictors.items():
            if operator in marked[0].seconds:
                predicted_s = counts.get(operator, 1) * predict(shape)
                pair = _pair(predicted_s, marked, itemgetter(operator))
                pairs.setdefault(operator, []).append(pair)
        pairs.setdefault(STAGE, []).append(_pair(cost.times(shape.work())[0], whole, stage_s))
    total_s = plain_sum(pair.measured_s for pair in pairs[STAGE])
    pairs[STAGE] = pairs.pop(STAGE)  # to the end
    return [_errors(operator, pairs[operator], total_s) for operator in pairs]


def record_errors(path: Path, rows: Sequence[Errors]) -> None:
    """Write into a profile how far its predictions of whole stages were off."""
    checked, stage = read_profile(path), rows[-1]
    words = (
        f"whole stages off by {stage.median:.1%} (median) and {stage.p95:.1%} (P95) over "
        f"{stage.batches} random micro-batches; single runs spread by {stage.spread_median:.1%} "
        f"and {stage.spread_p95:.1%}"
    )
    words_in = replace(checked, header=replace(checked.header, checked=words))
    write_profile(path, words_in, over=True)


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


def _predictor(parts: StageParts, operator: str) -> Callable[[Shape], float]:
    """Return a function that predicts the seconds of an operator, of one layer."""
    if operator.startswith("attention_prefill"):
        prefill = parts.attention(operator)
        return lambda shape: plain_sum(prefill(*chunk)[0] for chunk in shape.chunks)
    if operator.startswith("attention_decode"):
        decode = parts.attention(operator)
        return lambda shape: decode(len(shape.decodes), sum(shape.decodes))[0]
    along = parts.by_tokens(operator)
    if operator in PER_ROW:
        return lambda shape: along(shape.rows).seconds
    return lambda shape: along(shape.tokens).seconds
