"""Limits on percentiles of latencies while a run goes on: when enough requests are beyond one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evenflow.core.decodes import Sequence as Served
from evenflow.study.slo import LATENCY, Condition

MISSED = "missed"
"""The key of a record of a run that ended early: the metric whose limit it could not keep."""


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


def allowed(slo: Iterable[Condition], requests: int) -> tuple[Allowed, ...]:
    """Return what the limits of an SLO on percentiles allow of a number of requests.

    Percentiles of ITL are of gaps, not of requests.
    """
    found = [(each, LATENCY.fullmatch(each.metric)) for each in slo if not each.at_least]
    return tuple(
        Allowed(each.metric, match[3], each.limit, most_beyond(float(match[2]), requests))
        for each, match in found
        if match is not None and match[2] is not None and match[3] != "itl"
    )


def most_beyond(percent: float, requests: int) -> int:
    """Return how many of some requests may be beyond a limit on a percentile, at most.

    The percentile of n numbers lies between the numbers of two ranks (linear, as NumPy's); with one
    more beyond the limit, the lower of the two is beyond it. It is no more for fewer requests.
    """
    return requests - 1 - math.floor(percent / 100 * (requests - 1))


class EarlyEnd:
    """Watch of a run: raises MissedError once more requests are beyond a limit than are allowed."""

    def __init__(self, limits: Iterable[Allowed]) -> None:
        self._done = 0
        self._left = {each: each.most for each in limits}

    def __call__(self, finished: Sequence[Served]) -> None:
        """Count the latencies of finished requests; a request that was given up has none."""
        for seq in finished:
            if seq.aborted:
                continue
            self._done += 1
            for limit in self._left:
                if latency_s(seq, limit.name) * 1e3 > limit.limit_ms:
                    self._left[limit] -= 1
                    if self._left[limit] < 0:
                        raise MissedError(limit.metric, self._done)


def latency_s(seq: Served, name: str) -> float:
    """Return a latency of a finished request, as in `request_metrics`; NaN where it has none."""
    arrival_s = seq.request.arrival_s
    ttft_s, e2el_s = seq.first_token_s - arrival_s, seq.completion_s - arrival_s
    if name == "ttft":
        return ttft_s
    if name == "queue":
        return seq.first_scheduled_s - arrival_s
    if name == "e2el":
        return e2el_s
    return (e2el_s - ttft_s) / (seq.generated - 1) if seq.generated > 1 else math.nan
