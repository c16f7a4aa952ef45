"""Published measured runs on real GPUs, simulated again, and the errors.

The catalogue has a YAML for each set of runs: where its data lies, and what is simulated as it.
Every run is simulated so, and once more with `runtime: ideal`. That shows what the CPU time of the
engine adds. An error is simulated / measured - 1. What is in the data is `measured`'s business.
Knows no picture and no command line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.yaml_file import Document, Patch, checked, patched, read
from evenflow.errors import UsageError, instead_of, require_counts
from evenflow.experiments.reproduce.forms import read_results
from evenflow.experiments.reproduce.measured import MeasuredRun, layout_words
from evenflow.keys import Count, Keys, Positive
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import write_table
from evenflow.study import uncertainty
from evenflow.study.fair import alike, alone, marked
from evenflow.study.nearness import likeness
from evenflow.study.points import Point
from evenflow.study.trials import How, Trial

FOLDER = Path(__file__).parent
DATA = "EVENFLOW_SHARED"
Text = Annotated[str, Field(min_length=1)]


class SourceKeys(Keys):
    """Place of the original: a repository, a commit of it, and a path in that."""

    repository: Text
    commit: Text
    path: Text

    def words(self) -> str:
        return f"https://{self.repository}, commit {self.commit}, {self.path}"


Where = dict[str, list[Any]]
"""The values of a fact that are meant, by its name."""


class LaunchKeys(Keys):
    """Start of the engine: the script that did it, the commit of that, and its settings.

    `not_simulated` are those of the settings that the simulation leaves out, and what they change.
    """

    script: Text
    commit: Text
    settings: Text
    not_simulated: list[Text] = Field(default_factory=list)


class SomeKeys(Keys):
    """The keys of RUN.yaml that are different for rows with facts among those of `where`."""

    where: Where
    run: dict[str, Any]


class EntryKeys(Keys):
    """A set of measured runs that one RUN.yaml describes, each from a file, or from a row of one.

    `files` are patterns below the folder of the data. The first is of the form that this catalogue
    was made with, the others of the original. `sha256` are the hashes of files that were read. Of a
    file with many rows, those with facts among those of `where`, or of one of several, are taken.
    `metrics` are compared, with the largest error that is aimed at (null: none). `spread` is the
    run-to-run spread by metric, of runs with names that end so. `launch` is how the engine was
    started, where that is known. `run` holds RUN.yaml's keys. Lengths, arrivals and layout come
    from the file where it says them. `by_clients` holds keys that are the number of clients plus a
    constant. `by_step` holds keys of a prompt, a decode of each client and a constant, in tokens.
    `some` holds those of some rows, each before what stands before it. A closed loop serves
    `rounds` requests a client. Lengths are uniform from the `shortest` share of what is stated to
    all of it, as InferenceX's client draws them. `sequence`: the runs, by how their names end, were
    made one after the other on one server. They had the same prompts at these requests a second
    (null: all at once). `assumed` is what nothing measured says, `misses` why what misses does.
    """

    title: Text
    source: SourceKeys
    engine: Text | None = None
    files: Annotated[list[Text], Field(min_length=1)]
    sha256: dict[str, Text] = Field(default_factory=dict)
    where: Where | list[Where] = Field(default_factory=dict)
    metrics: dict[str, Positive | None]
    spread: dict[str, dict[str, Positive]] = Field(default_factory=dict)
    rounds: Count = 5
    shortest: Annotated[float, Field(gt=0, le=1)] = 1.0
    sequence: dict[str, Positive | None] = Field(default_factory=dict)
    assumed: list[Text]
    misses: Text | None = None
    launch: LaunchKeys | None = None
    run: dict[str, Any]
    by_clients: dict[str, int] = Field(default_factory=dict)
    by_step: dict[str, int] = Field(default_factory=dict)
    some: list[SomeKeys] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the catalogue, by name; every `every`th of its runs counts."""

    name: str
    keys: EntryKeys
    every: int = 1

    def files(self, folder: Path) -> list[Path]:
        """Return the files below a folder, of the first pattern that has any.

        The shared folder keeps measured runs in `measured`; a folder with only this entry's files
        will do, too.
        """
        for pattern in self.keys.files:
            for below in (pattern, f"measured/{pattern}", pattern.rpartition("/")[2]):
                if found := sorted(path for path in folder.glob(below) if path.is_file()):
                    return found
        return []

    def measured(self, folder: Path) -> list[MeasuredRun]:
        """Return the runs that count of all below a folder; none where there are none."""
        where = self.keys.where
        meant = where if isinstance(where, list) else [where]
        runs = (run for path in self.files(folder) for run in read_results(path))
        return [run for run in runs if any(_is_of(run, each) for each in meant)][:: self.every]

    @property
    def by_hand(self) -> str:
        """Say which hardware the entry states itself, in place of the catalogue's."""
        run = self.keys.run
        own = {"card": isinstance(run.get("gpu"), dict), "links": {"link", "nodes"} & run.keys()}
        return "".join(f", {name} by hand" for name, there in own.items() if there)

    def own_keys(self, run: MeasuredRun) -> dict[str, Any]:
        """Return the keys of RUN.yaml that a run of this entry has by its facts."""
        arrivals = run.run.get("workload.arrivals")
        clients = arrivals.get("concurrency", 0) if isinstance(arrivals, Mapping) else 0
        keys = {key: clients + more for key, more in self.keys.by_clients.items()}
        step = clients + run.facts.get("isl", 0)
        keys |= {key: step + more for key, more in self.keys.by_step.items()}
        for each in self.keys.some:
            keys |= each.run if _is_of(run, each.where) else {}
        return keys

    def others(self, folder: Path) -> list[Path]:
        """Return this entry's files below a folder that its `sha256` does not have."""
        known = set(self.keys.sha256.values())
        files = self.files(folder)
        return [f for f in files if hashlib.sha256(f.read_bytes()).hexdigest() not in known]

    def where_from(self) -> str:
        """Say where to get the data."""
        return f"it is at {self.keys.source.words()}, to be given with --data DIR"


