"""How a study's points are chosen: listed, drawn, proposed by Optuna, or narrowed to a rate.

Knows parameters and their values, rates of arrivals, and what a search needs to know of its
trials; simulates nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from evenflow.config.yaml_file import Patch
from evenflow.errors import MOST_RUNS, UsageError, require_package
from evenflow.keys import Keys, expect, short_form
from evenflow.report.tables import is_number
from evenflow.study.trials import Search, Trial, Variant
from evenflow.traces import AnyArrivals, Replay
from evenflow.traces.trace import random_stream
from evenflow.types import Request

Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]

DIGITS = 6
"""Values of a range are rounded to this many significant digits, so that tables can be read."""


Points = Annotated[int, Field(ge=1, le=MOST_RUNS)]


class NumberRange(Keys):
    """Numbers from `low` to `high`."""

    low: Finite
    """The least, in the key's unit."""
    high: Finite
    """The greatest, in the key's unit."""
    log: bool = False
    """Whether they are evenly spread in the logarithm."""
    integer: bool = False
    """Whether they are whole."""
    steps: Points | None = None
    """How many points of a grid, which needs it."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise expected("a range whose low is below its high")
        if self.log and self.low <= 0:
            raise expected("a range above 0 where log is true")
        return self

    def at(self, share: float) -> float | int:
        """Return the number at a share of the range: 0 is `low`, 1 is `high`."""
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.integer else rounded(value, DIGITS)

    def grid(self) -> list[float | int]:
        """Return `steps` numbers, evenly spread; fewer where whole numbers coincide."""
        assert self.steps is not None  # the schema asks for it
        shares = [0.0] if self.steps == 1 else [i / (self.steps - 1) for i in range(self.steps)]
        return list(dict.fromkeys(map(self.at, shares)))


def expected(what: str) -> PydanticCustomError:
    """Return the error of a schema's check: it should be `what`."""
    return PydanticCustomError("expected", "{expected}", {"expected": what})


def _distinct(values: list[Any]) -> bool:
    return len({repr(value) for value in values}) == len(values) > 0


Parameter = Annotated[
    Annotated[list[Any], expect(_distinct, "at least one value, each once"), Tag("list")]
    | Annotated[NumberRange, Tag("range")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "range"),
    expect(lambda v: isinstance(v, list | dict | NumberRange), "a list of values, or {low, high}"),
]
Space: TypeAlias = Mapping[str, Parameter]
"""What is varied, by dotted key."""


class Grid(Keys):
    """Every combination of values; the last parameter varies fastest."""

    kind: Literal["grid"]

    def patches(self, space: Space, default: Patch | None) -> list[Patch]:
        """Return the points; UsageError for more than MOST_RUNS."""
        values = [values_of(parameter) for parameter in space.values()]
        count = math.prod(map(len, values))
        if count > MOST_RUNS:
            raise UsageError(f"method: grid: {count} combinations; at most {MOST_RUNS} are right")
        return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


class OneAtATime(Keys):
    """The run as it is, and each value of each parameter with all others as in the run."""

    kind: Literal["one_at_a_time"]

    def patches(self, space: Space, default: Patch | None) -> list[Patch]:
        """Return the points, each once; UsageError where the run lacks the others' values."""
        if default is None:
            raise UsageError(
                "method: one_at_a_time: the run has to say what every parameter is by default"
            )
        values = {name: values_of(parameter) for name, parameter in space.items()}
        changed = [{**default, name: value} for name in values for value in values[name]]
        return distinct([default, *changed])


class Random(Keys):
    """Independent draws; those that are drawn twice count once.

    Each parameter is drawn from a stream of its own: one more leaves the others as they were.
    """

    kind: Literal["random"]
    points: Points
    """How many draws."""
    seed: Seed = 0
    """What they are drawn from."""

    def patches(self, space: Space, default: Patch | None) -> list[Patch]:
        """Return the points, each once."""

        def drawn(name: str, parameter: Parameter) -> list[Any]:
            shares = random_stream(self.seed, name).random(self.points).tolist()
            if isinstance(parameter, NumberRange):
                return list(map(parameter.at, shares))
            return [parameter[int(share * len(parameter))] for share in shares]

        rows = zip(*itertools.starmap(drawn, space.items()), strict=True)
        return distinct(dict(zip(space, values, strict=True)) for values in rows)


class Optuna(Keys):
    """Points that Optuna proposes, a batch at a time from what the earlier batches came to.

    The batch decides what is proposed, so that it does not follow from the number of workers.
    """

    kind: Literal["optuna"]
    trials: Points
    """How many points."""
    sampler: Literal["tpe", "nsga2"] = "tpe"
    """The tree-structured Parzen estimator, or a genetic search for several objectives."""
    batch: Annotated[int, Field(ge=2)] | None = None
    """How many points at a time; null: 8 of TPE, 24 of NSGA-II, its population."""
    seed: Seed = 0
    """What the sampler draws from."""

    @property
    def batch_size(self) -> int:
        return self.batch or {"tpe": 8, "nsga2": 24}[self.sampler]

    def patches(self, space: Space, default: Patch | None) -> list[Patch]:
        """Return none: the points follow from results."""
        return []


