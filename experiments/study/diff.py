"""Two runs side by side: what differs in how they were made, and in what they came to.

Reads the folders that runs are saved in, or takes runs themselves. Simulates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evenflow.errors import UsageError
from experiments.outcome import Outcome
from experiments.report.tables import is_number, percent, read_table
from experiments.report.words import metrics, overload
from experiments.run_file.yaml_file import flat
from experiments.study.fair import Side, doubts
from experiments.study.intervals import (
    Interval,
    paired_difference,
    signed,
    unpaired_difference,
)

SAME_S = 1e-6
"""Arrivals closer than this are the same."""

PER_REQUEST = {"mean_ttft_ms": "ttft", "mean_tpot_ms": "tpot", "mean_e2el_ms": "e2el"}
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "completion_s")


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
        assert self.requests is not None
        rows = self.requests
        ttft, e2el = (rows[end] - rows["arrival_s"] for end in ("first_token_s", "completion_s"))
        steps = (rows["output_tokens"] - 1).where(rows["output_tokens"] > 1)
        columns = {"ttft": ttft.where(e2el.notna()), "tpot": (e2el - ttft) / steps, "e2el": e2el}
        return 1e3 * pd.DataFrame(columns)


@dataclass(frozen=True)
class Difference:
    """What differs between run `a` and run `b`; differences are b's less a's."""

    a: Saved
    b: Saved

    @cached_property
    def config(self) -> pd.DataFrame:
        """A row a key of the configuration that differs, as each run has it; None: not given."""
        ours, theirs = (flat(run.provenance.get("config", {})) for run in (self.a, self.b))
        keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
        rows = [(ours.get(key), theirs.get(key)) for key in keys]
        return pd.DataFrame(
            rows, index=pd.Index(keys, name="key"), columns=["a", "b"], dtype=object
        )

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row a number of the summaries that differs, with its 95 % interval where it has one.

        `mean` and `half_width` are of the n differences per request, or of the two sides' means.
        """
        rows = {}
        for key, value in self.a.summary.items():
            other = self.b.summary.get(key)
            if is_number(value) and is_number(other) and value != other:
                rows[key] = {"a": value, "b": other, "difference": other - value, **self._of(key)}
        columns = ["a", "b", "difference", "mean", "half_width", "n"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")

    def _of(self, key: str) -> dict[str, float]:
        found = self.interval(key)
        if found is None:
            return {}
        return {"mean": found.mean, "half_width": found.half_width, "n": found.n}

    def interval(self, key: str) -> Interval | None:
        """Return by how much a mean latency is more in b; None of what no request has."""
        if key not in PER_REQUEST or self.a.requests is None or self.b.requests is None:
            return None
        sides = [run.latencies[PER_REQUEST[key]] for run in (self.b, self.a)]
        if self.paired:
            both = pd.concat(sides, axis=1, join="inner").dropna()
            ours, theirs = (both.iloc[:, side].tolist() for side in (0, 1))
            return paired_difference(ours, theirs) if ours else None
        ours, theirs = (side.dropna().tolist() for side in sides)
        return unpaired_difference(ours, theirs) if ours and theirs else None

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
        """Sentences on what makes the comparison unfair, or weak."""
        sides = {run.name: Side(run.summary, run.provenance) for run in (self.a, self.b)}
        return [*self._of_sources(), *self._of_requests(), *doubts(sides), *self._of_load()]

    def _of_sources(self) -> list[str]:
        sides = self.a.provenance, self.b.provenance
        first, second = (side.get("trace", {}) for side in sides)
        if first.get("sha256") == second.get("sha256"):
            return []
        return [f"other traces: {first.get('name')} and {second.get('name')}"]

    def _of_requests(self) -> list[str]:
        lacking = [run.name for run in (self.a, self.b) if run.requests is None]
        if lacking:
            names = " and ".join(lacking)
            return [
                f"no table of requests in {names}: no differences per request (--save requests)"
            ]
        return [] if self.paired else ["not the same requests: the differences are unpaired"]

    def _of_load(self) -> list[str]:
        return [
            f"{run.name} is overloaded: {told}"
            for run in (self.a, self.b)
            if (told := overload(run.summary))
        ]


def diff(a: str | Path | Outcome, b: str | Path | Outcome) -> Difference:
    """Read two runs, each a saved folder or at hand; UsageError for a folder that is none."""
    first, second = (_saved(each, name) for each, name in ((a, "a"), (b, "b")))
    return Difference(first, second)


def _saved(run: str | Path | Outcome, name: str) -> Saved:
    if isinstance(run, Outcome):
        return Saved(name, run.summary, run.result.provenance, _by_id(run.requests))
    folder = Path(run)
    summary = _summary(folder)
    rows = read_table(folder, "requests", ["request_id", *COLUMNS])
    requests = None if rows is None else _by_id(rows)
    return Saved(str(run), summary, summary["provenance"], requests)


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
        if isinstance(summary["provenance"]["config"], dict):
            return dict(summary)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UsageError(f"{path}: is no summary that evenflow wrote")


def _by_id(requests: pd.DataFrame) -> pd.DataFrame:
    columns: pd.DataFrame = requests.set_index("request_id")[list(COLUMNS)].astype(float)
    return columns.sort_index()


def config_rows(found: Difference) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of what differs in the configuration."""
    rows = [[str(key), _value(a), _value(b)] for key, a, b in found.config.itertuples()]
    return ["key", found.a.name, found.b.name], rows


def _value(value: object) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def metric_rows(found: Difference) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the numbers that differ and that tables show."""
    rows = []
    for metric in metrics():
        if metric.key in found.metrics.index:
            a, b = (float(run.summary[metric.key]) for run in (found.a, found.b))
            each = found.interval(metric.key)
            share = percent((b - a) / a, 1) if a else ""
            told = "" if each is None else signed(each)
            rows.append([metric.words, metric.form.format(a), metric.form.format(b), share, told])
    how = "per request" if found.paired else "unpaired"
    return ["", found.a.name, found.b.name, "change", f"{how}, 95 %"], rows
