"""Trials: a run with some keys changed, simulated on several parts of its trace, as one table.

The only loop over searches is `run`. Knows neither how cases are chosen nor what is good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from evenflow.config.build import Workload, build
from evenflow.config.run import RunConfig, with_
from evenflow.config.yaml_file import Document, Patch
from evenflow.errors import UsageError
from evenflow.report.echo import Watch
from evenflow.report.folder import claimed, staged
from evenflow.report.words import LOAD, overload
from evenflow.results.outcome import Outcome, Served
from evenflow.study.early import MISSED, Allowed
from evenflow.study.fair import Side, doubts, marked
from evenflow.study.points import (
    Point,
    Record,
    Store,
    executor_of,
    simulated,
    summary,
)
from evenflow.study.runs import Job, run_job

if TYPE_CHECKING:
    from pandas import DataFrame


class Replication(NamedTuple):
    """The requests of one replication: a seed, and how many of the trace are skipped before."""

    seed: int
    skip: int

    @property
    def patch(self) -> Patch:
        return {"workload.seed": self.seed, "workload.skip": self.skip}


Parts: TypeAlias = Callable[[RunConfig], Sequence[Replication]]
"""The parts that a run is simulated on, an equal number for all runs of a study."""

Redrawn: TypeAlias = Literal["seeds", "windows"]
"""What each replication draws: what a seed draws, or also the next rows of the trace."""


def redrawn(config: RunConfig, asked: Redrawn | None = None) -> Redrawn:
    """Return what replications draw: of a sample a seed draws all; of a file the rows differ too.

    Replications of the same rows would say nothing of others.
    """
    return asked or ("seeds" if config.workload.is_drawn else "windows")


def replications(count: int, asked: Redrawn | None = None, window: int | None = None) -> Parts:
    """Return the parts of `count` replications; their seeds count up from the run's own.

    `window`: the requests from one's beginning to the next's; None: `workload.requests`.
    """

    def parts(config: RunConfig) -> list[Replication]:
        own, step = config.workload, 0
        if redrawn(config, asked) == "windows":
            step = window or own.requests or 0
        return [Replication(own.seed + index, own.skip + index * step) for index in range(count)]

    return parts


def why_alike(
    config: RunConfig, beside: Path, count: int, asked: Redrawn | None = None
) -> str | None:
    """Return why a run cannot have `count` different replications, and what would be right."""
    own = config.workload
    if count == 1:
        return None
    if redrawn(config, asked) == "seeds":
        return (
            None
            if seed_matters(config)
            else (
                f"all would be alike, as the seed draws nothing of trace {own.trace} with "
                f"{own.arrivals.kind} arrivals; give random arrivals, such as poisson"
            )
        )
    wanted = None if own.requests is None else count * own.requests
    rows = len(own.rows(beside, wanted))
    if wanted is not None and (own.is_drawn or rows >= wanted):
        return None
    right = f"workload.requests, at most {rows // count:,}" if rows >= count else "fewer"
    return (
        f"each takes the next workload.requests rows of trace {own.trace}, which has {rows:,}: "
        f"give {right}"
    )


class Variant(NamedTuple):
    """A case to try: a patch of the run; `labels` name it in tables, as columns.

    Its runs end early once more requests than `allowed` are beyond a limit.
    """

    labels: Mapping[str, Any]
    patch: Patch
    allowed: tuple[Allowed, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A case that was tried: its labels, and the record of each part.

    `config` is the first part's.
    """

    labels: Mapping[str, Any]
    records: tuple[Record, ...]
    parts: tuple[Replication, ...] = ()
    config: RunConfig | None = None

    @property
    def side(self) -> Side:
        """The first part, as a side of a comparison; all trials of a study are of one version."""
        first, resolved = self.records[0], self.config.resolved() if self.config else {}
        named = self.config.cpu_time if self.config else ""
        facts = {"runtime": {"name": named if isinstance(named, str) else ""}}
        return Side(first.values, {"config": resolved, "cost_source": first.cost_source, **facts})

    @property
    def served(self) -> Served:
        """Numbers of requests that were asked for on all parts, and completed."""
        done = (record for record in self.records if record.error is None)
        return Served.of_all(Served.of(record.values, record.why) for record in done)

    @property
    def is_missed(self) -> bool:
        """Whether a run ended early, as it could not keep its SLO."""
        return any(MISSED in record.values for record in self.records)

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    def values(self, metric: str) -> list[float]:
        """Return a metric on each part, NaN where there is none."""
        found = (record.values.get(metric) for record in self.records)
        return [math.nan if value is None else float(value) for value in found]

    def mean(self, metric: str) -> float:
        return math.fsum(self.values(metric)) / len(self.records)

    @property
    def overload(self) -> str | None:
        """Excess of arrivals over what is served, where most parts that can tell are overloaded."""
        return overload(self.load)

    @property
    def keeps_up(self) -> bool:
        """Whether it is not overloaded, as far as the parts can tell."""
        return not self.load.get("overloaded")

    @property
    def load(self) -> dict[str, Any]:
        """Rates of arrivals and of service (LOAD), means over the parts that are not too short.

        `overloaded` is the majority's verdict; {} where no run has one.
        """
        *rates, verdict = LOAD
        told = [each.values for each in self.records if verdict in each.values]
        if not told:
            return {}
        sure = [values for values in told if values[verdict] is not None]
        load: dict[str, Any] = {key: fmean(each[key] for each in sure or told) for key in rates}
        return load | {verdict: round(fmean(each[verdict] for each in sure)) if sure else None}


