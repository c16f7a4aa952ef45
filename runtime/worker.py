"""A worker process: one stage of the pipeline, whatever computes in it.

One thread takes messages in and prepares inputs, the other computes: the inputs of the next
micro-batch are made meanwhile. A step that comes with its activation is prepared by the thread that
computes. Knows sockets and the order of things; no model.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import zmq

from evenflow.children import end_with_parent
from evenflow.errors import WorkerError
from evenflow.runtime import wire
from evenflow.user_code import reason_of

LOOK_S = 0.25
"""How often a worker with nothing to do looks whether it shall end."""

BEAT_S = 1.0
"""How often a worker says that it runs; its intake does, so a long micro-batch delays none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place: its stage of `depth`, the page pool, the folder of the sockets.

    It is one of the `ranks` of its stage. Each hands on to that of its rank in the next stage; the
    first speaks for all.
    """

    stage: int
    depth: int
    page_tokens: int
    total_pages: int
    folder: str
    rank: int = 0
    ranks: int = 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.depth - 1

    @property
    def number(self) -> int:
        """Its number among all the `workers`, stage by stage."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        return self.depth * self.ranks


class Executed(NamedTuple):
    """Times of a micro-batch: its input was there, it was computed; and what came of it.

    `num_bytes` go to the next stage; `tokens` come out of the last one.
    """

    available_s: float
    start_s: float
    end_s: float
    num_bytes: int
    tokens: list[int]


class Worker(Protocol):
    """The computation of a stage. Micro-batches come in order, to each of the methods.

    `prepare` makes the inputs of a step, `fetch` returns when what comes with an activation is
    here. Both run in another thread, while an earlier micro-batch computes. Where steps come with
    activations, just before `execute`, which computes it. Stage 0 has no activation. `received_s`
    is when the stage had all it needs.
    """

    def prepare(self, step: wire.Step) -> Any: ...

    def fetch(self, activation: wire.Activation) -> None: ...

    def execute(
        self, prepared: Any, activation: wire.Activation | None, received_s: float
    ) -> Executed: ...


@runtime_checkable
class KvHolder(Protocol):
    """A holder of keys and values for another pool; called from another thread.

    `read_kv` returns the keys and values that a message names, `write_kv` stores those of one.
    """

    def read_kv(self, move: wire.Move) -> bytes: ...

    def write_kv(self, cached: wire.Cached, data: bytes) -> None: ...


class WorkerSettings(Protocol):
    """Settings that make a worker, in its own process."""

    def make(self, place: Place) -> Worker: ...


class _Work(NamedTuple):
    """A micro-batch that a stage can compute, and since when it can.

    `step` are the bytes of its step, where they go on to the next stage.
    """

    batch_id: int
    prepared: Any
    activation: wire.Activation | None
    received_s: float
    step: Sequence[bytes] = ()


