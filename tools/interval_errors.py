"""Make `errors.csv` of measured runs, and say how often the intervals it gives hold on others.

    evenflow reproduce closed vllm0 --out OUT
    python -m tools.interval_errors OUT/reality.csv

The table is of every second run of each entry; the others are scored, at each distance by sets that
are no nearer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from evenflow.report.tables import markdown_table, percent
from evenflow.study.nearness import ERRORS, KEPT, Likeness, alike, deviation

METRICS = {"mean_tpot_ms": "TPOT", "mean_ttft_ms": "TTFT"}
FEWEST = 3
"""A set of fewer runs says little of how they spread, and is left out."""


class Scored(NamedTuple):
    """A run's interval at a distance: whether it holds, and half its width as a share."""

    inside: bool
    half_width: float


def read(path: Path) -> pd.DataFrame:
    """Return the closed-loop and other runs with both latencies' logs; `even` are to be scored."""
    table = pd.read_csv(path)
    table = table[table["metric"].isin(METRICS) & (table["simulated"] > 0)]
    place = table.groupby(["entry", "metric"]).cumcount()
    return table.assign(even=place % 2 == 0, log=np.log(table["measured"] / table["simulated"]))


def sets_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the sets of the runs that are not scored."""
    keys = [*(f"like_{name}" for name in Likeness._fields), "metric"]
    logs = table[~table["even"]].groupby(keys)["log"]
    sets = logs.agg(runs="count", mean="mean", sd="std").round(4).reset_index()
    return sets[sets["runs"] >= FEWEST].rename(columns=lambda name: name.removeprefix("like_"))


def scores(table: pd.DataFrame, sets: pd.DataFrame, metric: str, distance: str) -> Iterator[Scored]:
    """Yield the runs' intervals of sets at a distance: what is nearer is not known."""
    nearer = list(KEPT)[: list(KEPT).index(distance)]
    for row in table[table["even"] & (table["metric"] == metric)].to_dict("records"):
        like = Likeness(*(row[f"like_{name}"] for name in Likeness._fields))
        there = sets
        for each in nearer:
            there = there[~alike(there, like, KEPT[each])]
        found = deviation(like, metric, there)
        if found is not None and found.distance == distance:
            inside = found.low <= row["log"] <= found.high
            yield Scored(inside, float(np.expm1((found.high - found.low) / 2)))


def coverage(table: pd.DataFrame, sets: pd.DataFrame) -> str:
    """Return the table of coverage by distance, as Markdown."""
    heads = ["measured before", "latency", "runs", "inside 90 %", "half-width, median"]
    rows = []
    for distance in KEPT:
        for metric, name in METRICS.items():
            if found := list(scores(table, sets, metric, distance)):
                share = float(np.mean([each.inside for each in found]))
                half = float(np.median([each.half_width for each in found]))
                cells = (percent(share, 0, sign=False), percent(half, 0, sign=False))
                rows.append([distance, name, str(len(found)), *cells])
    return markdown_table(heads, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path, help="what evenflow reproduce wrote")
    table = read(parser.parse_args(argv).csv)
    sets = sets_of(table)
    sets.to_csv(ERRORS, index=False, lineterminator="\n")
    print(coverage(table, sets))


if __name__ == "__main__":
    main()
