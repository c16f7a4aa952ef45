"""Runs side by side: schedulers simulated on the same requests, and any two runs.

Of two: the differences in how they were made, and in their results. They are read from the folders
that they are saved in, or given as objects.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.config.build import load_workload, reads_text
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, engine_of_all, with_
from evenflow.config.systems import PublishedSystem, systems
from evenflow.config.yaml_file import Patch, flat, value_of
from evenflow.errors import UsageError
from evenflow.report.folder import reading
from evenflow.report.shown import Shown, Table
from evenflow.report.tables import Format, is_metric, percent, read_table, write_summaries
from evenflow.report.words import NOT_FAIR, metrics, overload, refusals
from evenflow.results.outcome import Outcome, Served
from evenflow.schedulers import POLICIES, POOLED
from evenflow.study import fair
from evenflow.study.deployments import budget_key
from evenflow.study.points import processes
from evenflow.study.runs import GivenPolicy, Job, Save, run_job, write_run

if TYPE_CHECKING:
    from ctypes import Array, c_long

    from matplotlib.figure import Figure

POLL_S = 0.1
SAME_S = 1e-6
"""Arrivals closer than this are the same."""

LATENCIES = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "completion_s")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """The results of schedulers and published systems, in the order given.

    `budgets` is a line on their micro-batches' most tokens; empty where these are equal.
    """

    outcomes: Sequence[Outcome]
    systems: Sequence[PublishedSystem] = ()
    budgets: str = ""

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """The summary of each scheduler by label."""
        return {outcome.label: outcome.summary for outcome in self.outcomes}

    @property
    def runs(self) -> dict[str, Outcome]:
        """The run of each pipeline by name."""
        return {name: run for outcome in self.outcomes for name, run in outcome.parts.items()}

    @property
    def table(self) -> pd.DataFrame:
        """A row a scheduler, in the order given; the numbers of its summary."""
        return pd.DataFrame.from_dict(self.summaries, orient="index").rename_axis("scheduler")

    def require_served(self, *, allowed: bool) -> None:
        """Raise UsageError where a scheduler refused too much for a comparison."""
        fair.require_served({run.label: run.served for run in self.outcomes}, allowed=allowed)

    def told(self) -> Iterator[str | Table]:
        yield from (f"{system.name}: {system.keys}" for system in self.systems)
        yield from fair.runs_told(self.outcomes)
        yield from [self.budgets] if self.budgets else []

    def draw(self) -> Figure:
        """Return a figure, a row a run: tokens of micro-batches in a row, shares of stage time."""
        from evenflow.report.plots import draw_comparison

        return draw_comparison(self.runs)

    def write(self, folder: Path, title: str) -> None:
        """Write comparison.csv and report.html."""
        from evenflow.report.run_page import write_report

        write_summaries(folder / "comparison.csv", "scheduler", self.summaries)
        runs = {outcome.label: outcome for outcome in self.outcomes}
        sources = {name: run.result.provenance for name, run in runs.items()}
        more = [f'<p class="caption">{escape(self.budgets)}.</p>'] if self.budgets else []
        write_report(folder / "report.html", runs, title, sources, more)


def parse_schedulers(text: str) -> list[object]:
    """Return the entries of a comma-separated list of schedulers.

    An entry is a name, `module:Class`, or a mapping such as `{name: sarathi, token_budget: 2048}`.
    """
    try:
        return list(value_of(f"[{text}]", "--schedulers"))
    except UsageError:
        raise UsageError(
            f"--schedulers {text}: should be like sarathi,{{name: sarathi, token_budget: 64}}"
        ) from None


class Named(NamedTuple):
    """A scheduler, as any other entry, with a name that the user chose."""

    label: str
    entry: object


def line_up(entries: Sequence[object], config: RunConfig, beside: Path) -> list[Job]:
    """Return a job for each scheduler or system on the same requests; UsageError for any mistake.

    A bare name that the configuration has too keeps the parameters given there.
    """
    patches = [_patch(entry, config) for entry in entries]
    labels = [label for label, _ in patches]
    given = [entry.entry if isinstance(entry, Named) else entry for entry in entries]
    _require_apart(labels, in_python=any(isinstance(entry, GivenPolicy) for entry in given))
    if not entries:
        raise UsageError(
            "--schedulers, --systems: nothing is named; give at least one, like "
            "--schedulers sarathi,token_throttling"
        )
    configs = on_one_engine([with_(config, patch) for _, patch in patches])
    workload = load_workload(configs[0], beside, keep_text=any(map(reads_text, configs)))
    jobs = [
        Job(own, workload, beside, entry if isinstance(entry, GivenPolicy) else None, label)
        for entry, own, label in zip(given, configs, labels, strict=True)
    ]
    _require_apart([job.folder for job in jobs], in_python=False)
    for job in jobs:
        job.built()
    return jobs


def on_one_engine(configs: Sequence[RunConfig]) -> Sequence[RunConfig]:
    """Return the runs with the pages and CPU time of one engine, where none says which."""
    if not (shared := engine_of_all(configs)):
        return configs
    paged = {key: value for key, value in shared.items() if key != "runtime"}
    return [
        with_(each, paged) if each.runtime else with_(each, shared).with_defaults(shared)
        for each in configs
    ]


OURS = ("report.html", "comparison.csv", "manifest.json")


def _require_apart(labels: Sequence[str], *, in_python: bool) -> None:
    """Raise a UsageError for a name that is there twice, or that no folder can have."""
    for label in labels:
        if labels.count(label) > 1:
            right = '; a mapping names them: {"a": ..., "b": ...}' if in_python else ""
            raise UsageError(f"--schedulers, --systems: {label} is there twice{right}")
        if not label or label in OURS:
            raise UsageError(f'--schedulers: "{label}" can be no folder; another name is right')


def _patch(entry: object, config: RunConfig) -> tuple[str, Patch]:
    if isinstance(entry, Named):
        return entry.label, _patch(entry.entry, config)[1]
    if isinstance(entry, GivenPolicy):
        return entry.label, {"scheduler": {"name": entry.name}}
    if isinstance(entry, PublishedSystem):
        return entry.name, entry.patch()
    if isinstance(entry, str):
        _refuse_system(entry)
        return entry, {} if entry == config.scheduler.name else {"scheduler": {"name": entry}}
    scheduler = with_name(entry)
    listed = ",".join(f"{key}={value}" for key, value in scheduler.items() if key != "name")
    if not listed and scheduler["name"] == config.scheduler.name and config.scheduler.params:
        listed = "defaults"
    label = f"{scheduler['name']}({listed})" if listed else scheduler["name"]
    return label, {"scheduler": scheduler}


def with_name(entry: object) -> dict[str, Any]:
    """Return an entry of a list of schedulers as a mapping, its name first; UsageError for none."""
    known = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(known, Mapping) or not isinstance(known.get("name"), str):
        raise UsageError(f"--schedulers: {entry!r} should be a name, or a mapping with a name")
    return {"name": known["name"], **{str(key): value for key, value in known.items()}}


def _refuse_system(name: str) -> None:
    """UsageError for the name or title of a published system that is no policy's name."""
    for system in systems():
        own = (system.name, system.title.casefold())
        if name not in (*POLICIES, *POOLED) and name.casefold() in own:
            raise UsageError(f"--schedulers {name}: is a system; --systems {system.name} is right")