Method = Annotated[Grid | OneAtATime | Random | Optuna, short_form("kind"), Discriminator("kind")]


def values_of(parameter: Parameter) -> list[Any]:
    """Return the values of a parameter that a grid takes; of a range without steps, its ends."""
    if not isinstance(parameter, NumberRange):
        return parameter
    return [parameter.at(0), parameter.at(1)] if parameter.steps is None else parameter.grid()


def distinct(patches: Iterable[Patch]) -> list[Patch]:
    """Return each patch once, in order."""
    return list({identity(patch): patch for patch in patches}.values())


def identity(patch: Patch) -> str:
    """Return a text that is the same for equal patches, 1 and 1.0 being equal."""
    plain = {key: float(value) if is_number(value) else value for key, value in patch.items()}
    return json.dumps(plain, sort_keys=True, default=str)


Score: TypeAlias = tuple[Sequence[float], Mapping[str, float]]
"""What Optuna is told of a trial: its objectives, and by how much it is beyond each limit."""


def optuna(
    method: Optuna,
    goals: Sequence[str],
    propose: Callable[[Any], Variant],
    score: Callable[[Trial], Score],
) -> Search:
    """Let Optuna propose cases, batch by batch, from what the earlier batches came to.

    `propose` makes a case of what `proposed` says of one of Optuna's trials. Results are reported
    in the order of the batch, so that the proposals depend on the seed and on results only: an
    interrupted search, run again, proposes the same. UsageError without the extra `search`.
    """
    require_package("optuna", "method: optuna:")
    import optuna
    from optuna.samplers import NSGAIISampler, TPESampler

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size, seed = method.batch_size, method.seed
    tpe = method.sampler == "tpe"
    study = optuna.create_study(
        directions=goals,
        sampler=TPESampler(seed=seed, constant_liar=True)
        if tpe
        else NSGAIISampler(population_size=size, seed=seed),
    )

    def batches() -> Search:
        for start in range(0, method.trials, size):
            asked = [study.ask() for _ in range(min(size, method.trials - start))]
            trials = yield [propose(each) for each in asked]
            for each, trial in zip(asked, trials, strict=True):
                values, excess = score(trial)
                if any(map(math.isnan, [*values, *excess.values()])):
                    study.tell(each, state=optuna.trial.TrialState.FAIL)
                    continue
                for name, amount in excess.items():
                    each.set_constraint(name, amount)
                study.tell(each, values)

    return batches()


def proposed(asked: Any, name: str, parameter: Parameter) -> Any:
    """Ask Optuna for one value; a list of numbers is in order, one of anything else is not."""
    if isinstance(parameter, NumberRange):
        return parameter.at(asked.suggest_float(name, 0.0, 1.0))
    if all(type(value) in (int, float) for value in parameter):
        return sorted(parameter)[asked.suggest_int(name, 0, len(parameter) - 1)]
    return parameter[asked.suggest_categorical(name, range(len(parameter)))]


def side_by_side(searches: Sequence[Search]) -> Search:
    """Yield in one batch what several searches ask for, until all have ended."""
    asked = [(each, cases) for each in searches if (cases := next(each, None))]
    while asked:
        trials = iter((yield [case for _, cases in asked for case in cases]))
        answers = [(each, list(itertools.islice(trials, len(cases)))) for each, cases in asked]
        asked = []
        for each, answer in answers:
            with suppress(StopIteration):
                asked.append((each, each.send(answer)))


RATE_DIGITS = 4
"""Rates are rounded to so many significant digits: readable, and found again in a store."""

LEAST_TOLERANCE = 0.002
"""Below it, neighbouring rates round to one."""

IDLE_REQUESTS = 0.1
"""With fewer requests in the system, on average, no two of them share anything."""

ENOUGH_TIMES = 10
"""A run with so many times the requests that are in the system at once has a steady state."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one rate (requests/s): it passes, or these conditions fail.

    `in_system` is the mean number of requests in the system (Little's law: rate x mean E2EL) of the
    `requests` of the run.
    """

    rate: float
    failed: tuple[str, ...]
    in_system: float
    requests: int

    @property
    def passes(self) -> bool:
        return not self.failed

    @property
    def crowded(self) -> bool:
        """Whether all requests arrive before, on average, one of them is served.

        The queue of such a run is as long as the run has requests: it says nothing of longer ones.
        """
        return self.in_system >= self.requests

    @property
    def idle(self) -> bool:
        """Whether a lower rate would change nothing: a request mostly has the system to itself."""
        return self.in_system < IDLE_REQUESTS


