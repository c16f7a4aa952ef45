"""Measure a profile of a model on this machine's device, and check one against new measurements.

Wires the profiler to the runtime's model; knows no command line. Nothing here needs a library
beyond those of the measuring itself, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from evenflow.costs.profile.cost import profile_cost
from evenflow.costs.profile.file import (
    Header,
    LayerShapes,
    Point,
    Profile,
    read_profile,
    require_writable,
    write_profile,
)
from evenflow.errors import UsageError
from evenflow.specs.checks import require_counts, require_positive
from evenflow.specs.deployment import require_shareable
from evenflow.specs.model import ModelSpec, model
from profiler import check, environment
from profiler.communication import all_reduce_points, transfer_points
from profiler.driver import detokenise_points, driver_points
from profiler.journal import Journal, Shot
from profiler.measure import Progress, measure, shots_by_shape
from profiler.points import operator_points
from profiler.shapes import Limits, ladder, random_shapes
from profiler.stopwatch import CpuStopwatch, CudaStopwatch, Stopwatch

LIMITS = {"cpu": Limits(1024, 64, 4096, 32768), "cuda": Limits(4096, 256, 32768, 262144)}
TILE_TOKENS = {"cpu": 1, "cuda": 128}
DTYPES = {2: "bfloat16", 4: "float32"}
LINK_REPEATS = 20
DRIVER_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure: `minutes` in all, on so many `threads`, a stage of so many `layers`.

    `max_tokens`, `max_rows` and `max_context` bound the grid; None takes the device's default.
    """

    device: str = "cpu"
    minutes: float = 5.0
    threads: int = 1
    layers: int = 4
    tensor_parallel: int = 1
    max_tokens: int | None = None
    max_rows: int | None = None
    max_context: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("profile", minutes=self.minutes)
        require_counts(
            "profile",
            threads=self.threads,
            layers=self.layers,
            tensor_parallel=self.tensor_parallel,
        )

    def limits(self, max_position: int) -> Limits:
        """Return the bounds of the grid for a model of so many positions."""
        default = LIMITS[self.device]
        context = min(self.max_context or default.max_context, max_position)
        return Limits(
            min(self.max_tokens or default.max_tokens, context),
            self.max_rows or default.max_rows,
            context,
            max(default.max_total_context, context),
        )


def measure_profile(
    name_or_path: str | Path, out: Path, settings: Settings, progress: Progress | None = None
) -> Profile:
    """Measure and write a profile of a model: a name in the table, or the path of a config.json.

    An interrupted measurement goes on from the journal beside `out`. UsageError on anything that
    cannot be measured here.
    """
    environment.require_device(settings.device)
    spec = _runnable(name_or_path)
    require_shareable(spec, settings.tensor_parallel)
    spec = replace(spec, num_layers=min(settings.layers, spec.num_layers))
    limits = settings.limits(spec.max_position_embeddings)
    header = _header(spec, settings)
    require_writable(out)
    facts = {
        "header": asdict(replace(header, date="")),
        "limits": asdict(limits),
        "layers": spec.num_layers,
        "ranks": settings.tensor_parallel,
    }
    began_s = perf_counter()
    with Journal(out.with_name(f"{out.name}.journal"), facts) as journal:
        points = _other_points(spec, limits, settings, _tokenizer_beside(name_or_path))
        with environment.pinned(settings.device, settings.threads):
            subject = _subject(spec, limits, settings)
            shapes = measure(
                subject,
                limits,
                header.tile_tokens,
                _stopwatch(settings),
                journal,
                budget_s=60 * settings.minutes - (perf_counter() - began_s),
                rng=np.random.default_rng(settings.seed),
                progress=progress,
            )
        shots = shots_by_shape(shapes, journal.shots)
        points += operator_points(shots, spec.num_layers, settings.tensor_parallel)
        grid = _grid_words(len(shapes), journal.shots, spec.num_layers, settings.minutes)
        profile = Profile(replace(header, grid=grid), tuple(points))
        write_profile(out, profile)
        journal.remove()
    return profile


def check_profile(
    path: Path,
    *,
    batches: int = 100,
    repeats: int = 15,
    layers: int = 4,
    tensor_parallel: int = 1,
    seed: int = 1,
    progress: Progress | None = None,
) -> list[check.Errors]:
    """Measure random micro-batches off a profile's grid and compare; the whole stage comes last.

    Of a tensor-parallel stage one shard runs, alone: its all-reduces are not compared. UsageError
    when this machine is not the one that the profile is of.
    """
    profile = read_profile(path)
    header = profile.header
    environment.require_device(header.device_kind)
    if (here := environment.device_name(header.device_kind)) != header.device:
        raise UsageError(f'{path}: measured on "{header.device}"; this is "{here}"')
    limits = _limits_of(profile, tensor_parallel, path)
    spec = _spec_of(profile, layers, limits)
    settings = Settings(
        header.device_kind, threads=header.threads, layers=layers, tensor_parallel=tensor_parallel
    )
    cost = profile_cost(
        profile, spec, [layers], tensor_parallel, name=str(path), with_all_reduces=False
    )
    rng = np.random.default_rng(seed)
    with environment.pinned(settings.device, settings.threads):
        shots = check.take(
            _subject(spec, limits, settings),
            random_shapes(limits, batches, rng),
            _stopwatch(settings),
            repeats=repeats,
            rng=rng,
            progress=progress,
        )
    return check.errors(shots, profile, cost, layers=layers, ranks=tensor_parallel)