def run_all(
    jobs: Sequence[Job],
    folder: Path | None = None,
    save: Save = "all",
    on_progress: Callable[[Sequence[int]], None] | None = None,
    form: Format = "csv",
    *,
    published: Sequence[PublishedSystem] = (),
) -> Comparison:
    """Simulate all jobs, each in a separate process, and write a folder for each.

    A policy that Python gave, which another process may not find, runs in this one. `folder` None:
    nothing is written. `on_progress` is called now and then with the number of requests done by
    each. `form`: the format of the tables of each. `published`: systems that are among them.
    """
    tell = on_progress or (lambda counts: None)
    done = multiprocessing.get_context("spawn").RawArray("l", len(jobs))
    workers = min(len(jobs), os.cpu_count() or 1)
    _Worker.done = done  # for policies that run in this process
    with processes(workers, _count_in, done) as pool:
        futures = {
            index: pool.submit(_run_one, index, job, folder, save, form)
            for index, job in enumerate(jobs)
            if job.policy is None
        }
        _watch(list(futures.values()), lambda: tell(list(done)))
        outcomes = [
            futures[index].result()
            if index in futures
            else _run_one(index, job, folder, save, form)
            for index, job in enumerate(jobs)
        ]
    return Comparison(outcomes, published, budgets(jobs))


