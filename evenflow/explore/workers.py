"""Worker processes of a page: each does one task at a time, and stops when it is not wanted.

Knows that a task sends messages; not what they are about. A stopped task that does not stop by
itself is killed with its process, and another one starts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from multiprocessing.connection import Connection
from typing import Any

from pydantic_core import to_json

from evenflow.children import end_with_parent
from evenflow.errors import UsageError, told_in_a_line
from evenflow.explore import tasks
from evenflow.explore.document import Given, question_of
from evenflow.user_code import words_of

STOP_LIMIT_S = 2.0
"""How long a stopped task may take to end; a policy's answer may take longer."""

LOOK_S = 0.02
"""How often a task looks whether it is still wanted."""

MOST_PROCESSES = 4

ERROR = "error: "
"""What the command line begins its line with."""

Task = tuple[str, Any, tuple[Any, ...]]
"""The name of a function of `tasks`, what a page asks for, and more arguments."""


def lines_of(given: Given, task: Task, tell: tasks.Tell) -> None:
    """Carry out a task; a mistake has the command line's words."""
    name, question, more = task
    try:
        getattr(tasks, name)(given, question_of(question), tell, *more)
    except tasks.Stopped:
        pass
    except UsageError as error:
        tell({"error": told_in_a_line(str(error), ERROR).removeprefix(ERROR)})
    except MemoryError:
        tell({"error": "the memory does not suffice: give fewer requests"})
    except Exception as error:  # of a worker, which goes on
        tell({"error": words_of(error)})


def line(message: Any) -> bytes:
    return to_json(message, inf_nan_mode="null") + b"\n"


def work(channel: Connection, given: Given) -> None:
    """Do the tasks that come, in a separate process; send `b""` after the last message of one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    looked_s = 0.0

    def tell(message: Any) -> None:
        nonlocal looked_s
        if message:
            channel.send_bytes(line(message))
        if time.monotonic() - looked_s > LOOK_S:
            looked_s = time.monotonic()
            if channel.poll():
                raise tasks.Stopped

    with suppress(EOFError, OSError):  # the server has ended
        while True:
            task = channel.recv()
            if task is not None:  # None: a stop that came when there was nothing to stop
                lines_of(given, task, tell)
                channel.send_bytes(b"")


class TaskProcess:
    """One process, and the channel to it."""

    def __init__(self, given: Given) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, given), daemon=True)
        self._process.start()
        other.close()
        self.busy = False

    async def lines(self, task: Task) -> AsyncGenerator[bytes]:
        self.busy = True
        self._channel.send(task)
        while found := await self._next():
            yield found
        self.busy = False

    async def stopped(self) -> bool:
        """Stop the task; say whether the process can do another one."""
        try:
            self._channel.send(None)
            async with asyncio.timeout(STOP_LIMIT_S):
                while await self._next():
                    pass
        except (OSError, EOFError, TimeoutError):
            return False
        self.busy = False
        return True

    async def _next(self) -> bytes:
        loop, here = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel.fileno(), here.set)
        try:
            await here.wait()
        finally:
            loop.remove_reader(self._channel.fileno())
        return self._channel.recv_bytes()

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.join()
        self._process.close()


class WorkerPool:
    """The processes of a server; a task waits until one is free."""

    def __init__(self, given: Given, count: int | None = None) -> None:
        self._given = given
        self._count = count or max(1, min(MOST_PROCESSES, os.cpu_count() or 1))
        self._all: list[TaskProcess] = []
        self._free: asyncio.Queue[TaskProcess] = asyncio.Queue()
        self._stops: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for _ in range(self._count):
            self._add()

    def _add(self) -> None:
        worker = TaskProcess(self._given)
        self._all.append(worker)
        self._free.put_nowait(worker)

    def end(self) -> None:
        while self._all:
            self._all.pop().end()

    async def lines(self, task: Task) -> AsyncGenerator[bytes]:
        """Yield the messages of a task, which is stopped where this is left before its end."""
        worker = await self._free.get()
        try:
            async with aclosing(worker.lines(task)) as told:
                async for found in told:
                    yield found
        except (EOFError, OSError):
            yield line({"error": "a worker died, perhaps for want of memory; give fewer requests"})
        finally:
            stop = asyncio.get_running_loop().create_task(self._free_again(worker))
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)

    async def _free_again(self, worker: TaskProcess) -> None:
        if not worker.busy or await worker.stopped():
            self._free.put_nowait(worker)
        elif worker in self._all:
            self._all.remove(worker)
            worker.end()
            self._add()
