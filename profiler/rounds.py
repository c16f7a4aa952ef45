"""The measuring loop: every shape once a round, in a new order each round, until time is up.

Knows a subject that runs shapes and a stopwatch; no model and no file format.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import numpy as np

from profiler.shapes import LEVELS, Limits, Shape, grid
from profiler.stopwatch import Stopwatch
from profiler.timed_runs import Journal, TimedRun

MIN_ROUNDS = 3
GOOD_ROUNDS = 15
"""Rounds at least, however little time there is; and rounds before a denser grid is worth it."""

Mark = Callable[[str], None]
Progress = Callable[[float, float], None]
"""Is told the share that is done and the seconds that are left."""


class Subject(Protocol):
    """What is measured: a stage of some model on some device."""

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[Mark], None]:
        """Return a run of a micro-batch, with fresh random inputs, that marks its operators."""
        ...


def time_run(
    subject: Subject, shape: Shape, stopwatch: Stopwatch, rng: np.random.Generator
) -> TimedRun:
    """Time one run of a shape; the run's index is left at 0."""
    began_s = perf_counter()
    run = subject.prepare(shape, rng)
    stopwatch.start()
    run(stopwatch.mark)
    seconds = stopwatch.stop()
    return TimedRun(0, seconds, perf_counter() - began_s, stopwatch.was_disturbed)


def measure(
    subject: Subject,
    limits: Limits,
    tile_tokens: int,
    stopwatch: Stopwatch,
    journal: Journal,
    *,
    budget_s: float,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> list[Shape]:
    """Fill the journal with runs of a grid as dense as `budget_s` allows; return the grid.

    Rounds of random order keep a drift of the machine from looking like an effect of the shape.
    The unrecorded first round warms up and tells how long a round takes.
    """
    began_s = perf_counter()
    round_s = _round_s(subject, limits, tile_tokens, stopwatch, rng)
    budget_s -= perf_counter() - began_s
    if "level" not in journal.plan:
        journal.decide(level=_level(limits, tile_tokens, round_s, budget_s))
    shapes = grid(limits, journal.plan["level"], tile_tokens)
    taken = [0] * len(shapes)
    for run in journal.runs:
        taken[run.shape] += 1
    spent_s = journal.spent_s
    while True:
        left = [index for index, count in enumerate(taken) if count == min(taken)]
        for index in rng.permutation(left):
            if taken[index] >= MIN_ROUNDS and spent_s > budget_s:
                return shapes
            run = time_run(subject, shapes[index], stopwatch, rng)
            journal.add(run._replace(shape=int(index)))
            spent_s += run.wall_s
            taken[index] += 1
            if progress is not None:
                left_s = max(budget_s - spent_s, 0.0)
                progress(spent_s / (spent_s + left_s), left_s)


def _round_s(
    subject: Subject,
    limits: Limits,
    tile_tokens: int,
    stopwatch: Stopwatch,
    rng: np.random.Generator,
) -> float:
    """Return the seconds of a round of the coarsest grid, in its second, warmer run."""
    shapes = grid(limits, 0, tile_tokens)
    for shape in shapes:
        time_run(subject, shape, stopwatch, rng)
    return sum(time_run(subject, shape, stopwatch, rng).wall_s for shape in shapes)


def _level(limits: Limits, tile_tokens: int, coarse_round_s: float, budget_s: float) -> int:
    """Return the densest grid of which GOOD_ROUNDS rounds fit the budget."""
    sizes = [len(grid(limits, level, tile_tokens)) for level in range(LEVELS)]
    each_s = coarse_round_s / sizes[0]
    fitting = [level for level, size in enumerate(sizes) if size * each_s * GOOD_ROUNDS <= budget_s]
    return max(fitting, default=0)
