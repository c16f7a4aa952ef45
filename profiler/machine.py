"""The measured machine: its names and versions, pinned threads, and neighbouring stages.

Stages on one CPU share its memory and its last cache. After it waited for its next micro-batch a
stage finds there what the others have left. So others compute on this machine while one is
measured, as those of a pipeline do. Knows no operators and keeps no times. torch is imported inside
the functions that ask it.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from evenflow.children import end_with_parent
from evenflow.errors import UsageError, require_package
from evenflow.profiler.shapes import Shape
from evenflow.profiler.timed_runs import CpuStopwatch, Subject, time_run

DEVICES = ("cpu", "cuda")


def require_device(device: str) -> None:
    """Raise a UsageError unless torch is there and can compute on `device`."""
    require_package("torch", "measuring", "torch safetensors")
    import torch

    if device not in DEVICES:
        raise UsageError(f"--device: unknown {device!r}; known: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")


def device_name(device: str) -> str:
    """Return the device's name as the driver or the kernel gives it."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def driver_version(device: str) -> str:
    """Return the GPU driver's version, "none" on a CPU, "unknown" where nothing says it."""
    if device == "cpu":
        return "none"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    words = text.split("\n", maxsplit=1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def libraries() -> str:
    """Return the libraries that compute, with versions."""
    import torch

    return f"torch {torch.__version__}, python {platform.python_version()}"


def _cores() -> list[int]:
    """Return the cores that may be used; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def require_threads(threads: int, stages: int = 1) -> None:
    """Raise a UsageError unless there is a core for each thread of `stages` stages."""
    most = len(_cores()) or os.cpu_count() or 1
    if not 1 <= threads <= most:
        raise UsageError(f"--threads {threads}: from 1 to the number of cores, {most}, is right")
    if threads * stages > most:
        raise UsageError(
            f"--beside {stages - 1}: {stages} stages of {threads} threads need a core each, and "
            f"there are {most}; at most {most // threads - 1} is right"
        )


def most_beside(device: str, threads: int) -> int:
    """Return how many stages beside the measured one can have separate cores."""
    return max(len(_cores()) // threads - 1, 0) if device == "cpu" else 0


def places_beside(count: int, threads: int) -> list[list[int]]:
    """Return the cores of `count` stages beside the measured one, which has the last cores."""
    cores = _cores()[:-threads]
    return [cores[len(cores) - (each + 1) * threads :][:threads] for each in range(count)]


def placed(cores: Sequence[int]) -> None:
    """Let torch use a thread for each of these cores, and only them."""
    import torch

    torch.set_num_threads(len(cores))
    os.sched_setaffinity(0, cores)


@contextmanager
def pinned(device: str, threads: int) -> Iterator[None]:
    """Let torch use `threads` threads, on as many cores (the last ones); undo it afterwards.

    With a GPU the cores are left free: the driver's own threads need some.
    """
    import torch

    cores = _cores()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if cores and device == "cpu":
        os.sched_setaffinity(0, cores[-threads:])
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if cores:
            os.sched_setaffinity(0, cores)


# -- other stages that compute beside ------------------------------------------------------------

START_S = 120.0
"""The longest that a neighbour may take to import torch and make its weights."""


@contextmanager
def neighbours(
    make: Callable[[], Subject], shapes: Sequence[Shape], places: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Run a stage on each of `places` (cores) meanwhile; it computes the shapes in random order.

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
    """Compute as a neighbour until the parent process ends this process, or exits."""
    end_with_parent()
    rng = np.random.default_rng(os.getpid())
    placed(cores)
    subject, stopwatch = make(), CpuStopwatch(len(cores))
    ready.send(True)
    while True:
        time_run(subject, shapes[int(rng.integers(len(shapes)))], stopwatch, rng, marked=False)
