"""Seconds against bytes: from one stage to the next, and all-reduce inside a stage.

On CPU both run over gloo between processes. On CUDA a transfer is a copy within the device where
there is one GPU (several stages share it), NCCL between two where there are more; an all-reduce
needs a GPU a rank. Knows bytes; not what they hold.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from evenflow.costs.profile.file import Point
from evenflow.errors import UsageError
from profiler.timed_runs import Key, point

WARM_UP = 3
TIMEOUT_S = 60.0
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def transfer_points(device: str, sizes_bytes: Sequence[int], repeats: int) -> list[Point]:
    """Measure the way from one stage to the next; seconds are one way."""
    if device == "cuda":
        import torch

        if torch.cuda.device_count() == 1:
            samples = [_copies_s(size, repeats) for size in sizes_bytes]
            return _points("transfer", sizes_bytes, samples)
    return _between_processes(
        "transfer", sizes_bytes, backend=BACKENDS[device], ranks=2, repeats=repeats
    )


def all_reduce_points(
    device: str, ranks: int, sizes_bytes: Sequence[int], repeats: int
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
    return _between_processes(
        "all_reduce", sizes_bytes, backend=BACKENDS[device], ranks=ranks, repeats=repeats
    )


def _copies_s(size_bytes: int, repeats: int) -> list[float]:
    """Return the seconds of copies from one buffer of the GPU to another."""
    import torch

    source = torch.randint(127, (size_bytes,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    seconds = []
    for _ in range(WARM_UP + repeats):
        torch.cuda.synchronize()
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1000)
    return seconds[WARM_UP:]


class Job(NamedTuple):
    """What the processes of a measurement are told."""

    operator: str
    backend: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    folder: str


def _between_processes(
    operator: str, sizes_bytes: Sequence[int], *, backend: str, ranks: int, repeats: int
) -> list[Point]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(operator, backend, ranks, tuple(sizes_bytes), repeats, folder)
        processes = [
            spawn.Process(target=_rank, args=(rank, job), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        _wait(processes, operator, TIMEOUT_S + repeats * len(sizes_bytes))
        samples = json.loads((Path(folder) / "samples.json").read_text(encoding="utf-8"))
    return _points(operator, sizes_bytes, samples, ranks if operator == "all_reduce" else 1)


def _points(
    operator: str, sizes_bytes: Sequence[int], samples: Sequence[Sequence[float]], ranks: int = 1
) -> list[Point]:
    keys: list[Key] = [(operator, None, None, size) for size in sizes_bytes]
    return [point(key, seconds, ranks) for key, seconds in zip(keys, samples, strict=True)]


def _wait(processes: Sequence[Any], operator: str, limit_s: float) -> None:
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
        raise UsageError(f"{operator}: the processes that measure it ended with {codes}")


def _rank(rank: int, job: Job) -> None:
    """Be one process of a measurement; rank 0 writes the seconds of each size."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        job.backend,
        init_method=f"file://{job.folder}/meeting",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    step = _round_trip if job.operator == "transfer" else _all_reduce
    trips = 2 if job.operator == "transfer" else 1
    device = "cuda" if job.backend == "nccl" else "cpu"
    samples = []
    for size in job.sizes_bytes:
        buffer = torch.ones(size, dtype=torch.uint8, device=device)
        seconds = [_timed(step, rank, buffer) for _ in range(WARM_UP + job.repeats)]
        samples.append([value / trips for value in seconds[WARM_UP:]])
    if rank == 0:
        (Path(job.folder) / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
    distributed.destroy_process_group()


def _timed(step: Callable[[int, Any], None], rank: int, buffer: Any) -> float:
    import torch

    start_s = perf_counter()
    step(rank, buffer)
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start_s


def _round_trip(rank: int, buffer: Any) -> None:
    from torch import distributed

    if rank == 0:
        distributed.send(buffer, 1)
        distributed.recv(buffer, 1)
    else:
        distributed.recv(buffer, 0)
        distributed.send(buffer, 0)


def _all_reduce(rank: int, buffer: Any) -> None:
    from torch import distributed

    distributed.all_reduce(buffer)
