"""What a torch worker is made from, as data: which layers, on which device, how it is connected.

Knows no torch, so that a driver needs none.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from evenflow.errors import UsageError
from evenflow.specs.huggingface import DTYPE_BYTES
from evenflow.specs.model import ModelSpec
from runtime.torch import StageSettings
from runtime.worker import Place, Worker

ONE_GPU = "gloo, ipc or one_process"
"""The transports of several stages on one GPU."""


class TorchSettings(StageSettings):
    """What makes a torch worker, once it is in its own process."""

    __slots__ = ()

    def make(self, place: Place) -> Worker:
        """Load the weights, reserve the KV pages, meet the other stages within `limit_s`."""
        from runtime.torch.worker import make_worker

        return make_worker(place, self)


def cut(layers_per_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers [start, stop) of each stage."""
    stops = [sum(layers_per_stage[: stage + 1]) for stage in range(len(layers_per_stage))]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def torch_settings(
    model: str, spans: Sequence[tuple[int, int]], *, threads: int = 1, **more: Any
) -> list[TorchSettings]:
    """Return the settings of a worker for each span of layers; `more` as in TorchSettings."""
    mailboxes = tuple(deque[Any]() for _ in spans[1:])
    one_process = more.get("transport") == "one_process"
    return [
        TorchSettings(
            model,
            *span,
            cores=cores_of(stage, threads) if more.get("device", "cpu") == "cpu" else (),
            mailboxes=mailboxes if one_process else (),
            **more,
        )
        for stage, span in enumerate(spans)
    ]


def transport_of(wanted: str | None, device: str, stages: int) -> str:
    """Return how hidden states cross between so many stages; UsageError where they cannot so.

    What is wanted, or else gloo on a CPU and nccl on GPUs.
    """
    if device == "cpu":
        if wanted in ("nccl", "sm_partition"):
            raise UsageError(f"workers.transport: {wanted} is for GPUs; {ONE_GPU} is right")
        return wanted or "gloo"
    import torch

    if not torch.cuda.is_available():
        raise UsageError("workers.device: torch finds no CUDA device here; cpu is right")
    if wanted == "sm_partition":
        raise UsageError(
            "workers.transport: torch's green contexts take a number of SMs and not which, so "
            f"stages would share theirs; {ONE_GPU} is right"
        )
    gpus, chosen = torch.cuda.device_count(), wanted or "nccl"
    if chosen == "nccl" and stages > gpus:
        raise UsageError(
            f"workers.transport: nccl needs a GPU for each of the {stages} stages, here are {gpus};"
            f" {ONE_GPU} is right"
        )
    return chosen


def cores_of(stage: int, threads: int) -> tuple[int, ...]:
    """Return the cores of a stage: its own while there are enough, else shared in turn."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    free = sorted(os.sched_getaffinity(0))
    if threads > len(free):
        raise UsageError(f"workers.threads: {threads}, and there are {len(free)} cores")
    return tuple(free[(stage * threads + index) % len(free)] for index in range(threads))


def require_memory(spec: ModelSpec, stages: int, kv_tokens: int, dtype: str) -> None:
    """Raise UsageError unless weights and `kv_tokens` of all stages fit into this machine's memory.

    A tied embedding is there twice with several stages. Known error: activations are left out.
    """
    free_bytes = free_memory_bytes()
    size = DTYPE_BYTES[dtype]
    copies = spec.embedding_parameters if spec.tie_word_embeddings and stages > 1 else 0
    weights_bytes = (spec.num_parameters + copies) * size
    kv_bytes = spec.kv_bytes_per_token() // spec.dtype_bytes * size * kv_tokens
    if free_bytes is not None and weights_bytes + kv_bytes > free_bytes:
        weights, pages, free = (count / 2**30 for count in (weights_bytes, kv_bytes, free_bytes))
        raise UsageError(
            f"{spec.name} does not fit: {weights:.1f} GiB of weights and {pages:.1f} of KV pages, "
            f"{free:.1f} are free; fewer kv.pages, a smaller dtype or a smaller model is right"
        )


def free_memory_bytes() -> int | None:
    """Return how much memory this machine can still give, None where nothing tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
