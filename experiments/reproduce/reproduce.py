"""Simulate measured runs, and say how far the simulation is off: simulated / measured - 1.

Every run is simulated as its entry of the catalogue says, and once more with `runtime: ideal`, to
show what the CPU time of the engine adds. Knows no picture and no command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.errors import UsageError
from evenflow.specs.gpu import gpu
from experiments.report.tables import write_table
from experiments.reproduce.catalogue import Entry
from experiments.reproduce.measured import Measured, layout_words
from experiments.run_file.run import RunConfig, configured, with_
from experiments.run_file.yaml_file import Document, Patch, patched
from experiments.study import uncertainty
from experiments.study.fair import alike, alone
from experiments.study.points import Point
from experiments.study.trials import How, Trial

IDEAL: Patch = {"runtime": "ideal"}

GROUP = ["entry", "engine", "gpu", "layout"]
"""What the summary has a row for, with the metric."""


class Case(NamedTuple):
    """A measured run, the entry it is of, and what simulates it."""

    entry: Entry
    measured: Measured
    config: RunConfig

    @property
    def labels(self) -> dict[str, str]:
        """Which engine on what, for tables."""
        config = self.config
        name = "-" if self.config.gpu is None else gpu(self.config.gpu).name
        engine = self.entry.keys.engine or self.measured.facts.get("engine", "-")
        return {
            "entry": self.entry.name,
            "run": self.measured.label,
            "engine": str(engine),
            "gpu": f"{config.pipeline_gpus} {name}",
            "layout": layout_words(config.tensor_parallel, config.data_parallel, config.num_stages),
        }


@dataclass(frozen=True, slots=True)
class Reproduced:
    """What came of measured runs.

    `table` has a row a run and metric: `measured`, `simulated` and `ideal` (with no CPU time), each
    with its `error`, the `goal` for it, and the `spread` of what was measured, as shares; NaN where
    there is none. Where intervals were asked for, also `low_90`, `high_90`, the `half_width` as a
    share, and whether the measured value lies `inside`. `failures` are runs that could not be
    simulated, with the reason; `doubts` say what is not fair, by the name of an entry.
    """

    entries: Sequence[Entry]
    table: pd.DataFrame
    failures: Mapping[str, str]
    doubts: Sequence[tuple[str, str]] = ()

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
    with TemporaryDirectory() as scratch:
        cases = [
            case for entry in entries for case in cases_of(entry, data, Path(scratch), overrides)
        ]
        if not cases:
            names, where = (", ".join(e.name for e in entries), entries[0].where_from())
            raise UsageError(f"{data}: no data of {names}; of the first, {where}")
        patches = [[{}, IDEAL, *(_errors(case.config) if intervals else [])] for case in cases]
        points = [
            [Point(with_(case.config, patch), Path()) for patch in each]
            for case, each in zip(cases, patches, strict=True)
        ]
        with how.simulator("reproduce", sum(map(len, points))) as simulator:
            trials = simulator.trials_of([({}, each) for each in points])
    failures = {
        case.measured.label: trial.errors[0]
        for case, trial in zip(cases, trials, strict=True)
        if trial.errors
    }
    pairs = [pair for pair in zip(cases, trials, strict=True) if not pair[1].errors]
    if not pairs:
        why = next(iter(failures.values()))
        raise UsageError(f"no run can be simulated, the first because: {why}")
    table = pd.DataFrame([row for case, trial in pairs for row in _rows(case, trial)])
    there = [entry for entry in entries if entry.files(data)]
    return Reproduced(there, _with_repeats(table), failures, [*_unfair(there, pairs)])


def _unfair(
    entries: Sequence[Entry], pairs: Sequence[tuple[Case, Trial]]
) -> Iterator[tuple[str, str]]:
    """Say what makes it unfair to compare an entry's runs: a line for those alike, with the first
    run's numbers."""
    for entry in entries:
        own = [(case.measured, trial.side) for case, trial in pairs if case.entry is entry]
        lines = [
            each for run, side in own for each in (*run.doubts, *alone("the simulation", side))
        ]
        yield from ((entry.name, line) for line in alike(lines))


def _errors(config: RunConfig) -> list[Patch]:
    return [case.patch for case in uncertainty.cases(config, uncertainty.stated(config, Path()))]


