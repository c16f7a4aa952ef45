"""The Python front door: what the commands do, as functions that return tables.

`import evenflow as ef` finds them as `ef.simulate` and so on. Nothing is written unless a folder is
given as `out`. Knows which pieces answer a question; each piece does its own work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

from evenflow.config.build import load_workload
from evenflow.config.files import inputs_of
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.systems import parse_systems
from evenflow.config.yaml_file import Document, patched, read
from evenflow.core.scheduling import Scheduler
from evenflow.experiments.figures.make import chosen, make, write_claims
from evenflow.experiments.figures.study import Drawing
from evenflow.experiments.reproduce import Reproduced, data_folder
from evenflow.experiments.reproduce import chosen as chosen_entries
from evenflow.experiments.reproduce import reproduce as reproduce_entries
from evenflow.experiments.reproduce.calibrate import Calibrated
from evenflow.experiments.reproduce.calibrate import calibrate as calibrate_run
from evenflow.experiments.reproduce.forms import read_results
from evenflow.experiments.reproduce.write import write as write_reproduced
from evenflow.report.folder import claimed, staged
from evenflow.report.tables import Format, check_format
from evenflow.results.outcome import Outcome
from evenflow.study.capacity import Capacity, Question
from evenflow.study.capacity import capacity as study_capacity
from evenflow.study.compare import Comparison, Difference, line_up, run_all
from evenflow.study.compare import diff as study_diff
from evenflow.study.deployments import parse_gpus
from evenflow.study.plan import Planned
from evenflow.study.plan import plan as study_plan
from evenflow.study.plan_search import Ask
from evenflow.study.points import Store, executor_of
from evenflow.study.runs import GivenPolicy, Job, Save, run_job, write_run
from evenflow.study.slo import Condition, parse_slo
from evenflow.study.sweep import sweep as study_sweep
from evenflow.study.sweep_file import load_sweep, sweep_of
from evenflow.study.sweep_findings import Findings
from evenflow.study.trials import How
from evenflow.study.uncertainty import Prediction, predict


class Simulators(TypedDict, total=False):
    """Who simulates: `executor` is process, dask or dask:ADDRESS; `workers`: all cores."""

    executor: str
    workers: int | None


RunFile = str | Path | Mapping[str, Any] | RunConfig
"""A RUN.yaml's path, its keys, or a checked configuration."""

Policy = str | Mapping[str, Any] | type[Scheduler] | Scheduler
"""A policy's name or `module:Class`; a mapping of `name` and parameters; a class; an object."""


Limits = Mapping[str, float] | str | Sequence[str]
"""Limits by metric, `{"p99_itl_ms": 200}`, or as the option `--slo` says them, "p99_itl_ms=200"."""

Gpus = int | str
"""A number of GPUs, or several, as the option `--gpus` says them: 8, "4,8", "4..64"."""


@dataclass(frozen=True)
class SimulatedRun(Outcome):
    """One simulated run, which can be written; `file` is what it was simulated from."""

    file: Path = Path("the run")

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
        with staged(folder, force=force, reads=reads) as scratch:
            write_run(scratch, self, save, self.file.name, form=format)
        return folder


