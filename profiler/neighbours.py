"""Other stages that compute on this machine while one is measured, as those of a pipeline do.

Stages on one CPU share its memory and its last cache: what a stage finds there after it waited for
its next micro-batch is what the others have left. Knows no operators and keeps no times.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from evenflow.errors import UsageError
from profiler.machine import placed
from profiler.shapes import Shape
from profiler.stopwatch import CpuStopwatch
from profiler.timed_runs import Subject, time_run

START_S = 120.0
"""The longest that a neighbour may take to import torch and make its weights."""


@contextmanager
def neighbours(
    make: Callable[[], Subject], shapes: Sequence[Shape], places: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Let a stage compute the shapes on each of `places` (cores) meanwhile, in random order.

    `make` is sent to its process. UsageError when one does not start, or ended early, as what was
    measured then holds less than it says.
    """
    spawn = multiprocessing.get_context("spawn")
    started = []
    try:
        for cores in places:
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_compute, args=(make, shapes, cores, theirs), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        for process, ours in started:
            if not ours.poll(START_S) or process.exitcode is not None:
                raise UsageError("profile: the stage that is to compute beside does not start")
        yield
        codes = [process.exitcode for process, _ in started if process.exitcode is not None]
        if codes:
            raise UsageError(f"profile: a stage that computed beside ended with {codes[0]}")
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _compute(
    make: Callable[[], Subject], shapes: Sequence[Shape], cores: Sequence[int], ready: Connection
) -> None:
    """Be a neighbour until the parent process ends it, or is no more."""
    parent, rng = os.getppid(), np.random.default_rng(os.getpid())
    placed(cores)
    subject, stopwatch = make(), CpuStopwatch(len(cores))
    ready.send(True)
    while os.getppid() == parent:
        time_run(subject, shapes[int(rng.integers(len(shapes)))], stopwatch, rng, marked=False)
