"""The same measured runs with several kinds of costs: how far off each is, and which is nearer.

`default` is a run that says its model, GPUs, precision, policy, limits and requests, no more.

TPOT is compared, of an offline run its output tokens a second, and TTFT apart. A set is what
`GROUP` names; the odd rows are every second one of an entry, from its second on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from evenflow.config.build import model_of
from evenflow.config.costs import MEASURED_COSTS
from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Patch
from evenflow.errors import UsageError, instead_of
from evenflow.experiments.reproduce import GROUP, Entry, MeasuredCase, cases_of, simulated
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import markdown_table, percent, write_table
from evenflow.study.trials import How

DEFAULT = "default"
KNOWN = (*MEASURED_COSTS, DEFAULT)

LEFT_TO_US: Patch = {
    "costs": {"kind": "roofline"},
    **dict.fromkeys(("runtime", "machine", "link", "nodes", "dispatch", "kv.like")),
}
"""What `default` changes: the keys that no launch line of an engine has."""

COMPARED = ("mean_tpot_ms", "output_throughput")
AXES = ("family", "engine", "gpu", "precision", "layout", "entry")
"""What the errors are grouped by."""


@dataclass(frozen=True, slots=True, repr=False)
class Scored(Shown):
    """The errors of `kinds` of costs, in columns of a `table` with a row a run and metric.

    A run that one of them cannot simulate is in `failures` instead, with the reason.
    """

    kinds: Sequence[str]
    table: pd.DataFrame
    failures: Mapping[str, str]

    def told(self) -> Iterator[str | Table]:
        if DEFAULT in self.kinds:
            heads = [f"{of}{kind}" for of in ("", "TTFT, ") for kind in self.kinds]
            yield Table(["mean error / median off", "runs", *heads], list(self.entries()))
        else:
            yield from self.nearest()
            heads = ["rows", "of", "runs", *(f"{kind}, median / P90" for kind in self.kinds)]
            yield Table(heads, list(self.rows()))
        yield from (Aside(f"not compared: {label}: {why}") for label, why in self.failures.items())

    @property
    def compared(self) -> pd.DataFrame:
        """The rows that decide which kind is nearer."""
        return self.table[self.table["metric"].isin(COMPARED)]

    def entries(self) -> Iterator[list[str]]:
        """Yield a row an entry, and one of all sets' medians, with the errors by kind.

        Errors are of TPOT, of an offline run its throughput, then of TTFT.
        """
        tables = self.compared, self.table[self.table["metric"] == "mean_ttft_ms"]
        for name in dict.fromkeys(map(str, self.table["entry"])):
            own = [table[table["entry"] == name] for table in tables]
            yield [name, str(len(own[0])), *(_both(of[k]) for of in own for k in self.kinds)]
        sets = [
            table.set_index(GROUP)[[*self.kinds]].abs().groupby(GROUP).median() for table in tables
        ]
        words = [percent(of[k].median(), 0, sign=False) for of in sets for k in self.kinds]
        yield [f"{len(sets[0])} sets, median off", str(len(tables[0])), *words]

    def nearest(self) -> Iterator[str]:
        """Yield in how many sets a kind has the smallest median of the odd rows."""
        odd = self.compared[self.compared["odd"]]
        off = odd.set_index(GROUP)[[*self.kinds]].abs().groupby(GROUP, sort=False).median()
        for kind, count in off.idxmin(axis=1).value_counts().items():
            yield f"{kind} is nearest in {count} of {len(off)} sets (odd rows)"

    def rows(self) -> Iterator[list[str]]:
        """Yield the numbers of runs and the errors: of all, of TTFT, and by each of AXES."""
        first = self.table[self.table["metric"] == "mean_ttft_ms"]
        parts = [("all", self.compared), ("TTFT", first)]
        for axis in AXES:
            parts += [(str(name), rows) for name, rows in self.compared.groupby(axis, sort=False)]
        for name, rows in parts:
            for odd, part in rows.groupby("odd", sort=False):
                offs = [_off(part[kind].abs()) for kind in self.kinds]
                yield ["odd" if odd else "even", name, str(len(part)), *offs]


def _both(errors: pd.Series) -> str:
    if errors.empty:
        return ""
    return f"{percent(errors.mean(), 0)} / {percent(errors.abs().median(), 0, sign=False)}"


def _off(errors: pd.Series) -> str:
    both = float(errors.median()), float(errors.quantile(0.9))
    return " / ".join(percent(share, 1, sign=False) for share in both)


def score(
    entries: Sequence[Entry], data: Path, how: How, overrides: Sequence[str], kinds: Sequence[str]
) -> Scored:
    """Simulate the runs of entries with measured operators, with each of these kinds of costs.

    Of the kind that an entry has, its own keys stay, and `overrides` with all. UsageError where
    there is no run.
    """
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(f"--costs: {kind} is there twice; compare different kinds")
        if kind not in KNOWN:
            raise UsageError(f"--costs: no measured costs {kind}; {instead_of(kind, KNOWN)}")

    given = {text.partition("=")[0].partition(".")[0] for text in overrides}
    left = {key: v for key, v in LEFT_TO_US.items() if key.partition(".")[0] not in given}

    def patches(config: RunConfig) -> list[Patch]:
        costs: Any = config.costs
        known: dict[str, Patch] = {costs.kind: {}, DEFAULT: left}
        return [
            known.get(kind, {"costs": {"kind": kind, "framework": costs.framework}})
            for kind in kinds
        ]

    with TemporaryDirectory() as scratch:
        every = (cases_of(each, data, Path(scratch), overrides) for each in entries)
        cases = [case for of in every for case in of if case.config.costs.kind in MEASURED_COSTS]
        if not cases:
            raise UsageError(f"{data}: no runs of entries with costs among {', '.join(kinds)}")
        pairs, failures = simulated(cases, patches, how)
    table = [
        {**_labels(case), "odd": case.number % 2 == 1, "metric": metric, "measured": measured}
        | {kind: v / measured - 1 for kind, v in zip(kinds, trial.values(metric), strict=True)}
        for case, trial in pairs
        for metric in case.entry.keys.metrics
        if (measured := case.measured.metrics.get(metric)) is not None
    ]
    return Scored(kinds, pd.DataFrame(table), failures)


def _labels(case: MeasuredCase) -> dict[str, str]:
    model = model_of(case.config, Path())
    assert model is not None
    return {**case.labels, "family": model.family, "precision": model.quantization or "16 bits"}


def write(folder: Path, found: Scored) -> None:
    """Write scores.csv, a row a run and metric, and scores.md, which says what is printed."""
    write_table(folder / "scores.csv", found.table)
    parts = [
        markdown_table(each.heads, each.rows) if isinstance(each, Table) else f"{each}\n"
        for each in found.told()
        if not isinstance(each, Aside)
    ]
    (folder / "scores.md").write_text("\n".join(parts), encoding="utf-8")
