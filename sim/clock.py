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


class SimClock:
    """Calls at absolute times, in the queue of a SimPy `environment`, which may have processes.

    NOTE: `timeout(t - now)` may fire one bit away from `t`, and then two ways to compute the same
    schedule differ; `at(t)` fires at `t`.
    """

    def __init__(self) -> None:
        self.environment = Environment()
        self._calls: list[Any] = self.environment._queue  # SimPy knows only of events
        self._numbers = self.environment._eid
        self.now = 0.0
        self.process, self.timeout = self.environment.process, self.environment.timeout

    def at(
        self, time_s: float, call: Callable[[float], None], priority: EventPriority = NORMAL
    ) -> None:
        """Have `call` called with the time at the instant `time_s`, which must not be past.

        NOTE: in SimPy's queue a function costs a third of an event with one callback.
        """
        heappush(self._calls, (time_s, priority, next(self._numbers), call))

    def late(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called after all arrivals and returns of that instant, before any policy."""
        self.at(time_s, call, LATE)

    def until(self, time_s: float) -> Event:
        """Return an event of the instant `time_s`, for a process to wait for."""
        event = Event(self.environment)
        event._ok = True
        event._value = None
        heappush(self._calls, (time_s, NORMAL, next(self._numbers), event))
        return event

    def run_out(self) -> None:
        """Run until nothing is queued."""
        calls, environment = self._calls, self.environment
        while calls:
            now: float = calls[0][0]
            call = calls[0][3]
            self.now = now
            if isinstance(call, Event):
                environment.step()
            else:
                heappop(calls)
                environment._now = now
                call(now)

    def more_now(self) -> bool:
        """Say whether anything else is queued for this instant."""
        calls = self._calls
        if not calls:
            return False
        next_s: float = calls[0][0]
        return next_s <= self.now
