"""Searches, which choose a study's points: listed, drawn, or proposed by Optuna.

Knows parameters and their values, and what a search needs to know of its trials; simulates nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from evenflow.config.yaml_file import Patch
from evenflow.errors import MOST_RUNS, UsageError, require_package
from evenflow.keys import Keys, expect, short_form
from evenflow.report.tables import is_number
from evenflow.study.trials import Search, Trial, Variant
from evenflow.traces.trace import random_stream

Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]

DIGITS = 6
"""Values of a range are rounded to this many significant digits, so that tables can be read."""


Points = Annotated[int, Field(ge=1, le=MOST_RUNS)]


class NumberRange(Keys):
    """Numbers from `low` to `high`."""

    low: Finite = Field(examples=[16])
    """The least, in the key's unit."""
    high: Finite = Field(examples=[256])
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
    """Independent draws; equal ones count once.

    Each parameter is drawn from a separate stream: one more leaves the others as they were.
    """

    kind: Literal["random"]
    points: Points = Field(examples=[32])
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
    trials: Points = Field(examples=[64])
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
"""A trial for Optuna: its objectives, and by how much it is beyond each limit."""


def optuna(
    method: Optuna,
    goals: Sequence[str],
    propose: Callable[[Any], Variant],
    score: Callable[[Trial], Score],
) -> Search:
    """Let Optuna propose cases, batch by batch, from what the earlier batches came to.

    `propose` makes a case of what `proposed` says of one of Optuna's trials. Results are reported
    in the order of the batch, so proposals depend on the seed and on results only. An interrupted
    search, run again, proposes the same. UsageError without the extra `search`.
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


def rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
