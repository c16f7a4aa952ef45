"""The machine that is measured: its names and versions, and threads held in place.

torch is imported inside the functions that ask it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evenflow.errors import UsageError, require_package

DEVICES = ("cpu", "cuda")


def require_device(device: str) -> None:
    """Raise a UsageError unless torch is there and can compute on `device`."""
    require_package("torch", "measuring", "torch")
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
    """Return the GPU driver's version, "none" on a CPU, "unknown" where nothing tells."""
    if device == "cpu":
        return "none"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    words = text.split("\n", maxsplit=1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def libraries() -> str:
    """Return what computes, with versions."""
    import torch

    return f"torch {torch.__version__}, python {platform.python_version()}"


def _cores() -> list[int]:
    """Return the cores that may be used; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def require_threads(threads: int, stages: int = 1) -> None:
    """Raise a UsageError unless there is a core for each thread of so many stages."""
    most = len(_cores()) or os.cpu_count() or 1
    if not 1 <= threads <= most:
        raise UsageError(f"--threads {threads}: from 1 to the number of cores, {most}, is right")
    if threads * stages > most:
        raise UsageError(
            f"--beside {stages - 1}: {stages} stages of {threads} threads need a core each, and "
            f"there are {most}; at most {most // threads - 1} is right"
        )


def most_beside(device: str, threads: int) -> int:
    """Return how many stages have cores of their own beside the one that is measured."""
    return max(len(_cores()) // threads - 1, 0) if device == "cpu" else 0


def places_beside(count: int, threads: int) -> list[list[int]]:
    """Return the cores of so many stages beside the measured one, which has the last."""
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