ProbeT = TypeVar("ProbeT", bound=Probe)
Status = Literal["found", "never", "too_short"]


@dataclass(frozen=True, slots=True)
class RateFound:
    """The result of a search for a rate.

    `found`: `rate` passes and `fails_at`, within the tolerance above it, does not. `never`: even
    where requests do not meet, at `fails_at`, it fails. `too_short`: rates pass up to one at which
    all requests arrive before one is served, on average; `rate` None. `failed` are the conditions
    at `fails_at`. `enough_requests`: how many the run should have so that its length does not
    matter much.
    """

    status: Status
    rate: float | None
    fails_at: float | None
    failed: tuple[str, ...]
    enough_requests: int


def bisect(
    start: float,
    tolerance: float,
    case: Callable[[float], Variant],
    probe: Callable[[Trial], ProbeT],
    *,
    width: int = 1,
    probes: Sequence[ProbeT] = (),
) -> Generator[Sequence[Variant], list[Trial], list[ProbeT]]:
    """Find the largest rate that passes: bracket it by doubling, then narrow the bracket.

    Up to `width` rates are probed at once; `probes` are known before. Returns all probes. It
    assumes that what fails at one rate fails at all higher ones; where that is not so, it finds one
    that passes just below one that fails.
    """
    known = list(probes)
    while rates := next_rates(known, start, tolerance, width):
        trials = yield list(map(case, rates))
        known += map(probe, trials)
    return known


def next_rates(
    probes: Sequence[Probe], start: float, tolerance: float, width: int = 1
) -> list[float]:
    """Return the rates to probe next, up to `width` at once; none when the search has ended.

    Doubles from `start` while all pass, halves while all fail, then divides the bracket in equal
    ratios until its ends differ by no more than `tolerance` (0.02: 2 %).
    """
    low, high = _bracket(probes)
    steps = range(1, width + 1)
    if low is None and high is None:
        rates = [start * 2 ** (step - 1) for step in steps]
    elif low is None:
        assert high is not None
        rates = [] if high.idle else [high.rate / 2**step for step in steps]
    elif low.crowded:
        rates = []
    elif high is None:
        rates = [low.rate * 2**step for step in steps]
    elif high.rate <= low.rate * (1 + tolerance):
        rates = []
    else:
        ratio = high.rate / low.rate
        rates = [low.rate * ratio ** (step / (width + 1)) for step in steps]
    known = {probe.rate for probe in probes}
    return [rate for rate in sorted({rounded(rate) for rate in rates}) if rate not in known]


def found(probes: Sequence[Probe]) -> RateFound:
    """Return what the probes of an ended search say."""
    low, high = _bracket(probes)
    failed = () if high is None else high.failed
    fails_at = None if high is None else high.rate
    if low is None:
        return RateFound("never", None, fails_at, failed, 0)
    enough = math.ceil(ENOUGH_TIMES * low.in_system)
    if low.crowded:
        return RateFound("too_short", None, fails_at, failed, enough)
    return RateFound("found", low.rate, fails_at, failed, enough)


def _bracket(probes: Sequence[Probe]) -> tuple[Probe | None, Probe | None]:
    """Return the highest rate that passes below the lowest that fails, and that one."""
    high = min((p for p in probes if not p.passes), key=lambda probe: probe.rate, default=None)
    below = (p for p in probes if p.passes and (high is None or p.rate < high.rate))
    return max(below, key=lambda probe: probe.rate, default=None), high


def rounded(value: float, digits: int = RATE_DIGITS) -> float:
    """Return a number rounded to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def rate_patch(arrivals: AnyArrivals, rate: float, start: float) -> Patch:
    """Return a patch that puts arrivals at `rate`; their own rate is `start`."""
    if isinstance(arrivals, Replay):
        return {"workload.arrivals.scale": arrivals.scale * rate / start}
    return {"workload.arrivals.rate": rate}


def own_rate(arrivals: AnyArrivals, requests: Sequence[Request]) -> float:
    """Return the mean rate at which requests arrive, in requests/s.

    UsageError for arrivals that have none: offline, closed, or a trace that comes all at once.
    """
    if len(requests) < 2:
        raise UsageError(f"workload: {len(requests)} request has no rate; give more requests")
    if isinstance(arrivals, Replay):
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        if span_s > 0:
            return (len(requests) - 1) / span_s
        raise UsageError("workload.trace: all its requests arrive at once; give poisson arrivals")
    rate = getattr(arrivals, "rate", None)
    if rate is None:
        raise UsageError(
            f"workload.arrivals: {arrivals.kind} has no rate to search for; give poisson, gamma, "
            "onoff or replay"
        )
    return float(rate)