def cases_of(entry: Entry, data: Path, scratch: Path, overrides: Sequence[str] = ()) -> list[Case]:
    """Return what simulates each run of an entry; requests are written to files in `scratch`."""
    runs = entry.measured(data)
    traces = [scratch / f"{entry.name}-{index}.csv" for index in range(len(runs))]
    cases = [_case(entry, run, trace, overrides) for run, trace in zip(runs, traces, strict=True)]
    served = {
        end: trace
        for end in entry.keys.sequence
        for run, trace in zip(runs, traces, strict=True)
        if run.label.endswith(end)
    }
    return [_warm(case, served) for case in cases] if served else cases


def _warm(case: Case, traces: Mapping[str, Path]) -> Case:
    """Return a case after those runs of its entry's sequence that were before it.

    A rate that was not given is that of the slowest given one, with its arrivals so much faster:
    the client draws the same gaps at every rate. Lengths differ by a few tokens from run to run.
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


def _case(entry: Entry, measured: Measured, trace: Path, overrides: Sequence[str]) -> Case:
    """Return what simulates a measured run; its requests are written to the file `trace`."""
    facts = measured.facts
    patch = served(measured, trace, entry.keys.rounds, entry.keys.shortest)
    patch |= entry.keys.by_lengths.get(f"{facts.get('isl')}/{facts.get('osl')}", {})
    document = patched(
        Document(f"{entry.name}.yaml: run", {"stages": 1, **entry.keys.run}, {}), patch
    )
    return Case(entry, measured, configured(document, overrides))


def served(measured: Measured, trace: Path, rounds: int, shortest: float = 1.0) -> dict[str, Any]:
    """Write the requests of a measured run to the file `trace`; return the keys that serve them.

    A closed loop of which only the lengths are known gets `rounds` requests a client, of lengths
    from the `shortest` share of them on; of a run without requests the workload is not known.
    """
    requests = measured.requests
    if not len(requests):
        return dict(measured.run)
    closed = measured.run.get("workload.arrivals")
    if closed is not None and "arrival_s" not in requests:
        requests = pd.concat([requests] * (rounds * closed["concurrency"]), ignore_index=True)
        rng = np.random.default_rng(0)
        drawn = rng.integers((shortest * requests).astype(int), requests, endpoint=True)
        requests = pd.DataFrame(drawn, columns=requests.columns)
    columns = {
        "arrived_at": requests.get("arrival_s", pd.Series(0.0, index=requests.index)),
        "num_prefill_tokens": requests["input_tokens"],
        "num_decode_tokens": requests["output_tokens"],
    }
    write_table(trace, columns)
    return {"workload": {"trace": str(trace), "format": "vidur"}, **measured.run}


def _rows(case: Case, trial: Trial) -> Iterator[dict[str, Any]]:
    keys = case.entry.keys
    spreads = (known for end, known in keys.spread.items() if case.measured.label.endswith(end))
    spread = next(spreads, {})
    simulated, ideal, *others = (record.values for record in trial.records)
    ranges = uncertainty.ranges_of(others)
    for metric, goal in keys.metrics.items():
        measured = case.measured.metrics.get(metric)
        if measured is None:
            continue
        yield {
            **case.labels,
            "metric": metric,
            "measured": measured,
            "spread": spread.get(metric, np.nan),
            "simulated": simulated[metric],
            "error": simulated[metric] / measured - 1,
            "ideal": ideal[metric],
            "ideal_error": ideal[metric] / measured - 1,
            "goal": np.nan if goal is None else goal,
            **_told(ranges.get(metric), measured),
        }


def _told(found: uncertainty.Range | None, measured: float) -> dict[str, float]:
    if found is None:
        return {}
    inside = found.low <= measured <= found.high
    return {
        "low_90": found.low,
        "high_90": found.high,
        "half_width": found.half_width,
        "inside": float(inside),
    }


def _with_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Give runs that were measured twice the spread between the two, as a share of their mean."""
    again = table.groupby([*GROUP, "run", "metric"])["measured"]
    spread = (again.transform("max") - again.transform("min")) / again.transform("mean")
    return table.assign(spread=spread.where(again.transform("size") > 1, table["spread"]))
