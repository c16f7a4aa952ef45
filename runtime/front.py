"""The front end that replays a trace in real time: which requests are due.

Knows when a request comes; nothing of what happens to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from evenflow.types import Request


class TraceReplay:
    """Lets `requests`, in order of time, in at their arrival times.

    `concurrency`: only as many at once; each that ends lets the next one in, and the arrival times
    are ignored. A request that comes late, because the driver was busy, keeps its own time.
    """

    def __init__(self, requests: Sequence[Request], concurrency: int | None = None) -> None:
        self._backlog = deque(requests)
        self._places = concurrency

    def __len__(self) -> int:
        return len(self._backlog)

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

    def left(self, count: int) -> None:
        """Hear that so many requests have ended."""
        if self._places is not None:
            self._places += count
