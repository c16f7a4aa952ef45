"""Measure a profile of a model on this machine's device, and check one against new measurements.

The caller passes what runs the model's stage. Needs no library beyond those of the measuring
itself, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from evenflow.costs.base import StageCost
from evenflow.costs.profile.cost import ENDS, StageParts, operator_counts, profile_cost
from evenflow.costs.profile.file import (
    Header,
    LayerShapes,
    Profile,
    ProfilePoint,
    read_profile,
    require_writable,
    write_profile,
)
from evenflow.costs.tables import Curve
from evenflow.errors import Count, Positive, UsageError, require_declared
from evenflow.profiler import machine
from evenflow.profiler.outside import (
    Service,
    all_reduce_points,
    copy_points,
    detokenise_points,
    host_points,
)
from evenflow.profiler.shapes import Limits, Shape, ladder, random_shapes
from evenflow.profiler.timed_runs import (
    PER_ROW,
    STAGE,
    CpuStopwatch,
    CudaStopwatch,
    ProfileJournal,
    Progress,
    Stopwatch,
    Subject,
    TimedRun,
    by_marks,
    marks_share,
    measure,
    operator_points,
    point,
    runs_by_shape,
    stage_s,
    time_run,
    undisturbed,
)
from evenflow.specs.deployment import require_shareable
from evenflow.specs.model import ModelSpec, of_shape
from evenflow.sums import plain_sum

TILES = (64, 128, 256)
"""Tokens of a tile that kernels of GPUs are known for. A grid has points on both sides of the edges
of each, some of them no edges of the next."""
LIMITS = {"cpu": Limits(1024, 64, 4096, 32768), "cuda": Limits(4096, 256, 32768, 262144)}
TILES_OF = {"cpu": (), "cuda": TILES}
DTYPES = {2: "bfloat16", 4: "float32"}
LINK_REPEATS = 20
HOST_REPEATS = 50


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Plan of a measurement: `minutes` in all, on `threads` threads, of a stage of `layers` layers.

    More layers where these would not be of all of the model's kinds. `max_tokens`, `max_rows` and
    `max_context` bound the grid; None takes the device's default, and a window with a chunk.
    `beside`: other stages that compute on this machine's CPU meanwhile, as those of a pipeline do;
    None is one where there are cores for it.
    """

    device: str = "cpu"
    minutes: Positive = 5.0
    threads: Count = 1
    layers: Count = 4
    tensor_parallel: Count = 1
    max_tokens: int | None = None
    max_rows: int | None = None
    max_context: int | None = None
    seed: int = 0
    beside: int | None = None

    def __post_init__(self) -> None:
        require_declared("profile", self)

    @property
    def neighbours(self) -> int:
        """Number of other stages that compute meanwhile."""
        if self.beside is None:
            return min(machine.most_beside(self.device, self.threads), 1)
        return self.beside if self.device == "cpu" else 0

    def limits(self, spec: ModelSpec) -> Limits:
        """Return the bounds of the grid for a model."""
        default = LIMITS[self.device]
        wide = max(default.max_context, spec.sliding_window + default.max_tokens)
        context = min(self.max_context or wide, spec.max_position_embeddings)
        return Limits(
            min(self.max_tokens or default.max_tokens, context),
            self.max_rows or default.max_rows,
            context,
            max(default.max_total_context, context),
        )


StageOf = Callable[[ModelSpec, Limits, ProfileSettings], Subject]
"""Returns what runs the micro-batches within the limits through a stage of all the model's layers,
with random weights, as one tensor-parallel rank holds them."""

ServiceOf = Callable[[ModelSpec, ProfileSettings], Service | None]
"""Returns what serves a model for real on this machine; None where it cannot be."""


