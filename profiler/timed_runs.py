"""Timed runs of micro-batches: taken in rounds, kept on disk as they come, made into points.

Every shape is run once a round, in a new order each round, until time is up. Time between marks is
measured on the CPU by a clock, of CPU time or of the wall. On CUDA it is measured by events. Torch
is imported only there. Knows a subject that runs shapes; no model and no profile file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple, Protocol

import numpy as np

from evenflow.costs.profile.file import ProfilePoint
from evenflow.errors import UsageError
from evenflow.profiler.shapes import LEVELS, Limits, Shape, grid
from evenflow.sums import plain_sum

UNDISTURBED = 0.97
"""Share of its time for which a run must have had the CPU, to count as undisturbed."""
WAIT_S = 0.005
"""A stage waits for its next micro-batch: as long as other stages compute some of theirs."""


class Stopwatch(Protocol):
    """Seconds from `start` to the first mark, and from mark to mark, summed by name."""

    def start(self) -> None: ...
    def mark(self, name: str) -> None: ...
    def stop(self) -> dict[str, float]: ...
    @property
    def was_disturbed(self) -> bool:
        """Whether something else had the CPU for a part of the time between start and stop."""
        ...


class CpuStopwatch:
    """Time what a CPU computes; a mark costs 0.5 to 3 microseconds.

    It starts after a wait, as a worker does. Caches are as the micro-batch before, and what else
    computed meanwhile, have left them. `threads` that compute: with one, seconds are those for
    which it had the CPU. What other processes take meanwhile is no cost of an operator. A run is
    disturbed when these were less than UNDISTURBED of its time. With several, that looks like their
    waiting for each other, and seconds are those of the clock.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._clock = thread_time if threads == 1 else perf_counter
        self._began_s = 0.0
        self._share = 1.0
        self._names: list[str] = []
        self._times: list[float] = []

    def start(self) -> None:
        self._names.clear()
        self._times.clear()
        sleep(WAIT_S)
        self._began_s = perf_counter()
        self._times.append(self._clock())

    def mark(self, name: str) -> None:
        self._times.append(self._clock())
        self._names.append(name)

    def stop(self) -> dict[str, float]:
        wall_s = perf_counter() - self._began_s
        self._share = (self._clock() - self._times[0]) / wall_s
        seconds = [after - before for before, after in pairwise(self._times)]
        return summed(self._names, seconds)

    @property
    def was_disturbed(self) -> bool:
        return self._threads == 1 and self._share < UNDISTURBED


class CudaStopwatch:
    """Time what a GPU computes, gaps between launches included, as an eager stage meets them.

    The L2 cache is overwritten before each start. The weights of a stage do not survive in it from
    one micro-batch to the next. A mark is an event, some microseconds of CPU time.
    """

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._flush = flush_buffer()
        self._names: list[str] = []
        self._events: list[Any] = []
        self._used = 0

    def start(self) -> None:
        self._flush.zero_()
        self._cuda.synchronize()
        self._names.clear()
        self._used = 0
        self._record()

    def mark(self, name: str) -> None:
        self._record()
        self._names.append(name)

    def stop(self) -> dict[str, float]:
        self._cuda.synchronize()
        pairs = pairwise(self._events[: self._used])
        return summed(self._names, [a.elapsed_time(b) / 1000 for a, b in pairs])

    @property
    def was_disturbed(self) -> bool:
        return False

    def _record(self) -> None:
        # Events are kept: to create one costs more than to record it.
        if self._used == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        self._events[self._used].record()
        self._used += 1


def flush_buffer() -> Any:
    """Return memory of the GPU that, when it is written, leaves nothing else in the L2 cache."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    size_bytes = 4 * int(getattr(properties, "L2_cache_size", 64 << 20))
    return torch.empty(size_bytes, dtype=torch.int8, device="cuda")


def summed(names: list[str], seconds: list[float]) -> dict[str, float]:
    """Return the sum of the seconds under each name."""
    totals: dict[str, float] = {}
    for name, duration_s in zip(names, seconds, strict=True):
        totals[name] = totals.get(name, 0.0) + duration_s
    return totals


# -- the runs ------------------------------------------------------------------------------------

PER_ROW = ("head", "sample")
OUTSIDE = ("cpu_prepare",)
"""What is no time of a stage: `evenflow.profiler.outside` measures it where a pipeline serves."""
STAGE = "stage"
"""All that is not outside, of a run without marked operators."""

Key = tuple[str, int | None, int | None, int | None]
"""Operator, tokens, context_tokens, bytes."""


class TimedRun(NamedTuple):
    """A timed run: shape, seconds by operator and in all, and whether others took CPU time."""

    shape: int
    seconds: dict[str, float]
    wall_s: float
    disturbed: bool = False


def undisturbed(runs: Sequence[TimedRun]) -> Sequence[TimedRun]:
    """Return the runs that were not disturbed, or all where fewer than three were not."""
    quiet = [run for run in runs if not run.disturbed]
    return quiet if len(quiet) >= 3 else runs


FIRST = b'{"facts": '
"""How a profile's journal begins."""


