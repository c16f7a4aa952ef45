"""vLLM's engine core in this process, its workers in others, and the driver of a run it serves.

vLLM's engine asks, and the driver hands it what comes. It lets requests in and out, as
`runtime.driver` does for our own pipeline, and records what happens. Only for the version that
`evenflow.runtime.vllm` asks for.
"""

from __future__ import annotations

import select
from collections import abc
from contextlib import suppress
from typing import Any, Self

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request as EngineRequest

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.loop import Loop
from evenflow.core.request import Request
from evenflow.core.world import World
from evenflow.errors import UsageError, WorkerError
from evenflow.runtime.driver import LOOK_S, Driver
from evenflow.runtime.tokens import Text, TextOf
from evenflow.runtime.vllm.scheduler import BatcherOwner, PolicyScheduler


class VllmEngine:
    """vLLM's engine with `arguments`, in a `with` block.

    `own_scheduler`: vLLM decides itself, as it does without us. Raises WorkerError when it does not
    start, or a step fails.
    """

    def __init__(self, arguments: dict[str, Any], *, own_scheduler: bool = False) -> None:
        self._arguments = arguments
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(Exception):  # it has failed already, or everything has been returned
            self.core.shutdown()

    def attach(self, batcher: Batcher, owner: BatcherOwner) -> None:
        """Let our Batcher decide: `owner` is asked, and takes micro-batches back."""
        self.core.scheduler.attach(batcher, owner)

    def watch(self, descriptor: int) -> None:
        """Let `wait` end when a descriptor is readable."""
        self._listens.append(descriptor)

    def wait(self, timeout_s: float) -> None:
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
        self.core.abort_requests([str(request_id)])

    @property
    def is_busy(self) -> bool:
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


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


class VllmLoop(Loop):
    """A loop in which vLLM's engine asks; `engine` gets the admitted requests."""

    engine: VllmEngine
    text_of: TextOf

    def admit(self, request: Request) -> str | None:
        """Give an arrival to our Batcher and to vLLM."""
        reason = super().admit(request)
        if reason is None:
            self.engine.add(request, self.text_of(request))
        return reason

    def settle(self, now_s: float) -> None:
        """Do nothing: vLLM asks when it can."""

    def ask(self, now_s: float) -> MicroBatch | None:
        batch = self._next(now_s)
        if batch is None:
            self._record_wait(now_s)
        return batch


class EngineDriver(Driver):
    """Serves the requests of a world with vLLM; its parameters are those of `Driver`.

    `world` is as results show it, with all of vLLM's stages as one.
    """

    def __init__(
        self,
        world: World,
        engines: abc.Sequence[Batcher],
        engine: VllmEngine,
        *,
        text_of: TextOf,
        **options: Any,
    ) -> None:
        super().__init__(world, engines, engine, **options)  # type: ignore[arg-type]
        (self._batcher,) = engines
        self._engine = engine
        self._returned_s = 0.0
        loop = self._loop = VllmLoop(engines, self._steps, self, self._recorder)
        loop.engine, loop.text_of = engine, text_of
        self._ask = loop.ask
        engine.attach(self._batcher, self)

    def _turn(self) -> float:
        idle_s = min(LOOK_S, max(0.0, self.next_s - self.now_s))
        self._engine.wait(idle_s if self._is_idle else 0.0)
        now_s = self.now_s
        self.let_in(now_s)
        if self._engine.is_busy:
            self._engine.step()
        return now_s

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to do before an arrival, or before the policy is asked again."""
        waits = self._wake_at_s is not None and not self._batcher.queues.in_flight
        return waits or not self._engine.is_busy

    def ask(self) -> MicroBatch | None:
        """Return the policy's next micro-batch; vLLM's scheduler calls it."""
        self._wake_at_s = None
        asked_s = self.now_s
        batch = self._ask(asked_s)
        if batch is not None:
            self._steps.driver_s.append(self.now_s - asked_s)
        return batch

    def returned(self, batch: MicroBatch, outputs: list[Any]) -> None:
        """Hand out the tokens of a micro-batch that is back; vLLM's scheduler calls it."""
        now_s = self.now_s
        pairs = [(int(out.request_id), token) for out in outputs for token in out.new_token_ids]
        cut_short = self._hand_out([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        for request_id in cut_short:
            self._engine.abort(request_id)
        stopped = [int(out.request_id) for out in outputs if out.finish_reason is FinishReason.STOP]
        start_s = max(batch.scheduled_s, self._returned_s)
        self._recorder.batch(batch, [batch.scheduled_s, start_s, now_s])
        self._noted["returned_s"].append(now_s)
        self._returned_s = now_s
        self._loop.returned(now_s, sorted({*stopped, *cut_short}))

    def finished(self, sequences: list[Sequence], now_s: float) -> None:
        """Record what has ended, and end in vLLM what the policy gave up; the loop calls it."""
        for seq in sequences:
            if seq.aborted:
                self._engine.abort(seq.request.request_id)
        super().finished(sequences, now_s)

    def _abort(self, request_id: int, reason: str) -> None:
        super()._abort(request_id, reason)
        self._engine.abort(request_id)