class _Intake(threading.Thread):
    """Receives messages, and queues their work.

    Steps that come with their activations, or from the driver on stage 0, are queued with the
    step's bytes. None in the queue ends the worker, because the driver said so or because of
    `failure`.
    """

    def __init__(self, context: wire.Context, place: Place, worker: Worker) -> None:
        super().__init__(name="intake", daemon=True)
        self.work: queue.SimpleQueue[_Work | tuple[wire.Step | wire.Activation, bytes] | None]
        self.work = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.connected = threading.Event()
        self._ends = threading.Event()
        self._place = place
        self._worker = worker
        number, folder = place.number, place.folder
        heard = [wire.step_address(folder, number)]
        if place.stage:
            heard.append(wire.hop_address(folder, number))
        self._sockets = [wire.open_socket(context, zmq.PULL, address) for address in heard]
        self._driver = wire.open_socket(context, zmq.PUSH, wire.driver_address(folder))
        self._context = context
        self._peers: dict[str, zmq.Socket[bytes]] = {}  # workers of other pools
        self._silent = len(self._sockets)  # sockets without a connection yet
        self._early: deque[wire.Activation] = deque()  # without their steps: sockets know no order
        self._ahead: deque[_Work] = deque()  # prepared, and without their activations
        self._beat_s = 0.0

    def run(self) -> None:
        try:
            self._take_all()
        except Exception as error:
            self.failure = error
        finally:
            self.work.put(None)
            self.connected.set()
            for socket in (*self._sockets, self._driver, *self._peers.values()):
                socket.close()

    def end(self) -> None:
        """End the thread, and wait until it has."""
        self._ends.set()
        self.join()

    def _take_all(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._ends.is_set():
            self._beat()
            for socket, _ in poller.poll(int(LOOK_S * 1000)):
                received_s = time.monotonic()
                message, *data = socket.recv_multipart()
                if not self._take(wire.decode(message), received_s, data):
                    return

    def _take(self, message: wire.Message, received_s: float, data: list[bytes]) -> bool:
        """Pass a message on to its reader; return whether another may follow."""
        if data and isinstance(message, (wire.Step, wire.Activation)):
            self.work.put((message, data[0]))
        elif isinstance(message, wire.Step):
            work = _Work(message.batch_id, self._worker.prepare(message), None, received_s)
            if self._place.stage:
                self._ahead.append(work)
            else:
                self.work.put(work)
        elif isinstance(message, wire.Activation):
            self._early.append(message)
        elif isinstance(message, (wire.Move, wire.Cached)):
            assert isinstance(self._worker, KvHolder)
            if isinstance(message, wire.Cached):
                self._worker.write_kv(message, data[0])
                self._driver.send(wire.encode(wire.Arrived()))
            else:
                self._hand_over(message, self._worker.read_kv(message))
        elif isinstance(message, wire.Ready):
            self._silent -= 1
            if not self._silent:
                self.connected.set()
        else:
            return False
        while self._early and self._ahead:
            activation, work = self._early.popleft(), self._ahead.popleft()
            self._worker.fetch(activation)
            self.work.put(work._replace(activation=activation, received_s=time.monotonic()))
        return True

    def _hand_over(self, move: wire.Move, data: bytes) -> None:
        if (peer := self._peers.get(move.address)) is None:
            peer = self._peers[move.address] = wire.open_socket(
                self._context, zmq.PUSH, move.address
            )
        peer.send_multipart([wire.encode(wire.Cached(move.to_start, move.to_pages)), data])

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._driver.send(wire.encode(wire.Beat(self._place.number)))


class _Outlet:
    """Destinations of results: the next stage, and the driver."""

    def __init__(self, context: wire.Context, place: Place) -> None:
        self._place = place
        self._driver = wire.open_socket(context, zmq.PUSH, wire.driver_address(place.folder))
        if not place.is_last:
            address = wire.hop_address(place.folder, place.number + place.ranks)
            self._next = wire.open_socket(context, zmq.PUSH, address)
            self._next.send(wire.encode(wire.Ready(place.number)))

    def tell(self, message: wire.Message) -> None:
        self._driver.send(wire.encode(message))

    def hand_on(
        self, batch_id: int, done: Executed, activation: wire.Activation | None, *step: bytes
    ) -> None:
        """Send a micro-batch's results, and its step, to the next stage or the driver."""
        before = [] if activation is None else activation.times
        times = [*before, done.available_s, done.start_s, done.end_s]
        if self._place.is_last:
            if not self._place.rank:
                self.tell(wire.Returned(batch_id, times, done.tokens))
            return
        if not self._place.number:
            self.tell(wire.Free(batch_id))  # first: the next micro-batch waits for it
        given = wire.encode(wire.Activation(batch_id, times, done.num_bytes))
        self._next.send_multipart([given, *step])

    def close(self) -> None:
        self._driver.close(linger=1000)
        if not self._place.is_last:
            self._next.close()


def run_process(stages: Sequence[tuple[Place, WorkerSettings]]) -> None:
    """Run these stages until the driver says stop or is gone: a process's entry point."""
    end_with_parent(stages[0][0].folder)
    run_stages(stages)
    os._exit(0)  # all is closed; to take torch apart would take a second


def run_stages(stages: Sequence[tuple[Place, WorkerSettings]]) -> None:
    """Run stages, each in a thread, until the driver says stop."""
    threads = [threading.Thread(target=run_worker, args=stage, daemon=True) for stage in stages[1:]]
    for thread in threads:
        thread.start()
    run_worker(*stages[0])
    for thread in threads:
        thread.join()


def run_worker(place: Place, settings: WorkerSettings) -> None:
    context: wire.Context = zmq.Context()
    outlet = _Outlet(context, place)
    try:
        worker = settings.make(place)
        intake = _Intake(context, place, worker)
        intake.start()
        try:
            intake.connected.wait()
            outlet.tell(wire.Ready(place.number))
            _serve(worker, intake, outlet)
        finally:
            intake.end()
        if intake.failure is not None:
            raise intake.failure
    except Exception as error:
        outlet.tell(wire.Failed(place.number, reason_of(error)))
    finally:
        outlet.close()
        context.term()


def _serve(worker: Worker, intake: _Intake, outlet: _Outlet) -> None:
    while (entry := intake.work.get()) is not None:
        work = entry if isinstance(entry, _Work) else _take_up(worker, *entry)
        activation = work.activation
        if activation is not None and activation.batch_id != work.batch_id:
            raise WorkerError(f"activations of {activation.batch_id}, expected {work.batch_id}")
        done = worker.execute(work.prepared, activation, work.received_s)
        outlet.hand_on(work.batch_id, done, activation, *work.step)


def _take_up(worker: Worker, message: wire.Step | wire.Activation, data: bytes) -> _Work:
    """Prepare the step of an activation, and fetch what came with it."""
    activation = message if isinstance(message, wire.Activation) else None
    step = wire.decode(data) if activation is not None else message
    assert isinstance(step, wire.Step)
    prepared = worker.prepare(step)
    if activation is not None:
        worker.fetch(activation)
    return _Work(step.batch_id, prepared, activation, time.monotonic(), [data])
