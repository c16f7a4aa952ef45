"""A sweep: SWEEP.yaml says what to vary in a run and what to look for; findings are its points.

Knows what is a mistake in it and which points are best. Writes and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from evenflow.errors import DoesNotFitError, PolicyError, UsageError, instead_of
from evenflow.keys import Count, Keys, expect, needed
from evenflow.schedulers import POOLED, parameters, policy
from experiments.run_file import pools as config_pools
from experiments.run_file import yaml_file
from experiments.run_file.build import build
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import Document, KeyPath, Patch, checked, find
from experiments.study.points import Point, Record, workload_of
from experiments.study.searches import (
    Finite,
    Grid,
    Method,
    OneAtATime,
    Optuna,
    Parameter,
    Random,
    Range,
    Score,
    distinct,
    draws,
    expected,
    grid,
    identity,
    one_at_a_time,
    optuna,
    proposed,
    values_of,
)
from experiments.study.slo import Condition, Objective, pareto_front
from experiments.study.trials import (
    Case,
    Part,
    Search,
    Simulator,
    Study,
    Trial,
    all_alike,
    dry_run,
    run,
    seed_matters,
    seeds,
)

TRIED = 32
"""How many points with one value are tried, at most, for one that accepts it."""


def _default_objectives() -> list[Objective]:
    return [Objective(metric="mean_e2el_ms")]


class Bounds(Keys):
    """What the mean of a metric has to be for a point to count."""

    at_most: Finite | None = None
    at_least: Finite | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise expected("at_most or at_least")
        return self

    def of(self, metric: str) -> list[Condition]:
        """Return the bounds as conditions on a metric."""
        ends = ((self.at_most, False), (self.at_least, True))
        return [Condition(metric, limit, least) for limit, least in ends if limit is not None]


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
                    raise needed(f"method: {self.method.kind}", key)
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, each once: of the objectives, then of the limits."""
        return list(dict.fromkeys([*(each.metric for each in self.objectives), *self.limits]))

    @property
    def conditions(self) -> list[Condition]:
        """The limits, each end by itself."""
        return [each for name, bounds in self.limits.items() for each in bounds.of(name)]


@dataclass(frozen=True)
class Sweep:
    """A checked SWEEP.yaml, its document, and that of its run.

    `beside` is the folder that the run's relative paths start from.
    """

    config: SweepConfig
    document: Document
    run: Document
    beside: Path

    @cached_property
    def study(self) -> Study:
        """The run with what is varied in it; a mistake in a value names its line of SWEEP.yaml."""
        count = self.config.replications
        parts = seeds(count) if self.config.replicate == "seeds" else self._windows
        places = {key: self.place("parameters", key) for key in self.config.parameters}
        return Study(self.run, self.beside, parts, places=places)

    def place(self, *path: str | int) -> str:
        """Return where something was written."""
        return self.document.place(path)

    def _windows(self, config: RunConfig) -> list[Part]:
        own = config.workload
        if own.requests is None:
            raise UsageError(
                f'{self.place("replicate")}: replicate: windows needs the key "run.workload.'
                'requests"'
            )
        count = self.config.replications
        return [Part(own.seed + i, own.skip + i * own.requests) for i in range(count)]


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
    for assignment in overrides:
        if assignment not in of_run:
            document = yaml_file.override(document, assignment)
    config = checked(SweepConfig, document)
    run_document, beside = _run_document(document, config.run, beside)
    for assignment in of_run:
        run_document = yaml_file.override(run_document, assignment, below="run.")
    return Sweep(config, document, run_document, beside)


def _run_document(
    document: Document, run_keys: str | dict[str, Any], folder: Path
) -> tuple[Document, Path]:
    if isinstance(run_keys, str):
        path = Path(find(run_keys, folder))
        try:
            return yaml_file.read(path), path.parent
        except UsageError as error:
            raise UsageError(f"{document.place(('run',))}: run: {error}") from None
    places = {key[1:]: place for key, place in document.places.items() if key[:1] == ("run",)}
    return Document(document.name, run_keys, places), folder


