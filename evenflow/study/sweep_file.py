"""SWEEP.yaml: a run, what to vary in it and how, and what to look for.

Knows which points there are and what is a mistake; simulates no more than a few requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from evenflow.config import yaml_file
from evenflow.config.files import make_importable
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document, KeyPath, Patch, checked, find, flat
from evenflow.errors import DoesNotFitError, PolicyError, UsageError, instead_of
from evenflow.keys import Keys, expect, needed
from evenflow.schedulers import POOLED, policy
from evenflow.schedulers.limits import Range
from evenflow.study import searches, trials
from evenflow.study.points import Point
from evenflow.study.slo import Condition, Objective, with_cost

TRIED = 32
"""How many points with one value are tried, at most, for one that accepts it."""


class Bounds(Keys):
    """Limit on the mean of a metric, for a point to count."""

    at_most: searches.Finite | None = None
    """In the metric's unit."""
    at_least: searches.Finite | None = None
    """In the metric's unit."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise searches.expected("at_most or at_least")
        return self

    def of(self, metric: str) -> list[Condition]:
        ends = ((self.at_most, False), (self.at_least, True))
        return [Condition(metric, limit, least) for limit, least in ends if limit is not None]


class SweepConfig(Keys):
    """Study of a sweep: the keys to vary in a run, and the objectives.

    All points of one replication see the same requests.
    """

    run: Annotated[
        str | dict[str, Any],
        expect(lambda v: isinstance(v, str | dict) and bool(v), "a RUN.yaml, or its keys"),
    ] = Field(examples=["RUN.yaml"])
    """A RUN.yaml, or its keys."""
    parameters: dict[str, searches.Parameter] = Field(
        default_factory=dict, examples=[{"kv.pages": [500, 1000]}]
    )
    """What is varied (grid, vary): a list of values or a range for each dotted key. A name that is
    no key of the run has mappings of keys as values, which change together.
    """
    search_space: bool = False
    """Whether the parameters that the run's scheduler calls worth trying are varied, too."""
    method: searches.Method = searches.Grid(kind="grid")
    """Which points are simulated."""
    objectives: list[Objective] = Field(
        default_factory=lambda: [Objective(metric="mean_e2el_ms")], min_length=1
    )
    """What to look for; several make a Pareto front."""
    limits: dict[str, Bounds] = Field(default_factory=dict)
    """A point beyond them is in the tables, but is not called best."""
    replications: searches.Points = 1
    """How many times each point is simulated, `workload.seed` one higher each time."""
    replicate: trials.Redrawn | None = None
    """`windows` also takes the next `workload.requests` of the trace each time. null: `windows` of
    a file, `seeds` of a sample.
    """
    price: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Dollars of a GPU an hour. Points then have `dollars_per_hour` and
    `dollars_per_million_tokens`, also `_input_tokens` and `_output_tokens` as if these paid for
    all.
    """

    @model_validator(mode="after")
    def _varies_something(self) -> Self:
        if not (self.parameters or self.search_space):
            raise needed("a sweep", '"parameters", or search_space: true')
        if self.method.kind in ("grid", "one_at_a_time"):
            for name, parameter in self.parameters.items():
                if isinstance(parameter, searches.NumberRange) and parameter.steps is None:
                    key = f'"parameters.{name}.steps", or a list of values'
                    raise needed(f"method: {self.method.kind}", key)
        return self

    @property
    def tied(self) -> frozenset[str]:
        """The parameters whose values are keys of the run that change together."""
        return frozenset(
            name
            for name, parameter in self.parameters.items()
            if name.partition(".")[0] not in RunConfig.model_fields
            and isinstance(parameter, list)
            and all(isinstance(value, dict) and value for value in parameter)
        )

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, each once: of the objectives, then of the limits."""
        return list(dict.fromkeys([*(each.metric for each in self.objectives), *self.limits]))

    @property
    def conditions(self) -> list[Condition]:
        """The limits, a condition for each end."""
        return [each for name, bounds in self.limits.items() for each in bounds.of(name)]


