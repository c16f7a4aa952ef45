"""Limits on percentiles of latencies while a run goes on: when enough requests are beyond one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from evenflow.core.decodes import Sequence as Served

if TYPE_CHECKING:
    from evenflow.sim.driver import SimDriver

EVERY = 8
"""Ends of requests from one count of the late ones to the next."""

MISSED = "missed"
"""Key of a record of a run that ended early: the metric with the limit that it could not keep."""


class MissedError(Exception):
    """A run cannot keep the limit on `metric` any more; `done` requests are completed."""

    def __init__(self, metric: str, done: int) -> None:
        super().__init__(f"{metric} is beyond its limit, whatever comes")
        self.metric, self.done = metric, done


class Allowed(NamedTuple):
    """A limit in ms on a latency of requests, which `most` of them may be beyond, at most.

    `name` is ttft, tpot, e2el or queue, `metric` the percentile that the SLO limits.
    """

    metric: str
    name: str
    limit_ms: float
    most: int


def most_beyond(percent: float, requests: int) -> int:
    """Return the largest number of `requests` that may be beyond a limit on a percentile.

    The percentile of n numbers lies between the numbers of two ranks (linear, as NumPy's). With one
    more beyond the limit, the lower of the two is beyond it. It is no more for fewer requests.
    """
    return requests - 1 - math.floor(percent / 100 * (requests - 1))


class EarlyEnd:
    """Watch of a run: raises MissedError once more requests are beyond a limit than `allowed`.

    Unfinished requests that already exceed the limit are counted at times, too. One of them may
    still be aborted, but a run that serves fewer requests keeps no SLO either.
    """

    def __init__(self, limits: Iterable[Allowed]) -> None:
        self._done = self._calls = 0
        self._beyond = dict.fromkeys(limits, 0)
        self._drivers: dict[SimDriver, None] = {}

    def __call__(self, finished: Sequence[Served], driver: SimDriver, now_s: float) -> None:
        """Count the latencies of finished requests; a request that was given up has none."""
        served = [seq for seq in finished if not seq.aborted]
        self._done += len(served)
        self._calls += 1
        self._drivers[driver] = None
        live: list[Served] = []
        if self._calls % EVERY == 0:
            engines = chain.from_iterable(each.engines for each in self._drivers)
            live = [seq for each in engines for seq in each.queues.live.values()]
        for limit in self._beyond:
            self._beyond[limit] += _count(served, limit, now_s)
            if self._beyond[limit] + _count(live, limit, now_s) > limit.most:
                raise MissedError(limit.metric, self._done)


def _count(sequences: Iterable[Served], limit: Allowed, now_s: float) -> int:
    return sum(latency_s(seq, limit.name, now_s) * 1e3 > limit.limit_ms for seq in sequences)


def latency_s(seq: Served, name: str, now_s: float) -> float:
    """Return a latency of a request in ms, as in `request_metrics`; NaN where it has none.

    Of an unfinished request: its latency if it ended now, a lower bound.
    """
    request = seq.request
    first_s = seq.first_scheduled_s if name == "queue" else seq.first_token_s
    e2el_s = (now_s if math.isnan(seq.completion_s) else seq.completion_s) - request.arrival_s
    ttft_s = e2el_s if math.isnan(first_s) else first_s - request.arrival_s
    if name == "e2el":
        return e2el_s
    if name != "tpot":
        return ttft_s
    return (e2el_s - ttft_s) / gaps if (gaps := request.output_tokens - 1) > 0 else math.nan
