"""The output of `evenflow reproduce`: tables in a terminal, a document, a CSV, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evenflow.experiments.reproduce import GROUP, Entry, Reproduced
from evenflow.report.plots import finish, panels, plain_decades, save
from evenflow.report.shown import Table
from evenflow.report.style import BAND, colour
from evenflow.report.tables import markdown_table, number, percent, write_table
from evenflow.report.words import metric_words
from evenflow.runtimes import runtimes

NAME = "reality"
FEW_RUNS = 8
"""The most runs of an entry that the page lists; the CSV has all."""

RATIOS = {1.5: (0.9, 1, 1.1), 3: (0.5, 1, 2), np.inf: (0.1, 1, 10)}
"""What an axis of simulated / measured says that reaches at most so far."""

Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
"""The column of a table under each head, and what writes its cells."""

SHOWN = (
    "mean_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "p99_itl_ms",
    "request_throughput",
    "output_throughput",
    "duration",
)

INSIDE_HEADS = ("inside 90 % interval", "metric", "all", "not used", "half-width, median")

INSIDE = """## How many lie inside the predicted intervals

Each run is simulated nine more times, with errors of its costs and of its host as large as stated,
and with other seeds; this is how many measured values lie inside the 90 % interval that comes out.
The stated error of measured operators was itself taken from the even rows of the closed loops (of
TPOT alone); "not used" leaves these out.
"""

INTRO = """\
# How far from measured runs of others

Each row is a set of runs that others measured on real GPUs with real engines, simulated here.
Misses stand beside hits. Nothing was measured by us, and no GPU was used.

- An error is simulated / measured - 1; "off" is an error without its sign.
- "no CPU" is the same simulation with `runtime: ideal`, without what the engine's CPU spends.
- "Spread" is how far two measurements of one run are apart, where that is known.
- A goal was written before its runs were simulated.
- Kernels' times are tables measured by others, or a roofline. Constants of the CPU were fitted to
  some of these runs: each set says to which. The others are predicted.

The command:

    evenflow reproduce --data DIR --out out/reality
"""


def _shown(table: pd.DataFrame) -> list[str]:
    """Return the metrics to show, all where none is one of SHOWN."""
    there = dict.fromkeys(map(str, table["metric"]))
    return [metric for metric in SHOWN if metric in there] or [*there]


def word(metric: str) -> str:
    return "requests/s" if metric == "request_throughput" else metric_words(metric)


def _share(value: float, *, sign: bool = True) -> str:
    return "" if np.isnan(value) else percent(value, 1, sign=sign)


_size = partial(_share, sign=False)

RUN_COLUMNS: Columns = {
    "metric": ("metric", word),
    "measured": ("measured", number),
    "spread": ("spread", _size),
    "simulated": ("simulated", number),
    "error": ("error", _share),
    "no CPU": ("ideal", number),
    "its error": ("ideal_error", _share),
}
SUMMARY_COLUMNS: Columns = {
    **{
        head: (name, str)
        for head, name in zip(("entry", "engine", "GPUs", "layout"), GROUP, strict=True)
    },
    "metric": ("metric", word),
    "runs": ("runs", str),
    "mean error": ("mean_error", _share),
    "median off": ("median_off", _size),
    "P90 off": ("p90_off", _size),
    "no CPU: median off": ("ideal_median_off", _size),
    "goal": ("goal", _size),
}


def _told(row: Mapping[Any, Any], columns: Columns) -> list[str]:
    return [told(row[name]) for name, told in columns.values()]


def runs_told(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each run shown by itself; the others are too many."""
    for entry, of_entry in table.groupby("entry", sort=False):
        count = of_entry["run"].nunique()
        if count <= FEW_RUNS:
            for run, rows in of_entry.groupby("run", sort=False):
                yield str(entry if count == 1 else run), rows


def error_rows(table: pd.DataFrame, metrics: Sequence[str]) -> Iterator[list[str]]:
    """Yield rows of a run's errors, a column a metric: as it is, with no CPU time, the spread."""
    for name, rows in runs_told(table):
        known = rows.drop_duplicates("metric", keep="last").set_index("metric").reindex([*metrics])
        told = ((name, "error", _share), ("  no CPU time", "ideal_error", _share))
        for label, column, cell in (*told, ("  spread", "spread", _size)):
            if any(cells := [*map(cell, known[column])]):
                yield [label, *cells]


