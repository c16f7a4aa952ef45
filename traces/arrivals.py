"""When requests arrive, and the making of requests from a trace.

An arrival process gives times for any number of requests. It knows nothing of lengths; random ones
draw gaps at unit rate and divide by the rate, so that a change of rate stretches the same pattern
(common random numbers), and a longer run begins with the shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import repeat
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from evenflow.errors import UsageError, instead_of
from evenflow.types import Request
from traces.samples import random_stream, sample_trace
from traces.trace import SKIPPED, Floats, Trace


class Arrivals(Protocol):
    """An arrival process: `times` gives n arrivals in seconds, never decreasing, [n]."""

    def times(self, n: int, rng: np.random.Generator, trace_s: Floats | None, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Replay:
    """The trace's own times, `scale` times as fast (2: twice the rate)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("replay", scale=self.scale)

    def times(self, n: int, _rng: np.random.Generator, trace_s: Floats | None, /) -> Floats:
        if trace_s is None:
            raise UsageError(
                "the trace has no arrival times to replay; give arrivals of another kind, "
                "such as poisson with a rate"
            )
        if len(trace_s) < n:
            have = f"a trace with {len(trace_s)} arrivals to replay"
            raise UsageError(f"{n} requests asked of {have}")
        return trace_s[:n] / self.scale


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps at `rate` requests per second.

    `rescale` stretches the times so that the last is at n / rate, as vLLM's benchmark does.
    """

    rate: float
    rescale: bool = False

    def __post_init__(self) -> None:
        positive("poisson", rate=self.rate)

    def times(self, n: int, rng: np.random.Generator, _trace_s: Floats | None, /) -> Floats:
        return at_rate(np.cumsum(rng.standard_exponential(n)), self.rate, self.rescale)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps at `rate` requests per second with shape `burstiness`.

    The coefficient of variation is 1 / sqrt(burstiness): 1 is Poisson, below 1 is burstier,
    infinite gives equal gaps. The parameters are those of vLLM's benchmark.
    """

    rate: float
    burstiness: float = 1.0
    rescale: bool = False

    def __post_init__(self) -> None:
        positive("gamma", rate=self.rate)
        if not self.burstiness > 0:
            given = f"burstiness is {self.burstiness}"
            raise UsageError(f"gamma arrivals: {given}; expected a number above 0")

    def times(self, n: int, rng: np.random.Generator, _trace_s: Floats | None, /) -> Floats:
        if math.isinf(self.burstiness):
            gaps = np.ones(n)
        else:
            gaps = rng.standard_gamma(self.burstiness, n) / self.burstiness
        return at_rate(np.cumsum(gaps), self.rate, self.rescale)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals for `on_s`, silence for `off_s`, and again; `rate` is the mean over both."""

    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        positive("onoff", rate=self.rate, on_s=self.on_s, off_s=self.off_s)

    def times(self, n: int, rng: np.random.Generator, _trace_s: Floats | None, /) -> Floats:
        rate_while_on = self.rate * (self.on_s + self.off_s) / self.on_s
        busy_s = np.cumsum(rng.standard_exponential(n)) / rate_while_on
        return busy_s + np.floor(busy_s / self.on_s) * self.off_s


@dataclass(frozen=True, slots=True)
class Offline:
    """All requests at time 0."""

    def times(self, n: int, _rng: np.random.Generator, _trace_s: Floats | None, /) -> Floats:
        return np.zeros(n)


@dataclass(frozen=True, slots=True)
class Closed:
    """`concurrency` clients, each sending its next request when the last one is answered.

    The arrivals follow from the run, so the times given here are all 0: whoever runs it must look
    at the concurrency.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if not self.concurrency >= 1:
            raise UsageError(
                f"closed arrivals: concurrency is {self.concurrency}; expected at least 1"
            )

    def times(self, n: int, _rng: np.random.Generator, _trace_s: Floats | None, /) -> Floats:
        return np.zeros(n)


ARRIVALS: Mapping[str, type[Arrivals]] = MappingProxyType(
    {
        "replay": Replay,
        "poisson": Poisson,
        "gamma": Gamma,
        "onoff": OnOff,
        "offline": Offline,
        "closed": Closed,
    }
)
"""The kinds of arrivals by name; their fields are their options."""


def make_arrivals(kind: str = "", **options: Any) -> Arrivals:
    """Build arrivals from a kind in ARRIVALS and its options; None counts as not given.

    Raises UsageError for an unknown kind or option, a missing one, and a value out of range.
    """
    if kind not in ARRIVALS:
        raise UsageError(f'arrivals kind "{kind}" is unknown; {instead_of(kind, ARRIVALS)}')
    given = {key: value for key, value in options.items() if value is not None}
    names = [field.name for field in fields(ARRIVALS[kind])]  # type: ignore[arg-type]
    for key in given:
        if key not in names:
            known = instead_of(key, names) if names else "it has none"
            raise UsageError(f'{kind} arrivals: option "{key}" is unknown; {known}')
    try:
        return ARRIVALS[kind](**given)
    except TypeError as error:
        needed = ", ".join(names)
        raise UsageError(f"{kind} arrivals: {given or 'no options'}; expected {needed}") from error


def arrival_times(
    kind: str, n: int, rng: np.random.Generator, trace_times: Floats | None = None, **options: Any
) -> Floats:
    """Return the times of n arrivals of a kind, in seconds, never decreasing, [n]."""
    return make_arrivals(kind, **options).times(n, rng, trace_times)


def make_requests(
    trace: Trace,
    arrivals: Arrivals | Mapping[str, Any],
    n: int | None = None,
    seed: int = 0,
) -> list[Request]:
    """Return the trace's first n requests (None: all) with arrival times of the given process.

    `arrivals` is a process or its options with `kind`. Ids count from 0 in order of arrival. `seed`
    draws only the arrivals: lengths are the trace's. A sample is drawn on to n; a file with fewer
    requests raises UsageError.
    """
    if isinstance(arrivals, Mapping):
        arrivals = make_arrivals(**arrivals)
    n = len(trace) if n is None else n
    if n < 1:
        raise UsageError(f"{n} requests asked; expected at least 1")
    if n > len(trace):
        if trace.seed is None:
            raise UsageError(f"{n} requests asked of trace {trace.name}, which has {len(trace)}")
        trace = sample_trace(trace.name, n, trace.seed, trace.dropped.get(SKIPPED, 0))
    times_s = arrivals.times(n, random_stream(seed, "arrivals"), trace.arrival_s)
    columns = (times_s, trace.prompt_tokens, trace.output_tokens)
    rows = zip(*(column[:n].tolist() for column in columns), strict=True)
    prefixes = repeat(None) if trace.prefixes is None else trace.prefixes
    return [
        Request(number, arrival_s, prompt, output, prefix=prefix)
        for number, ((arrival_s, prompt, output), prefix) in enumerate(
            zip(rows, prefixes, strict=False)
        )
    ]


def at_rate(unit_rate_times: Floats, rate: float, rescale: bool) -> Floats:
    """Turn times at one request per second into `rate`; `rescale` puts the last at n / rate."""
    n = len(unit_rate_times)
    if rescale and unit_rate_times[-1] > 0:
        unit_rate_times = unit_rate_times * (n / unit_rate_times[-1])
    return unit_rate_times / rate


def positive(kind: str, **options: float) -> None:
    """Raise UsageError unless every option is a finite number above 0."""
    for key, value in options.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{kind} arrivals: {key} is {value}; expected a number above 0")
