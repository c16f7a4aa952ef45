"""SimPy with events at absolute times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from simpy import Environment, Event
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(8)
"""After all arrivals and returns of the same instant, before any policy is asked."""

LAST = EventPriority(9)
"""After everything else of the same instant."""


class Clock(Environment):
    """A SimPy environment that also schedules at absolute times.

    NOTE: `timeout(t - now)` may fire one bit away from `t`, and then two ways to compute the same
    schedule differ; `at(t)` fires at `t`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = self._queue  # SimPy knows only of events

    def at(
        self, time_s: float, call: Callable[[float], None], priority: EventPriority = NORMAL
    ) -> None:
        """Have `call` called with the time at the instant `time_s`, which must not be past.

        NOTE: in SimPy's queue a function costs a third of an event with one callback.
        """
        heappush(self._calls, (time_s, priority, next(self._eid), call))

    def late(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called after all arrivals and returns of that instant, before any policy."""
        self.at(time_s, call, LATE)

    def until(self, time_s: float) -> Event:
        """Return an event of the instant `time_s`, for a process to wait for."""
        event = Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (time_s, NORMAL, next(self._eid), event))
        return event

    def run_out(self) -> None:
        """Run until nothing is queued."""
        calls = self._calls
        while calls:
            call = calls[0][3]
            if isinstance(call, Event):
                self.step()
            else:
                self._now = heappop(calls)[0]
                call(self._now)

    def more_now(self) -> bool:
        """Say whether anything else is queued for this instant."""
        queue = self._queue
        return queue[0][0] <= self._now if queue else False