class ProfileJournal:
    """The runs of one profile, on disk as soon as they are taken.

    An interrupted measurement goes on where it was.

    `facts` say what is measured: a journal of something else is refused. `plan` is what the first
    start decided and later ones keep.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.runs: list[TimedRun] = []
        self.plan: dict[str, Any] = {}
        if path.is_symlink():
            raise UsageError(f"{path}: is a link; a profile's journal is a file")
        if path.exists():
            self._resume(json.loads(json.dumps(dict(facts))))
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        if not path.stat().st_size:
            self._write({"facts": dict(facts)})

    @property
    def spent_s(self) -> float:
        return plain_sum(run.wall_s for run in self.runs)

    def decide(self, **plan: Any) -> None:
        """Keep a plan for all later starts."""
        self.plan.update(plan)
        self._write({"plan": plan})

    def add(self, run: TimedRun) -> None:
        self.runs.append(run)
        self._write({"shot": run})

    def remove(self) -> None:
        """Delete the file: its runs are in a profile now."""
        self._file.close()
        self.path.unlink()

    def __enter__(self) -> ProfileJournal:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _resume(self, facts: dict[str, Any]) -> None:
        try:
            data = self.path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines and lines[0]["facts"] != facts:
                raise UsageError(
                    f"{self.path}: an interrupted profile of something else; "
                    "delete it, or give another --out"
                )
            for line in lines[1:]:
                self.plan.update(line.get("plan", {}))
                if "shot" in line:
                    self.runs.append(TimedRun(*line["shot"]))
            if not (lines or FIRST.startswith(data[: len(FIRST)])):
                raise ValueError(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{self.path}: not a profile's journal; delete it") from None
        os.truncate(self.path, len(whole))  # the interruption came in the middle of a line


# -- the rounds ---------------------------------------------------------------------------------

UNMARKED_EVERY = 4
"""Of this many runs of a shape one, the second, is not marked: the others hold what marks add."""
MIN_ROUNDS = 4
GOOD_ROUNDS = 15
"""Rounds at least, however little time there is; and rounds before a denser grid is worth it."""

Mark = Callable[[str], None]
Progress = Callable[[float, float], None]
"""Called with the share that is done and the seconds that are left."""


class Subject(Protocol):
    """A measured stage of some model on some device."""

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[Mark], None]:
        """Return a run of a micro-batch, with fresh random inputs, that marks its operators."""
        ...

    @property
    def note(self) -> str:
        """The note in the header of a profile on the runs so far."""
        ...


def time_run(
    subject: Subject,
    shape: Shape,
    stopwatch: Stopwatch,
    rng: np.random.Generator,
    *,
    marked: bool = True,
) -> TimedRun:
    """Time one run of a shape, or its STAGE as a whole; the run's index is left at 0."""
    began_s = perf_counter()
    run = subject.prepare(shape, rng)
    stopwatch.start()
    if marked:
        run(stopwatch.mark)
    else:
        run(lambda name: stopwatch.mark(name) if name in OUTSIDE else None)
        stopwatch.mark(STAGE)
    seconds = stopwatch.stop()
    return TimedRun(0, seconds, perf_counter() - began_s, stopwatch.was_disturbed)


