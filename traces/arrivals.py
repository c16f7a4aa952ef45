"""Arrivals, as a configuration says them, and the making of requests from a trace.

An arrival process gives times for any number of requests, and knows nothing of lengths. Random ones
draw gaps at unit rate and divide by the rate. So a change of rate stretches the same pattern
(common random numbers). A longer run begins with the shorter one.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer

from evenflow.errors import UsageError, within_a_run
from evenflow.keys import Count, Keys, Positive, short_form
from evenflow.traces.trace import SKIPPED, Floats, Trace, random_stream, sample_trace
from evenflow.types import Prefix, Request


class Arrivals(Protocol):
    """An arrival process: n times in seconds, never decreasing, drawn with `seed`."""

    def times(self, n: int, seed: int, trace_s: Floats | None, /) -> Floats: ...


class Replay(Keys):
    """The trace's own times."""

    kind: Literal["replay"] = "replay"
    scale: Positive = 1.0
    """How many times as fast, a ratio: 2 is twice the rate."""

    def times(self, n: int, _seed: int, trace_s: Floats | None, /) -> Floats:
        if trace_s is None:
            raise UsageError(
                "the trace has no arrival times to replay; name their column (columns: "
                "{arrival: NAME}), or give arrivals of another kind, such as poisson with a rate"
            )
        if len(trace_s) < n:
            have = f"a trace with {len(trace_s)} arrivals to replay"
            raise UsageError(f"{n} requests asked of {have}")
        return trace_s[:n] / self.scale


class Poisson(Keys):
    """Independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate: Positive = Field(examples=[2.0])
    """Requests a second (request_rate, qps)."""
    rescale: bool = False
    """Whether times are stretched so that the last of n requests is at n / rate, as vLLM's
    benchmark does.
    """

    def times(self, n: int, seed: int, _trace_s: Floats | None, /) -> Floats:
        gaps = random_stream(seed, "arrivals").standard_exponential(n)
        return at_rate(np.cumsum(gaps), self.rate, self.rescale)


class Gamma(Keys):
    """Independent gamma gaps, whose coefficient of variation is 1 / sqrt(burstiness)."""

    kind: Literal["gamma"] = "gamma"
    rate: Positive = Field(examples=[2.0])
    """Requests a second."""
    burstiness: Annotated[
        float,
        Field(gt=0),
        BeforeValidator(lambda said: math.inf if said == ".inf" else said),
        PlainSerializer(lambda shape: ".inf" if math.isinf(shape) else shape, when_used="json"),
    ] = 1.0
    """The shape, a ratio: 1 is Poisson, below 1 is burstier, .inf gives equal gaps (vLLM's
    parameter).
    """
    rescale: bool = False
    """As of `arrivals: poisson`."""

    def times(self, n: int, seed: int, _trace_s: Floats | None, /) -> Floats:
        if math.isinf(self.burstiness):
            gaps = np.ones(n)
        else:
            stream = random_stream(seed, "arrivals")
            gaps = stream.standard_gamma(self.burstiness, n) / self.burstiness
        return at_rate(np.cumsum(gaps), self.rate, self.rescale)


class Offline(Keys):
    """All requests at time 0."""

    kind: Literal["offline"] = "offline"

    def times(self, n: int, _seed: int, _trace_s: Floats | None, /) -> Floats:
        return np.zeros(n)


class Closed(Keys):
    """Clients, each sending its next request when the last one is answered.

    The arrivals follow from the run, so the times given here are all 0: the simulation must
    read the concurrency.
    """

    kind: Literal["closed"] = "closed"
    concurrency: Count = Field(examples=[16])
    """How many clients (max_concurrency), which is how many requests are in the system."""

    def times(self, n: int, _seed: int, _trace_s: Floats | None, /) -> Floats:
        return np.zeros(n)


def _replay_by_default(value: object) -> object:
    """Return the mapping with its kind: one with `scale` alone is a replay."""
    if isinstance(value, dict) and value.keys() == {"scale"}:
        return {"kind": "replay", **value}
    return value


AnyArrivals = Annotated[
    Replay | Poisson | Gamma | Closed | Offline,
    short_form("kind"),
    Discriminator("kind"),
    BeforeValidator(_replay_by_default),
]
"""What a configuration says of arrivals: a mapping, its kind alone, or a replay's `scale` alone."""


def make_requests(
    trace: Trace, arrivals: Arrivals, n: int | None = None, seed: int = 0
) -> list[Request]:
    """Return the trace's first n requests (None: all) with arrival times of the given process.

    Ids count from 0 in order of arrival. `seed` draws only the arrivals: lengths are the trace's. A
    sample is drawn on to n. UsageError for a file with fewer requests, and as `within_a_run`.
    """
    n = len(trace) if n is None else n
    if n < 1:
        raise UsageError(f"{n} requests asked; expected at least 1")
    if n > len(trace):
        if trace.seed is None:
            raise UsageError(f"{n} requests asked of trace {trace.name}, which has {len(trace)}")
        trace = sample_trace(
            trace.name, n, trace.seed, trace.dropped.get(SKIPPED, 0), trace.neighbours
        )
    with np.errstate(over="ignore"):
        times_s = arrivals.times(n, seed, trace.arrival_s)
    within_a_run(float(times_s[-1]), "workload")
    columns = (times_s, trace.prompt_tokens, trace.output_tokens)
    rows = zip(*(column[:n].tolist() for column in columns), strict=True)
    prefixes = repeat(None) if trace.prefixes is None else trace.prefixes
    limits = repeat(None) if trace.max_new is None else trace.max_new
    priorities = repeat(0) if trace.priority is None else trace.priority
    return [
        Request(number, arrival_s, prompt, output, None, prefix, limit, priority)
        for number, ((arrival_s, prompt, output), prefix, limit, priority) in enumerate(
            zip(rows, prefixes, limits, priorities, strict=False)
        )
    ]


def with_own_prefixes(requests: Iterable[Request]) -> list[Request]:
    """Return the requests; one without a known prefix gets unique tokens, by its id.

    So a preempted request finds what is left of its pages, and a repeated one its prompt.
    """

    def known(request: Request) -> Request:
        tokens = request.prompt_tokens + request.output_tokens
        return replace(request, prefix=Prefix((request.request_id,), tokens, tokens))

    return [known(request) if request.prefix is None else request for request in requests]


def at_rate(unit_rate_times: Floats, rate: float, rescale: bool) -> Floats:
    """Turn times at one request per second into `rate`; `rescale` puts the last at n / rate."""
    n = len(unit_rate_times)
    if rescale and unit_rate_times[-1] > 0:
        unit_rate_times = unit_rate_times * (n / unit_rate_times[-1])
    return unit_rate_times / rate
