"""Time between marks: on the CPU by a clock, of CPU time or of the wall, on CUDA by events.

Knows names and seconds; not what is between the marks. torch is imported only where CUDA is timed.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, sleep, thread_time
from typing import Any, Protocol

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

    It starts after a wait, as a worker does: caches are as the micro-batch before, and what else
    computed meanwhile, have left them.
    `threads` that compute: with one, seconds are those for which it had the CPU, since what other
    processes take meanwhile is no cost of an operator, and a run is disturbed when these were less
    than UNDISTURBED of its time. With several, that cannot be told from their waiting for each
    other, and seconds are those of the clock.
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

    The L2 cache is overwritten before each start: the weights of a stage do not survive in it from
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