def budgets(jobs: Sequence[Job]) -> str:
    """Return a line on the tokens that shipped policies put into a micro-batch at most.

    Empty where they do not differ. Some count prompt tokens only, as the parameter's name says.
    """
    found = {}
    for label, config in ((job.label, job.config) for job in jobs):
        if (name := config.scheduler.name) in POLICIES:
            known = defaults(name) | config.params
            if key := budget_key(known):
                found[label] = key, known[key]
    if len({most for _, most in found.values()}) < 2:
        return ""
    told = (
        f"{label} no {key}" if most is None else f"{label} {key} {most}"
        for label, (key, most) in found.items()
    )
    return f"budgets of a micro-batch differ (tokens): {', '.join(told)}"


def _watch(futures: Sequence[Future[Any]], tell: Callable[[], None]) -> None:
    """Wait until all are done, or until one has failed."""
    pending: set[Future[Any]] = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=POLL_S, return_when="FIRST_COMPLETED")
        for future in finished:
            future.result()
        tell()


class _Worker:
    """A worker process's counters of progress; shared memory cannot be sent with a task."""

    done: Array[c_long]


def _count_in(done: Array[c_long]) -> None:
    _Worker.done = done


def _run_one(index: int, job: Job, folder: Path | None, save: Save, form: Format) -> Outcome:
    def on_done(count: int) -> None:
        _Worker.done[index] = count

    outcome = run_job(job, on_done)
    for run in outcome.parts.values():
        _ = run.idle  # found here, where it keeps nobody waiting
    if folder is not None:
        write_run(folder / job.folder, outcome, save, form=form)
    return outcome


