"""vLLM's engine core in this process, its workers in others: requests go in, and it steps.

Only for the version that `runtime.vllm.settings` asks for.
"""

from __future__ import annotations

import select
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request as EngineRequest

from evenflow.batcher import Batcher
from evenflow.errors import UsageError, WorkerError
from evenflow.types import Request
from evenflow.world import World
from runtime.tokens import Text
from runtime.vllm.scheduler import Owner, PolicyScheduler
from runtime.vllm.settings import EngineSettings

CPU_PAGE = 32
"""Tokens of which a block of vLLM's attention on a CPU is a multiple."""


class Engine:
    """vLLM's engine with as many stages and pages as a world, in a `with` block.

    `own_scheduler`: vLLM decides itself, as it does without us. Raises UsageError for what vLLM
    does not take, WorkerError when it does not start, or a step fails.
    """

    def __init__(
        self, settings: EngineSettings, world: World, *, own_scheduler: bool = False
    ) -> None:
        self._arguments = _arguments(settings, world)
        if current_platform.is_cpu():
            self._arguments |= _cpu_arguments(settings, world)
        self._own_scheduler = own_scheduler
        self._listens: list[int] = []

    def __enter__(self) -> Self:
        options = {} if self._own_scheduler else {"scheduler_cls": PolicyScheduler}
        try:
            config = EngineArgs(**self._arguments, **options).create_engine_config()
            self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
            self.core.collective_rpc("make_buffers")
        except Exception as error:
            raise WorkerError(f"vLLM: {_first_line(error)}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(Exception):  # it has failed already, or everything has been returned
            self.core.shutdown()

    def attach(self, batcher: Batcher, owner: Owner) -> None:
        """Have our Batcher decide; `owner` is asked, and told what comes back."""
        self.core.scheduler.attach(batcher, owner)

    def watch(self, descriptor: int) -> None:
        """Let `wait` end when a descriptor is readable."""
        self._listens.append(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait for at most so many seconds for what is watched."""
        select.select(self._listens, [], [], timeout_s)

    def add(self, request: Request, text: Text) -> None:
        """Let a request in; it gets all its tokens unless one of `text.stop_ids` comes."""
        draw = text.draw
        drawn = {"temperature": 0.0}
        if draw is not None:
            top_k = draw.top_k or -1
            drawn = {"top_k": top_k, "top_p": draw.top_p, "seed": draw.seed}
            drawn["temperature"] = draw.temperature
        parameters = SamplingParams(
            max_tokens=request.output_tokens,
            ignore_eos=True,
            stop_token_ids=sorted(text.stop_ids),
            detokenize=False,
            **drawn,
        )
        number = str(request.request_id)
        self.core.add_request(EngineRequest(number, list(text.prompt_ids), parameters, None))

    def abort(self, request_id: int) -> None:
        """End a request, if it is there."""
        self.core.abort_requests([str(request_id)])

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do."""
        return self.core.scheduler.has_requests() or bool(self.core.batch_queue)

    def step(self) -> dict[int, Any]:
        """Let vLLM ask for a micro-batch, or wait for one; return its outputs."""
        try:
            outputs, _ = self.core.step_fn()
        except (UsageError, WorkerError):
            raise
        except Exception as error:
            raise WorkerError(f"vLLM: {self._why(error)}") from error
        return outputs or {}

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"a stage has not answered for {VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS} s"
        died = getattr(self.core.model_executor, "is_failed", False)
        return "a worker died" if died else _first_line(error)


def _arguments(settings: EngineSettings, world: World) -> dict[str, Any]:
    """Return vLLM's options: one of its blocks is the null block, which holds nothing."""
    return {
        "model": settings.folder,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": settings.dtype,
        "load_format": "dummy" if settings.dummy else "auto",
        "max_model_len": world.max_model_len,
        "block_size": world.page_tokens,
        "num_gpu_blocks_override": world.total_pages + 1,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "pipeline_parallel_size": world.depth,
        "worker_extension_cls": "runtime.vllm.buffers.Buffers",
    }


def _cpu_arguments(settings: EngineSettings, world: World) -> dict[str, Any]:
    """Return the options for a machine whose memory is not the workers' alone."""
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


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
