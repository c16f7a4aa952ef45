"""The Python front door: what the commands do, as functions that return tables.

`import evenflow as ef` finds them as `ef.simulate` and so on. Nothing is written unless a folder is
given as `out`. Knows which pieces answer a question; each piece does its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from evenflow.results.run import RunResult
from evenflow.scheduling import Scheduler
from experiments.given_policy import GivenPolicy
from experiments.report.folder import staged
from experiments.run_file.build import load_workload
from experiments.run_file.run import RunConfig, with_
from experiments.run_file.yaml_file import Document, read
from experiments.runs import Job, Outcome, Save, run_job, with_bubbles, write_run
from experiments.study.compare import Comparison, line_up, run_all, with_schedulers
from experiments.study.points import inputs_of

RunFile = str | Path | Mapping[str, Any] | RunConfig
"""A RUN.yaml's path, its keys, or a checked configuration."""

Policy = str | Mapping[str, Any] | type[Scheduler] | Scheduler
"""A policy's name or `module:Class`; a mapping of `name` and parameters; a class; an object."""


@dataclass(frozen=True)
class SimulatedRun:
    """One simulated run. Tables are DataFrames with the columns of the files of their names.

    Where there are several pipelines (replicas, or the pools of a system), `batches`, `stages` and
    `bubbles` begin with the column `pipeline`. Times are in seconds, those of `summary` as its keys
    say.
    """

    label: str
    outcome: Outcome
    beside: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of summary.json, under the keys of vLLM's `bench serve`."""
        return self.outcome.summary

    @property
    def result(self) -> RunResult:
        """What happened, as arrays."""
        return self.outcome.result

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request, in order of request id."""
        return pd.DataFrame(self.result.tables()["requests"])

    @cached_property
    def transfers(self) -> pd.DataFrame:
        """A row a transfer of KV between pools; empty without pools."""
        return pd.DataFrame(self.result.tables().get("transfers", {}))

    @cached_property
    def batches(self) -> pd.DataFrame:
        """A row a micro-batch, in the order scheduled."""
        return self._by_pipeline("batches")

    @cached_property
    def stages(self) -> pd.DataFrame:
        """A row a stage and micro-batch: when it starts and ends."""
        return self._by_pipeline("stages")

    @cached_property
    def bubbles(self) -> pd.DataFrame:
        """A row an idle interval of a stage, with its cause."""
        return self._by_pipeline("bubbles")

    def write(self, out: str | Path, *, save: Save = "all", force: bool = False) -> Path:
        """Write the folder that `evenflow simulate` writes; return it.

        `save`: only the summary, also the requests, or all. UsageError for a folder with files that
        evenflow did not write, unless `force`, which leaves them as they are.
        """
        folder = Path(out)
        provenance = self.result.provenance
        reads = inputs_of(RunConfig.model_validate(provenance["config"]), self.beside)
        with staged(folder, force=force, reads=reads) as scratch:
            write_run(scratch, self.outcome, self.label, save, self.label)
        return folder

    def _by_pipeline(self, name: str) -> pd.DataFrame:
        tables = {
            pipeline: pd.DataFrame((part.result.tables() | {"bubbles": part.bubbles.table()})[name])
            for label, run in with_bubbles(self.outcome, self.label).items()
            for pipeline, part in (run.pools or {label: run}).items()
        }
        if len(tables) == 1:
            return next(iter(tables.values()))
        return pd.concat(tables, names=["pipeline"]).reset_index("pipeline").reset_index(drop=True)


def simulate(
    run: RunFile,
    *,
    scheduler: Policy | None = None,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    save: Save = "all",
    force: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> SimulatedRun:
    """Simulate one run: `simulate("run.yaml", scheduler="sarathi", set={"kv.pages": 4000})`.

    `scheduler` replaces the run's. A class is called; an object is copied for each engine, seed and
    run, and never changed itself. `set` gives keys of the run new values. `on_done` is called with
    the number of requests done. `out`, `save` and `force` are as for `SimulatedRun.write`. Raises
    UsageError for what cannot be, in one line, and PolicyError when a policy breaks its promise.
    """
    job = _job(run, scheduler, set)
    simulated = SimulatedRun(job.config.scheduler.name, run_job(job, on_done), job.beside)
    if out is not None:
        simulated.write(out, save=save, force=force)
    return simulated


def compare(
    run: RunFile,
    schedulers: Sequence[Policy],
    *,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    save: Save = "all",
    force: bool = False,
) -> Comparison:
    """Simulate several schedulers on the same requests; `.table` has a row for each.

    Schedulers are as for `simulate`; a class or an object goes by the name of its class. `set`
    gives keys of the run new values. `out`, `save` and `force` are as for `simulate`, with a folder
    for each scheduler. Raises UsageError for what cannot be.
    """
    entries = [_named_or_given(policy) for policy in schedulers]
    document, beside = _document(run)
    first = {} if "scheduler" in document.data else {"scheduler": _key(entries[0])}
    config = with_(document, first | dict(set or {}))
    given = {entry.label: entry for entry in entries if isinstance(entry, GivenPolicy)}
    contenders = line_up(with_schedulers(entries, config), beside, given)
    if out is None:
        return run_all(contenders)
    with staged(Path(out), force=force, reads=inputs_of(config, beside)) as scratch:
        comparison = run_all(contenders, scratch, save)
        comparison.write(scratch, Path(document.name).name)
    return comparison


def _job(run: RunFile, scheduler: Policy | None, patch: Mapping[str, Any] | None) -> Job:
    """Return the job that a run, a policy in place of its own and a patch of its keys make."""
    document, beside = _document(run)
    entry = None if scheduler is None else _named_or_given(scheduler)
    changes = {} if entry is None else {"scheduler": _key(entry)}
    config = with_(document, changes | dict(patch or {}))
    policy = entry if isinstance(entry, GivenPolicy) else None
    return Job(config, load_workload(config, beside), beside, policy)


def _document(run: RunFile) -> tuple[Document, Path]:
    if isinstance(run, RunConfig):
        return run.document(), Path()
    if isinstance(run, Mapping):
        return Document("the run", dict(run), {}), Path()
    return read(Path(run)), Path(run).parent


def _named_or_given(policy: Policy) -> str | dict[str, Any] | GivenPolicy:
    if isinstance(policy, Mapping):
        return dict(policy)
    return policy if isinstance(policy, str) else GivenPolicy(policy)


def _key(entry: str | dict[str, Any] | GivenPolicy) -> str | dict[str, Any]:
    """Return what the run's key `scheduler` holds for a policy."""
    return entry.name if isinstance(entry, GivenPolicy) else entry
