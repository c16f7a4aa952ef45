"""The schema of SWEEP.yaml: a run, what to vary in it and how, what to look for.

Knows how one point becomes a checked configuration; simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from evenflow.errors import UsageError
from experiments.run_file import yaml_file
from experiments.run_file.fields import Count, Keys, expect, short_form
from experiments.run_file.run import RunConfig, configured
from experiments.run_file.yaml_file import Document, find, mistakes

Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]
Assignment = Mapping[str, Any]
"""The value of each swept key, by dotted key."""

DIGITS = 6
"""Values of a range are rounded to this many significant digits, so that tables can be read."""


class Range(Keys):
    """Numbers from `low` to `high`, both included; `log`: evenly spread in the logarithm.

    `steps`: how many of them a grid takes.
    """

    low: Finite
    high: Finite
    log: bool = False
    integer: bool = False
    steps: Count | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise _expected("a range whose low is below its high")
        if self.log and self.low <= 0:
            raise _expected("a range above 0 where log is true")
        return self

    def at(self, share: float) -> float | int:
        """Return the number at a share of the range: 0 is `low`, 1 is `high`."""
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.integer else float(f"{value:.{DIGITS}g}")

    def grid(self) -> list[float | int]:
        """Return `steps` numbers, evenly spread; fewer where whole numbers coincide."""
        assert self.steps is not None  # the schema asks for it
        shares = [0.0] if self.steps == 1 else [i / (self.steps - 1) for i in range(self.steps)]
        return list(dict.fromkeys(map(self.at, shares)))


def _kind_of_parameter(value: object) -> str:
    return "list" if isinstance(value, list) else "range"


def _distinct(values: list[Any]) -> bool:
    return len({repr(value) for value in values}) == len(values)


Parameter = Annotated[
    Annotated[
        Annotated[
            list[Any], expect(lambda v: bool(v) and _distinct(v), "at least one value, each once")
        ],
        Tag("list"),
    ]
    | Annotated[Range, Tag("range")],
    Discriminator(_kind_of_parameter),
    expect(lambda v: isinstance(v, list | dict | Range), "a list of values, or {low, high}"),
]


class Grid(Keys):
    """Every combination of values."""

    kind: Literal["grid"]


class OneAtATime(Keys):
    """The run as it is, and each value of each parameter with all others as in the run."""

    kind: Literal["one_at_a_time"]


class Random(Keys):
    """`points` independent draws; those that are drawn twice count once."""

    kind: Literal["random"]
    points: Count
    seed: Seed = 0


class Optuna(Keys):
    """`trials` proposed by Optuna, `batch` at a time from what the earlier batches came to.

    `batch` null: 8 of TPE; NSGA-II takes 24, its population. The batch decides what is proposed,
    so that it does not follow from the number of workers.
    """

    kind: Literal["optuna"]
    trials: Count
    sampler: Literal["tpe", "nsga2"] = "tpe"
    batch: Annotated[int, Field(ge=2)] | None = None
    seed: Seed = 0

    @property
    def batch_size(self) -> int:
        return self.batch or {"tpe": 8, "nsga2": 24}[self.sampler]


Method = Annotated[Grid | OneAtATime | Random | Optuna, short_form("kind"), Discriminator("kind")]


class Objective(Keys):
    """A key of the summary, and whether less or more of it is better."""

    metric: Annotated[str, Field(min_length=1)]
    goal: Literal["minimize", "maximize"] = "minimize"

    def cost(self, value: float) -> float:
        """Return a number that is smaller where the value is better."""
        return value if self.goal == "minimize" else -value


def _default_objectives() -> list[Objective]:
    return [Objective(metric="mean_e2el_ms")]


class Bounds(Keys):
    """What the mean of a metric has to be for a point to count."""

    at_most: Finite | None = None
    at_least: Finite | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise _expected("at_most or at_least")
        return self

    def excess(self, value: float) -> float:
        """Return by how much a value is out of bounds; 0 or less where it is within."""
        above = -math.inf if self.at_most is None else value - self.at_most
        below = -math.inf if self.at_least is None else self.at_least - value
        return max(above, below)


class SweepConfig(Keys):
    """What to vary in a run, and what to look for.

    `run`: a RUN.yaml, or its keys. With several `objectives` there is a Pareto front. Each point is
    simulated `replications` times, with `workload.seed` one higher each time; `replicate: windows`
    also takes the next `workload.requests` of the trace. All points of one replication see the same
    requests. `limits`: a point beyond them is in the tables, but is not
    called best.
    """

    run: Annotated[
        str | dict[str, Any],
        expect(lambda v: isinstance(v, str | dict) and bool(v), "a RUN.yaml, or its keys"),
    ]
    parameters: Annotated[dict[str, Parameter], Field(min_length=1)]
    method: Method = Grid(kind="grid")
    objectives: list[Objective] = Field(default_factory=_default_objectives, min_length=1)
    limits: dict[str, Bounds] = Field(default_factory=dict)
    replications: Count = 1
    replicate: Literal["seeds", "windows"] = "seeds"

    @model_validator(mode="after")
    def _steps_where_needed(self) -> Self:
        if self.method.kind in ("grid", "one_at_a_time"):
            for name, parameter in self.parameters.items():
                if isinstance(parameter, Range) and parameter.steps is None:
                    key = f'"parameters.{name}.steps", or a list of values'
                    context = {"reason": f"method: {self.method.kind}", "key": key}
                    raise PydanticCustomError("needed", "", context)
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, each once: of the objectives, then of the limits."""
        return list(dict.fromkeys([*(each.metric for each in self.objectives), *self.limits]))


def _expected(what: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{expected}", {"expected": what})


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked SWEEP.yaml, its document, and that of its run.

    `beside` is the folder that the run's relative paths start from.
    """

    config: SweepConfig
    document: Document
    run: Document
    beside: Path

    def run_config(self, assignment: Assignment) -> RunConfig:
        """Return the run with these values; UsageError naming the line of SWEEP.yaml."""
        document = self.run
        # An outer key first: `scheduler` would undo what was said of `scheduler.max_prefill`.
        for dotted in sorted(assignment, key=lambda key: key.count(".")):
            place = self.document.place(("parameters", dotted))
            document = yaml_file.assign(document, dotted.split("."), assignment[dotted], place)
        return configured(document)


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read and check SWEEP.yaml, with `dotted.key=value` overrides applied first.

    `run.KEY=VALUE` overrides a key of the run, wherever that is written. Raises UsageError naming
    the file, the line, the key, and what would be right.
    """
    document = yaml_file.read(path, "run, parameters")
    of_run = [each for each in overrides if each.strip().startswith("run.")]
    for assignment in overrides:
        if assignment not in of_run:
            document = yaml_file.override(document, assignment)
    try:
        config = SweepConfig.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None
    run, beside = _run_document(document, config.run, path.parent)
    for assignment in of_run:
        run = yaml_file.override(run, assignment, below="run.")
    return Sweep(config, document, run, beside)


def _run_document(
    document: Document, run: str | dict[str, Any], folder: Path
) -> tuple[Document, Path]:
    if isinstance(run, str):
        path = Path(find(run, folder))
        try:
            return yaml_file.read(path), path.parent
        except UsageError as error:
            raise UsageError(f"{document.place(('run',))}: run: {error}") from None
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    return Document(document.name, run, places), folder
