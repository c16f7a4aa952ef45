"""The driver of a real run: the clock of a loop, between a front end and a pipeline of workers.

An instant is over when all messages and arrivals that are there have been applied, at one time. The
loop asks then, at that time.
"""

from __future__ import annotations

import time
from array import array
from collections import abc, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.core.routing import router_of
from evenflow.core.world import World
from evenflow.engines.queues import ahead_of, sent_of
from evenflow.errors import WorkerError
from evenflow.results.recorder import Block, Blocks, Recorder
from evenflow.results.run import Floats, RunResult
from evenflow.runtime.front import Front, TraceReplay
from evenflow.runtime.page_tables import StepWriter
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.tokens import TextOf, TokenBook
from evenflow.runtime.wire import Free, Message, Returned
from evenflow.sums import plain_sum

LOOK_S = 0.1
"""How often a driver with nothing to do looks whether it shall stop."""

FLUSH_S = 1.0
"""How often what was recorded is put where it outlives the driver, and out of its memory."""


class _Sent(NamedTuple):
    """A micro-batch in the pipeline: its step, the requests that get a token of it, its seconds."""

    batch: MicroBatch
    number: int
    sampled: list[int]
    work_s: float


class Heard(NamedTuple):
    """Times at which the driver received messages, in seconds of the run.

    `admitted_s`: of each request, in order of arrival. `freed_s`: of each micro-batch, that stage 0
    has computed it (nothing with a single stage). `returned_s`: that it is back. `driver_s` are the
    seconds that the driver itself spent on each.
    """

    admitted_s: Floats
    freed_s: Floats
    returned_s: Floats
    driver_s: Floats


class _Steps:
    """Pipeline of the loop: micro-batches are sent as steps, and return in order.

    `driver_s` has the seconds of `clock` that the driver spent on each, from when it was `asked_s`.
    """

    def __init__(
        self, world: World, pipeline: WorkerPipeline, writer: StepWriter, clock: Callable[[], float]
    ) -> None:
        self._costs = world.costs
        self._per_token_s = [hop.per_token_s for hop in world.hops] or [0.0] * (world.depth - 1)
        self._pipeline = pipeline
        self._writer = writer
        self._clock = clock
        self.stage0_free = True
        self.sent: deque[_Sent] = deque()
        self.asked_s = 0.0
        self.driver_s = array("d")

    def is_free(self, now_s: float) -> bool:
        """Say whether stage 0 could start a micro-batch now."""
        return self.stage0_free

    def call_when_free(self) -> None:
        """Do nothing: a message comes whenever stage 0 is free."""

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch to stage 0, with the times that emulated workers take for it."""
        work = batch if batch.charged is None else batch.charged
        times_s = self._costs.times(work)
        hops_s = [seconds * batch.num_tokens for seconds in self._per_token_s]
        step = self._writer.step(batch, int(self._costs.transfer_bytes(work)), times_s, hops_s)
        sampled = [piece.request_id for piece in step.pieces if piece.last] + step.decodes
        self._pipeline.send(step)
        self.sent.append(
            _Sent(batch, step.batch_id, sampled, plain_sum(times_s) + plain_sum(hops_s))
        )
        self.stage0_free = False
        done_s = self._clock()
        self.driver_s.append(done_s - self.asked_s)
        self.asked_s = done_s

    def lose(self, writer: StepWriter) -> None:
        """Drop the micro-batches in flight; `writer` writes the steps from now on."""
        self.sent.clear()
        self.stage0_free = True
        self._writer = writer

    def freed(self, message: Free) -> None:
        """Note that stage 0 has computed a micro-batch; news of the one before may come later."""
        self.stage0_free |= not self.sent or message.batch_id == self.sent[-1].number

    def take_back(self, message: Returned) -> _Sent:
        """Return the micro-batch that a message brings back; WorkerError when another was due."""
        sent = self.sent.popleft()
        expected = sent.number, len(sent.sampled)
        if (message.batch_id, len(message.tokens)) != expected:
            raise WorkerError(
                f"micro-batch {message.batch_id} with {len(message.tokens)} tokens returned, "
                f"expected {expected[0]} with {expected[1]}"
            )
        self.stage0_free |= not self.sent  # with a single stage, nothing else says so
        return sent


class System:
    """System that `drivers` serve together, by one thread; a single driver is its own."""

    drivers: abc.Sequence[Driver]
    stops: bool = False
    quits: bool = False

    @property
    def next_s(self) -> float:
        """Time (s) of the next event that no driver knows of; infinite: none."""
        return float("inf")

    @property
    def goes_on(self) -> bool:
        return any(driver.busy if self.stops else driver.goes_on for driver in self.drivers)

    @property
    def num_done(self) -> int:
        return sum(driver.num_done for driver in self.drivers)

    def let_in(self, now_s: float) -> None:
        """Admit the requests that are due."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write out what was recorded since the last flush."""
        for driver in self.drivers:
            driver.flush()

    def run(self) -> None:
        """Serve until nothing is left to do or, after `stop`, in flight.

        An instant is over when all drivers have read their messages and the system has admitted the
        due requests. No decision has then changed anything for another driver.
        """
        for other in self.drivers[1:]:
            self.drivers[0].pipeline.watch(other.pipeline.results)
        flushed_s = 0.0
        try:
            while self.goes_on and not self.quits:
                if (now_s := self._turn()) - flushed_s >= FLUSH_S:
                    flushed_s = now_s
                    self.flush()
        finally:
            self.flush()

    def _turn(self) -> float:
        """Wait for the next message or event; serve that instant, and return its time (s)."""
        drivers = first, *others = self.drivers
        due_s = min(self.next_s, *(driver.next_s for driver in drivers))
        idle_s = min(LOOK_S, max(0.0, due_s - self.now_s))
        heard = [first.pipeline.receive(idle_s), *(o.pipeline.receive(0.0) for o in others)]
        now_s = self.now_s
        for driver, messages in zip(drivers, heard, strict=True):
            driver.hear(messages, now_s)
        if not self.stops:
            self.let_in(now_s)
            while due := [driver for driver in drivers if driver.is_due(now_s)]:
                for driver in due:
                    driver.decide(now_s)
        return now_s

    @property
    def now_s(self) -> float:
        """The time of the run, which is that of the first driver."""
        return self.drivers[0].now_s

    def stop(self) -> None:
        """Send nothing more; what is in the pipelines still comes back."""
        self.stops = True

    def quit(self) -> None:
        """Leave `run` at once, even with micro-batches in the pipelines."""
        self.quits = True


