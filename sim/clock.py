"""SimPy with events at absolute times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

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

    def at(self, time_s: float, event: Event, priority: EventPriority = NORMAL) -> None:
        """Queue an event for the instant `time_s`, which must not be in the past."""
        heappush(self._queue, (time_s, priority, next(self._eid), event))

    def until(self, time_s: float) -> Event:
        """Return an event of the instant `time_s`, for a process to wait for."""
        event = Event(self)
        event._ok = True
        event._value = None
        self.at(time_s, event)
        return event

    def more_now(self) -> bool:
        """Say whether anything else is queued for this instant."""
        queue = self._queue
        return queue[0][0] <= self._now if queue else False


class Signal(Event):
    """An event that calls one function with the time, and may be queued any number of times.

    NOTE: SimPy clears an event's callbacks when it processes it; putting them back costs less than
    a new event for each of a million micro-batches.
    """

    def __init__(self, clock: Clock, call: Callable[[float], None]) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        self._call = call
        self._handlers: list[Callable[[Event], None]] = [self._fire]
        self.callbacks = self._handlers

    def _fire(self, _: Event) -> None:
        self.callbacks = self._handlers
        self._call(self.env._now)