@dataclass(frozen=True)
class Sweep:
    """A checked SWEEP.yaml, its document, and its run's document.

    `beside` is the folder that the run's relative paths start from.
    """

    config: SweepConfig
    document: Document
    run: Document
    beside: Path

    @cached_property
    def study(self) -> trials.Study:
        """The run with what is varied in it; a mistake in a value names its line of SWEEP.yaml."""
        parts = trials.replications(self.config.replications, self.config.replicate)
        space, tied = self.config.parameters, self.config.tied
        places = {key: self.document.place(("parameters", key)) for key in space}
        for name in tied:
            places |= {
                key: places[name] for value in searches.values_of(space[name]) for key in value
            }
        more = (("price", self.config.price),)
        return trials.Study(self.run, self.beside, parts, with_cost, more, places, tied)

    @cached_property
    def default(self) -> Patch | None:
        """The values of the parameters in the run as it is; None where it has none."""
        try:
            config = self.study.config({})
            parameters = self.config.parameters.items()
            return {name: self._own(config, name, each) for name, each in parameters}
        except (UsageError, KeyError):  # a key that is swept is missing, or wrong in every point
            return None

    def _own(self, config: RunConfig, name: str, parameter: searches.Parameter) -> Any:
        """Return the run's own value of a key; KeyError where there is none."""
        for value in [] if isinstance(parameter, searches.NumberRange) else parameter:
            with suppress(UsageError):
                if self.study.config({name: value}) == config:
                    return value
        outer, _, inner = name.partition(".")
        if outer != "scheduler":
            return flat(config.resolved())[name]
        if not inner:
            return {"name": config.scheduler.name, **config.scheduler.params}
        return {**defaults(config.scheduler.name), **flat(config.params)}[inner]

    @cached_property
    def chosen(self) -> list[Patch]:
        """The points that the method lists, each once; none of a search."""
        return self.config.method.patches(self.config.parameters, self.default)

    @cached_property
    def known(self) -> list[Patch]:
        """The points that are known beforehand; the run as it is comes first if not among them.

        A search's points follow from its results: only the first one is known.
        """
        chosen, default = self.chosen, self.default
        if default is not None and searches.identity(default) not in map(searches.identity, chosen):
            chosen = [default, *chosen]
        return searches.distinct(chosen)

    @property
    def num_simulations(self) -> int:
        """Number of simulations; of a search, the most there may be."""
        method = self.config.method
        proposed = method.trials if isinstance(method, searches.Optuna) else 0
        return (len(self.known) + proposed) * self.config.replications


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read and check SWEEP.yaml, with `dotted.key=value` overrides applied first.

    `run.KEY=VALUE` overrides a key of the run, wherever that is written. Raises UsageError naming
    the file, the line, the key, and what would be right.
    """
    return sweep_of(yaml_file.read(path, "run, parameters"), path.parent, overrides)


def sweep_of(document: Document, beside: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Return the sweep that a document of SWEEP.yaml's keys describes, as `load_sweep` does.

    `beside` is the folder that a RUN.yaml named in it is looked for in.
    """
    of_run = [each for each in overrides if each.strip().startswith("run.")]
    document = yaml_file.overridden(document, [each for each in overrides if each not in of_run])
    if not {"run", "parameters"} & document.data.keys() and "stages" in document.data:
        raise UsageError(
            f"{document.name}: holds a run, and a SWEEP.yaml is right: the keys run and "
            "parameters; did you mean evenflow simulate?"
        )
    config = checked(SweepConfig, document)
    run, beside = _run_of(document, config.run, beside)
    run = yaml_file.overridden(run, of_run, below="run.")
    make_importable([document.data, run.data], beside)
    if config.search_space:
        space = _worth_trying(document, run) | document.data.get("parameters", {})
        config = checked(SweepConfig, document._replace(data=document.data | {"parameters": space}))
    return Sweep(config, document, run, beside)