@dataclass(frozen=True)
class Saved:
    """A run: its summary, where it comes from, and its requests by id, if they were kept."""

    name: str
    summary: Mapping[str, Any]
    provenance: Mapping[str, Any]
    requests: pd.DataFrame | None

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """TTFT, TPOT and E2EL of each request by id, in ms; NaN where it has none."""
        rows = pd.DataFrame(columns=COLUMNS) if self.requests is None else self.requests
        ttft, e2el = (rows[end] - rows["arrival_s"] for end in ("first_token_s", "completion_s"))
        steps = (rows["output_tokens"] - 1).where(rows["output_tokens"] > 1)
        columns = (ttft.where(e2el.notna()), (e2el - ttft) / steps, e2el)
        return 1e3 * pd.concat(columns, axis=1, keys=LATENCIES)


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """Differences between run `a` and run `b`: b's numbers less a's."""

    a: Saved
    b: Saved

    def told(self) -> Iterator[str | Table]:
        lost = refusals({run.name: Served.of(run.summary) for run in (self.a, self.b)})
        yield from dict.fromkeys([*lost, *fair.marked(self.warnings)])
        yield from dict.fromkeys(run.provenance.get("setup", "") for run in (self.a, self.b))
        heads = ["", self.a.name, self.b.name]
        keys = [[str(key), *map(_value, values)] for key, *values in self.config.itertuples()]
        yield Table(["key", *heads[1:]], keys) if keys else "the configurations are equal"
        how = "per request" if self.paired else "unpaired"
        rows = list(self._metric_rows())
        yield Table([*heads, "change", f"{how}, 95 %"], rows) if rows else "all numbers are equal"

    def _metric_rows(self) -> Iterator[list[str]]:
        """Yield rows of the numbers that differ and that tables show."""
        for metric in metrics():
            if metric.key in self.metrics.index:
                values = (run.summary.get(metric.key) for run in (self.a, self.b))
                a, b = (math.nan if value is None else float(value) for value in values)
                share = percent((b - a) / a, 1) if a else ""
                of = self.interval(metric.key)
                told = "" if of is None else fair.signed(of)
                yield [metric.words, metric.cell(a), metric.cell(b), share, told]

    @cached_property
    def config(self) -> pd.DataFrame:
        """A row a key of the configuration that differs, as each run has it; None: not given."""
        ours, theirs = (flat(run.provenance.get("config", {})) for run in (self.a, self.b))
        keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
        rows = [(ours.get(key), theirs.get(key)) for key in keys]
        index = pd.Index(keys, name="key")
        return pd.DataFrame(rows, index=index, columns=["a", "b"], dtype=object)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row a number of the summaries that differs, with its 95 % interval where it has one.

        NaN where a run has none. `mean` and `half_width` are of the n differences per request, or
        of the two sides' means.
        """
        rows = {}
        for key in {**self.a.summary, **self.b.summary}:
            value, other = (run.summary.get(key) for run in (self.a, self.b))
            if is_metric(value) and is_metric(other) and value != other:
                less = math.nan if value is None or other is None else other - value
                rows[key] = {"a": value, "b": other, "difference": less}
                if (of := self.interval(key)) is not None:
                    rows[key] |= {"mean": of.mean, "half_width": of.half_width, "n": of.n}
        columns = ["a", "b", "difference", "mean", "half_width", "n"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")

    def interval(self, key: str) -> fair.Interval | None:
        """Return by how much a mean latency is longer in b; None if no request has it."""
        if key not in LATENCIES:
            return None
        sides = [run.latencies[key] for run in (self.b, self.a)]
        if self.paired:
            both = pd.concat(sides, axis=1, join="inner").dropna().to_numpy()
            return fair.paired_difference(*both.T.tolist()) if len(both) else None
        ours, theirs = (side.dropna().tolist() for side in sides)
        return fair.unpaired_difference(ours, theirs) if ours and theirs else None

    @cached_property
    def paired(self) -> bool:
        """Whether both served the same requests: ids, arrivals and prompts are equal."""
        ours, theirs = self.a.requests, self.b.requests
        if ours is None or theirs is None or not ours.index.equals(theirs.index):
            return False
        same = ours["prompt_tokens"].equals(theirs["prompt_tokens"])
        return same and bool(
            np.allclose(ours["arrival_s"], theirs["arrival_s"], rtol=0, atol=SAME_S)
        )

    @property
    def warnings(self) -> list[str]:
        """Sentences on what makes the comparison unfair or weak evidence."""
        runs = (self.a, self.b)
        lost = refusals({run.name: Served.of(run.summary) for run in runs})
        told = [line.removeprefix(NOT_FAIR) for line in lost if line.startswith(NOT_FAIR)]
        first, second = (run.provenance.get("trace", {}) for run in runs)
        if first.get("sha256") != second.get("sha256"):
            told.append(f"other traces: {first.get('name')} and {second.get('name')}")
        if lacking := " and ".join(run.name for run in runs if run.requests is None):
            told.append(
                f"no table of requests in {lacking}: no differences per request (--save requests)"
            )
        elif not self.paired:
            told.append("not the same requests: the differences are unpaired")
        told += fair.doubts({run.name: fair.Side(run.summary, run.provenance) for run in runs})
        loads = {run.name: overload(run.summary) for run in runs}
        return told + [f"{name} is overloaded: {load}" for name, load in loads.items() if load]


def diff(a: str | Path | Outcome, b: str | Path | Outcome) -> Difference:
    """Compare two runs, each a saved folder or an object; UsageError for a folder without a run."""
    return Difference(_saved(a, "a"), _saved(b, "b"))


def _saved(run: str | Path | Outcome, name: str) -> Saved:
    if isinstance(run, Outcome):
        return Saved(name, run.summary, run.result.provenance, _by_id(run.requests))
    with reading(folder := Path(run)):
        summary = _summary(folder)
        rows = read_table(folder, "requests", ["request_id", *COLUMNS])
    return Saved(str(run), summary, summary["provenance"], None if rows is None else _by_id(rows))


def _summary(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is a file; the folder of a run" if folder.exists() else "no such folder; a run's"
        raise UsageError(f"{folder}: {what} is right")
    path = folder / "summary.json"
    if not path.is_file():
        inside = sorted(str(each.parent) for each in folder.glob("*/summary.json"))
        hint = f"; it holds several: {', '.join(inside)}" if inside else ""
        raise UsageError(f"{folder}: holds no run of evenflow's (no summary.json){hint}")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        made = summary["provenance"]
        parts = [made.get(part, {}) for part in ("trace", "cost_source", "deployment")]
        parts += made["config"], made.get("runtime") or {}
        numbers = [each for name, each in summary.items() if name != "provenance"]
        if {*map(type, parts)} == {dict} and not {*map(type, numbers)} & {str, list}:
            return dict(summary)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path}: is no summary that evenflow wrote")


def _by_id(requests: pd.DataFrame) -> pd.DataFrame:
    columns: pd.DataFrame = requests.set_index("request_id")[list(COLUMNS)].astype(float)
    return columns.sort_index()


def _value(value: object) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)