def default_patch(sweep: Sweep) -> Patch | None:
    """Return what the parameters are in the run as it is; None where it does not say."""
    try:
        config = sweep.study.config({})
    except UsageError:  # it may lack a key that is swept; a mistake shows in every point
        return None
    try:
        return {
            name: _default(sweep, config, name, parameter)
            for name, parameter in sweep.config.parameters.items()
        }
    except KeyError:
        return None


def _default(sweep: Sweep, config: RunConfig, name: str, parameter: Parameter) -> Any:
    """Return the run's own value of a key; KeyError where there is none."""
    for value in [] if isinstance(parameter, Range) else parameter:
        try:
            if sweep.study.config({name: value}) == config:
                return value
        except UsageError:
            continue
    outer, _, inner = name.partition(".")
    if outer != "scheduler":
        return _flat(config.resolved())[name]
    if not inner:
        return {"name": config.scheduler.name, **config.scheduler.params}
    return {**_policy_defaults(config.scheduler.name), **_flat(config.scheduler.params)}[inner]


def _policy_defaults(name: str) -> dict[str, Any]:
    if name in POOLED:
        return dict(config_pools.parameters(name))
    declared = parameters(policy(name)).items()
    return {key: each.default for key, each in declared if each.default is not each.empty}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat[prefix + key] = value
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
    return flat


def chosen_patches(sweep: Sweep, default: Patch | None) -> list[Patch]:
    """Return the points that the method lists, each once; none of a search.

    UsageError when only one parameter is to vary at a time and the run does not say what the others
    are.
    """
    method, space = sweep.config.method, sweep.config.parameters
    if isinstance(method, Optuna):
        return []
    if isinstance(method, Random):
        return draws(space, method)
    if isinstance(method, OneAtATime):
        if default is None:
            raise UsageError(
                "method: one_at_a_time: the run has to say what every parameter is by default"
            )
        return one_at_a_time(space, default)
    return grid(space)


def known_patches(sweep: Sweep) -> list[Patch]:
    """Return the points that are known beforehand; the run as it is comes first if not among them.

    Those of a search follow from its results: of them only that first one is known.
    """
    default = default_patch(sweep)
    chosen = chosen_patches(sweep, default)
    return distinct(chosen if default is None or _is_in(default, chosen) else [default, *chosen])


def _is_in(patch: Patch, others: Sequence[Patch]) -> bool:
    return identity(patch) in map(identity, others)


def expected_points(sweep: Sweep) -> int:
    """Return how many simulations a sweep has; of a search, the most there may be."""
    method = sweep.config.method
    trials = method.trials if isinstance(method, Optuna) else 0
    return (len(known_patches(sweep)) + trials) * sweep.config.replications


