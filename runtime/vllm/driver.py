"""The driver of a run that vLLM serves: vLLM's engine asks, and this hands it what comes.

It lets requests in and out, as `runtime.driver` does for our own pipeline, and records what
happens.
"""

from __future__ import annotations

from collections import abc
from typing import Any

from vllm.v1.engine import FinishReason

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.decodes import Sequence
from evenflow.loop import Loop
from evenflow.request import Request
from evenflow.world import World
from runtime.driver import FLUSH_S, LOOK_S, Driver
from runtime.tokens import TextOf
from runtime.vllm.engine import Engine


class EngineLoop(Loop):
    """A loop in which vLLM's engine does the asking; `engine` gets what is admitted."""

    engine: Engine
    text_of: TextOf

    def admit(self, request: Request) -> str | None:
        """Give an arrival to our Batcher and to vLLM."""
        reason = super().admit(request)
        if reason is None:
            self.engine.add(request, self.text_of(request))
        return reason

    def settle(self, now_s: float) -> None:
        """Nothing to do: vLLM asks when it can."""

    def ask(self, now_s: float) -> MicroBatch | None:
        """Return what the policy sends now."""
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
        engine: Engine,
        *,
        text_of: TextOf,
        **options: Any,
    ) -> None:
        super().__init__(world, engines, engine, **options)  # type: ignore[arg-type]
        (self._batcher,) = engines
        self._engine = engine
        self._returned_s = 0.0
        loop = self._loop = EngineLoop(world, engines, self._steps, self, self._recorder)
        loop.engine, loop.text_of = engine, text_of
        self._ask = loop.ask
        engine.attach(self._batcher, self)

    def run(self) -> None:
        """Serve until every request is done, or until `stop`."""
        flushed_s = 0.0
        try:
            while self.goes_on:
                idle_s = min(LOOK_S, max(0.0, self.next_s - self.now_s))
                self._engine.wait(idle_s if self._is_idle else 0.0)
                now_s = self.now_s
                self.let_in(now_s)
                if self._engine.is_busy:
                    self._engine.step()
                if now_s - flushed_s >= FLUSH_S:
                    flushed_s = now_s
                    self.flush()
        finally:
            self.flush()

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to do before an arrival, or before the policy is asked again."""
        waits = self._wake_at_s is not None and not self._batcher.queues.in_flight
        return waits or not self._engine.is_busy

    def ask(self) -> MicroBatch | None:
        """Return what the policy sends now; vLLM's scheduler calls it."""
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
