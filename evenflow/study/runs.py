"""Simulate one configuration and write its folder: for `simulate`, and for each in `compare`.

Its policy may be one that Python gives as a class or an object, where RUN.yaml could only name one.
Knows the steps and their order; no command line and no other run.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from evenflow.config.build import Built, Workload, build
from evenflow.config.files import inputs_of
from evenflow.config.provenance import provenance, wall_clock
from evenflow.config.run import RunConfig
from evenflow.core.scheduling import Scheduler
from evenflow.errors import UsageError
from evenflow.report.folder import staged
from evenflow.report.shown import Shown, Table
from evenflow.report.tables import Format, check_format, write_json, write_table
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.results.run import Columns, RunResult, merged
from evenflow.schedulers import require_sound
from evenflow.sim import pipeline_of, simulate_replicas
from evenflow.study.fair import runs_told
from evenflow.user_code import words_of

if TYPE_CHECKING:
    from evenflow.core.world import World
    from evenflow.engines.pools import PooledWorld
    from evenflow.report.page import Addition
    from evenflow.sim.driver import Watch
    from evenflow.sim.processes import UserProcess

Save = Literal["summary", "requests", "all"]
"""How much is written of a run."""

TIMELINE_BATCHES = 20_000
"""Micro-batches that a timeline shows if no window is asked for."""


class GivenPolicy:
    """A policy given in Python: a class to call, or an object to copy, for each engine and run.

    It is copied when given, too. `label` is its name in tables; `name`, `module:Class`, that in the
    configuration. UsageError for an object without a method schedule(view).
    """

    def __init__(self, policy: type[Scheduler] | Scheduler) -> None:
        if not callable(getattr(policy, "schedule", None)):
            raise UsageError(
                "scheduler: should be a name, a mapping, or a class or object with a method "
                f"schedule(view), not {policy!r}"
            )
        self._cls: type = policy if isinstance(policy, type) else type(policy)
        self.label = self._cls.__name__
        try:
            self._policy = copy.deepcopy(policy)
        except Exception as error:
            raise UsageError(
                f"scheduler {self.label}: cannot be copied for each engine ({words_of(error)}); a "
                "class is right"
            ) from error
        self.name = f"{self._cls.__module__}:{self._cls.__qualname__}"

    def make(self, **facts: Any) -> Scheduler:
        """Return a fresh policy; a class gets those facts of the deployment that it takes."""
        if isinstance(self._policy, type):
            accepted = inspect.signature(self._policy).parameters
            made = self._policy(**{key: fact for key, fact in facts.items() if key in accepted})
        else:
            made = copy.deepcopy(self._policy)
        require_sound(made)
        return made

    def source(self) -> Mapping[str, str | None]:
        """Return the name, and the SHA-256 of the class's source where Python can find it."""
        try:
            digest = hashlib.sha256(inspect.getsource(self._cls).encode()).hexdigest()
        except (OSError, TypeError):
            digest = None
        return {"name": self.name, "source_sha256": digest}


def given_process(process: object) -> tuple[object, UserProcess | None]:
    """Return a process as a configuration names it and, if Python gives one, its function.

    UsageError for what is neither a name, a mapping nor a function of a world.
    """
    if isinstance(process, str | Mapping):
        return process, None
    inner = process.func if isinstance(process, partial) else process
    name = getattr(inner, "__qualname__", None)
    if not callable(process) or name is None:
        raise UsageError(
            "processes: each should be a name, a mapping, or a function of a world that yields "
            f"events, not {process!r}"
        )
    return f"{inner.__module__}:{name}", process


class Job(NamedTuple):
    """One configuration to simulate on requests already made; `beside` is its file's folder.

    `policy`, given in Python, replaces the configuration's, `name` its name in tables. `processes`
    given in Python replace the configuration's at the same positions.
    """

    config: RunConfig
    workload: Workload
    beside: Path
    policy: GivenPolicy | None = None
    name: str = ""
    processes: tuple[UserProcess | None, ...] = ()

    @property
    def label(self) -> str:
        """Label of the run in tables."""
        return self.name or self.config.scheduler.name

    @property
    def folder(self) -> str:
        """The label, as a folder may be called."""
        return re.sub(r"[^\w.=-]+", "-", self.label).strip("-.")

    def built(self) -> Built:
        """Return the world to simulate; UsageError for an impossible one."""
        make = None if self.policy is None else self.policy.make
        return build(self.config, self.beside, self.workload, make)

    def simulate(
        self,
        world: World | PooledWorld,
        on_done: Callable[[int], None] | None = None,
        *,
        whole: bool = True,
        watch: Watch | None = None,
    ) -> list[RunResult]:
        """Simulate a world with the pipeline and the processes of the configuration."""
        return simulate_replicas(
            world,
            on_done,
            pipeline=self.config.pipeline,
            processes=self.joining(),
            seed=self.config.workload.seed,
            whole=whole,
            watch=watch,
        )

    def joining(self) -> list[UserProcess]:
        """Return the processes that join the run, as functions of a world."""
        named = self.config.processes or []
        if not named:
            return []
        from evenflow.config.processes import processes_of

        given = self.processes or (None,) * len(named)
        made = iter(
            processes_of([n for n, g in zip(named, given, strict=True) if not g], self.beside)
        )
        return [process or next(made) for process in given]

    def source(self, built: Built, **facts: Any) -> dict[str, Any]:
        """Return where the results of a run come from, and those `facts` that there are."""
        facts |= {} if self.policy is None else {"policy": self.policy.source()}
        source = provenance(self.config, self.workload.trace, built.cost_source, built.host)
        if budget := built.deployment.get("token_budget"):
            source["setup"] += f", token_budget {budget} (auto)"
        return {
            **source,
            "deployment": built.deployment,
            **{name: fact for name, fact in facts.items() if fact},
        }