def profile(
    spec: ModelSpec,
    out: Path,
    settings: ProfileSettings,
    stage_of: StageOf,
    *,
    service_of: ServiceOf | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model and write its profile to `out`.

    Without a service the host's time and the hops are left out. With a tokenizer.json, the time to
    turn tokens into text is in it. An interrupted measurement goes on from the journal beside
    `out`. UsageError on anything that cannot be measured here.
    """
    machine.require_device(settings.device)
    machine.require_threads(settings.threads, 1 + settings.neighbours)
    require_shareable(spec, settings.tensor_parallel)
    service = None if service_of is None else service_of(spec, settings)
    spec = replace(spec, num_layers=min(_of_all_kinds(settings.layers, spec), spec.num_layers))
    limits = settings.limits(spec)
    header = _header(spec, settings)
    require_writable(out)
    facts = {
        "header": asdict(replace(header, date="")),
        "limits": asdict(limits),
        "layers": spec.num_layers,
        "ranks": settings.tensor_parallel,
    }
    began_s = perf_counter()
    with ProfileJournal(out.with_name(f"{out.name}.journal"), facts) as journal:
        points = _other_points(spec, limits, settings, service, tokenizer)
        with _in_service(spec, limits, settings, stage_of):
            subject = stage_of(spec, limits, settings)
            shapes = measure(
                subject,
                limits,
                TILES_OF[settings.device],
                _stopwatch(settings),
                journal,
                budget_s=60 * settings.minutes - (perf_counter() - began_s),
                rng=np.random.default_rng(settings.seed),
                progress=progress,
            )
        by_shape = runs_by_shape(shapes, journal.runs)
        points += operator_points(by_shape, operator_counts(spec), settings.tensor_parallel)
        grid = _grid_words(by_shape, spec.num_layers, settings) + subject.note
        grid += "" if service else "; nothing served, so no host's time and no hops"
        products = [each for each in points if each.operator.startswith("linear_")]
        tile = tile_of(products, TILES_OF[settings.device])
        measured = Profile(replace(header, grid=grid, tile_tokens=tile), tuple(points))
        write_profile(out, measured)
        journal.remove()
    return measured


def tokenizer_beside(name_or_path: str | Path) -> Path | None:
    """Return the tokenizer.json in the folder of a model, if there is one."""
    path = Path(name_or_path)
    tokenizer = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return tokenizer if path.exists() and tokenizer.is_file() else None


@contextmanager
def _in_service(
    spec: ModelSpec, limits: Limits, settings: ProfileSettings, stage_of: StageOf
) -> Iterator[None]:
    """Reserve the measured stage's cores, and let the other stages compute on theirs."""
    shapes = random_shapes(limits, 100, np.random.default_rng(settings.seed))
    places = machine.places_beside(settings.neighbours, settings.threads)
    with (
        machine.pinned(settings.device, settings.threads),
        machine.neighbours(partial(stage_of, spec, limits, settings), shapes, places),
    ):
        yield


def _grid_words(
    by_shape: Mapping[Shape, Sequence[TimedRun]], layers: int, settings: ProfileSettings
) -> str:
    shapes, runs = len(by_shape), [run for runs in by_shape.values() for run in runs]
    disturbed = sum(run.disturbed for run in runs) / len(runs)
    return (
        f"{settings.minutes:g} minutes: {shapes} micro-batches, {len(runs) / shapes:.0f} times "
        f"each, through {layers} layers, {settings.neighbours} other stages computing meanwhile; "
        f"{disturbed:.0%} of the runs disturbed by other processes; "
        f"marks make a stage {marks_share(by_shape):+.1%} longer"
    )


def _header(spec: ModelSpec, settings: ProfileSettings) -> Header:
    return Header(
        device=machine.device_name(settings.device),
        device_kind=settings.device,
        driver=machine.driver_version(settings.device),
        libraries=machine.libraries(),
        dtype=DTYPES[spec.dtype_bytes],
        date=datetime.now(UTC).date().isoformat(),
        threads=settings.threads,
        grid="",
        tile_tokens=1,
        source="measured by evenflow profile",
        model=spec.name,
        shapes=LayerShapes.of(spec),
    )


def _stopwatch(settings: ProfileSettings) -> Stopwatch:
    return CudaStopwatch() if settings.device == "cuda" else CpuStopwatch(settings.threads)


def _other_points(
    spec: ModelSpec,
    limits: Limits,
    settings: ProfileSettings,
    service: Service | None,
    tokenizer: Path | None,
) -> list[ProfilePoint]:
    """Measure what is not part of a stage: the host's time, and links."""
    points: list[ProfilePoint] = []
    rows, prompts = ladder(1, limits.max_rows, 1), ladder(1, limits.max_tokens, 1)
    token_bytes = spec.hidden_size * spec.dtype_bytes
    if service is not None:
        sizes_of = {"token_bytes": token_bytes, "repeats": HOST_REPEATS}
        points += host_points(service, rows, prompts, **sizes_of)
    sizes, dtype = [tokens * token_bytes for tokens in prompts], DTYPES[spec.dtype_bytes]
    if settings.device == "cuda":
        points += copy_points(sizes, LINK_REPEATS)
    if settings.tensor_parallel > 1:
        ranks = settings.tensor_parallel
        points += all_reduce_points(settings.device, ranks, sizes, LINK_REPEATS, dtype)
    if tokenizer is not None:
        points += detokenise_points(tokenizer, rows, HOST_REPEATS)
    return points


def _of_all_kinds(layers: int, shapes: ModelSpec | LayerShapes) -> int:
    """Return the number of layers to measure so that there is one of every kind."""
    return max(layers, shapes.dense_layers + 1, shapes.full_every)


def tile_of(points: Sequence[ProfilePoint], tiles: Sequence[int] = TILES) -> int:
    """Return which of `tiles` predicts points of products best, each point from the others.

    1 where a straight line does it: no steps. The measure is the mean relative error.
    """
    curves: dict[str, dict[int, float]] = {}
    for each in points:
        curves.setdefault(each.operator, {})[each.tokens or 0] = each.median_s

    def mean_error(tile: int) -> float:
        off = [
            Curve.of({k: v for k, v in known.items() if k != size}, tile)(size) / known[size] - 1
            for known in curves.values()
            for size in sorted(known)[1:-1]
        ]
        return float(np.mean(np.abs(off))) if off else 0.0

    return min((1, *tiles), key=mean_error)


# -- held against new measurements ---------------------------------------------------------------


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
    with _in_service(spec, limits, settings, stage_of):
        by_shape = take(
            stage_of(spec, limits, settings),
            random_shapes(limits, batches, rng),
            _stopwatch(settings),
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
        num_layers=_of_all_kinds(layers, profile.header.shapes),
        max_position_embeddings=limits.max_context,
        rope_theta=10000.0,
        dtype_bytes=4 if profile.header.dtype == "float32" else 2,
        **asdict(profile.header.shapes),
    )


class Errors(NamedTuple):
    """Errors of predictions of one operator, over the micro-batches that have it.

    Shares of the mean (Swanson's) of the undisturbed runs: absolute relative errors (median and
    P95), and the signed mean. Beside them the machine's spread: how far all single runs lie from
    their median (median and P95), and the medians of their halves from each other (P95). `share`:
    of the stages' time.
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
