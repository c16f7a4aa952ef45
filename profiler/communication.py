"""Seconds against bytes of all-reduces inside a stage, and of copies within a GPU.

An all-reduce runs over gloo between processes on a CPU, and over NCCL on CUDA, a GPU a rank. Knows
bytes and their dtype; not what they hold.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from evenflow.costs.profile.file import Point
from evenflow.errors import UsageError
from profiler.timed_runs import Key, point

WARM_UP = 3
TIMEOUT_S = 60.0
SAMPLES = "samples.json"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def copy_points(sizes_bytes: Sequence[int], repeats: int) -> list[Point]:
    """Measure copies within the one GPU there is, as `device_copy`; nothing where there are more,
    between which a pipeline that serves measures transfers."""
    import torch

    if torch.cuda.device_count() > 1:
        return []
    samples = [_copies_s(size, repeats) for size in sizes_bytes]
    return _points("device_copy", sizes_bytes, samples)


def all_reduce_points(
    device: str, ranks: int, sizes_bytes: Sequence[int], repeats: int, dtype: str = "float32"
) -> list[Point]:
    """Measure all-reduces over `ranks` processes; UsageError where there are too few GPUs."""
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < ranks:
            raise UsageError(
                f"all-reduce over {ranks} ranks needs {ranks} GPUs, {gpus} found (NCCL refuses "
                "two ranks on one); profile without --tensor-parallel, or where there are more"
            )
    job = Job(BACKENDS[device], ranks, tuple(sizes_bytes), repeats, dtype)
    samples = _between_processes(job)
    return _points("all_reduce", sizes_bytes, samples, ranks)


def _copies_s(size_bytes: int, repeats: int) -> list[float]:
    """Return the seconds of copies from one buffer of the GPU to another, neither in its cache."""
    import torch

    from profiler.stopwatch import flush_buffer

    source = torch.randint(127, (size_bytes,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    seconds, flush = [], flush_buffer()
    for _ in range(WARM_UP + repeats):
        flush.zero_()
        torch.cuda.synchronize()
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1000)
    return seconds[WARM_UP:]


class Job(NamedTuple):
    """What the processes of a measurement are told."""

    backend: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    dtype: str


def _between_processes(job: Job) -> list[list[float]]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=_rank, args=(rank, job, folder), daemon=True)
            for rank in range(job.ranks)
        ]
        for process in processes:
            process.start()
        _wait(processes, TIMEOUT_S + job.repeats * len(job.sizes_bytes))
        samples: list[list[float]] = json.loads((Path(folder) / SAMPLES).read_text("utf-8"))
    return samples


def _points(
    operator: str, sizes_bytes: Sequence[int], samples: Sequence[Sequence[float]], ranks: int = 1
) -> list[Point]:
    keys: list[Key] = [(operator, None, None, size) for size in sizes_bytes]
    return [point(key, seconds, ranks) for key, seconds in zip(keys, samples, strict=True)]


def _wait(processes: Sequence[Any], limit_s: float) -> None:
    """Wait for all; when one fails or time is up, end the others and say so."""
    deadline_s = monotonic() + limit_s
    while any(process.is_alive() for process in processes):
        failed = any(process.exitcode for process in processes)
        if failed or monotonic() > deadline_s:
            break
        processes[0].join(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    if any(code != 0 for code in codes):
        raise UsageError(f"all_reduce: the processes that measure it ended with {codes}")


def _rank(rank: int, job: Job, folder: str) -> None:
    """Be one process of a measurement; rank 0 writes the seconds of each size to `folder`."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        job.backend,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    device = "cuda" if job.backend == "nccl" else "cpu"
    samples, dtype = [], getattr(torch, job.dtype)
    for size in job.sizes_bytes:
        buffer = torch.ones(-(-size // dtype.itemsize), dtype=dtype, device=device)
        seconds = [_timed_s(buffer) for _ in range(WARM_UP + job.repeats)]
        samples.append(seconds[WARM_UP:])
    if rank == 0:
        (Path(folder) / SAMPLES).write_text(json.dumps(samples), encoding="utf-8")
    distributed.destroy_process_group()


def _timed_s(buffer: Any) -> float:
    """Return the seconds of an all-reduce of a buffer."""
    import torch

    start_s = perf_counter()
    torch.distributed.all_reduce(buffer)
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start_s