def record_errors(path: Path, rows: Sequence[check.Errors]) -> None:
    """Write into a profile how far its predictions of whole stages were found to be off."""
    profile, stage = read_profile(path), rows[-1]
    found = (
        f"whole stages off by {stage.median:.1%} (median) and {stage.p95:.1%} (P95) over "
        f"{stage.batches} random micro-batches; single runs spread by {stage.spread_median:.1%} "
        f"and {stage.spread_p95:.1%}"
    )
    write_profile(path, replace(profile, header=replace(profile.header, checked=found)))


def errors_table(rows: Sequence[check.Errors]) -> str:
    """Return the errors as text, a line an operator."""
    lines = [
        f"{'':20}{'micro-':>8}{'share of':>10}{'error':>16}{'':8}{'spread':>18}{'halves':>8}",
        f"{'':20}{'batches':>8}{'time':>10}{'median':>8}{'P95':>8}{'bias':>8}"
        f"{'median':>10}{'P95':>8}{'P95':>8}",
    ]
    lines += [
        f"{row.operator:20}{row.batches:8}{row.share:10.1%}{row.median:8.1%}{row.p95:8.1%}"
        f"{row.bias:+8.1%}{row.spread_median:10.1%}{row.spread_p95:8.1%}{row.halves_p95:8.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def _runnable(name_or_path: str | Path) -> ModelSpec:
    from runtime.torch.weights import read_model, require_runnable

    spec = model(name_or_path)
    require_runnable(spec)
    if Path(name_or_path).exists():
        spec, _ = read_model(name_or_path)
    return spec


def _grid_words(shapes: int, shots: Sequence[Shot], layers: int, minutes: float) -> str:
    disturbed = sum(shot.disturbed for shot in shots) / len(shots)
    return (
        f"{minutes:g} minutes: {shapes} micro-batches, {len(shots) / shapes:.0f} times each, "
        f"through {layers} layers; {disturbed:.0%} of the runs disturbed by other processes"
    )


def _header(spec: ModelSpec, settings: Settings) -> Header:
    return Header(
        device=environment.device_name(settings.device),
        device_kind=settings.device,
        driver=environment.driver_version(settings.device),
        libraries=environment.libraries(),
        dtype=DTYPES[spec.dtype_bytes],
        date=datetime.now(UTC).date().isoformat(),
        threads=settings.threads,
        grid="",
        tile_tokens=TILE_TOKENS[settings.device],
        source="measured by evenflow profile",
        model=spec.name,
        shapes=LayerShapes.of(spec),
    )


def _subject(spec: ModelSpec, limits: Limits, settings: Settings):  # type: ignore[no-untyped-def]
    from runtime.torch.model import Rope
    from runtime.torch.timed import TimedStage
    from runtime.torch.weights import random_stage

    stage = random_stage(
        spec,
        Rope(spec.rope_theta),
        0,
        spec.num_layers,
        dtype=DTYPES[spec.dtype_bytes],
        device=settings.device,
        tensor_parallel=settings.tensor_parallel,
    )
    return TimedStage(stage, limits.max_total_context, limits.max_rows)


def _stopwatch(settings: Settings) -> Stopwatch:
    return CudaStopwatch() if settings.device == "cuda" else CpuStopwatch(settings.threads)


def _tokenizer_beside(name_or_path: str | Path) -> Path | None:
    """Return the tokenizer.json in the folder of a model, if there is one."""
    path = Path(name_or_path)
    found = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return found if path.exists() and found.is_file() else None


def _other_points(
    spec: ModelSpec, limits: Limits, settings: Settings, tokenizer: Path | None
) -> list[Point]:
    """Measure what is not part of a stage: links and the driver's CPU time."""
    token_bytes = spec.hidden_size * spec.dtype_bytes
    sizes = [tokens * token_bytes for tokens in ladder(1, limits.max_tokens, 1)]
    points = transfer_points(settings.device, sizes, LINK_REPEATS)
    if settings.tensor_parallel > 1:
        ranks = settings.tensor_parallel
        points += all_reduce_points(settings.device, ranks, sizes, LINK_REPEATS)
    rows = ladder(1, limits.max_rows, 1)
    points += driver_points(rows, DRIVER_REPEATS)
    if tokenizer is not None:
        points += detokenise_points(tokenizer, rows, DRIVER_REPEATS)
    return points


def _limits_of(profile: Profile, ranks: int, path: Path) -> Limits:
    """Return the bounds of a profile's grid."""
    chunks = profile.of("attention_prefill", ranks)
    decodes = profile.of("attention_decode", ranks)
    if not chunks or not decodes:
        raise UsageError(f"{path}: no attention for {ranks} ranks; there is nothing to check")
    contexts = [(point.tokens or 0) + (point.context_tokens or 0) for point in chunks]
    return Limits(
        max(point.tokens or 0 for point in chunks),
        max(point.tokens or 0 for point in decodes),
        max(contexts),
        max(*contexts, *(point.context_tokens or 0 for point in decodes)),
    )


def _spec_of(profile: Profile, layers: int, limits: Limits) -> ModelSpec:
    """Return a model of a profile's shapes and so many layers."""
    return ModelSpec(
        name=profile.header.model,
        num_layers=layers,
        max_position_embeddings=limits.max_context,
        rope_theta=10000.0,
        dtype_bytes=4 if profile.header.dtype == "float32" else 2,
        **asdict(profile.header.shapes),
    )