@dataclass(frozen=True, slots=True)
class Findings:
    """All points of a sweep; `default` is the position of the run as it is, if there is one.

    `default_is_extra`: it is no point of the grid or the draws, and was simulated besides.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    default: int | None
    default_is_extra: bool = False

    @property
    def metrics(self) -> list[str]:
        """All metrics of all points, in the order of their first appearance."""
        records = [record for trial in self.trials for record in trial.records]
        return list(dict.fromkeys(name for record in records for name in record.values))


def run_sweep(sweep: Sweep, simulator: Simulator) -> Findings:
    """Simulate all points of a sweep that the store does not have.

    The findings depend on the sweep only, not on who simulates nor on what was there before.
    """
    known = known_patches(sweep)
    tried = run(sweep.study, simulator, _search(sweep, known))
    trials = list({identity(trial.labels): trial for trial in tried}.values())
    default = default_patch(sweep)
    if default is None:
        return Findings(sweep, trials, None)
    chosen = chosen_patches(sweep, default) or [trial.labels for trial in tried[len(known) :]]
    where = [identity(trial.labels) for trial in trials].index(identity(default))
    return Findings(sweep, trials, where, not _is_in(default, chosen))


def _search(sweep: Sweep, known: Sequence[Patch]) -> Search:
    """Ask for the points known beforehand, then for those that Optuna proposes."""
    config, method = sweep.config, sweep.config.method
    if known:
        yield [Case(patch, patch) for patch in known]
    if isinstance(method, Optuna):

        def propose(asked: Any) -> Case:
            values = {name: proposed(asked, name, each) for name, each in config.parameters.items()}
            return Case(values, values)

        goals = [objective.goal for objective in config.objectives]
        yield from optuna(method, goals, propose, lambda trial: _score(config, trial))


def _score(config: SweepConfig, trial: Trial) -> Score:
    values = [trial.mean(objective.metric) for objective in config.objectives]
    excess = {
        name: max(each.excess(trial.mean(name)) for each in bounds.of(name))
        for name, bounds in config.limits.items()
    }
    return values, excess


def run_shard(sweep: Sweep, simulator: Simulator, index: int, count: int) -> list[Record]:
    """Simulate every `count`-th point from the one at `index` on, counting from 0."""
    return simulator.records(sweep.study.points(known_patches(sweep))[index::count])


def eligible(config: SweepConfig, trial: Trial) -> bool:
    """Say whether all replications were completed, and the means are within the limits."""
    means = {metric: trial.mean(metric) for metric in config.metrics}
    if trial.errors or any(map(math.isnan, means.values())):
        return False
    return all(condition.holds(means) for condition in config.conditions)


def ranked(findings: Findings) -> list[int]:
    """Return the positions of the points that count, the best first.

    Of several objectives, the Pareto front in order of the first objective.
    """
    config = findings.sweep.config
    costs = {i: _costs(config, t) for i, t in enumerate(findings.trials) if eligible(config, t)}
    able = list(costs)
    if len(config.objectives) > 1:
        front = pareto_front(list(costs.values()))
        able = [index for index, kept in zip(costs, front, strict=True) if kept]
    return sorted(able, key=lambda index: (costs[index], index))


def _costs(config: SweepConfig, trial: Trial) -> tuple[float, ...]:
    return tuple(each.cost(trial.mean(each.metric)) for each in config.objectives)


def check(sweep: Sweep) -> None:
    """Raise UsageError naming the place of what is wrong in a sweep, where that can be known.

    A value that no run accepts is a mistake. A deployment that does not fit and a policy that
    breaks its promise are results: such points are recorded as failed.
    """
    known = known_patches(sweep)
    sweep.study.points(known)
    space = sweep.config.parameters
    if isinstance(sweep.config.method, Optuna):
        known = known or [{name: values_of(each)[0] for name, each in space.items()}]
    right = _first_right(sweep, known, "")
    for name, parameter in space.items():
        place = f"{sweep.place('parameters', name)}: {name}: "
        for value in values_of(parameter):
            with_value = distinct({**each, name: value} for each in known[:TRIED])
            _first_right(sweep, with_value, place)
    point = sweep.study.points([right])[0]
    _check_metrics(sweep, point)
    _check_replications(sweep, point.config)


def _first_right(sweep: Sweep, candidates: Sequence[Patch], place: str) -> Patch:
    """Return the first of some patches that is no mistake; raise what is wrong with them."""
    mistake: UsageError | None = None
    for patch in islice(candidates, TRIED):
        point = sweep.study.points([patch])[0]
        try:
            build(point.config, workload_of(point).requests, point.beside)
        except (DoesNotFitError, PolicyError):
            return patch
        except UsageError as error:
            mistake = mistake or error
        else:
            return patch
    assert mistake is not None  # there is at least one candidate
    raise UsageError(f"{place}{mistake}")


def _check_metrics(sweep: Sweep, point: Point) -> None:
    summary = _dry_summary(point)
    paths: list[tuple[str, KeyPath]] = [
        (objective.metric, ("objectives", index, "metric"))
        for index, objective in enumerate(sweep.config.objectives)
    ]
    paths += [(name, ("limits", name)) for name in sweep.config.limits]
    for metric, path in paths:
        if summary and metric not in summary:
            hint = instead_of(metric, summary)
            raise UsageError(f'{sweep.place(*path)}: unknown metric "{metric}"; {hint}')


def _dry_summary(point: Point) -> dict[str, Any]:
    """Return the summary of a run of few requests, and nothing of one that fails."""
    try:
        return dry_run(point.config, workload_of(point), point.beside).summary
    except UsageError:
        return {}


def _check_replications(sweep: Sweep, config: RunConfig) -> None:
    alike = sweep.config.replicate == "seeds" and not seed_matters(config)
    if sweep.config.replications > 1 and alike:
        raise UsageError(
            f"{sweep.place('replications')}: replications: {all_alike(config)}, or "
            "replicate: windows, or replications: 1"
        )
