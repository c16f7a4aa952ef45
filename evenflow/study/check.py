"""Runs beside a baseline: how a change of the code moves their numbers, and past which bounds.

A baseline is JSON in the form of github-action-benchmark, `[{"name", "unit", "value", "extra"}]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import pandas as pd
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from evenflow.errors import UsageError, instead_of
from evenflow.files import require_file, require_writable, write_whole
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import is_number, percent
from evenflow.report.words import NOT_FAIR, metric_words, metrics, refusals
from evenflow.results.outcome import Outcome
from evenflow.study.fair import require_served
from evenflow.study.runs import Job

ALWAYS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")
FORM = re.compile(r"(\w+)([<>])([+-]?)((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(%?)")
RIGHT = "mean_tpot_ms>+3% or p99_itl_ms>+5 of the change, p99_itl_ms>200 of the run"


class Benchmark(BaseModel):
    """A number of a baseline, named `run: metric`; `extra` says of which configuration."""

    name: str
    unit: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    extra: str = ""


BENCHMARKS = TypeAdapter(list[Benchmark])


class FailIf(NamedTuple):
    """A bound on a number, on its change (`>+5`), or on its relative change (`>+3%`)."""

    text: str
    metric: str
    above: bool
    bound: float
    column: str

    def passed(self, value: float) -> bool:
        """Say whether a value is beyond the bound; NaN (no requests) is."""
        return not (value <= self.bound if self.above else value >= self.bound)


def parse_fail_if(text: str) -> FailIf:
    """Return the bound that `METRIC>NUMBER` says; a sign makes it one on the change."""
    found = FORM.fullmatch("".join(text.split()))
    if found is None or (found[5] and not found[3]):
        raise UsageError(f"--fail-if {text}: should be like {RIGHT}")
    metric, side, sign, number, share = found.groups()
    known = [each.key for each in metrics()]
    if metric not in known:
        raise UsageError(f"--fail-if {text}: unknown metric; {instead_of(metric, known)}")
    column = "value" if not sign else "change" if share else "difference"
    return FailIf(text, metric, side == ">", float(sign + number) / (100 if share else 1), column)


def read_baseline(path: Path) -> dict[str, Benchmark]:
    """Read a baseline; UsageError for another file."""
    require_file(path)
    try:
        return {each.name: each for each in BENCHMARKS.validate_json(path.read_bytes())}
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; evenflow check --write {path} makes it") from None
    except (OSError, ValidationError):
        raise UsageError(f"{path}: is no baseline that evenflow check wrote") from None


@dataclass(frozen=True, repr=False)
class Checked(Shown):
    """Runs with the numbers of a baseline, None without one, and bounds on both."""

    outcomes: Sequence[Outcome]
    baseline: dict[str, Benchmark]
    fail_if: Sequence[FailIf]

    @cached_property
    def benchmarks(self) -> dict[str, Benchmark]:
        """The numbers of the runs, as a baseline has them."""
        found = [
            Benchmark(
                name=f"{run.label}: {metric.key}",
                unit=(re.findall(r"\((.+)\)$", metric.words) or [metric.words.split(",")[0]])[0],
                value=run.summary[metric.key],
                extra=f"config {run.result.provenance['config_sha256'][:12]}",
            )
            for run, metric in product(self.outcomes, metrics())
            if is_number(run.summary.get(metric.key))
        ]
        return {each.name: each for each in found}

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a run and metric: `value`, that `before`, `difference`, relative `change`.

        NaN where there is none; a change from 0 is infinite.
        """
        known = {name: each.value for name, each in self.baseline.items()}
        rows = {
            (run.label, m.key): (run.summary[m.key], known.get(f"{run.label}: {m.key}"))
            for run, m in product(self.outcomes, metrics())
            if m.key in run.summary
        }
        index = pd.MultiIndex.from_tuples(rows, names=["run", "metric"])
        table = pd.DataFrame([*rows.values()], index, ["value", "before"], dtype=float)
        less = table["value"] - table["before"]
        share = (less / table["before"].abs()).where(less != 0, 0.0)
        return table.assign(difference=less, change=share)

    @property
    def failures(self) -> list[str]:
        """A sentence for each bound and run that is beyond it."""
        return [
            f"FAILS {bound.text}: {run.label}: {self._cell(run.label, bound.metric)}"
            for bound, run in product(self.fail_if, self.outcomes)
            if bound.passed(self._number(run.label, bound.metric, bound.column))
        ]

    @property
    def is_failure(self) -> bool:
        return bool(self.failures)

    def told(self) -> Iterator[str | Table]:
        yield from self.failures or [f"ok: {len(self.outcomes)} runs, {len(self.fail_if)} limits"]
        yield from refusals({run.label: run.served for run in self.outcomes})
        yield from self._unlike()
        keys = dict.fromkeys([*(bound.metric for bound in self.fail_if), *ALWAYS])
        rows = [
            [run.label.replace("|", "\\|"), *(self._cell(run.label, key) for key in keys)]
            for run in self.outcomes
        ]
        yield Table(["run", *map(metric_words, keys)], rows, markdown=True)

    def _cell(self, run: str, key: str) -> str:
        value, before, change = (self._number(run, key, c) for c in ("value", "before", "change"))
        shown = next(metric for metric in metrics() if metric.key == key).cell(value)
        return shown if math.isnan(before) else f"{shown} ({percent(change, 1)})"

    def _number(self, run: str, metric: str, column: str) -> float:
        return cast("float", self.table.at[(run, metric), column])

    def _unlike(self) -> Iterator[str]:
        """Yield the baseline's numbers of another configuration, or without a run here."""
        for run in self.outcomes:
            of_run = (
                now for name, now in self.benchmarks.items() if name.startswith(f"{run.label}: ")
            )
            if any(now.extra != self.baseline.get(now.name, now).extra for now in of_run):
                yield f"{NOT_FAIR}{run.label}: another configuration than the baseline's"
        before = {name.rpartition(": ")[0] for name in self.baseline}
        for label in sorted(before - {run.label for run in self.outcomes}):
            yield Aside(f"{label}: in the baseline only")

    def write(self, path: Path) -> None:
        """Write the numbers as a baseline, in the place of one or of nothing."""
        write_whole(path, BENCHMARKS.dump_json([*self.benchmarks.values()], indent=1) + b"\n")


def check(
    jobs: Sequence[Job],
    simulate: Callable[[Job], Outcome],
    against: Path | None,
    fail_if: Sequence[FailIf],
    write: Path | None = None,
    *,
    allow_refused: bool = False,
) -> Checked:
    """Simulate jobs, set them beside the baseline `against`, and `write` another one.

    UsageError where there is not the number that a bound is on.
    """
    baseline = {} if against is None else read_baseline(against)
    if write is not None:
        if write.exists():
            read_baseline(write)  # a file that is none stays
        require_writable(write)
    for bound, job in product(fail_if, jobs):
        if bound.column != "value" and f"{job.label}: {bound.metric}" not in baseline:
            raise UsageError(
                f"--fail-if {bound.text}: the baseline has no {bound.metric} of {job.label}; "
                "evenflow check --write makes one"
            )
    outcomes = list(map(simulate, jobs))
    require_served({run.label: run.served for run in outcomes}, allowed=allow_refused)
    for bound, run in product(fail_if, outcomes):
        if bound.metric not in run.summary:
            raise UsageError(f"--fail-if {bound.text}: {run.label} has no {bound.metric}")
    checked = Checked(outcomes, baseline, fail_if)
    if write is not None:
        checked.write(write)
    return checked