class Driver(System):
    """Serves the requests of a world in real time by the engines of one pipeline.

    `clock` is that of the workers' times, `origin_s` its time at the start. `front` lets requests
    in; without one, those of the world come. `text_of` gives the tokens that workers compute with;
    `book` has them where several drivers share the requests. The run fails when no message of a
    micro-batch comes for `patience_s` seconds longer than all those in flight take. Called are
    `on_done` with the number of requests done, and `on_token` with (request id, token). What
    happens goes to `blocks` every FLUSH_S.
    """

    def __init__(
        self,
        world: World,
        engines: abc.Sequence[Batcher],
        pipeline: WorkerPipeline,
        *,
        text_of: TextOf | None = None,
        book: TokenBook | None = None,
        patience_s: float = 30.0,
        front: Front | None = None,
        on_done: Callable[[int], None] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        blocks: Blocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = engines
        self.pipeline = pipeline
        self._patience_s = patience_s
        self._facts = world.facts
        self._on_done = on_done
        self._on_token = on_token
        self._clock = clock
        self.origin_s = clock()
        replay = TraceReplay(world.requests, world.concurrency)
        self._front: Front = replay if front is None else front
        self._recorder = Recorder(world.depth, blocks)
        self._book = book if text_of is None else TokenBook(text_of)
        self._writer = StepWriter(engines, self._book)
        self._steps = _Steps(world, pipeline, self._writer, clock)
        self._loop = world.start(engines, self._steps, self, self._recorder)
        self._heard_s = 0.0
        self._changed = False
        self._wake_at_s: float | None = None
        self.drivers = [self]
        self._noted = {name: array("d") for name in Heard._fields}
        self._noted["driver_s"] = self._steps.driver_s

    def hear(self, messages: list[Message], now_s: float) -> None:
        """Apply the messages that have come at an instant."""
        self._check_alive(messages, now_s)
        for message in messages:
            self._apply(message, now_s)

    def is_due(self, now_s: float) -> bool:
        """Say whether anything happened at this instant, which makes the policy due."""
        return self._changed or (self._wake_at_s is not None and self._wake_at_s <= now_s)

    def decide(self, now_s: float) -> None:
        """The instant is over: ask the policy."""
        self._changed = False
        self._wake_at_s = None
        self._steps.asked_s = self._clock()
        self._loop.settle(now_s)

    def admit(self, request: Request, now_s: float) -> None:
        self._changed = True
        self._noted["admitted_s"].append(now_s)
        reason = self._loop.admit(request)
        if reason is not None:
            self._front.refused(request.request_id, reason)
            self._left(1)

    def let_in(self, now_s: float) -> None:
        """Admit due requests, and abort those of clients that left."""
        while (request := self._front.due(now_s)) is not None:
            self.admit(request, now_s)
        for request_id in self._front.withdrawn():
            self._abort(request_id, "the client left")

    def flush(self) -> None:
        """Write out what was recorded since the last flush."""
        noted: Block = {name: np.array(values) for name, values in self._noted.items()}
        self._loop.flush({**noted, "flushed_s": np.array([self.now_s])})
        for values in self._noted.values():
            del values[:]

    def abandon(self, reason: str) -> None:
        """Record what is still being served as aborted, once `run` has ended."""
        for engine in self.engines:
            for request_id in list(engine.queues.live):
                self._abort(request_id, reason)

    @property
    def num_done(self) -> int:
        """Number of requests that finished, were aborted or rejected."""
        return self._recorder.num_done

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return sum(engine.pool.free_pages for engine in self.engines)

    @property
    def heard(self) -> Heard:
        """Times at which the driver received what it answered, once `run` has ended."""
        return Heard(*map(self._recorder.column, Heard._fields))

    def result(self) -> RunResult:
        return self._loop.result(**self._facts)

    @property
    def goes_on(self) -> bool:
        if self.stops:
            return self.busy
        return bool(self._front or self.outstanding)

    @property
    def busy(self) -> bool:
        return bool(self._steps.sent)

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._loop.outstanding

    @property
    def now_s(self) -> float:
        return self._clock() - self.origin_s

    # -- waiting --------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """Time (s) of the next known arrival or wake-up; infinite: none."""
        times = (self._front.next_s, self._wake_at_s)
        return min((at_s for at_s in times if at_s is not None), default=float("inf"))

    def _check_alive(self, messages: list[Message], now_s: float) -> None:
        sent = self._steps.sent
        if messages or not sent:
            self._heard_s = now_s
        expected_s = plain_sum(step.work_s for step in sent)
        if now_s - self._heard_s > self._patience_s + expected_s:
            raise WorkerError(
                f"nothing heard of micro-batch {sent[0].number} for "
                f"{now_s - self._heard_s:.1f} s: a worker hangs, or a message was lost"
            )

    # -- an instant: what happened, then what to send -------------------------------------------

    def _apply(self, message: Message, now_s: float) -> None:
        if isinstance(message, Returned):
            self._take_back(message, now_s)
        elif isinstance(message, Free):
            self._noted["freed_s"].append(now_s)
            self._steps.freed(message)
            self._loop.freed(now_s)

    def _take_back(self, message: Returned, now_s: float) -> None:
        batch, _, sampled, _ = self._steps.take_back(message)
        self._noted["returned_s"].append(now_s)
        self._recorder.batch(batch, [at_s - self.origin_s for at_s in message.times])
        pairs = [*zip(sampled, message.tokens, strict=True)]
        if (ahead := ahead_of(batch)) is not None:  # what others get has been computed in vain
            preempted = (seq.request.request_id for seq, _ in sent_of(batch).preempted)
            wanted = {*ahead, *preempted}
            pairs = [pair for pair in pairs if pair[0] in wanted]
        self._loop.returned(now_s, self._hand_out(*zip(*pairs, strict=True)) if pairs else [])

    def finished(self, sequences: list[Sequence], now_s: float) -> None:
        self._recorder.finish(sequences)
        for seq in sequences:
            if seq.aborted:
                self._front.given_up(seq.request.request_id)
        self._writer.ended(sequences)
        self._left(len(sequences))

    def _hand_out(self, request_ids: abc.Sequence[int], tokens: abc.Sequence[int]) -> list[int]:
        """Give each request its token; return the requests that end with it."""
        stopped = [] if self._book is None else self._book.sampled(request_ids, tokens)
        for request_id, token in zip(request_ids, tokens, strict=True):
            if self._on_token is not None:
                self._on_token(request_id, token)
            if self._front.token(request_id, token) and request_id not in stopped:
                stopped.append(request_id)
        return stopped

    def _abort(self, request_id: int, reason: str) -> None:
        """Abort a request, unless it has ended."""
        for engine in self.engines:
            seq = engine.queues.live.get(request_id)
            if seq is not None and not seq.aborted:
                self._changed = True
                engine.abort(request_id)
                self._writer.ended([seq])
                self._recorder.abort(seq, reason)
                self._left(1)

    def _left(self, count: int) -> None:
        self._front.left(count)
        if self._on_done is not None:
            self._on_done(self.num_done)

    def changed(self, now_s: float) -> None:
        """Note a change: the policy is asked once all messages are applied; the loop calls it."""
        self._changed = True

    def wake(self, at_s: float) -> None:
        """Note that a policy wants to be asked again at that time; the loop calls it."""
        self._wake_at_s = at_s


class Replicas(System):
    """Pipelines of one kind, each with its driver: the world's router distributes the requests.

    `drives` make the drivers, given the front that they share and a callback for finished requests.
    """

    def __init__(
        self,
        world: World,
        drives: abc.Iterable[Callable[..., Driver]],
        on_done: Callable[[int], None] | None = None,
    ) -> None:
        self._front = TraceReplay(world.requests, world.concurrency)
        self._on_done = on_done
        self.drivers = [drive(front=self._front, on_done=self._tell) for drive in drives]
        self._choose = router_of(world.router, self.drivers)
        for driver in self.drivers:
            driver.origin_s = self.drivers[0].origin_s

    def let_in(self, now_s: float) -> None:
        """Pass due requests to the drivers that the router chooses."""
        while (request := self._front.due(now_s)) is not None:
            self._choose(request).admit(request, now_s)

    def _tell(self, _: int) -> None:
        if self._on_done is not None:
            self._on_done(self.num_done)
