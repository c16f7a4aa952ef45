"""The driver of a real run: owns the Batcher and the clock, between a front end and a pipeline.

One rule orders what happens together: finish the instant, then ask. All messages and arrivals that
are there are applied, at one time, before the policy is asked at that time.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError, WorkerError
from evenflow.results.run import Recorder, RunResult
from evenflow.types import MicroBatch
from runtime.front import Front, TraceReplay
from runtime.page_tables import StepWriter
from runtime.pipeline import Pipeline
from runtime.serving import Serving
from runtime.tokens import TokenBook
from runtime.wire import Free, Message, Returned

LOOK_S = 0.1
"""How often a driver with nothing to do looks whether it shall stop."""


class _Sent(NamedTuple):
    """A micro-batch in the pipeline, the requests that get a token of it, the seconds it takes."""

    batch: MicroBatch
    sampled: list[int]
    work_s: float


class Heard:
    """When the driver heard of things, in seconds of the run.

    `admitted_s`: of each request, in order of arrival; `freed_s`: of each micro-batch, that stage 0
    has computed it (nothing with a single stage); `returned_s`: that it is back.
    """

    __slots__ = ("admitted_s", "freed_s", "returned_s")

    def __init__(self) -> None:
        self.admitted_s, self.freed_s, self.returned_s = array("d"), array("d"), array("d")


class Driver:
    """Serves the requests of one run. `clock` is the one that the workers' times are of.

    `front` lets requests in, without one those of `serving`. `on_added` is called with (request id,
    why it is refused or None), `on_token` with (request id, token) as tokens come, and says with
    True that the request ends there; `on_done` with the number of requests done. `work_s` has the
    seconds the driver itself spent on each micro-batch, `heard` when it heard of what it answered,
    `origin_s` the clock's time of its start.
    """

    def __init__(
        self,
        serving: Serving,
        batcher: Batcher,
        pipeline: Pipeline,
        *,
        front: Front | None = None,
        on_added: Callable[[int, str | None], None] | None = None,
        on_done: Callable[[int], None] | None = None,
        on_token: Callable[[int, int], bool | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = serving
        self._batcher = batcher
        self._pipeline = pipeline
        self._on_added = on_added
        self._on_done = on_done
        self._on_token = on_token
        self._clock = clock
        self.origin_s = clock()
        replay = TraceReplay(serving.requests, serving.concurrency)
        self._front: Front = replay if front is None else front
        self._recorder = Recorder(serving.depth)
        self._book = None if serving.text_of is None else TokenBook(serving.text_of)
        self._writer = StepWriter(batcher, self._book)
        self._sent: deque[_Sent] = deque()
        self._stage0_free = True
        self._heard_s = 0.0
        self._wake_at_s: float | None = None
        self._last_wait = ""
        self._stops = self._quits = False
        self.work_s = array("d")
        self.heard = Heard()

    def run(self) -> None:
        """Serve until every request is done, or, after `stop`, until the pipeline is empty."""
        while self._goes_on:
            messages = self._pipeline.receive(self._patience_s())
            now_s = self._now_s()
            self._check_alive(messages, now_s)
            changed = [self._apply(message, now_s) for message in messages]
            if not self._stops and (self._admit(now_s) or any(changed) or self._is_woken(now_s)):
                self._settle(now_s)

    def stop(self) -> None:
        """Send nothing more; what is in the pipeline still comes back."""
        self._stops = True

    def quit(self) -> None:
        """Leave `run` at once, whatever is in the pipeline."""
        self._quits = True

    def abandon(self, reason: str) -> None:
        """Record what is still being served as aborted, once `run` has ended."""
        for request_id in list(self._batcher.queues.live):
            self._abort(request_id, reason)

    @property
    def num_done(self) -> int:
        """Requests that need nothing more: finished, aborted or rejected."""
        return self._recorder.num_done

    def result(self) -> RunResult:
        """Return what happened so far."""
        batcher = self._batcher
        return self._recorder.result(
            max_in_flight=self._serving.max_in_flight,
            total_pages=batcher.pool.total_pages,
            page_tokens=batcher.pool.page_tokens,
            gap_s=batcher.queues.gap_s,
            gap_count=batcher.queues.gap_count,
        )

    @property
    def _goes_on(self) -> bool:
        if self._stops or self._quits:
            return bool(self._sent) and not self._quits
        return bool(self._front or self._batcher.queues.live)

    def _now_s(self) -> float:
        return self._clock() - self.origin_s

    # -- waiting --------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        """Return how long there is nothing to do but to listen."""
        times = (self._front.next_s, self._wake_at_s)
        due_s = min((at_s for at_s in times if at_s is not None), default=float("inf"))
        return min(LOOK_S, max(0.0, due_s - self._now_s()))

    def _check_alive(self, messages: list[Message], now_s: float) -> None:
        if messages or not self._sent:
            self._heard_s = now_s
        expected_s = sum(sent.work_s for sent in self._sent)
        if now_s - self._heard_s > self._serving.patience_s + expected_s:
            raise WorkerError(
                f"nothing heard of micro-batch {self._sent[0].batch.batch_id} for "
                f"{now_s - self._heard_s:.1f} s: a worker hangs, or a message was lost"
            )

    # -- an instant: what happened, then what to send -------------------------------------------

    def _apply(self, message: Message, now_s: float) -> bool:
        """Take note of a message; return whether there may be something to send now."""
        if isinstance(message, Returned):
            self._take_back(message, now_s)
            return True
        if isinstance(message, Free):
            self.heard.freed_s.append(now_s)
            self._stage0_free = True
            return self._serving.dispatch == "stage0"
        return False

    def _take_back(self, message: Returned, now_s: float) -> None:
        batch, sampled, _ = self._sent.popleft()
        if (message.batch_id, len(message.tokens)) != (batch.batch_id, len(sampled)):
            raise WorkerError(
                f"micro-batch {message.batch_id} with {len(message.tokens)} tokens returned, "
                f"expected {batch.batch_id} with {len(sampled)}"
            )
        self.heard.returned_s.append(now_s)
        self._recorder.batch(batch, [at_s - self.origin_s for at_s in message.times])
        self._stage0_free |= not self._sent  # with a single stage, nothing else says so
        finished = self._batcher.complete(batch, now_s, self._hand_out(sampled, message.tokens))
        if finished:
            self._recorder.finish(finished)
            self._writer.ended(finished)
            self._left(len(finished))

    def _hand_out(self, request_ids: list[int], tokens: list[int]) -> list[int]:
        """Give everyone the token that came; return the requests that end with it."""
        stopped = [] if self._book is None else self._book.sampled(request_ids, tokens)
        if (on_token := self._on_token) is not None:
            pairs = zip(request_ids, tokens, strict=True)
            stopped += [request_id for request_id, token in pairs if on_token(request_id, token)]
        return stopped

    def _admit(self, now_s: float) -> bool:
        """Let in who is due, and let go who has left; say whether anybody came or went."""
        changed = False
        while (request := self._front.due(now_s)) is not None:
            changed = True
            self.heard.admitted_s.append(now_s)
            reason = self._batcher.add(request)
            if self._on_added is not None:
                self._on_added(request.request_id, reason)
            if reason is not None:
                self._recorder.reject(request, reason)
                self._left(1)
        for request_id in self._front.withdrawn():
            changed |= self._abort(request_id, "the client left")
        return changed

    def _abort(self, request_id: int, reason: str) -> bool:
        """Abort a request, unless it has ended; say whether it had not."""
        seq = self._batcher.queues.live.get(request_id)
        if seq is None or seq.aborted:
            return False
        self._batcher.abort(request_id)
        self._writer.ended([seq])
        self._recorder.abort(seq, reason)
        self._left(1)
        return True

    def _is_woken(self, now_s: float) -> bool:
        return self._wake_at_s is not None and self._wake_at_s <= now_s

    def _left(self, count: int) -> None:
        self._front.left(count)
        if self._on_done is not None:
            self._on_done(self.num_done)

    def _settle(self, now_s: float) -> None:
        """Send micro-batches while the pipeline can take one and the policy has one."""
        self._wake_at_s = None
        while self._stage0_free or self._serving.dispatch == "eager":
            started_s = self._clock()
            batch = self._batcher.next(now_s)
            if batch is None:
                return self._wait(now_s)
            self._send(batch)
            self.work_s.append(self._clock() - started_s)
        if not self._batcher.can_send:
            self._record_wait(now_s)
        return None

    def _send(self, batch: MicroBatch) -> None:
        cost = self._serving.cost(batch)
        step = self._writer.step(batch, cost.activation_bytes, cost.work_s, cost.hops_s)
        sampled = [piece.request_id for piece in step.pieces if piece.last] + step.decodes
        self._pipeline.send(step)
        self._sent.append(_Sent(batch, sampled, sum(cost.work_s) + sum(cost.hops_s)))
        self._stage0_free = False
        self._last_wait = ""

    def _wait(self, now_s: float) -> None:
        self._wake_at_s = self._batcher.wake_at_s
        if self._wake_at_s is not None and not self._wake_at_s > now_s:
            raise PolicyError(f"a policy asks at {now_s} s to be woken at {self._wake_at_s} s")
        self._record_wait(now_s)

    def _record_wait(self, now_s: float) -> None:
        reason = self._batcher.wait_reason
        if reason != self._last_wait:
            self._recorder.wait(now_s, reason)
            self._last_wait = reason
