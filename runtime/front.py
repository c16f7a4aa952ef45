"""Front ends: which requests are due; here, those of a trace in real time.

Knows when a request comes and when its client leaves; nothing of what happens to it in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from evenflow.types import Request


class Front:
    """Source of a driver's requests, which gets their tokens and ends; true while more may come."""

    @property
    def next_s(self) -> float | None:
        """Time at which the next request is due, as far as is known."""
        return None

    def due(self, now_s: float) -> Request | None:
        """Return a request that enters now, if there is one."""
        raise NotImplementedError

    def withdrawn(self) -> Iterable[int]:
        """Iterate over the requests withdrawn by their clients since the last call."""
        return ()

    def refused(self, request_id: int, why: str) -> None:
        """Note why a request never can be served."""

    def given_up(self, request_id: int) -> None:
        """Note that the policy ended a request early."""

    def token(self, request_id: int, token: int) -> bool:
        """Note a token; return whether the request ends with it, though more might be allowed."""
        return False

    def left(self, count: int) -> None:
        """Note that `count` requests have ended."""


class TraceReplay(Front):
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
        """Time at which the next request is due; None: when one ends, or never."""
        if not self._backlog or self._places == 0:
            return None
        return self._backlog[0].arrival_s if self._places is None else 0.0

    def due(self, now_s: float) -> Request | None:
        if not self._backlog:
            return None
        if self._places is None:
            return self._backlog.popleft() if self._backlog[0].arrival_s <= now_s else None
        if not self._places:
            return None
        self._places -= 1
        return replace(self._backlog.popleft(), arrival_s=now_s)

    def left(self, count: int) -> None:
        if self._places is not None:
            self._places += count