def _is_of(run: MeasuredRun, where: Where) -> bool:
    return all(run.facts.get(name) in values for name, values in where.items())


def entries() -> dict[str, Entry]:
    """Return the catalogue, by name."""
    return {path.stem: load_entry(path) for path in sorted(FOLDER.glob("*.yaml"))}


def load_entry(path: Path) -> Entry:
    """Read one YAML of the catalogue, or of a user's; UsageError naming the line and the key."""
    return Entry(path.stem, checked(EntryKeys, read(path, "title, source, files, run")))


def chosen(names: Sequence[str], every: int = 1) -> list[Entry]:
    """Return the entries asked for, each once: by name, beginning of a name, or a YAML; or all."""
    require_counts("reproduce", every=every)
    known = entries()
    found = {} if names else known
    for name in names:
        found |= _named(name, known)
    return [replace(entry, every=every) for entry in found.values()]


def _named(name: str, known: Mapping[str, Entry]) -> dict[str, Entry]:
    if name.endswith(".yaml"):
        return {name: load_entry(Path(name))}
    begin = [key for key in known if key.startswith(name)]
    if not begin:
        raise UsageError(f"reproduce {name}: no such entry; {instead_of(name, known)}")
    return {key: known[key] for key in ([name] if name in known else begin)}


def data_folder(given: Path | None) -> Path:
    """Return the folder that holds the data: as given, or as the environment says.

    UsageError where neither names a folder.
    """
    folder = given or Path(os.environ.get(DATA, "../shared"))
    if not folder.is_dir():
        where = "--data" if given else DATA
        raise UsageError(
            f"{where}: no folder {folder}; give the data's with --data DIR or {DATA}; what it "
            "should hold: evenflow reproduce --list"
        )
    return folder


