"""Settings of a torch worker, as data: which layers, on which device, how it is connected.

Knows no torch, so that a driver needs none.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate, pairwise
from multiprocessing import get_context
from typing import Any

from evenflow.errors import UsageError
from evenflow.runtime.torch import TorchSettings
from evenflow.specs.deployment import require_shareable
from evenflow.specs.gpu import GIB
from evenflow.specs.modelspec import ModelSpec
from evenflow.specs.precision import DTYPE_BYTES

ONE_GPU = "gloo or one_process"
"""The transports of several stages on one GPU."""


def cut(layers_per_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers [start, stop) of each stage."""
    return list(pairwise(accumulate(layers_per_stage, initial=0)))


def torch_settings(
    model: str, spans: Sequence[tuple[int, int]], *, threads: int = 1, first: int = 0, **more: Any
) -> list[TorchSettings]:
    """Return the settings of a worker for each span of layers, which several ranks may share.

    `first`: how many workers have cores before theirs. `more` as in TorchSettings.
    """
    mailboxes = tuple(deque[Any]() for _ in spans[1:])
    one_process = more.get("transport") == "one_process"
    return [
        TorchSettings(
            model,
            *span,
            cores=cores_of(first + worker, threads) if more.get("device", "cpu") == "cpu" else (),
            mailboxes=mailboxes if one_process else (),
            **more,
        )
        for worker, span in enumerate(spans)
    ]


def require_divisible(spec: ModelSpec, ranks: int) -> None:
    """Raise UsageError unless `ranks` tensor-parallel ranks have equal parts of a model."""
    require_shareable(spec, ranks)
    columns = "expert_intermediate_size" if spec.num_experts else "intermediate_size"
    for key in (columns, "vocab_size"):
        if (size := getattr(spec, key)) % ranks:
            raise UsageError(
                f"tensor_parallel: {ranks} ranks cannot share {spec.name}'s {key} of {size} evenly;"
                " a divisor of it is right"
            )


def transport_of(wanted: str | None, device: str, stages: int, ranks: int = 1) -> str:
    """Return the transport of hidden states between `stages` stages; UsageError if impossible.

    `wanted`, or else gloo on a CPU and nccl on GPUs.
    """
    if wanted == "one_process" and ranks > 1:
        raise UsageError(
            "workers.transport: the ranks of tensor_parallel are processes; gloo is right"
        )
    if device == "cpu":
        if wanted == "nccl":
            raise UsageError(f"workers.transport: nccl is for GPUs; {ONE_GPU} is right")
        return wanted or "gloo"
    import torch

    if not torch.cuda.is_available():
        raise UsageError("workers.device: torch finds no CUDA device here; cpu is right")
    gpus, chosen = torch.cuda.device_count(), wanted or "nccl"
    if chosen == "nccl" and stages * ranks > gpus:
        raise UsageError(
            f"workers.transport: nccl needs a GPU for each of the {stages * ranks} stages and "
            f"ranks, here are {gpus}; {ONE_GPU} is right"
        )
    return chosen


def sharing(settings: Sequence[TorchSettings]) -> list[str]:
    """Return how stages that share a GPU slow each other, in a line; none where no two do.

    Costs are of a stage that computes alone. Processes take turns: the GPU's time is sliced between
    them, unless NVIDIA's MPS serves them. No two stages then compute at once.
    """
    first, stages = settings[0], len(settings)
    if first.device == "cpu":
        return []
    import torch

    if stages <= (gpus := torch.cuda.device_count()):
        return []
    how = f"{stages} stages of {first.transport} on {gpus} GPU: processes take turns there"
    if first.transport == "one_process":
        how = f"{stages} stages on {gpus} GPU: each is slower while another computes"
    return [f"{how}; costs are of a stage that computes alone"]


def cores_of(worker: int, threads: int) -> tuple[int, ...]:
    """Return the cores of a worker: its own while there are enough, else shared in turn."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    free = sorted(os.sched_getaffinity(0))
    if threads > len(free):
        raise UsageError(f"workers.threads: {threads}, and there are {len(free)} cores")
    return tuple(free[(worker * threads + index) % len(free)] for index in range(threads))


def require_memory(
    spec: ModelSpec,
    spans: Sequence[tuple[int, int]],
    kv_tokens: int,
    dtype: str,
    free_bytes: Sequence[int],
    *,
    ranks: int = 1,
) -> None:
    """Raise UsageError unless weights and `kv_tokens` of all workers fit into the memory they have.

    `spans` has the layers of each, for each of a stage's `ranks`. `free_bytes` of each device;
    workers are on them in turn, and workers on one device divide it. Known error: activations are
    left out, and on a GPU what CUDA itself takes in each process.
    """
    size = DTYPE_BYTES[dtype]
    for device, free in enumerate(free_bytes):
        here = spans[device :: len(free_bytes)]
        weights = size * sum(_parameters(spec, *span, ranks) for span in here)
        layers = sum(stop - start for start, stop in here)
        pages = spec.kv_bytes_per_token(layers, ranks) // spec.dtype_bytes * size * kv_tokens
        if weights + pages > free:
            where = f" on GPU {device}" if len(free_bytes) > 1 else ""
            raise UsageError(
                f"{spec.name} does not fit: {weights / GIB:.1f} GiB of weights and "
                f"{pages / GIB:.1f} of KV pages, {free / GIB:.1f} are free{where}; fewer kv.pages, "
                "a smaller dtype or a smaller model is right"
            )


def _parameters(spec: ModelSpec, start: int, stop: int, ranks: int) -> int:
    """Return the parameters of layers [start, stop) and the ends that they have, on one rank.

    A tied embedding is there twice with several stages.
    """
    first, last = start == 0, stop == spec.num_layers
    ends = first + last - (first and last and spec.tie_word_embeddings)
    return (
        (stop - start) * spec.layer_parameters(ranks)
        + ends * spec.embedding_parameters // ranks
        + last * spec.hidden_size
    )


def free_bytes(device: str) -> list[int]:
    """Return the free bytes of each memory that workers are in; nothing where unknown.

    Of GPUs another process asks: to ask takes some hundred MiB of each, as long as a process lives.
    """
    if device == "cuda":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(_ask_gpus).result()
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return [int(sizes["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError, ValueError):
        return []


def _ask_gpus() -> list[int]:
    import torch

    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