def _worth_trying(document: Document, run: Document) -> dict[str, Any]:
    """Return the parameters that the policy of a run calls worth trying."""
    name = configured(run).scheduler.name
    space: Any = {} if name in POOLED else getattr(policy(name), "search_space", {})
    if not isinstance(space, Mapping) or not space:
        place = document.place(("search_space",))
        raise UsageError(f"{place}: search_space: {name} has none; parameters are right")

    def parameter(values: Any) -> Any:
        if isinstance(values, Range):
            return values._asdict() | {"integer": values.whole}
        return list(values) if isinstance(values, tuple) else values

    return {f"scheduler.{key}": parameter(values) for key, values in space.items()}


def _run_of(document: Document, run: str | dict[str, Any], folder: Path) -> tuple[Document, Path]:
    if isinstance(run, str):
        path = Path(find(run, folder))
        try:
            return yaml_file.read(path), path.parent
        except UsageError as error:
            raise UsageError(f"{document.place(('run',))}: run: {error}") from None
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    return Document(document.name, run, places), folder


def check(sweep: Sweep) -> None:
    """Raise UsageError naming the place of what is wrong in a sweep, where that can be known.

    A value that no run accepts is a mistake. A deployment that does not fit and a policy that
    breaks its promise are results. Their points are recorded as failed.
    """
    known, space = sweep.known, sweep.config.parameters
    _require_apart(sweep)
    sweep.study.points(known)
    if isinstance(sweep.config.method, searches.Optuna):
        known = known or [{name: searches.values_of(each)[0] for name, each in space.items()}]
    right = _first_right(sweep, known)
    for name, parameter in space.items():
        for value in searches.values_of(parameter):
            with_value = searches.distinct({**each, name: value} for each in known[:TRIED])
            _first_right(sweep, with_value, name)
    point = sweep.study.points_of(right)[0]
    _check_metrics(sweep, point)
    _check_replications(sweep, point.config)


def _require_apart(sweep: Sweep) -> None:
    """Raise UsageError where two parameters set one key: the later would hide the earlier."""
    taken: set[str] = set()
    for name, parameter in sweep.config.parameters.items():
        values = searches.values_of(parameter)
        patches = values if name in sweep.config.tied else [{name: value} for value in values]
        for key in (key for patch in patches for key in patch):
            if any(f"{other}.".startswith(f"{key}.") for other in taken):
                place = sweep.document.place(("parameters", name))
                raise UsageError(f"{place}: {name}: sets {key}, as a parameter above it does")
        taken.update(*map(flat, patches))


def _first_right(sweep: Sweep, candidates: Sequence[Patch], name: str = "") -> Patch:
    """Return the first of some patches that is no mistake; raise what is wrong with the first.

    `name`: the parameter that has the same value in all.
    """
    mistakes = []
    for patch in candidates[:TRIED]:
        try:
            sweep.study.build(patch)
        except (DoesNotFitError, PolicyError):
            return patch
        except UsageError as error:
            mistakes.append(error)
        else:
            return patch
    place = f"{sweep.document.place(('parameters', name))}: {name}: " if name else ""
    raise UsageError(f"{place}{mistakes[0]}")


def _check_metrics(sweep: Sweep, point: Point) -> None:
    try:
        outcome = trials.dry_run(point.config, point.workload, point.beside)
        summary = point.measure(outcome, **dict(point.more))
    except UsageError:  # a run that fails has none
        return
    paths: dict[KeyPath, str] = {
        ("objectives", index, "metric"): objective.metric
        for index, objective in enumerate(sweep.config.objectives)
    }
    for path, metric in (paths | {("limits", name): name for name in sweep.config.limits}).items():
        if metric not in summary:
            hint = instead_of(metric, summary)
            raise UsageError(f'{sweep.document.place(path)}: unknown metric "{metric}"; {hint}')


def _check_replications(sweep: Sweep, config: RunConfig) -> None:
    count, asked = sweep.config.replications, sweep.config.replicate
    if why := trials.why_alike(config, sweep.beside, count, asked):
        other = ""
        if trials.redrawn(config, asked) == "seeds":
            other = "replicate: windows, or "
        elif trials.seed_matters(config):
            other = "replicate: seeds (the same rows, other arrivals), or "
        place = sweep.document.place(("replications",))
        raise UsageError(f"{place}: replications: {why}, or {other}replications: 1")