def simulate(
    run: RunFile,
    *,
    scheduler: Policy | None = None,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    save: Save = "all",
    format: Format = "csv",
    force: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> SimulatedRun:
    """Simulate one run: `simulate("run.yaml", scheduler="sarathi", set={"kv.pages": 4000})`.

    `scheduler` replaces the run's. A class is called; an object is copied for each engine, seed and
    run, and never changed itself. `set` gives keys of the run new values. `on_done` is called with
    the number of requests done. `out`, `save`, `format` and `force` are as for
    `SimulatedRun.write`. Raises UsageError for what cannot be, in one line, and PolicyError when a
    policy breaks its promise.
    """
    check_format(format)
    job, file = _job(run, scheduler, set)
    simulated = SimulatedRun(**vars(run_job(job, on_done)), file=file)
    if out is not None:
        simulated.write(out, save=save, format=format, force=force)
    return simulated


def compare(
    run: RunFile,
    schedulers: Sequence[Policy] = (),
    *,
    systems: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
    allow_refused: bool = False,
    out: str | Path | None = None,
    save: Save = "all",
    format: Format = "csv",
    force: bool = False,
) -> Comparison:
    """Simulate several schedulers, or published systems, on the same requests.

    `.table` has a row for each. Schedulers are as for `simulate`; a class or an object goes by the
    name of its class. `systems` are names of `evenflow systems`. `set` gives keys of the run new
    values. `out`, `save`, `format` and `force` are as for `simulate`, with a folder for each.
    Raises UsageError for what cannot be, and where a scheduler refuses more than a tenth of the
    requests, unless `allow_refused`.
    """
    check_format(format)
    policies = list(map(_named_or_given, schedulers))
    document, file = _document(run)
    given = "scheduler" in document.data or not policies
    first = {} if given else {"scheduler": _key(policies[0])}
    config = with_(document, first | dict(set or {}))
    jobs = line_up([*policies, *parse_systems(",".join(systems))], config, file.parent)
    if out is None:
        comparison = run_all(jobs)
        comparison.require_served(allowed=allow_refused)
        return comparison
    with staged(Path(out), force=force, reads=inputs_of(config, file)) as scratch:
        comparison = run_all(jobs, scratch, save, form=format)
        comparison.require_served(allowed=allow_refused)
        comparison.write(scratch, file.name)
    return comparison


def diff(a: str | Path | Outcome, b: str | Path | Outcome) -> Difference:
    """Compare two runs: `diff("out/a", "out/b")`, each a saved folder, or a run that is at hand.

    `.config` has what differs in the configuration, `.metrics` the numbers that differ, with paired
    95 % intervals where both served the same requests, `.warnings` why it may not be fair. Requests
    of one run wait for each other: an interval is of these requests, not of other seeds. UsageError
    for a folder that holds no run.
    """
    return study_diff(a, b)


def sweep(
    file: str | Path | Mapping[str, Any],
    *,
    check: bool = False,
    allow_refused: bool = False,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **how: Unpack[Simulators],
) -> Findings:
    """Simulate a SWEEP.yaml (its path, or its keys): `.points` has a row a run, `.table` a point.

    `check`: the best point and the default also see requests that the sweep did not, in `.checks`.
    `allow_refused`: a point counts even where it refuses more than a tenth of the requests.
    `set` gives its keys, or `run.KEY`, new values. With `out` results are kept there and found
    again, and the command's files are written. Raises UsageError for what cannot be.
    """
    values = _assignments(set)
    if isinstance(file, Mapping):
        asked = sweep_of(Document("the sweep", dict(file), {}), Path(), values)
    else:
        asked = load_sweep(Path(file), values)
    reads = [Path(asked.document.name)]
    who = How(_folder(out), force, reads, **how)
    return study_sweep(asked, who, on_unseen=check, allow_refused=allow_refused)


def capacity(
    run: RunFile,
    slo: Limits,
    *,
    tolerance: float = 0.02,
    replications: int = 1,
    allow_refused: bool = False,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **how: Unpack[Simulators],
) -> Capacity:
    """Return the largest request rate that keeps limits: `slo={"p99_itl_ms": 200}`.

    `.rate` is the mean over the replications with its interval (requests/s), `.points` has a row
    for each rate simulated, `.served` how many requests were completed. It is known within
    `tolerance` of itself. `allow_refused` is as for `compare`, `set`, `out` and `force` are as for
    `sweep`. Raises UsageError for what cannot be.
    """
    document, file = _document(run, set)
    config = configured(document)
    asked = (config, _conditions(slo), file.parent, tolerance, replications, None, allow_refused)
    reads = inputs_of(config, file)
    return study_capacity(Question(*asked), How(_folder(out), force, reads, **how))


def plan(
    run: RunFile,
    slo: Limits,
    gpus: Gpus,
    *,
    rate: float | str | None = None,
    price: float | None = None,
    schedulers: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    replications: int = 1,
    exhaustive: bool = False,
    allow_refused: bool = False,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **how: Unpack[Simulators],
) -> Planned:
    """Find the cheapest deployment of so many GPUs that keeps limits, or what is nearest to it.

    `.table` has a row for each that does, the best first, `.points` one for all that was simulated.
    `rate`: requests/s, or a multiple of the run's own ("2x"); `price`: dollars of a GPU an hour;
    `budgets`: tokens of a micro-batch. `exhaustive` simulates every point. `slo`, `set`, `out`,
    `allow_refused` and `force` are as for `capacity`. Raises UsageError for what cannot be.
    """
    document, file = _document(run, set)
    ask = Ask(
        slo=_conditions(slo),
        gpus=parse_gpus(str(gpus)),
        rate=None if rate is None else str(rate),
        price=price,
        schedulers=schedulers,
        budgets=budgets,
        replications=replications,
        exhaustive=exhaustive,
        allow_refused=allow_refused,
    )
    return study_plan(document, file.parent, ask, How(_folder(out), force, [file], **how))


def figures(
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    allow_refused: bool = False,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **how: Unpack[Simulators],
) -> dict[str, Drawing]:
    """Make figures of the papers, or of a figure's YAML: each has `.figure`, `.table`, `.claims`.

    No names: all of them. `quick`: fewer points. `allow_refused` is as for `compare`, `set`, `out`
    and `force` are as for `sweep`; with `out` the table of claims is written too. Raises UsageError
    for what cannot be.
    """
    plans = chosen(names, tuple(_assignments(set)), quick=quick, allow_refused=allow_refused)
    who = executor_of(how.get("executor", "process"), how.get("workers"))
    with ExitStack() as stack:
        folder = Path(out or stack.enter_context(TemporaryDirectory()))
        stack.enter_context(claimed(folder, force=force))
        pool = stack.enter_context(who)
        store = Store(folder / "points")
        drawings = {plan.name: make(plan, folder, store, pool) for plan in plans}
        if any(plan.of_a_paper for plan in plans):
            write_claims(folder)
    return drawings


def reproduce(
    names: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    intervals: bool = False,
    out: str | Path | None = None,
    force: bool = False,
    workers: int | None = None,
) -> Reproduced:
    """Simulate runs that others measured: `.table` has a row a run and metric, with its error.

    No names: the whole catalogue. `data` is the folder of the runs, by default EVENFLOW_SHARED.
    `intervals`: nine more simulations of each run tell how far it may be off. `set`, `out` and
    `force` are as for `sweep`. Raises UsageError for what cannot be.
    """
    folder, how = data_folder(_folder(data)), How(workers=workers)
    entries = chosen_entries(names)
    found = reproduce_entries(entries, folder, how, _assignments(set), intervals=intervals)
    if out is not None:
        with staged(Path(out), force=force) as scratch:
            write_reproduced(scratch, found)
    return found


def calibrate(
    run: RunFile,
    results: Sequence[str | Path],
    *,
    set: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> Calibrated:
    """Find the CPU time of an engine from results of a benchmark: `.runtime`, `.constants`.

    `run` is what was measured, `results` are files of `bench serve`, GuideLLM or those that
    `reproduce` reads. `set` gives keys of the run new values. Raises UsageError for what cannot be.
    """
    document, file = _document(run, set)
    runs = [each for path in results for each in read_results(Path(path))]
    return calibrate_run(document, file.parent, runs, How(workers=workers))


def intervals(
    run: RunFile, *, set: Mapping[str, Any] | None = None, workers: int | None = None
) -> Prediction:
    """Simulate a run ten times: `.table` has a 90 % interval of each mean, P99 and throughput.

    It comes of the costs' stated error, the host's constants and the seed (`.error` says which).
    `set` gives keys of the run new values. Raises UsageError for what cannot be.
    """
    document, file = _document(run, set)
    return predict(document, file.parent, How(workers=workers))


def _folder(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)


def _assignments(patch: Mapping[str, Any] | None) -> list[str]:
    """Return what `--set` would be given."""
    return [f"{key}={json.dumps(value)}" for key, value in (patch or {}).items()]


def _job(
    run: RunFile, scheduler: Policy | None, patch: Mapping[str, Any] | None
) -> tuple[Job, Path]:
    """Return the job that a run, a policy in place of its own and a patch of its keys make."""
    document, file = _document(run)
    entry = None if scheduler is None else _named_or_given(scheduler)
    changes = {} if entry is None else {"scheduler": _key(entry)}
    config = with_(document, changes | dict(patch or {}))
    policy = entry if isinstance(entry, GivenPolicy) else None
    return Job(config, load_workload(config, file.parent), file.parent, policy), file


def _document(run: RunFile, patch: Mapping[str, Any] | None = None) -> tuple[Document, Path]:
    """Return the keys of a run, patched, and its file, from whose folder relative paths start."""
    file = Path("the run")
    if isinstance(run, RunConfig):
        document = run.document()
    elif isinstance(run, Mapping):
        document = Document("the run", dict(run), {})
    else:
        file = Path(run)
        document = read(file)
    return patched(document, dict(patch or {})), file


def _conditions(slo: Limits) -> tuple[Condition, ...]:
    if isinstance(slo, Mapping):
        slo = [f"{metric}={limit}" for metric, limit in slo.items()]
    return tuple(parse_slo([slo] if isinstance(slo, str) else slo))


def _named_or_given(policy: Policy) -> str | dict[str, Any] | GivenPolicy:
    if isinstance(policy, Mapping):
        return dict(policy)
    return policy if isinstance(policy, str) else GivenPolicy(policy)


def _key(entry: str | dict[str, Any] | GivenPolicy) -> str | dict[str, Any]:
    """Return what the run's key `scheduler` holds for a policy."""
    return entry.name if isinstance(entry, GivenPolicy) else entry
