"""Measurements beside stages: the host's time for a micro-batch, hops, copies, all-reduces.

The host's and the hops are measured while a pipeline serves, as the serving process sees them.
Processes share cores, and a message waits for its reader. They are the driver's whole step, the
inputs on stage 0, and the way from a stage to the next. A step is the policy, Batcher, page tables
and messages. The policy that serves here has few lines; another's time comes on top. An all-reduce
runs over gloo between processes on a CPU, and over NCCL on CUDA, a GPU a rank. Knows no workers and
no sockets.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np

from evenflow.children import end_with_parent, meeting
from evenflow.core.scheduling import Plan, Prefill, View
from evenflow.core.world import World
from evenflow.costs import AffineCost
from evenflow.costs.profile.file import ProfilePoint
from evenflow.errors import UsageError
from evenflow.files import load_tokenizer
from evenflow.profiler.timed_runs import Key, flush_buffer, point
from evenflow.results.run import Around, Floats, RunResult
from evenflow.types import Request

PROMPT_TOKENS = 16
WARM_UP = 5
LEAST_S = 1e-9
"""A time of nothing, as files hold times above 0."""


class Service(NamedTuple):
    """A pipeline of `depth` stages: `serve` serves the requests of a world on it, for real.

    `crosses`: hidden states go from device to device there, as in a deployment.
    """

    depth: int
    serve: Callable[[World], tuple[RunResult, Around]]
    crosses: bool


class Rounds:
    """Policy that computes groups of prompts, then their decodes, one group after the other.

    `phases`: how many requests are in a group, and how many requests there are, in their order.
    """

    def __init__(self, phases: Sequence[tuple[int, int]]) -> None:
        self._phases = deque(phases)
        self._rows = self._left = 0

    def schedule(self, view: View) -> Plan:
        if not self._left and not view.running and self._phases:
            self._rows, self._left = self._phases.popleft()
        if self._left:
            group = islice(view.waiting, self._rows)
            prefills = [Prefill(prompt.request_id, prompt.remaining) for prompt in group]
            self._left -= len(prefills)
            return Plan(prefills=prefills)
        return Plan(decodes=min(self._rows, view.ready_decodes))


def host_points(
    service: Service, rows: Sequence[int], prompts: Sequence[int], *, token_bytes: int, repeats: int
) -> list[ProfilePoint]:
    """Measure micro-batches of `rows` decodes, and of one prompt of `prompts` tokens.

    Points of `cpu_message`, `cpu_schedule` and `cpu_prepare` against rows, of `cpu_prompt` against
    tokens and, where the service crosses, of `transfer`. `token_bytes` of each token cross.
    """
    costs = AffineCost(1e-3, 0.0, service.depth, token_bytes)
    result, around = service.serve(_world(costs, rows, prompts, repeats))
    tokens, decodes = result.prefill_tokens, result.decode_tokens
    prepare_s = around.prepare_s[:, 0]
    by_rows = {
        "cpu_message": around.freed_s,
        "cpu_schedule": around.schedule_s,
        "cpu_prepare": prepare_s,
    }
    alone = np.arange(len(tokens)) > np.flatnonzero(decodes)[-1]
    found = [
        _point((name, count, None, None), seconds[(decodes == count) & (tokens == 0)])
        for name, seconds in by_rows.items()
        for count in rows
    ]
    whole_s = around.freed_s + around.schedule_s + prepare_s
    found += [
        _point(("cpu_prompt", count, None, None), whole_s[alone & (tokens == count)])
        for count in prompts
    ]
    if not service.crosses:
        return found
    crossing_s = around.hops_s[:, 0] + around.prepare_s[:, 1]
    told = np.where(alone, tokens, np.where(tokens == 0, decodes, 0))
    return found + [
        _point(("transfer", None, None, count * token_bytes), crossing_s[told == count])
        for count in sorted({*rows, *prompts})
    ]


def _world(costs: AffineCost, rows: Sequence[int], prompts: Sequence[int], repeats: int) -> World:
    """Return requests that decode in groups, one more than there are stages; then prompts alone."""
    groups, single = costs.depth + 1, WARM_UP + repeats
    steps = -(-single // groups)
    decoding = [(count, groups * count) for count in rows]
    shapes = [(PROMPT_TOKENS, steps + 1)] * sum(count for _, count in decoding)
    shapes += [(tokens, 1) for tokens in prompts for _ in range(single)]
    longest = max(*prompts, PROMPT_TOKENS + steps + 1)
    pages = [
        groups * max(rows) * -(-(PROMPT_TOKENS + steps + 1) // 16),
        groups * -(-(longest + 1) // 16),
    ]
    return World(
        [Request(index, 0.0, *shape) for index, shape in enumerate(shapes)],
        lambda: Rounds([*decoding, *[(1, single)] * len(prompts)]),
        costs,
        costs.depth,
        total_pages=max(pages),
        max_model_len=longest + 1,
        max_in_flight=groups,
    )


def _point(key: Key, seconds: Floats) -> ProfilePoint:
    return point(key, np.maximum(seconds[WARM_UP:], LEAST_S).tolist())


def detokenise_points(tokenizer: Path, rows: Sequence[int], repeats: int) -> list[ProfilePoint]:
    """Measure turning one token of each of `rows` requests into text (cpu_detokenise).

    `tokenizer` is a tokenizer.json. UsageError when it cannot be read, or the package is missing.
    """
    words, rng = load_tokenizer(tokenizer), np.random.default_rng(0)
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


# -- copies and all-reduces -----------------------------------------------------------------------

LINK_WARM_UP = 3
TIMEOUT_S = 60.0
SAMPLES = "samples.json"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def copy_points(sizes_bytes: Sequence[int], repeats: int) -> list[ProfilePoint]:
    """Measure copies within the only GPU; of several, a service measures transfers."""
    import torch

    if torch.cuda.device_count() > 1:
        return []
    samples = [_copies_s(size, repeats) for size in sizes_bytes]
    return _points("device_copy", sizes_bytes, samples)


def all_reduce_points(
    device: str, ranks: int, sizes_bytes: Sequence[int], repeats: int, dtype: str = "float32"
) -> list[ProfilePoint]:
    """Measure all-reduces over `ranks` processes; UsageError where there are too few GPUs."""
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < ranks:
            raise UsageError(
                f"all-reduce over {ranks} ranks needs {ranks} GPUs, {gpus} found (NCCL refuses "
                "two ranks on one); profile without --tensor-parallel, or where there are more"
            )
    job = MeasurementJob(BACKENDS[device], ranks, tuple(sizes_bytes), repeats, dtype)
    samples = _between_processes(job)
    return _points("all_reduce", sizes_bytes, samples, ranks)


def _copies_s(size_bytes: int, repeats: int) -> list[float]:
    """Return the seconds of copies from one buffer of the GPU to another, neither in its cache."""
    import torch

    source = torch.randint(127, (size_bytes,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    seconds, flush = [], flush_buffer()
    for _ in range(LINK_WARM_UP + repeats):
        flush.zero_()
        torch.cuda.synchronize()
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1000)
    return seconds[LINK_WARM_UP:]


class MeasurementJob(NamedTuple):
    """The settings sent to the processes of a measurement."""

    backend: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    dtype: str


def _between_processes(job: MeasurementJob) -> list[list[float]]:
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
) -> list[ProfilePoint]:
    keys: list[Key] = [(operator, None, None, size) for size in sizes_bytes]
    return [point(key, seconds, ranks) for key, seconds in zip(keys, samples, strict=True)]


def _wait(processes: Sequence[Any], limit_s: float) -> None:
    """Wait for all processes; on a failure or a timeout, end the others and raise."""
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


def _rank(rank: int, job: MeasurementJob, folder: str) -> None:
    """Run as one process of a measurement; rank 0 writes the seconds of each size to `folder`."""
    import torch
    from torch import distributed

    end_with_parent(folder)
    torch.set_num_threads(1)
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        job.backend,
        store=distributed.FileStore(meeting(folder), job.ranks),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    device = "cuda" if job.backend == "nccl" else "cpu"
    samples, dtype = [], getattr(torch, job.dtype)
    for size in job.sizes_bytes:
        buffer = torch.ones(-(-size // dtype.itemsize), dtype=dtype, device=device)
        seconds = [_timed_s(buffer) for _ in range(LINK_WARM_UP + job.repeats)]
        samples.append(seconds[LINK_WARM_UP:])
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
