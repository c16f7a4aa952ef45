"""The workers as the driver sees them: start, send a step, hear what happened, stop.

Owns the processes and the sockets, and leaves none behind. Every wait has a limit. Knows no
requests and no policy.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import zmq

from runtime.errors import WorkerError
from runtime.wire import Failed, Message, Ready, Step, Stop, decode, encode
from runtime.worker import (
    Context,
    Place,
    Settings,
    driver_address,
    open_socket,
    run_worker,
    step_address,
)

START_LIMIT_S = 60.0
STOP_LIMIT_S = 2.0


class Pipeline:
    """Worker processes, one for each of `settings`, in a `with` block.

    `receive` and `send` raise WorkerError for a worker that died, failed or takes no messages.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        page_tokens: int,
        total_pages: int,
        *,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._settings = settings
        self._pages = page_tokens, total_pages
        self._start_limit_s = start_limit_s
        self._processes: list[BaseProcess] = []
        self._steps: list[zmq.Socket[bytes]] = []
        self._failure: str | None = None

    def __enter__(self) -> Self:
        try:
            self._folder = tempfile.mkdtemp(prefix="evenflow-")
        except OSError as error:
            raise WorkerError(f"no folder for sockets: {error}") from None
        self._context = Context()
        self._poller = zmq.Poller()
        try:
            self._results = open_socket(self._context, zmq.PULL, driver_address(self._folder))
            self._poller.register(self._results, zmq.POLLIN)
            for stage, settings in enumerate(self._settings):
                self._start(stage, settings)
            self._await_all()
        except BaseException:
            self.close(grace_s=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(STOP_LIMIT_S if error is None else 0)

    @property
    def depth(self) -> int:
        return len(self._settings)

    @property
    def process_ids(self) -> list[int]:
        """The process of each stage."""
        return [process.pid or 0 for process in self._processes]

    def send(self, step: Step) -> None:
        """Tell every stage of a micro-batch."""
        data = encode(step)
        for stage, socket in enumerate(self._steps):
            try:
                socket.send(data)
            except zmq.Again:
                raise WorkerError(f"stage {stage} takes no messages") from None

    def receive(self, timeout_s: float) -> list[Message]:
        """Return all messages that have come; if none, wait for at most so many seconds.

        What came before a worker failed is returned first; only then the failure is raised.
        """
        events = self._poller.poll(int(timeout_s * 1000))
        messages: list[Message] = []
        while self._results.poll(0):
            message = decode(self._results.recv())
            if isinstance(message, Failed):
                self._failure = f"stage {message.stage} failed: {message.reason}"
            else:
                messages.append(message)
        if not messages and self._failure is not None:
            raise WorkerError(self._failure)
        if events and not messages:
            self._raise_dead()
        return messages

    def watch(self, descriptor: int) -> None:
        """Let `receive` return early when this file descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def close(self, grace_s: float) -> None:
        """End the workers, after so many seconds by force, and remove the sockets."""
        for socket in self._steps:
            try:
                socket.send(encode(Stop()), zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # this worker takes nothing any more: it is ended below
        limit_s = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, limit_s - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, stage: int, settings: Settings) -> None:
        place = Place(stage, self.depth, *self._pages, self._folder, os.getpid())
        process = multiprocessing.get_context("spawn").Process(
            target=run_worker, args=(place, settings), name=f"stage {stage}", daemon=True
        )
        # A worker inherits the mask: Ctrl-C reaches only the driver, which decides what it means.
        # NOTE: multiprocessing lifts the mask when it starts its tracker, so that comes before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._poller.register(process.sentinel, zmq.POLLIN)
        address = step_address(self._folder, stage)
        self._steps.append(open_socket(self._context, zmq.PUSH, address))
        self._steps[-1].send(encode(Ready(stage)))

    def _await_all(self) -> None:
        limit_s = time.monotonic() + self._start_limit_s
        missing = set(range(self.depth))
        while missing:
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                raise WorkerError(f"stages {sorted(missing)} did not start in time")
            for message in self.receive(min(left_s, 0.1)):
                if isinstance(message, Ready):
                    missing.discard(message.stage)

    def _raise_dead(self) -> None:
        for stage, process in enumerate(self._processes):
            if process.exitcode is not None:
                code = process.exitcode
                how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
                raise WorkerError(f"stage {stage} (process {process.pid}) was {how}")
