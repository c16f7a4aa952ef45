"""The Python front door: what the commands do, as functions that return tables.

`import evenflow as ef` finds them as `ef.simulate` and so on. Nothing is written unless a folder is
given as `out`. Knows which pieces answer a question; each piece does its own work.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from evenflow.errors import UsageError
from evenflow.results.run import RunResult
from evenflow.types import Scheduler
from experiments.report.folder import staged
from experiments.report.outputs import Save
from experiments.run_file.build import load_workload
from experiments.run_file.run import RunConfig, with_
from experiments.run_file.yaml_file import Document, read
from experiments.runs import Job, Outcome, run_job, with_bubbles, write_run
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
    job = job_of(run, scheduler, set)
    simulated = SimulatedRun(job.config.scheduler.name, run_job(job, on_done), job.beside)
    if out is not None:
        simulated.write(out, save=save, force=force)
    return simulated


def job_of(
    run: RunFile, scheduler: Policy | None = None, patch: Mapping[str, Any] | None = None
) -> Job:
    """Return the job that a run, a policy in place of its own and a patch of its keys make."""
    document, beside = _document(run)
    changes: dict[str, Any] = {} if scheduler is None else {"scheduler": _name_of(scheduler)}
    config = with_(document, changes | dict(patch or {}))
    made = None if scheduler is None else maker_of(scheduler)
    source = {} if made is None else {"policy": _source_of(scheduler)}
    return Job(config, load_workload(config, beside), beside, made, source)


def _document(run: RunFile) -> tuple[Document, Path]:
    if isinstance(run, RunConfig):
        return run.document(), Path()
    if isinstance(run, Mapping):
        return Document("the run", dict(run), {}), Path()
    return read(Path(run)), Path(run).parent


def _name_of(policy: Policy) -> Any:
    """Return what the key `scheduler` holds for a policy."""
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Mapping):
        return dict(policy)
    if not callable(getattr(policy, "schedule", None)):
        raise UsageError(
            f"scheduler: should be a name, a mapping, or a class or object with a method "
            f"schedule(view), not {policy!r}"
        )
    cls = policy if isinstance(policy, type) else type(policy)
    return f"{cls.__module__}:{cls.__qualname__}"


def maker_of(policy: Policy) -> Callable[..., Scheduler] | None:
    """Return what makes a fresh policy of a class or an object; None for one that has a name."""
    if isinstance(policy, str | Mapping):
        return None
    if isinstance(policy, type):
        accepted = inspect.signature(policy).parameters
        return lambda **facts: policy(**{key: facts[key] for key in facts if key in accepted})
    kept = copy.deepcopy(policy)
    return lambda **facts: copy.deepcopy(kept)


def _source_of(policy: object) -> dict[str, str | None]:
    """Return the name of a policy's class, and the SHA-256 of its source where there is one."""
    cls = policy if isinstance(policy, type) else type(policy)
    try:
        digest = hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()
    except (OSError, TypeError):
        digest = None
    return {"name": f"{cls.__module__}:{cls.__qualname__}", "source_sha256": digest}
