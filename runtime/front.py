"""Front ends: which requests are due, those of a trace in real time, or those of clients.

Knows when a request comes and when its client leaves; nothing of what happens to it in between.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from evenflow.types import Request


class Front(Protocol):
    """The source of a driver's requests. True as long as requests may come."""

    @property
    def next_s(self) -> float | None:
        """When the next request is due, as far as is known."""

    def __bool__(self) -> bool: ...

    def due(self, now_s: float) -> Request | None:
        """Return a request that enters now, if there is one."""

    def withdrawn(self) -> Iterator[int]:
        """Iterate over the requests withdrawn by their clients since the last call."""

    def left(self, count: int) -> None:
        """Note that `count` requests have ended."""


class TraceReplay:
    """Admits `requests`, in order of time, at their arrival times.

    `concurrency`: only as many at once; each that ends lets the next one in, and the arrival times
    are ignored. A request that comes late, because the driver was busy, keeps its own time.
    """

    def __init__(self, requests: Sequence[Request], concurrency: int | None = None) -> None:
        self._backlog = deque(requests)
        self._places = concurrency

    def __len__(self) -> int:
        return len(self._backlog)

    def __bool__(self) -> bool:
        return bool(self._backlog)

    @property
    def next_s(self) -> float | None:
        """When the next request is due, in a closed loop at once; None: when one ends, or never."""
        if not self._backlog or self._places == 0:
            return None
        return self._backlog[0].arrival_s if self._places is None else 0.0

    def due(self, now_s: float) -> Request | None:
        """Return a request that enters now, if there is one."""
        if not self._backlog:
            return None
        if self._places is None:
            return self._backlog.popleft() if self._backlog[0].arrival_s <= now_s else None
        if not self._places:
            return None
        self._places -= 1
        return replace(self._backlog.popleft(), arrival_s=now_s)

    def withdrawn(self) -> Iterator[int]:
        """Iterate over nothing: a trace's clients wait."""
        return iter(())

    def left(self, count: int) -> None:
        """Note that `count` requests have ended."""
        if self._places is not None:
            self._places += count


class LiveFront:
    """Takes requests from other threads, until it is closed. The driver's thread takes them out.

    Whenever something happens, `fileno` becomes readable, so that a driver need not look.
    """

    def __init__(self) -> None:
        self._events: deque[Request | int] = deque()  # arrivals, and ids withdrawn
        self._open = True
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    # -- any thread -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue an arrival; call it in the order of arrival times."""
        self._events.append(request)
        self._wake()

    def withdraw(self, request_id: int) -> None:
        """Withdraw a request because its client has left; it may have ended already."""
        self._events.append(request_id)
        self._wake()

    def close(self) -> None:
        """Admit no more requests; the admitted ones are served. A signal handler may call it."""
        self._open = False
        self._wake()

    def fileno(self) -> int:
        """Return what is readable when something has happened."""
        return self._read

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._write, b"\0")

    # -- the driver's thread --------------------------------------------------------------------

    def __bool__(self) -> bool:
        return self._open or bool(self._events)

    @property
    def next_s(self) -> float | None:
        """Return a time in the past if anything has happened: it is dealt with at once."""
        return 0.0 if self._events else None

    def due(self, now_s: float) -> Request | None:
        """Return the next request that has come, unless a withdrawal is before it."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)
        event = self._events[0] if self._events else None
        if not isinstance(event, Request):
            return None
        self._events.popleft()
        return event

    def withdrawn(self) -> Iterator[int]:
        """Iterate over withdrawn requests, up to the next arrival."""
        while self._events and isinstance(event := self._events[0], int):
            self._events.popleft()
            yield event

    def left(self, count: int) -> None:
        """Note that `count` requests have ended."""

    def release(self) -> None:
        """Close the pipe; no method may be called afterwards."""
        os.close(self._read)
        os.close(self._write)