def off_rows(summary: pd.DataFrame, metrics: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row for each engine, GPU and layout: median and P90 of errors, a column a metric."""
    for names, rows in summary.groupby(GROUP, sort=False):
        pairs = {
            metric: f"{_size(median)} / {_size(p90)}"
            for metric, median, p90 in zip(
                rows["metric"], rows["median_off"], rows["p90_off"], strict=True
            )
        }
        cells = [pairs.get(metric, "") for metric in metrics]
        yield [", ".join(map(str, names)), str(rows["runs"].iloc[0]), *cells]


def run_rows(table: pd.DataFrame) -> Iterator[list[str]]:
    """Yield a row of words for each run and metric of entries with few runs."""
    for name, rows in runs_told(table):
        for row in rows.to_dict("records"):
            yield [name, *_told(row, RUN_COLUMNS), verdict(row["error"], row["goal"])]


def inside_rows(table: pd.DataFrame) -> Iterator[list[str]]:
    """Yield a row of words for each entry and metric: how many measured values an interval holds.

    Even rows of closed loops determined the stated error; the score apart leaves them out.
    """
    order = table.groupby(["entry", "metric"], sort=False).cumcount()
    told = table["entry"].str.startswith("closed-") & (order % 2 == 0)
    known = table.dropna(subset=["inside"])
    everything = known.assign(entry="all")
    for part in (known, everything):
        for (entry, metric), rows in part.groupby(["entry", "metric"], sort=False):
            inside = rows["inside"], rows.loc[~told[rows.index], "inside"]
            if part is known:
                shares = [f"{each.sum():.0f} of {len(each)}" for each in inside]
            else:
                shares = [percent(each.mean(), 0, sign=False) for each in inside]
            yield [str(entry), word(str(metric)), *shares, _size(rows["half_width"].median())]


def verdict(error: float, goal: float) -> str:
    """Say whether an error is within its goal; nothing where there is no goal."""
    return "" if np.isnan(goal) else "hit" if abs(error) <= goal else "miss"


def summary_rows(summary: pd.DataFrame) -> Iterator[list[str]]:
    """Yield a row of words for each engine, GPU, layout and metric."""
    for row in summary.to_dict("records"):
        within = "" if np.isnan(row["goal"]) else f"{row['within_goal']:.0f} of {row['runs']}"
        yield [*_told(row, SUMMARY_COLUMNS), within]


def tables_told(found: Reproduced) -> Iterator[Table]:
    """Yield errors by run, where those are few, and the summary."""
    metrics = _shown(found.table)
    words = [word(metric).split(" (")[0] for metric in metrics]
    if rows := list(error_rows(found.table, metrics)):
        yield Table(["simulated / measured - 1", *words], rows)
    title = "off, median / P90"
    yield Table([title, "runs", *words], list(off_rows(found.summary, metrics)))
    if "inside" in found.table:
        yield Table(INSIDE_HEADS, list(inside_rows(found.table)))


def write(folder: Path, found: Reproduced) -> None:
    """Write reality.csv, a row a run and metric, summary.csv, the picture, and reality.md."""
    write_table(folder / f"{NAME}.csv", found.table)
    write_table(folder / "summary.csv", found.summary)
    save(draw(found.table), folder / NAME)
    (folder / f"{NAME}.md").write_text(markdown(found, f"{NAME}.svg"), encoding="utf-8")


def markdown(found: Reproduced, picture: str) -> str:
    """Return the document: the summary, the picture, run by run, and what each rests on."""
    parts = [
        INTRO,
        markdown_table([*SUMMARY_COLUMNS, "within"], summary_rows(found.summary)),
        f"![Simulated over measured: a row an entry, a panel a metric, a dot a run]({picture})\n",
        f"## Run by run\n\nEntries with more than {FEW_RUNS} runs are in the table above only.\n",
        markdown_table(["run", *RUN_COLUMNS, ""], run_rows(found.table)),
        "## What each rests on\n",
        *map(_section, found.entries),
    ]
    if "inside" in found.table:
        parts += [INSIDE, markdown_table(INSIDE_HEADS, inside_rows(found.table))]
    if found.doubts:
        doubts = "".join(f"- {name}: {doubt}\n" for name, doubt in found.doubts)
        parts.append(f"## What is not fair\n\n{doubts}")
    if found.failures:
        lost = "".join(f"- {label}: {reason}\n" for label, reason in found.failures.items())
        parts.append(f"## Not simulated\n\n{lost}")
    return "\n".join(parts)


def _section(entry: Entry) -> str:
    keys = entry.keys
    lines = [f"Source: {keys.source.words()}.", *(f"Assumed: {each}." for each in keys.assumed)]
    given = keys.run.get("runtime")
    name = given.get("like") if isinstance(given, dict) else given
    if isinstance(name, str) and name in runtimes():
        lines.append(f"CPU time `{name}`: {runtimes()[name].source}.")
    lines += [] if keys.misses is None else [f"What misses: {keys.misses}."]
    items = "".join(f"- {line}\n" for line in lines)
    return f"### {entry.name}\n\n{keys.title}.\n\n{items}"


def draw(table: pd.DataFrame) -> Figure:
    """Draw simulated over measured: a row an entry, a panel a metric, a dot a run."""
    names: Sequence[str] = list(dict.fromkeys(table["entry"]))
    metrics = _shown(table)
    widths = [2 if metric in SHOWN[:2] else 1 for metric in metrics]
    size = 11 / len(metrics), 1.1 + 0.23 * len(names)
    figure, cells = panels(len(metrics), *size, sharey=True, gridspec_kw={"width_ratios": widths})
    for axes, metric in zip(cells, metrics, strict=True):
        runs = table[table["metric"] == metric]
        axes.axvspan(1 - BAND, 1 + BAND, color="0.88", linewidth=0)
        axes.axvline(1, color="0.4", linewidth=0.8)
        for row, name in enumerate(names):
            ratios = 1 + runs.loc[runs["entry"] == name, "error"]
            axes.plot(ratios, [row] * len(ratios), "o", color=colour(0), markersize=4, alpha=0.35)
            axes.plot(ratios.median(), row, "|", color="black", markersize=11, markeredgewidth=1.8)
        reach = max(1.2, 1.1 * float(np.exp(np.log1p(runs["error"]).abs().max())))
        axes.set(xscale="log", xlim=(1 / reach, reach))
        plain_decades(axes.xaxis)
        axes.set_xticks(next(ticks for most, ticks in RATIOS.items() if reach <= most))
        finish(axes, word(metric).split(" (")[0].replace("output ", "output\n"))
    counts = table.value_counts(["entry", "metric"]).groupby("entry").max()
    cells[0].set_yticks(range(len(names)), [f"{name} ({counts[name]})" for name in names])
    cells[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(
        "simulated / measured; a dot is a run (how many: in brackets), a stroke their median",
        fontsize=10,
    )
    title = f"On the line the simulation is right, left of it too fast; the band is {BAND:.0%}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure
