"""The loop of both worlds: finish the instant, then ask.

All that happens at one instant (requests come, micro-batches return, stage 0 is free again) is
applied first. When the instant is over, its owner calls `settle`, and the policies are asked as
long as the dispatch rule allows it and one of them sends something. The owner is the driver of a
simulation or of a real run: it has the clock, and a pipeline that takes micro-batches. Here is
neither, so what differs between the worlds is not when a policy is asked, nor what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import chain
from typing import Protocol

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch, joined
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.core.world import World
from evenflow.errors import PolicyError
from evenflow.results.recorder import Block, Recorder
from evenflow.results.run import WAIT_REASONS, RunResult


class Pipeline(Protocol):
    """What a loop sends micro-batches down; they come back in the order in which they were sent.

    `is_free`: stage 0 could start one now. `submit` sends one to stage 0. `call_when_free`: have
    `Loop.freed` called when stage 0, which is not free now, will be.
    """

    def is_free(self, now_s: float) -> bool: ...
    def submit(self, batch: MicroBatch) -> None: ...
    def call_when_free(self) -> None: ...


class Owner(Protocol):
    """Who runs a loop, by its clock.

    `changed`: something happened, so `Loop.settle` is to be called when this instant is over.
    `wake`: a policy asks to be asked again at that time. `finished`: these have ended.
    """

    def changed(self, now_s: float) -> None: ...
    def wake(self, at_s: float) -> None: ...
    def finished(self, sequences: list[Sequence], now_s: float) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Loop:
    """Serves a world's requests with the engines of one pipeline.

    The pipeline, or whoever hears of it, calls `returned` for each micro-batch that has left the
    last stage, and `freed` when stage 0 has computed one. `recorder` is told of requests that are
    rejected and of waits; of micro-batches the pipeline tells it, of finished requests the owner.
    """

    def __init__(
        self,
        world: World,
        engines: Collection[Batcher],
        pipeline: Pipeline,
        owner: Owner,
        recorder: Recorder,
    ) -> None:
        self.engines = tuple(engines)
        self._world = world
        self._pipeline = pipeline
        self._recorder = recorder
        self._changed, self._wake, self._finished = owner.changed, owner.wake, owner.finished
        self._turns = deque(self.engines)
        self._others = self.engines[1:]
        self._travelling: deque[list[tuple[Batcher, MicroBatch]]] = deque()  # in order of return
        self._last_wait = ""
        # The dispatch rule: when to ask, and whether it is news that stage 0 is free again.
        eager = world.dispatch == "eager"  # what could be sent then was sent before
        self._is_free = None if eager else pipeline.is_free
        self.freed: Callable[[float], None] = _ignore if eager else self._changed
        self._completed: Callable[[float], None] = self._changed
        self._start(world)

    def _start(self, world: World) -> None:
        """Make what a kind of loop has of its own."""

    # -- what happens at an instant -------------------------------------------------------------

    def admit(self, request: Request) -> str | None:
        """Give an arrival to the engine with the fewest live requests.

        Return None, or why it is rejected.
        """
        reason = self._add(request)
        if reason is not None:
            self._recorder.reject(request, reason)
        return reason

    def _add(self, request: Request) -> str | None:
        return min(self.engines, key=_num_live).add(request)

    def returned(self, now_s: float, stopped: Collection[int] = ()) -> None:
        """Take back what was sent first, of each engine its part; see `Batcher.complete`."""
        finished: list[Sequence] = []
        for engine, batch in self._travelling.popleft():
            finished += engine.complete(batch, now_s, stopped)
        if finished:
            self._finished(finished, now_s)
        self._completed(now_s)

    # -- and when it is over --------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Send micro-batches while the dispatch rule allows it and a policy has one."""
        pipeline, is_free = self._pipeline, self._is_free
        while is_free is None or is_free(now_s):
            batch = self._next(now_s)
            if batch is None:
                return self._record_wait(now_s)
            pipeline.submit(batch)
        for engine in self.engines:
            if engine.can_send():
                return pipeline.call_when_free()
        return self._record_wait(now_s)

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask the engines in turn; the one that was served longest ago goes first."""
        turns = self._turns
        for engine in turns:
            batch = self._of(engine, now_s)
            if batch is not None:
                if self._others:
                    turns.remove(engine)
                    turns.append(engine)
                self._travelling.append([(engine, batch)])
                return batch
        return None

    def _of(self, engine: Batcher, now_s: float) -> MicroBatch | None:
        """Ask one engine."""
        batch = engine.next(now_s)
        if engine.given_up:
            self._finished(engine.given_up, now_s)
            engine.given_up = []
        if batch is not None:
            self._last_wait = ""
        elif (wake_at_s := engine.wake_at_s) is not None:
            if not wake_at_s > now_s:
                raise PolicyError(f"a policy asks at {now_s} s to be woken at {wake_at_s} s")
            self._wake(wake_at_s)
        return batch

    def _record_wait(self, now_s: float) -> None:
        """Record why there is nothing to send; of several engines, the most urgent reason.

        Nothing is worked out where it would not be kept.
        """
        if not self._recorder.whole:
            return
        reason = self.engines[0].wait_reason
        for engine in self._others:
            reason = min(reason, engine.wait_reason, key=WAIT_REASONS.index)
        if reason != self._last_wait:
            self._recorder.wait(now_s, reason)
            self._last_wait = reason

    # -- what came of it ------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return sum(map(_num_live, self.engines))

    def flush(self, more: Block) -> None:
        """Have the recorder put what it has, and `more` columns, where it keeps them."""
        self._recorder.flush(*self._gaps(), more)
        for engine in self.engines:
            engine.queues.gap_s.clear()
            engine.queues.gap_count.clear()

    def result(self) -> RunResult:
        """Return what happened so far."""
        gap_s, gap_count = self._gaps()
        return self._recorder.result(
            gap_s=gap_s,
            gap_count=gap_count,
            max_in_flight=self._world.max_in_flight,
            total_pages=sum(engine.pool.total_pages for engine in self.engines),
            page_tokens=self._world.page_tokens,
            engines=1 if self._world.lock_step else len(self.engines),
            prefix_cache=self._world.prefix_cache,
        )

    def _gaps(self) -> tuple[list[float], list[int]]:
        queues = [engine.queues for engine in self.engines]
        return (
            list(chain(*(each.gap_s for each in queues))),
            list(chain(*(each.gap_count for each in queues))),
        )


class LockStep(Loop):
    """The loop of engines that step together: what all of them send at a time is one micro-batch.

    An engine with nothing to send takes part in the step and waits for the others. Where prompts
    wait until all engines have one, no policy sees any before. Known errors: a prompt for which an
    engine has no place counts as one that it has, and one that was begun goes on.
    """

    def _start(self, world: World) -> None:
        self._most = world.max_in_flight or 1 << 60
        self._sent = 0
        self._wait = world.prompt_wait
        self._without = self._with = 0  # steps that prompts waited for others': not there, there

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask all engines."""
        if len(self._travelling) >= self._most:
            return None
        asked = self._ask_all(now_s, hidden=self._prompts_wait())
        parts = [(engine, part) for engine, part in asked if part is not None]
        if not parts:
            return None
        self._travelling.append(parts)
        batch = joined([part for _, part in parts], self._sent)
        self._sent += 1
        for engine, part in asked:
            if part is None:
                batch.free_pages += engine.pool.free_pages
                batch.kv_tokens += engine.kv.held_tokens
        return batch

    def _ask_all(self, now_s: float, *, hidden: bool) -> list[tuple[Batcher, MicroBatch | None]]:
        """Ask each engine; if who waits is `hidden` and none sends anything, without that."""
        if not hidden:
            return [(engine, self._of(engine, now_s)) for engine in self.engines]
        for engine in self.engines:
            engine.queues.hide_waiting()
        asked = self._ask_all(now_s, hidden=False)
        for engine in self.engines:
            engine.queues.show_waiting()
        if any(part is not None for _, part in asked):
            return asked
        return self._ask_all(now_s, hidden=False)

    def _prompts_wait(self) -> bool:
        """Count a step; say whether prompts wait in it. They do not where any has no decodes."""
        if self._wait is None:
            return False
        queues = [engine.queues for engine in self.engines]
        decode = all(each.ready.num_sequences for each in queues)
        if all(each.waiting or each.partials for each in queues):
            self._without = 0
            if decode:
                self._with = (self._with + 1) % (self._wait.batching_iters + 1)
            return decode and self._with > 0
        self._without += 1
        if decode and self._without < self._wait.timeout_iters:
            return True
        self._without = 0
        return False


class EngineLoop(Loop):
    """The loop of an engine that asks in turns with waiting, as vLLM's does.

    Answers are in a queue of as many places as micro-batches may be in flight. While there is work
    and a place, the policy is asked, and an empty answer takes a place too. Then the loop waits for
    the oldest answer; what arrives meanwhile is seen after it. With more slots than stages, what is
    chosen last is only sent then (SGLang's `pp_async_batch_depth`).
    """

    def _start(self, world: World) -> None:
        (self._engine,) = self.engines
        self._num_places = world.max_in_flight or world.depth
        self._answers: deque[MicroBatch | None] = deque()
        self._back: deque[Collection[int]] = deque()  # what stopped in each that is back
        self._unseen: list[Request] = []
        self._waits = False
        self._completed = _ignore  # the loop itself takes it back, and goes on
        self._sends_late = len(self._engine.queues.slots) > world.depth
        self._unsent: MicroBatch | None = None

    def _add(self, request: Request) -> str | None:
        """Take an arrival, which the engine sees when it does not wait."""
        if not self._waits:
            return self._engine.add(request)
        reason = self._engine.refusal(request)
        if reason is None:
            self._unseen.append(request)
        return reason

    def returned(self, now_s: float, stopped: Collection[int] = ()) -> None:
        """Note that the micro-batch that was sent first is back."""
        self._back.append(stopped)
        self._changed(now_s)

    def settle(self, now_s: float) -> None:
        """Ask and take back in turns, until the loop has to wait or there is no work."""
        while self._take_oldest(now_s) if self._waits else self._ask(now_s):
            pass
        self._record_wait(now_s)

    def _ask(self, now_s: float) -> bool:
        """Fill a place; return whether there is more to do at this instant."""
        queues = self._engine.queues
        if queues.live:
            preemptions, batch = queues.preemptions, self._next(now_s)
            if batch is not None:
                self._unsent = batch
            elif not (queues.in_flight or queues.resting) and (
                self._engine.wake_at_s is not None
                or (queues.moving and queues.preemptions == preemptions)
            ):
                return False  # until KV has moved, or the policy asks to be woken
            self._answers.append(batch)
        elif not self._answers:
            self._next(now_s)  # in vain: the engine is idle, and its journal says so
            return False
        self._waits = len(self._answers) >= self._num_places or not queues.live
        if not (self._waits and self._sends_late):
            self._send(now_s)
        return True

    def _send(self, now_s: float) -> None:
        batch, self._unsent = self._unsent, None
        if batch is not None:
            batch.scheduled_s = now_s
            self._pipeline.submit(batch)

    def _take_oldest(self, now_s: float) -> bool:
        """Take back the oldest answer if it is there; return whether it is."""
        if self._answers[0] is not None and not self._back:
            return False
        while self._unseen:
            self._engine.add(self._unseen.pop(0))
        self._waits = False
        self._send(now_s)
        if self._answers.popleft() is not None:
            super().returned(now_s, self._back.popleft())
        return True

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return super().outstanding + len(self._unseen)


def loop_of(world: World) -> type[Loop]:
    """Return the kind of loop that a world's dispatch rule asks for."""
    if world.lock_step:
        return LockStep
    return EngineLoop if world.dispatch == "engine_loop" else Loop


def _num_live(engine: Batcher) -> int:
    return len(engine.queues.live)


def _ignore(_: float) -> None:
    pass