IDEAL: Patch = {"runtime": "ideal"}

GROUP = ["entry", "engine", "gpu", "layout"]
"""What the summary has a row for, with the metric."""


class MeasuredCase(NamedTuple):
    """A measured run, the entry it is of, what simulates it, and its number in the entry."""

    entry: Entry
    measured: MeasuredRun
    config: RunConfig
    number: int

    @property
    def labels(self) -> dict[str, str]:
        """The engine and its hardware, for tables."""
        config = self.config
        name = "-" if self.config.gpu is None else self.config.gpu_words
        engine = self.entry.keys.engine or self.measured.facts.get("engine", "-")
        return {
            "entry": self.entry.name,
            "run": self.measured.label,
            "engine": str(engine),
            "gpu": f"{config.pipeline_gpus} {name}{self.entry.by_hand}",
            "layout": layout_words(config.tensor_parallel, config.data_parallel, config.num_stages),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Reproduced(Shown):
    """The results of reproducing measured runs.

    `table` has a row a run and metric: `measured`, `simulated` and `ideal` (with no CPU time).
    Beside them stand the `error` of each, the `goal` for it, and the `spread` of what was measured,
    as shares. NaN where there is none. Where intervals were asked for, also `low_90`, `high_90`,
    the `half_width` as a share, and whether the measured value lies `inside`. `failures` are runs
    that could not be simulated, with the reason. `doubts` say what is not fair, by the name of an
    entry. `others` what is missing of the data, or not as the catalogue knows it.
    """

    entries: Sequence[Entry]
    table: pd.DataFrame
    failures: Mapping[str, str]
    doubts: Sequence[tuple[str, str]] = ()
    others: Sequence[str] = ()

    def told(self) -> Iterator[str | Table]:
        from evenflow.experiments.reproduce.write import tables_told

        yield from tables_told(self)
        yield from map(Aside, self.others)
        yield from (Aside(f"{name}: {marked([doubt])[0]}") for name, doubt in self.doubts)
        for label, reason in self.failures.items():
            yield Aside(f"not simulated: {label}: {reason}")

    @property
    def summary(self) -> pd.DataFrame:
        """Return a row for each entry, engine, GPU, layout and metric: mean, median and P90."""
        grouped = self.table.groupby([*GROUP, "metric"], sort=False)
        return pd.DataFrame([_summed(rows) for _, rows in grouped])


def _summed(rows: pd.DataFrame) -> dict[str, Any]:
    off, ideal = rows["error"].abs(), rows["ideal_error"].abs()
    goals = rows["goal"].dropna()
    return {
        **{name: rows[name].iloc[0] for name in (*GROUP, "metric")},
        "runs": len(rows),
        "mean_error": rows["error"].mean(),
        "median_off": off.median(),
        "p90_off": off.quantile(0.9),
        "worst_off": off.max(),
        "ideal_median_off": ideal.median(),
        "goal": goals.iloc[0] if len(goals) else np.nan,
        "within_goal": int((off <= rows["goal"]).sum()) if len(goals) else np.nan,
    }


def reproduce(
    entries: Sequence[Entry],
    data: Path,
    how: How,
    overrides: Sequence[str] = (),
    *,
    intervals: bool = False,
) -> Reproduced:
    """Simulate the measured runs of these entries that lie below the folder `data`.

    `overrides` are KEY=VALUE of RUN.yaml, for all of them. `intervals`: nine more simulations of
    each run tell the interval of each number. Raises UsageError where no entry has
    data, or no run can be simulated.
    """

    def patches(config: RunConfig) -> list[Patch]:
        if not intervals:
            return [{}, IDEAL]
        cases = uncertainty.cases(config, uncertainty.stated(config, Path()))
        return [{}, IDEAL, *(case.patch for case in cases)]

    with TemporaryDirectory() as scratch:
        cases = [
            each for entry in entries for each in cases_of(entry, data, Path(scratch), overrides)
        ]
        if not cases:
            names, where = (", ".join(e.name for e in entries), entries[0].where_from())
            raise UsageError(f"{data}: no data of {names}; of the first, {where}")
        pairs, failures = simulated(cases, patches, how)
    table = pd.DataFrame([row for case, trial in pairs for row in _rows(case, trial)])
    # Runs that were measured twice have the spread between the two, as a share of their mean.
    again = table.groupby([*GROUP, "run", "metric"])["measured"]
    spread = (again.transform("max") - again.transform("min")) / again.transform("mean")
    table["spread"] = spread.where(again.transform("size") > 1, table["spread"])
    there = [entry for entry in entries if entry.files(data)]
    doubts = [*_unfair(there, pairs)]
    return Reproduced(there, table, failures, doubts, [*_others(entries, data)])


def simulated(
    cases: Sequence[MeasuredCase], patches: Callable[[RunConfig], Sequence[Patch]], how: How
) -> tuple[list[tuple[MeasuredCase, Trial]], dict[str, str]]:
    """Simulate each case with each of its patches; return what can be, and why others cannot.

    UsageError where none can.
    """
    points = [
        [Point(with_(case.config, patch), Path()) for patch in patches(case.config)]
        for case in cases
    ]
    with how.simulator("reproduce", sum(map(len, points))) as simulator:
        trials = simulator.trials_of([({}, each) for each in points])
    done = [pair for pair in zip(cases, trials, strict=True) if not pair[1].errors]
    pairs = zip(cases, trials, strict=True)
    failures = {case.measured.label: trial.errors[0] for case, trial in pairs if trial.errors}
    if not done:
        why = next(iter(failures.values()))
        raise UsageError(f"no run can be simulated, the first because: {why}")
    return done, failures


def _others(entries: Sequence[Entry], data: Path) -> Iterator[str]:
    for entry in entries:
        if not entry.files(data):
            yield f"{entry.name}: no data in {data}; {entry.where_from()}"
        for path in entry.others(data):
            yield f"{entry.name}: {path} is not what the catalogue was made with"


def _unfair(
    entries: Sequence[Entry], pairs: Sequence[tuple[MeasuredCase, Trial]]
) -> Iterator[tuple[str, str]]:
    """Say why comparing an entry's runs is unfair: a line for those alike, with the first run's
    numbers."""
    for entry in entries:
        own = [(case.measured, trial.side) for case, trial in pairs if case.entry is entry]
        lines = [
            each for run, side in own for each in (*run.doubts, *alone("the simulation", side))
        ]
        yield from ((entry.name, line) for line in alike(lines))


def cases_of(
    entry: Entry, data: Path, scratch: Path, overrides: Sequence[str] = ()
) -> list[MeasuredCase]:
    """Return a case for each run of an entry; requests are written to files in `scratch`."""
    runs = entry.measured(data)
    traces = [scratch / f"{entry.name}-{index}.csv" for index in range(len(runs))]
    cases = [
        MeasuredCase(entry, run, _config(entry, run, trace, overrides), number)
        for number, (run, trace) in enumerate(zip(runs, traces, strict=True))
    ]
    served = {
        end: trace
        for end in entry.keys.sequence
        for run, trace in zip(runs, traces, strict=True)
        if run.label.endswith(end)
    }
    return [_warm(case, served) for case in cases] if served else cases


def _warm(case: MeasuredCase, traces: Mapping[str, Path]) -> MeasuredCase:
    """Return a case preceded by the earlier runs of its entry's sequence.

    The client draws the same gaps at every rate. So a rate that was not given is the slowest given
    one, with faster arrivals. Lengths differ by a few tokens from run to run.
    """
    rates = case.entry.keys.sequence
    first = next(end for end in rates if end in traces)
    after: list[dict[str, Any]] = []
    for end, rate in rates.items():
        if case.measured.label.endswith(end):
            break
        part: dict[str, Any] = {"trace": str(traces.get(end, traces[first])), "format": "vidur"}
        if end not in traces:
            faster = {"kind": "replay", "scale": (rate or 0.0) / (rates[first] or 1.0)}
            part["arrivals"] = faster if rate else {"kind": "offline"}
        after.append(part)
    return case._replace(config=with_(case.config, {"workload.after": after})) if after else case


def _config(
    entry: Entry, measured: MeasuredRun, trace: Path, overrides: Sequence[str]
) -> RunConfig:
    """Return what simulates a measured run; its requests are written to the file `trace`."""
    patch = served(measured, trace, entry.keys.rounds, entry.keys.shortest)
    patch |= entry.own_keys(measured)
    keys = {"stages": 1, **entry.keys.run}
    document = patched(Document(f"{entry.name}.yaml: run", keys, {}), patch)
    return configured(document, overrides)


def served(
    measured: MeasuredRun, trace: Path, rounds: int, shortest: float = 1.0
) -> dict[str, Any]:
    """Write the requests of a measured run to the file `trace`; return the keys that serve them.

    A closed loop of which only the lengths are known gets `rounds` requests a client. Their lengths
    are from the `shortest` share of these on. The workload of a run without requests is not known.
    """
    requests = measured.requests
    if not len(requests):
        return dict(measured.run)
    closed = measured.run.get("workload.arrivals")
    if closed is not None and "arrival_s" not in requests:
        requests = _drawn(requests, rounds * closed["concurrency"], shortest)
    columns = {
        "arrived_at": requests.get("arrival_s", pd.Series(0.0, index=requests.index)),
        "num_prefill_tokens": requests["input_tokens"],
        "num_decode_tokens": requests["output_tokens"],
    }
    write_table(trace, columns)
    return {"workload": {"trace": str(trace), "format": "vidur"}, **measured.run}


def _drawn(stated: pd.DataFrame, requests: int, shortest: float) -> pd.DataFrame:
    """Return the lengths of requests as InferenceX's client draws them, of the `stated` ones.

    Uniform from the `shortest` share on, all prompts first, by NumPy's older generator with the
    seed 0. Source: `sample_random_requests` and `--seed` of its benchmark_serving.py. Runs of as
    many requests have the same ones.
    """
    rng = np.random.RandomState(0)
    longest = stated.iloc[0].astype(int)
    return pd.DataFrame(
        {name: rng.randint(int(shortest * n), n + 1, requests) for name, n in longest.items()}
    )


def _rows(case: MeasuredCase, trial: Trial) -> Iterator[dict[str, Any]]:
    keys = case.entry.keys
    spreads = (known for end, known in keys.spread.items() if case.measured.label.endswith(end))
    spread = next(spreads, {})
    like = likeness(case.config, uncertainty.kind_of_model(case.config, Path()))
    ranges = uncertainty.ranges_of([record.values for record in trial.records[2:]])
    ranges = uncertainty.widened(ranges, trial.records[0].values, like)
    for metric, goal in keys.metrics.items():
        measured = case.measured.metrics.get(metric)
        if measured is None:
            continue
        simulated, ideal, *_ = trial.values(metric)
        yield {
            **case.labels,
            "metric": metric,
            "measured": measured,
            "spread": spread.get(metric, np.nan),
            "simulated": simulated,
            "error": simulated / measured - 1,
            "ideal": ideal,
            "ideal_error": ideal / measured - 1,
            "goal": np.nan if goal is None else goal,
            **{f"like_{name}": value for name, value in like._asdict().items()},
            **_told(ranges.get(metric), measured),
        }


def _told(found: uncertainty.MetricInterval | None, measured: float) -> dict[str, float]:
    if found is None:
        return {}
    inside = found.low <= measured <= found.high
    return {
        "low_90": found.low,
        "high_90": found.high,
        "half_width": found.half_width,
        "inside": float(inside),
    }
