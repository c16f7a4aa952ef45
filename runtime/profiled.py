"""Parts of the runtime for a profiler: a stage with marked operators, and a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from evenflow.core.world import World
from evenflow.costs.profile.cost import operator_counts
from evenflow.costs.profile.file import Profile
from evenflow.costs.roofline import active_experts
from evenflow.errors import UsageError
from evenflow.profiler.machine import require_device
from evenflow.profiler.outside import Service
from evenflow.profiler.profile import DTYPES, ProfileSettings, profile, tokenizer_beside
from evenflow.profiler.shapes import Limits, Shape
from evenflow.profiler.timed_runs import Progress
from evenflow.results.run import Around, RunResult, around_stages
from evenflow.runtime.serve import Workers, serve
from evenflow.runtime.tokens import RandomTexts
from evenflow.runtime.torch.layers import Linear, Mark
from evenflow.runtime.torch.model import Ranks, Rope, Stage, sample
from evenflow.runtime.torch.settings import torch_settings, transport_of
from evenflow.runtime.torch.weights import FAMILIES, random_stage, read_model
from evenflow.runtime.wire import Piece
from evenflow.specs.modelspec import ModelSpec


class TimedStage:
    """Runs shapes on a stage that has both the embedding and the LM head.

    `kv_tokens`: the most that the rows of one shape hold in the KV pages together. The pages hold
    random values, and every run gets other tokens in other pages.
    """

    def __init__(self, stage: Stage, kv_tokens: int, max_rows: int, page_tokens: int = 16) -> None:
        self.stage = stage
        self.page_tokens = page_tokens
        self.total_pages = kv_tokens // page_tokens + max_rows + 1  # a row's last page is not full
        self._kv = stage.kv_pages(self.total_pages, page_tokens)
        self._kv.keys.normal_()
        self._kv.values.normal_()
        self._woken = self._woken_evenly = 0.0

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[Mark], None]:
        """Return a run of a micro-batch, with fresh random inputs, that marks its operators."""
        stage, kv, page_tokens = self.stage, self._kv, self.page_tokens
        rows = self._rows(shape, rng)
        ids = rng.integers(stage.spec.vocab_size, size=shape.tokens).tolist()
        self._woken_evenly += self._evenly(shape.tokens)

        def run(mark: Mark) -> None:
            def told(operator: str) -> None:
                self._woken += operator == "experts"
                mark(operator)

            batch = stage.inputs(rows, page_tokens, ids)
            mark("cpu_prepare")
            logits = stage.forward(batch.ids, batch, kv, told if stage.spec.num_experts else mark)
            sample(logits)
            mark("sample")

        return run

    def _evenly(self, tokens: int) -> float:
        """Return how many experts the layers' routers would wake if they chose evenly."""
        spec, layers = self.stage.spec, operator_counts(self.stage.spec)["experts"]
        each = active_experts(tokens, spec.num_experts, spec.experts_per_token) if layers else 0.0
        return layers * each

    @property
    def note(self) -> str:
        if not self._woken_evenly:
            return ""
        share = self._woken / self._woken_evenly
        return f"; routers chose {share:.0%} of the experts that even ones would"

    def _rows(self, shape: Shape, rng: np.random.Generator) -> list[Piece]:
        lengths = shape.lengths()
        counts = [-(-length // self.page_tokens) for length in lengths]
        starts = [context for _, context in shape.chunks] + list(shape.decodes)
        pages = rng.permutation(self.total_pages)[: sum(counts)].tolist()
        rows: list[Piece] = []
        first = 0
        for start, stop, count in zip(starts, lengths, counts, strict=True):
            rows.append(Piece(len(rows), start, stop, True, pages[first : first + count]))
            first += count
        return rows


def timed_stage(spec: ModelSpec, limits: Limits, settings: ProfileSettings) -> TimedStage:
    """Return a stage of all layers of a model, with random weights, for the profiler."""
    stage = random_stage(
        spec,
        Rope(spec.rope_theta),
        0,
        spec.num_layers,
        dtype=DTYPES[spec.dtype_bytes],
        device=settings.device,
        ranks=Ranks(size=settings.tensor_parallel),
    )
    return TimedStage(stage, limits.max_total_context, limits.max_rows)


def profile_model(
    name_or_path: str | Path, out: Path, settings: ProfileSettings, progress: Progress | None = None
) -> Profile:
    """Measure and write a profile of a model: a name in the table, or the path of a config.json."""
    require_device(settings.device)
    spec, _ = read_model(name_or_path, timed=True)
    if spec.quantization:
        _require_8_bits(spec, settings)
    return profile(
        spec,
        out,
        settings,
        timed_stage,
        service_of=partial(service_of, name_or_path),
        tokenizer=tokenizer_beside(name_or_path),
        progress=progress,
    )


def _require_8_bits(spec: ModelSpec, settings: ProfileSettings) -> None:
    """Raise UsageError unless torch multiplies a model's matrices in 8-bit floats on a device."""
    make = partial(torch.ones, dtype=torch.bfloat16, device=settings.device)
    for inputs, outputs in spec.linear_shapes(settings.tensor_parallel):
        try:
            Linear(make(outputs, inputs)).in_8_bits()(make(16, inputs))
        except (RuntimeError, AttributeError):  # NotImplementedError is the former
            raise UsageError(
                f"{spec.name}: weights in {spec.quantization} need torch._scaled_mm of {inputs} x "
                f"{outputs} on the {settings.device}; GPUs of compute capability 8.9 or above have "
                "it for multiples of 16"
            ) from None


def service_of(model: str | Path, spec: ModelSpec, settings: ProfileSettings) -> Service | None:
    """Return two one-layer stages: on a CPU, on two GPUs or, crossing none, on one.

    None without ZeroMQ, which carries micro-batches to stages, and for a model that is not served.
    """
    if find_spec("zmq") is None or spec.family not in FAMILIES or spec.quantization:
        return None
    layers, device = spec.num_layers, settings.device
    one_gpu = device == "cuda" and torch.cuda.device_count() == 1
    spans = [(0, 1), (layers - 1, layers)] if layers > 1 else [(0, 1)]
    stages = torch_settings(
        str(model),
        spans,
        threads=settings.threads,
        weights="random",
        device=device,
        dtype=DTYPES[spec.dtype_bytes],
        transport="one_process" if one_gpu else transport_of(None, device, len(spans)),
    )
    workers = Workers(stages, one_gpu, RandomTexts(spec.vocab_size, seed=0))
    return Service(len(spans), partial(served, workers), layers > 1 and not one_gpu)


def served(workers: Workers, world: World) -> tuple[RunResult, Around]:
    """Return what serving a world gave, and the times around its stages; UsageError if it fails."""
    done = serve(world, workers)
    if done.failure is not None:
        raise UsageError(f"profile: a pipeline to measure the host's time: {done.failure}")
    heard = done.heard
    return done.result, around_stages(done.result, heard.freed_s, heard.returned_s)