def unfair(trials: Mapping[str, Trial]) -> list[str]:
    """Return what makes it unfair or weak to compare trials, by name; of those completed."""
    return marked(doubts({name: each.side for name, each in trials.items() if not each.errors}))


@dataclass(frozen=True, slots=True)
class Study:
    """A run, the parts of its trace that each case is simulated on, and what is kept of each.

    `beside` is the folder that the run's relative paths start from. `measure` and `more` are as for
    a `Point`. `places` say where a patch's key was written, for error messages. A `tied` key is not
    one of the run: its values are mappings of keys that change together.
    """

    run: Document | RunConfig
    beside: Path
    parts: Parts = field(default_factory=lambda: replications(1))
    measure: Callable[..., dict[str, Any]] = summary
    more: tuple[tuple[str, Any], ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()

    def config(self, patch: Patch) -> RunConfig:
        """Return the run with a patch; UsageError names the place of an invalid value."""
        keys: dict[str, Any] = {}
        for key, value in patch.items():
            keys |= value if key in self.tied else {key: value}
        return with_(self.run, keys, self.places)

    def points_of(self, patch: Patch, allowed: tuple[Allowed, ...] = ()) -> list[Point]:
        """Return the points of a patch, one for each part; `allowed` as in Variant."""
        config = self.config(patch)
        configs = [with_(config, part.patch) for part in self.parts(config)]
        return [Point(each, self.beside, self.measure, self.more, allowed) for each in configs]

    def build(self, patch: Patch) -> None:
        """Build a patch's first point, which finds what is wrong with it; simulates nothing."""
        point = self.points_of(patch)[0]
        build(point.config, point.beside, point.workload)

    def points(self, patches: Iterable[Patch]) -> list[Point]:
        """Return the points of patches, part by part; points of a part share their requests."""
        columns = zip(*map(self.points_of, patches), strict=True)
        return [point for column in columns for point in column]


class Simulator:
    """Simulates points on an executor and keeps results in a store: each point at most once.

    `on_done` is called with the number of points done since the simulator was made. `on_failure`
    gets the record of each point that fails. A failed point is in the store too, with its error;
    `retry` simulates those again. `writes`: as for `simulated`.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        on_done: Callable[[int], None] = lambda count: None,
        on_failure: Callable[[Record], None] = lambda record: None,
        *,
        retry: bool = False,
        writes: Sequence[str] = (),
    ) -> None:
        self.store = store
        self._executor = executor
        self._on_done = on_done
        self._on_failure = on_failure
        self._retry = retry
        self._writes = writes
        self._done = 0

    def records(self, points: Sequence[Point]) -> list[Record]:
        """Return the record of each point, in order; those in the store are not simulated again.

        What is done is kept when this is interrupted, and when a worker dies, which is a
        UsageError. So is an input that changes meanwhile.
        """
        keys: list[str] = []
        copies: Counter[str] = Counter()
        records: dict[str, Record] = {}

        def missing() -> Iterator[Point]:  # one by one: others are simulated meanwhile
            for point in points:
                keys.append(key := point.key)
                copies[key] += 1
                known = self.store.get(key) if copies[key] == 1 else None
                if known is not None and not (self._retry and known.error):
                    records[key] = known
                elif copies[key] == 1:
                    yield point
            self._tell(sum(copies[key] for key in records))

        # Named, it outlives an error of this loop, whose pool ends what is left (`simulated`).
        made = simulated(missing(), self._executor, self._writes)
        for record in made:
            if record.key not in copies:
                raise UsageError(
                    "a file that results depend on has changed while they were made: a trace, a "
                    "profile, or code; run the same command again"
                )
            self.store.put(record)
            records[record.key] = record
            if record.error is not None:
                self._on_failure(record)
            self._tell(copies[record.key])
        return [records[key] for key in keys]

    def _tell(self, more: int) -> None:
        self._done += more
        self._on_done(self._done)

    def trials(self, study: Study, cases: Sequence[Variant]) -> list[Trial]:
        """Simulate cases, each on all parts of the study."""
        return self.trials_of(
            [(case.labels, study.points_of(case.patch, case.allowed)) for case in cases]
        )

    def trials_of(self, rows: Sequence[tuple[Mapping[str, Any], Sequence[Point]]]) -> list[Trial]:
        """Simulate rows of equally many points, part by part; return a trial of each row."""
        columns = zip(*(points for _, points in rows), strict=True)
        records = self.records([point for column in columns for point in column])
        return [
            Trial(
                labels,
                tuple(records[index :: len(rows)]),
                tuple(Replication(p.config.workload.seed, p.config.workload.skip) for p in points),
                points[0].config,
            )
            for index, (labels, points) in enumerate(rows)
        ]


STORE = "store"
"""The folder of records, below the results."""


@dataclass(frozen=True, slots=True)
class How:
    """Execution of a study: how it is simulated, and what is kept.

    `out`: the folder that is written; nothing is without it. Points are kept below it, and found
    again by the same study unless `resume` is false. It may hold files of the user's only with
    `force`, and no file that the study `reads`. `executor` and `workers`: as for
    `executor_of`. `retry_failed`: points that failed before are simulated again. `watch`: shows the
    progress.
    """

    out: Path | None = None
    force: bool = False
    reads: Iterable[Path] = ()
    executor: str = "process"
    workers: int | None = None
    resume: bool = True
    retry_failed: bool = False
    watch: Watch | None = None

    @contextmanager
    def simulator(self, label: str, total: int | None, *writes: str) -> Iterator[Simulator]:
        """Yield a simulator of up to `total` points, shown as `label`; claim the folder first.

        `writes`: modules that only what is written needs, loaded while processes simulate.
        """
        with ExitStack() as stack:
            if self.out is not None:
                stack.enter_context(claimed(self.out, force=self.force, reads=self.reads))
            folder = self.out or Path(stack.enter_context(TemporaryDirectory()))
            store = Store(folder / STORE)
            if not self.resume:
                store.clear()
            pool = stack.enter_context(executor_of(self.executor, self.workers))
            told: tuple[Any, ...] = ()
            if self.watch is not None:
                shown = stack.enter_context(self.watch([label], total))
                told = shown.done, shown.failed
            needed = writes if self.out is not None else ()
            yield Simulator(store, pool, *told, retry=self.retry_failed, writes=needed)

    def write(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill the folder, whole or not at all; do nothing without one."""
        if self.out is not None:
            with staged(self.out, force=True) as scratch:
                write(scratch)


Search: TypeAlias = Generator[Sequence[Variant], list[Trial], Any]
"""A search yields a batch of cases, is sent their trials, and ends when it has seen enough."""


def run(study: Study, simulator: Simulator, search: Search) -> list[Trial]:
    """Simulate what a search asks for until it ends; return all trials in the order asked for."""
    trials: list[Trial] = []
    batch: Any = None  # what a generator is started with
    while True:
        try:
            cases = search.send(batch)
        except StopIteration:
            return trials
        batch = simulator.trials(study, cases)
        trials += batch


def table(trials: Sequence[Trial]) -> DataFrame:
    """Return a row for each case and part, in order: labels, seed, values, and `error`.

    `error` is None where the run was completed; a value that a run lacks is missing.
    """
    from pandas import DataFrame

    return DataFrame(
        [
            {**trial.labels, "seed": part.seed, **_known(record.values), "error": record.error}
            for trial in trials
            for part, record in zip(trial.parts, trial.records, strict=True)
        ]
    )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with NaN for None, which makes no column one of objects."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def dry_run(config: RunConfig, workload: Workload, beside: Path) -> Outcome:
    """Simulate the two smallest requests of a workload; UsageError if neither can be served.

    So a run's mistakes, and the names of its numbers, are known before the first long one.
    """
    requests, texts = workload.requests, workload.texts
    sizes = [request.prompt_tokens + request.output_tokens for request in requests]
    places = sorted(nsmallest(2, range(len(sizes)), key=sizes.__getitem__))
    smallest = Workload(
        [requests[place] for place in places],
        workload.trace,
        None if texts is None else [texts[place] for place in places],
    )
    outcome = run_job(Job(config, smallest, beside))
    if not outcome.summary["completed"]:
        why = outcome.result.reason[0]
        raise UsageError(f"workload: none of its requests can be served: the smallest: {why}")
    return outcome


def seed_matters(config: RunConfig) -> bool:
    """Say whether another seed gives another run, as something is drawn."""
    return (
        config.workload.is_drawn
        or config.workload.arrivals.kind not in ("replay", "offline", "closed")
        or config.speculative is not None
        or bool(config.processes)
        or "predictor" in config.scheduler.params
    )
