"""The simulated clock: a SimPy environment, and events of it at absolute times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from simpy import Environment, Event
from simpy.events import NORMAL, EventPriority

INFINITY = float("inf")

PUSH: Final = heappush
POP: Final = heappop
NUMBER: Final = next
"""Constants of this module, which compiled code does not look up by name at each call."""

LATE, LATER = EventPriority(7), EventPriority(8)
"""After all arrivals and returns of the same instant, before any policy is asked."""

LAST = EventPriority(9)
"""After everything else of the same instant."""


class Instant(Event):
    """An event at an absolute time, as SimPy's Timeout is one after a delay.

    NOTE: `timeout(t - now)` may fire one bit away from `t`. Two ways to compute the same schedule
    then differ. SimPy schedules by delays only, so an Instant enters its queue by itself.
    """

    callbacks: Any  # SimPy's own fields, declared so that mypyc keeps them in the object
    env: Environment
    _ok: bool
    _value: Any

    def __init__(self, env: CheckedEnvironment, time_s: float) -> None:
        self.env, self.callbacks = env, []
        self._ok, self._value = True, time_s
        env.put(time_s, NORMAL, self)


class CheckedEnvironment(Environment):
    """A SimPy environment that refuses what would go back in time, as no process may run it.

    Its queue has calls beside events.
    """

    _now: float
    _queue: list[tuple[float, EventPriority, int, Any]]
    _eid: count[int]

    def put(self, time_s: float, priority: EventPriority, what: Any) -> None:
        """Queue an event, or what is called with its time, for an absolute time."""
        PUSH(self._queue, (time_s, priority, NUMBER(self._eid), what))

    def step(self) -> None:
        queue = self._queue
        if not queue or isinstance(queue[0][3], Event):
            super().step()
        else:
            self._now, _, _, call = POP(queue)
            call(self._now)

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        if not delay >= 0:
            raise ValueError(f"a delay of {delay} s; 0 or more is right")
        super().schedule(event, priority, delay)

    def run(self, until: Any = None) -> Any:
        if self.active_process is not None:
            raise RuntimeError("a process waits by yielding an event; the run goes on by itself")
        return super().run(until)


class SimClock:
    """Calls at absolute times, as events of the SimPy environment `env`."""

    def __init__(self) -> None:
        self.env = CheckedEnvironment(0.0)
        self.inner: set[Callable[[float], None]] = set()
        """Calls that change nothing outside the pipeline that they are of."""

    @property
    def now(self) -> float:
        return self.env._now

    def at(
        self, time_s: float, call: Callable[[float], None], priority: EventPriority = NORMAL
    ) -> None:
        """Have `call` called with the time at the instant `time_s`, which must not be past."""
        self.env.put(time_s, priority, call)

    def due(self, call: Callable[[float], None]) -> tuple[list[float], float]:
        """Return the times for which `call` is queued, in order, and the first of what is not
        `inner`.
        """
        times, first_s, inner = [], INFINITY, self.inner
        for time_s, _, _, what in self.env._queue:
            if what is call:
                times.append(time_s)
            elif time_s < first_s and what not in inner:
                first_s = time_s
        times.sort()
        return times, first_s

    def move(self, call: Callable[[float], None], times: list[float], count: int) -> None:
        """Queue `call` for the last `count` of `times` in place of the first it is queued for."""
        queue, others, left = self.env._queue, [], count
        while left:
            item = POP(queue)
            if item[3] is call:
                left -= 1
            else:
                others.append(item)
        for item in others:
            PUSH(queue, item)
        for time_s in times[len(times) - count :]:
            self.at(time_s, call)

    def late(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called after all arrivals and returns of that instant, before any policy."""
        self.at(time_s, call, LATE)

    def last(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called after the late calls of that instant."""
        self.at(time_s, call, LATER)

    def more_now(self) -> bool:
        """Say whether anything else is queued for this instant."""
        queue = self.env._queue
        return bool(queue) and queue[0][0] <= self.env._now