def run_job(
    job: Job,
    on_done: Callable[[int], None] | None = None,
    *,
    whole: bool = True,
    built: Built | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Simulate a job. `on_done` is called with the number of requests done.

    If not `whole`, only what a summary and the requests need is kept; `watch` may end the run (see
    `simulate_replicas`).
    `built`: what the job has built already.
    """
    started = time.perf_counter()
    built = built or job.built()
    results = job.simulate(built.world, on_done, whole=whole, watch=watch)
    asked, joining = job.config.pipeline, job.config.processes or ()
    source = job.source(built, pipeline=pipeline_of(built.world, asked, joining))
    replicas = tuple(replace(result, provenance=source) for result in results)
    result = replace(merged(replicas), provenance=source)
    summary = summarize(result, job.config.goodput)
    return Outcome(result, summary, time.perf_counter() - started, replicas, job.label)


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedRun(Outcome, Shown):
    """One simulated run, which can be written; `file` is what it was simulated from.

    `additions` are the further answers asked for.
    """

    file: Path = Path("the run")
    additions: list[Addition] = field(default_factory=list)

    def told(self) -> Iterator[str | Table]:
        yield from runs_told([self])
        for each in self.additions:
            yield from each.told()

    def write(
        self,
        out: str | Path,
        *,
        save: Save = "all",
        format: Format = "csv",
        force: bool = False,
    ) -> Path:
        """Write the folder that `evenflow simulate` writes; return it.

        `save`: only the summary, also the requests, or all. `format` is that of the tables.
        UsageError for a folder with files that evenflow did not write, unless `force`, which leaves
        them as they are.
        """
        check_format(format)
        folder = Path(out)
        provenance = self.result.provenance
        reads = inputs_of(RunConfig.model_validate(provenance["config"]), self.file)
        more = self.additions
        with staged(folder, force=force, reads=reads) as scratch:
            write_run(scratch, self, save, self.file.name, more=more, form=format)
        return folder


def write_run(
    folder: Path,
    outcome: Outcome,
    save: Save,
    title: str | None = None,
    window: tuple[float, float] | None = None,
    *,
    more: Sequence[Addition] = (),
    form: Format = "csv",
) -> None:
    """Write all that `save` asks for of a run; with a `title`, its report too.

    `window`: what the timeline shows, see `write_details`. `more` is in the report, and its
    tables are written. `form`: the format of the tables.
    """
    for each in more:
        each.write(folder)
    write_results(folder, outcome, save, form=form)
    if save != "all":
        return
    write_details(folder, outcome, window, form)
    if title is not None:
        from evenflow.report.run_page import write_report

        runs, parts = {outcome.label: outcome}, [each.html for each in more]
        write_report(folder / "report.html", runs, title, outcome.result.provenance, parts)


def write_results(
    folder: Path,
    outcome: Outcome,
    save: Save,
    more: Mapping[str, Any] | None = None,
    form: Format = "csv",
) -> None:
    """Write summary.json, with `more` in it; and unless only that is asked for, the requests and
    the wall clock."""
    folder.mkdir(parents=True, exist_ok=True)
    goodput = {"request_goodput": outcome.summary.get("request_goodput")}  # null: nothing limited
    source = {"provenance": outcome.result.provenance}
    write_json(folder / "summary.json", outcome.summary | goodput | {**(more or {})} | source)
    if save != "summary":
        _write_tables(folder, outcome.result.tables("requests", "transfers", "marks"), form)
        write_json(folder / "wall_clock.json", wall_clock(outcome.wall_s))


def write_details(
    folder: Path,
    outcome: Outcome,
    window: tuple[float, float] | None = None,
    form: Format = "csv",
) -> None:
    """Write the tables of micro-batches, stages and bubbles, and the timeline.

    The timeline shows a `window` (seconds of the run). None: all. Of more than a viewer takes,
    TIMELINE_BATCHES micro-batches around the middle of the steady window. Replicas have separate
    folders, and so have the pools of a system, with the requests as the pool saw them.
    """
    from evenflow.report.timeline import write_timeline

    for index, run in enumerate(outcome.parts.values()):
        part = folder if len(outcome.parts) == 1 else folder / f"replica-{index}"
        pools = {part / name: pool for name, pool in run.pools.items()}
        for place, pipeline in (pools or {part: run}).items():
            place.mkdir(parents=True, exist_ok=True)
            for name in ["batches", "stages", "bubbles", *(["requests"] if pools else [])]:
                _write_tables(place, pipeline.tables(name), form)
            shown = window or _shown(pipeline)
            path = place / "timeline.json.gz"
            write_timeline(path, pipeline.result, pipeline.idle, window=shown)


def _shown(pipeline: Outcome) -> tuple[float, float]:
    """Return the seconds of a run that its timeline shows if nothing else is asked for."""
    from evenflow.report.data import steady
    from evenflow.report.timeline import WHOLE

    result = pipeline.result
    if len(result.scheduled_s) <= TIMELINE_BATCHES:
        return WHOLE
    rows = steady(pipeline, TIMELINE_BATCHES)
    return float(result.scheduled_s[rows.start]), float(result.returned_s[rows.stop - 1])


def _write_tables(folder: Path, tables: Mapping[str, Columns], form: Format) -> None:
    """Write each of the tables as a file of its name."""
    for name, table in tables.items():
        write_table(folder / f"{name}.{form}", table)
