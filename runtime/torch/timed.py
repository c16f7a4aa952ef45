"""A stage as a profiler's subject: random micro-batches through `Stage.forward`, marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from evenflow.costs.profile.file import Profile
from evenflow.specs.model import ModelSpec
from profiler.profile import DTYPES, Settings, profile, tokenizer_beside
from profiler.shapes import Limits, Shape
from profiler.timed_runs import Progress
from runtime.torch.inputs import batch_inputs
from runtime.torch.model import Mark, Rope, Stage
from runtime.torch.sample import sample
from runtime.torch.weights import random_stage, read_model
from runtime.wire import Piece


class TimedStage:
    """Run shapes on a stage that has both the embedding and the LM head.

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

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[Mark], None]:
        """Return a run of a micro-batch, with fresh random inputs, that marks its operators."""
        stage, kv, page_tokens = self.stage, self._kv, self.page_tokens
        rows = self._rows(shape, rng)
        ids = rng.integers(stage.spec.vocab_size, size=shape.tokens).tolist()

        def run(mark: Mark) -> None:
            batch = batch_inputs(rows, page_tokens, stage.device, ids)
            mark("cpu_prepare")
            logits = stage.forward(batch.ids, batch, kv, mark)
            sample(logits)
            mark("sample")

        return run

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


def timed_stage(spec: ModelSpec, limits: Limits, settings: Settings) -> TimedStage:
    """Return a stage of all layers of a model, with random weights, for `profiler.profile`."""
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


def profile_model(
    name_or_path: str | Path, out: Path, settings: Settings, progress: Progress | None = None
) -> Profile:
    """Measure and write a profile of a model: a name in the table, or the path of a config.json."""
    spec, _ = read_model(name_or_path)
    tokenizer = tokenizer_beside(name_or_path)
    return profile(spec, out, settings, timed_stage, tokenizer=tokenizer, progress=progress)
