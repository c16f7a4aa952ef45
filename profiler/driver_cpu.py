"""CPU seconds of the driver for a micro-batch: schedule it, apply what came back, detokenise.

Times the Batcher with a policy of few lines, so what a policy itself takes comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from evenflow.batcher import Batcher
from evenflow.costs.profile.file import Point
from evenflow.errors import UsageError
from evenflow.kv import PagePool
from evenflow.scheduling import View
from evenflow.types import Plan, Prefill, Request
from profiler.timed_runs import point

PROMPT_TOKENS = 32
WARM_UP = 5


class _Everything:
    """Prefill all that waits, then decode all that is ready."""

    def schedule(self, view: View) -> Plan:
        prefills = tuple(Prefill(p.request_id, p.remaining) for p in view.waiting)
        return Plan(prefills=prefills, decodes=view.ready_decodes)


def driver_points(rows: Sequence[int], repeats: int) -> list[Point]:
    """Measure `next` and `sequences` (cpu_schedule), `complete` (cpu_sample) at so many decodes."""
    points = []
    for count in rows:
        schedule_s, sample_s = _steps(count, repeats)
        points.append(point(("cpu_schedule", count, None, None), schedule_s))
        points.append(point(("cpu_sample", count, None, None), sample_s))
    return points


def detokenise_points(tokenizer: Path, rows: Sequence[int], repeats: int) -> list[Point]:
    """Measure turning one token of each of so many requests into text (cpu_detokenise).

    `tokenizer` is a tokenizer.json. UsageError when it cannot be read, or the package is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            f"{tokenizer}: needs the package tokenizers; pip install 'evenflow[tokenizers]'"
        ) from None
    try:
        words = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises nothing more definite
        raise UsageError(f"{tokenizer}: not a tokenizer.json: {error}") from None
    rng = np.random.default_rng(0)
    points = []
    for count in rows:
        seconds = []
        for _ in range(WARM_UP + repeats):
            tokens = rng.integers(words.get_vocab_size(), size=count).tolist()
            start_s = perf_counter()
            for token in tokens:
                words.decode([token])
            seconds.append(perf_counter() - start_s)
        points.append(point(("cpu_detokenise", count, None, None), seconds[-repeats:]))
    return points


def _steps(rows: int, repeats: int) -> tuple[list[float], list[float]]:
    steps = WARM_UP + repeats + 1
    length = PROMPT_TOKENS + steps + 2
    pool = PagePool(rows * (length // 16 + 1))
    batcher = Batcher(_Everything(), pool, depth=1, max_in_flight=1, max_model_len=length)
    for index in range(rows):
        batcher.add(Request(index, 0.0, PROMPT_TOKENS, steps + 1))
    schedule_s, sample_s = [], []
    for step in range(steps):
        start_s = perf_counter()
        batch = batcher.next(float(step))
        assert batch is not None
        batch.sequences()
        scheduled_s = perf_counter()
        batcher.complete(batch, float(step))
        sample_s.append(perf_counter() - scheduled_s)
        schedule_s.append(scheduled_s - start_s)
    return schedule_s[-repeats:], sample_s[-repeats:]