def measure(
    subject: Subject,
    limits: Limits,
    tiles: Sequence[int],
    stopwatch: Stopwatch,
    journal: ProfileJournal,
    *,
    budget_s: float,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> list[Shape]:
    """Fill the journal with runs of a grid as dense as `budget_s` allows; return the grid.

    Rounds of random order keep a drift of the machine from looking like an effect of the shape. The
    unrecorded first round warms up, and times a round.
    """
    began_s, coarsest = perf_counter(), grid(limits, 0, tiles)
    for shape in coarsest:
        time_run(subject, shape, stopwatch, rng)
    round_s = plain_sum(time_run(subject, shape, stopwatch, rng).wall_s for shape in coarsest)
    budget_s -= perf_counter() - began_s
    if "level" not in journal.plan:
        journal.decide(level=_level(limits, tiles, round_s, budget_s))
    shapes = grid(limits, journal.plan["level"], tiles)
    taken = [0] * len(shapes)
    for run in journal.runs:
        taken[run.shape] += 1
    spent_s = journal.spent_s
    while True:
        left = [index for index, count in enumerate(taken) if count == min(taken)]
        for index in rng.permutation(left):
            if taken[index] >= MIN_ROUNDS and spent_s > budget_s:
                return shapes
            marked = taken[index] % UNMARKED_EVERY != 1
            run = time_run(subject, shapes[index], stopwatch, rng, marked=marked)
            journal.add(run._replace(shape=int(index)))
            spent_s += run.wall_s
            taken[index] += 1
            if progress is not None:
                left_s = max(budget_s - spent_s, 0.0)
                progress(spent_s / (spent_s + left_s), left_s)


def _level(limits: Limits, tiles: Sequence[int], coarse_round_s: float, budget_s: float) -> int:
    """Return the densest grid of which GOOD_ROUNDS rounds fit the budget."""
    sizes = [len(grid(limits, level, tiles)) for level in range(LEVELS)]
    each_s = coarse_round_s / sizes[0]
    fitting = [level for level, size in enumerate(sizes) if size * each_s * GOOD_ROUNDS <= budget_s]
    return max(fitting, default=0)


# -- the points ---------------------------------------------------------------------------------


def runs_by_shape(shapes: Sequence[Shape], runs: Sequence[TimedRun]) -> dict[Shape, list[TimedRun]]:
    """Return the runs of each shape."""
    by_shape: dict[Shape, list[TimedRun]] = {shape: [] for shape in shapes}
    for run in runs:
        by_shape[shapes[run.shape]].append(run)
    return by_shape


def stage_s(seconds: Mapping[str, float]) -> float:
    """Return the seconds that the stage was busy, of a run's seconds by operator."""
    return plain_sum(value for name, value in seconds.items() if name not in OUTSIDE)


def marks_share(by_shape: Mapping[Shape, Sequence[TimedRun]]) -> float:
    """Return the share by which marks lengthen a stage: the median over the shapes."""
    shares = []
    for runs in by_shape.values():
        marked, whole = (
            [stage_s(run.seconds) for run in undisturbed(kind)] for kind in by_marks(runs)
        )
        if marked and whole:
            shares.append(np.median(marked) / np.median(whole) - 1)
    return float(np.median(shares)) if shares else 0.0


def by_marks(runs: Sequence[TimedRun]) -> tuple[list[TimedRun], list[TimedRun]]:
    """Return the runs with marked operators, and the others."""
    marked = [run for run in runs if STAGE not in run.seconds]
    return marked, [run for run in runs if STAGE in run.seconds]


def _key(name: str, shape: Shape) -> Key | None:
    if name == STAGE or name in OUTSIDE:
        return None
    if name.startswith("attention_prefill"):
        return (name, *shape.chunks[0], None) if len(shape.chunks) == 1 else None
    if name.startswith("attention_decode"):
        return name, len(shape.decodes), sum(shape.decodes), None
    return name, shape.rows if name in PER_ROW else shape.tokens, None, None


def operator_points(
    by_shape: Mapping[Shape, Sequence[TimedRun]], counts: Mapping[str, int], ranks: int
) -> list[ProfilePoint]:
    """Return a point for each operator and size that was timed, of the marked, undisturbed runs.

    A point is of one time that an operator runs; `counts`: how often a stage runs it, if not once.
    Shapes with several chunks say nothing of one: their prefill attention is left out. Tokens met
    in one context only say nothing of how attention grows with the context. They are left out, so
    that the attention of a profile is a grid.
    """
    samples: dict[Key, list[float]] = {}
    for shape, runs in by_shape.items():
        for run in undisturbed(by_marks(runs)[0]):
            for name, seconds in run.seconds.items():
                if (key := _key(name, shape)) is not None:
                    samples.setdefault(key, []).append(seconds / counts.get(name, 1))
    met = Counter(key[:2] for key in samples)
    return [
        point(key, seconds, ranks)
        for key, seconds in samples.items()
        if key[2] is None or met[key[:2]] > 1
    ]


def point(key: Key, seconds: Sequence[float], ranks: int = 1) -> ProfilePoint:
    """Return the median, P10 and P90 of repeats as a point."""
    p10_s, median_s, p90_s = (float(q) for q in np.percentile(seconds, (10, 50, 90)))
    return ProfilePoint(*key, ranks, median_s, p10_s, p90_s, len(seconds))
