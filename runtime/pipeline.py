"""The workers as the driver sees them: start, send a step, receive messages, stop.

Owns the processes and the sockets, and leaves none behind. Every wait has a limit. Knows no
requests and no policy.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Self

import zmq

from evenflow.errors import WorkerError
from evenflow.runtime import wire
from evenflow.runtime.worker import BEAT_S, Place, WorkerSettings, run_process

STOP_LIMIT_S = 2.0

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a terminal or a service manager ends all of its processes."""

CAUSE_LIMIT_S = 0.5
"""How long a worker that was killed may be found after another one failed without it."""

LAST_WORDS_LIMIT_S = 2.0
"""How long after a worker ended by itself its reason may still be on the way."""

SILENT_LIMIT_S = 5 * BEAT_S
"""How long a worker's process may say nothing. It says that it runs at every `BEAT_S`, also while
it computes, so this is no limit on a micro-batch. A loaded machine may delay it."""

LOOK_S = 0.5
"""Counted of the driver's own absence at most: what stops it may have stopped all."""


class KvLayers(NamedTuple):
    """Layers [start, stop) with their KV in one worker, and the worker's address."""

    worker: int
    rank: int
    start: int
    stop: int
    address: str


@dataclass(eq=False)
class WorkerPipeline:
    """Worker processes, one for each of `settings` or one for all `together`, in a `with` block.

    Each stage is as many of them as it has `ranks`, which come one after the other. `name` is said
    of them where there are several pipelines. `coupled`: a stage gets a micro-batch with the
    activations, from the one before it. Only stage 0 gets it from the driver. `receive` and `send`
    raise WorkerError for a worker that died, was stopped, failed or takes no messages.
    """

    settings: Sequence[WorkerSettings]
    page_tokens: int
    total_pages: int
    _: KW_ONLY
    ranks: int = 1
    name: str = ""
    together: bool = False
    coupled: bool = False
    start_limit_s: float = 60.0

    def __enter__(self) -> Self:
        self._processes: list[BaseProcess] = []
        self._process_of: dict[int, BaseProcess] = {}
        self._steps: list[zmq.Socket[bytes]] = []
        self._failure: str | None = None
        self._silent_s = [0.0] * len(self.settings)
        self._beating: set[int] = set()
        self._looked_s = 0.0
        try:
            self._folder = tempfile.mkdtemp(prefix="evenflow-")
        except OSError as error:
            raise WorkerError(f"no folder for sockets: {error}") from None
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        try:
            self.results = wire.open_socket(
                self._context, zmq.PULL, wire.driver_address(self._folder)
            )
            self._poller.register(self.results, zmq.POLLIN)
            workers = range(len(self.settings))
            for group in [workers] if self.together else [[worker] for worker in workers]:
                self._start(group)
            self._await_all()
        except BaseException:
            self.close(grace_s=0)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(STOP_LIMIT_S if error is None else 0)

    def restart(self) -> None:
        """Kill all workers, and start others in their place; return when they are ready."""
        self.close(grace_s=0)
        self.__enter__()

    @property
    def process_ids(self) -> list[int]:
        """The processes, in the order of their stages and ranks."""
        return [process.pid or 0 for process in self._processes]

    def send(self, step: wire.Step) -> None:
        """Send a micro-batch to every stage, with token ids to stage 0, or to stage 0 alone."""
        frames, sockets = [wire.encode(step)], self._steps
        if self.coupled:
            frames, sockets = (
                [*frames, wire.encode(step._replace(tokens=[]))],
                sockets[: self.ranks],
            )
        for worker, socket in enumerate(sockets):
            if worker == self.ranks and step.tokens:
                frames = [wire.encode(step._replace(tokens=[]))]
            try:
                socket.send_multipart(frames)
            except zmq.Again:
                raise WorkerError(f"{self._name(worker)} takes no messages") from None

    def receive(self, timeout_s: float) -> list[wire.Message]:
        """Return all messages that have come; if none, wait for at most `timeout_s` seconds.

        What came before a worker failed is returned first; only then the failure is raised.
        """
        ready = {descriptor for descriptor, _ in self._poller.poll(int(timeout_s * 1000))}
        ended = [process for process in self._processes if process.sentinel in ready]
        self._grow_silent()
        messages = self._take_in(0)
        if ended and not messages and self._failure is None:
            messages = self._take_last_words(ended)
        if not messages:
            self._raise_failure(ended)
        return messages

    def tell(self, worker: int, message: wire.Message) -> None:
        self._steps[worker].send(wire.encode(message))

    @property
    def kv_layers(self) -> list[KvLayers]:
        """Addresses and layers of the workers' KV; empty for emulated workers."""
        return [
            KvLayers(worker, worker % self.ranks, stage.start, stage.stop, address)
            for worker, stage in enumerate(self.settings)
            if hasattr(stage, "start") and hasattr(stage, "stop")
            for address in [wire.step_address(self._folder, worker)]
        ]

    def watch(self, descriptor: int | zmq.Socket[bytes]) -> None:
        """Let `receive` return early when this file descriptor, or socket, is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def close(self, grace_s: float) -> None:
        """End the workers, after `grace_s` seconds by force, and remove the sockets."""
        for socket in self._steps:
            try:
                socket.send(wire.encode(wire.Stop()), zmq.NOBLOCK)
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

    def _start(self, group: Sequence[int]) -> None:
        stages = [(self._place(worker), self.settings[worker]) for worker in group]
        name = self._name(group[0]) if len(group) == 1 else f"stages 0 to {group[-1]}"
        process = multiprocessing.get_context("spawn").Process(
            target=run_process, args=(stages,), name=name, daemon=True
        )
        # A worker inherits the mask: such a signal reaches only the driver, which answers it.
        # NOTE: multiprocessing lifts the mask when it starts its tracker, so that comes before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            process.start()
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._poller.register(process.sentinel, zmq.POLLIN)
        self._process_of |= dict.fromkeys(group, process)
        for worker in group:
            address = wire.step_address(self._folder, worker)
            self._steps.append(wire.open_socket(self._context, zmq.PUSH, address))
            self._steps[-1].send(wire.encode(wire.Ready(worker)))

    def _place(self, worker: int) -> Place:
        depth, (stage, rank) = len(self.settings) // self.ranks, divmod(worker, self.ranks)
        pages = self.page_tokens, self.total_pages
        return Place(stage, depth, *pages, self._folder, rank, self.ranks)

    def _name(self, worker: int) -> str:
        stage, rank = divmod(worker, self.ranks)
        words = [self.name] * bool(self.name) + [f"stage {stage}"]
        return ", ".join(words + [f"rank {rank}"] * (self.ranks > 1))

    def _await_all(self) -> None:
        limit_s = time.monotonic() + self.start_limit_s
        missing = set(range(len(self.settings)))
        while missing:
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                stages = sorted({worker // self.ranks for worker in missing})
                raise WorkerError(
                    f"stages {stages} did not start within {self.start_limit_s:g} s "
                    "(workers.start_limit_s)"
                )
            for message in self.receive(min(left_s, 0.1)):
                if isinstance(message, wire.Ready):
                    missing.discard(message.worker)

    def _take_in(self, timeout_s: float) -> list[wire.Message]:
        """Return the messages received, after at most `timeout_s` s; keep the first failure."""
        messages: list[wire.Message] = []
        self.results.poll(int(timeout_s * 1000))
        while self.results.poll(0):
            message = wire.decode(self.results.recv())
            if isinstance(message, wire.Failed):
                failure = f"{self._name(message.worker)} failed: {message.reason}"
                self._failure = self._failure or failure  # later ones come of the first
            elif isinstance(message, wire.Beat):
                self._silent_s[message.worker] = 0.0
                self._beating.add(message.worker)
            else:
                messages.append(message)
        return messages

    def _grow_silent(self) -> None:
        """Add the time since the last look to each worker's silence, which a message ends.

        A worker without a message so far is starting, unless it is stopped.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_S), now_s
        for worker, process in self._process_of.items():
            if worker in self._beating or _is_stopped(process):
                self._silent_s[worker] += passed_s
            else:
                self._silent_s[worker] = 0.0

    def _take_last_words(self, ended: Sequence[BaseProcess]) -> list[wire.Message]:
        """Wait for the last message of a worker that ended by itself: it may come later."""
        limit_s = time.monotonic() + LAST_WORDS_LIMIT_S
        messages: list[wire.Message] = []
        if any(_exit_code(process) >= 0 for process in ended):
            while not messages and self._failure is None and time.monotonic() < limit_s:
                messages = self._take_in(0.1)
        return messages

    def _raise_failure(self, ended: Sequence[BaseProcess]) -> None:
        """Raise for a reported failure, or for silence, if there is one."""
        if self._failure is not None:
            self._raise_killed()
            raise WorkerError(self._failure)
        for process in ended:
            raise ended_error(process)
        silent_s = max(self._silent_s)
        if silent_s > SILENT_LIMIT_S:
            worker = self._silent_s.index(silent_s)
            raise WorkerError(
                f"{self._name(worker)} (process {self._process_of[worker].pid}) says nothing for "
                f"{silent_s:.1f} s: it was stopped, or the machine is too busy for it"
            )

    def _raise_killed(self) -> None:
        """Raise for a killed worker, if there is one: it breaks others' connections.

        Its neighbour may report that before the system reports the killed one.
        """
        limit_s = time.monotonic() + CAUSE_LIMIT_S
        while time.monotonic() < limit_s:
            for process in self._processes:
                if (process.exitcode or 0) < 0:
                    raise ended_error(process)
            time.sleep(0.01)


def _is_stopped(process: BaseProcess) -> bool:
    """Say whether the system has a process as stopped (SIGSTOP, a debugger)."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _exit_code(process: BaseProcess) -> int:
    """Return the exit code of a process that has ended by its sentinel."""
    process.join(CAUSE_LIMIT_S)  # the sentinel is a moment early
    return process.exitcode or 0


def ended_error(process: BaseProcess) -> WorkerError:
    """Return the error of a worker process that ended while serving."""
    code = _exit_code(process)
    how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return WorkerError(f"{process.name} (process {process.pid}) was {how}")
