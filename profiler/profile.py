"""Measure a profile of a model on this machine's device.

The caller passes what runs the model's stage. Needs no library beyond those of the measuring
itself, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from evenflow.costs.profile import file
from evenflow.costs.profile.cost import operator_counts
from evenflow.costs.tables import Curve
from evenflow.errors import Count, Positive, require_declared
from evenflow.files import require_new
from evenflow.profiler import machine, outside, timed_runs
from evenflow.profiler.shapes import Limits, Shape, ladder, random_shapes
from evenflow.specs.deployment import require_shareable
from evenflow.specs.modelspec import ModelSpec

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
    `beside`: other stages that compute on this machine's CPU meanwhile, as those of a pipeline do.
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


StageOf = Callable[[ModelSpec, Limits, ProfileSettings], timed_runs.Subject]
"""Returns a stage of all the model's layers with random weights, as one tensor-parallel rank holds
them. It runs the micro-batches within the limits."""

ServiceOf = Callable[[ModelSpec, ProfileSettings], outside.Service | None]
"""Returns what serves a model for real on this machine; None where it cannot be."""


def profile(
    spec: ModelSpec,
    out: Path,
    settings: ProfileSettings,
    stage_of: StageOf,
    *,
    service_of: ServiceOf | None = None,
    tokenizer: Path | None = None,
    progress: timed_runs.Progress | None = None,
) -> file.Profile:
    """Measure a model and write its profile to `out`.

    Without a service the host's time and the hops are left out. With a tokenizer.json, the time to
    turn tokens into text is in it. An interrupted measurement goes on from the journal beside
    `out`. UsageError on anything that cannot be measured here.
    """
    machine.require_device(settings.device)
    machine.require_threads(settings.threads, 1 + settings.neighbours)
    require_shareable(spec, settings.tensor_parallel)
    service = None if service_of is None else service_of(spec, settings)
    spec = replace(spec, num_layers=min(of_all_kinds(settings.layers, spec), spec.num_layers))
    limits = settings.limits(spec)
    header = _header(spec, settings)
    require_new(out)
    facts = {
        "header": asdict(replace(header, date="")),
        "limits": asdict(limits),
        "layers": spec.num_layers,
        "ranks": settings.tensor_parallel,
    }
    began_s = perf_counter()
    with timed_runs.ProfileJournal(out.with_name(f"{out.name}.journal"), facts) as journal:
        points = _other_points(spec, limits, settings, service, tokenizer)
        with in_service(spec, limits, settings, stage_of):
            subject = stage_of(spec, limits, settings)
            shapes = timed_runs.measure(
                subject,
                limits,
                TILES_OF[settings.device],
                stopwatch(settings),
                journal,
                budget_s=60 * settings.minutes - (perf_counter() - began_s),
                rng=np.random.default_rng(settings.seed),
                progress=progress,
            )
        by_shape = timed_runs.runs_by_shape(shapes, journal.runs)
        points += timed_runs.operator_points(
            by_shape, operator_counts(spec), settings.tensor_parallel
        )
        grid = _grid_words(by_shape, spec.num_layers, settings) + subject.note
        grid += "" if service else "; nothing served, so no host's time and no hops"
        products = [each for each in points if each.operator.startswith("linear_")]
        tile = tile_of(products, TILES_OF[settings.device])
        measured = file.Profile(replace(header, grid=grid, tile_tokens=tile), tuple(points))
        file.write_profile(out, measured)
        journal.remove()
    return measured


def tokenizer_beside(name_or_path: str | Path) -> Path | None:
    """Return the tokenizer.json in the folder of a model, if there is one."""
    path = Path(name_or_path)
    tokenizer = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return tokenizer if path.exists() and tokenizer.is_file() else None


@contextmanager
def in_service(
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
    by_shape: Mapping[Shape, Sequence[timed_runs.TimedRun]], layers: int, settings: ProfileSettings
) -> str:
    shapes, runs = len(by_shape), [run for runs in by_shape.values() for run in runs]
    disturbed = sum(run.disturbed for run in runs) / len(runs)
    return (
        f"{settings.minutes:g} minutes: {shapes} micro-batches, {len(runs) / shapes:.0f} times "
        f"each, through {layers} layers, {settings.neighbours} other stages computing meanwhile; "
        f"{disturbed:.0%} of the runs disturbed by other processes; "
        f"marks make a stage {timed_runs.marks_share(by_shape):+.1%} longer"
    )


def _header(spec: ModelSpec, settings: ProfileSettings) -> file.Header:
    return file.Header(
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
        shapes=file.LayerShapes.of(spec),
    )


def stopwatch(settings: ProfileSettings) -> timed_runs.Stopwatch:
    return (
        timed_runs.CudaStopwatch()
        if settings.device == "cuda"
        else timed_runs.CpuStopwatch(settings.threads)
    )


def _other_points(
    spec: ModelSpec,
    limits: Limits,
    settings: ProfileSettings,
    service: outside.Service | None,
    tokenizer: Path | None,
) -> list[file.ProfilePoint]:
    """Measure what is not part of a stage: the host's time, and links."""
    points: list[file.ProfilePoint] = []
    rows, prompts = ladder(1, limits.max_rows, 1), ladder(1, limits.max_tokens, 1)
    token_bytes = spec.hidden_size * spec.dtype_bytes
    if service is not None:
        sizes_of = {"token_bytes": token_bytes, "repeats": HOST_REPEATS}
        points += outside.host_points(service, rows, prompts, **sizes_of)
    sizes, dtype = [tokens * token_bytes for tokens in prompts], DTYPES[spec.dtype_bytes]
    if settings.device == "cuda":
        points += outside.copy_points(sizes, LINK_REPEATS)
    if settings.tensor_parallel > 1:
        ranks = settings.tensor_parallel
        points += outside.all_reduce_points(settings.device, ranks, sizes, LINK_REPEATS, dtype)
    if tokenizer is not None:
        points += outside.detokenise_points(tokenizer, rows, HOST_REPEATS)
    return points


def of_all_kinds(layers: int, shapes: ModelSpec | file.LayerShapes) -> int:
    """Return the number of layers to measure so that there is one of every kind."""
    return max(layers, shapes.dense_layers + 1, shapes.full_every)


def tile_of(points: Sequence[file.ProfilePoint], tiles: Sequence[int] = TILES) -> int:
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
