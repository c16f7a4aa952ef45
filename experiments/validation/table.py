"""What a validation found, as tables: in a terminal and as Markdown, the same rows in both.

Knows the mapping that `experiments.validation.validate` makes; computes nothing but worst cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

Found = Mapping[str, Any]

WORDS = {
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "duration": "duration (s)",
    "busy_share": "stages busy",
    "bubble_share": "stages idle",
}
"""How a row is called; latencies are by rule, `mean_ttft_ms` is TTFT mean (ms)."""


OVERVIEW = (
    *(f"{part}_{name}_ms" for name in ("ttft", "tpot", "e2el") for part in ("mean", "p99")),
    "output_throughput",
    "busy_share",
)
"""The columns of a table of several validations."""


class Section(NamedTuple):
    """A table: its title, the heads of its columns, its rows."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def print_validation(found: Found) -> None:
    """Print the layers, and what the driver and the messages took."""
    console = Console()
    for section in sections(found):
        table = Table(
            title=section.title,
            title_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for index, head in enumerate(section.heads):
            table.add_column(
                head, header_style="bold", justify="right" if index else "left", no_wrap=True
            )
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for line in notes(found):
        console.print(line, highlight=False)


def markdown(validations: Sequence[Found]) -> str:
    """Return the tables of several validations as Markdown: one of all, then a heading each."""
    parts = [_as_markdown(overview(validations))]
    for found in validations:
        parts.append(f"### {found['scheduler']}\n")
        parts += map(_as_markdown, sections(found))
        parts.append("\n".join(f"- {line}" for line in notes(found)) + "\n")
    return "\n".join(parts)


def _as_markdown(section: Section) -> str:
    rules = ["---", *["---:"] * (len(section.heads) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (section.heads, rules, *section.rows)]
    return "\n".join([f"{section.title}:\n", *lines, ""])


def overview(validations: Sequence[Found]) -> Section:
    """Return the errors of several validations, a line for each layer of each."""
    rows = []
    for found in validations:
        name, lines = found["scheduler"], [found["end_to_end"][key] for key in OVERVIEW]
        spreads = [_percent(line["spread"], sign=False) for line in lines]
        rows.append([f"{name}, spread of runs", *spreads])
        rows.append([f"{name}, simulated", *(_percent(line["error"]) for line in lines)])
        if found["calibration"] is not None:
            errors = [_percent(line["calibrated_error"]) for line in lines]
            rows.append([f"{name}, calibrated", *errors])
        worst = [
            max((each["metrics"].get(key, 0.0) for each in found["structure"]), key=abs)
            for key in OVERVIEW
        ]
        rows.append([f"{name}, structure, worst run", *map(_percent, worst)])
    heads = ["", *(_words(key).removesuffix(" (ms)") for key in OVERVIEW)]
    return Section("Errors", heads, rows)


def sections(found: Found) -> list[Section]:
    """Return the tables of a validation."""
    return [_end_to_end(found), _structure(found), _costs(found), _bubbles(found)]


def notes(found: Found) -> list[str]:
    """Return what to know beside the tables: times around the stages, calibration, load."""
    lines = [f"around the stages, on average: {_around(found['overheads'])}"]
    calibration = found["calibration"]
    if calibration is None:
        lines.append("not calibrated: the simulator knows only the configuration")
    else:
        lines.append(
            f"calibrated on {calibration['requests']} other requests (seed {calibration['seed']}, "
            f"{calibration['micro_batches']} micro-batches, {calibration['seconds']:.0f} s): "
            + _around(calibration)
        )
    loads = ", ".join(f"{before:.1f} to {after:.1f}" for before, after in found["load"])
    lines.append(f"load average of the machine, run by run: {loads}")
    return lines


def _around(times: Found) -> str:
    return (
        f"{times['freed_ms']:.2f} ms until the driver knows that stage 0 is free, "
        f"{times['returned_ms']:.2f} ms that a micro-batch is back, "
        f"{times['schedule_ms']:.2f} ms until stage 0 has the next ({times['driver_ms']:.2f} ms "
        f"of them the driver computes), {times['hop_ms']:.2f} ms a hop, "
        f"{times['prepare_ms']:.2f} ms until a stage starts what it could"
    )


def _end_to_end(found: Found) -> Section:
    calibrated = found["calibration"] is not None
    heads = ["", "measured", "spread", "simulated", "error"]
    heads += ["calibrated", "error"] if calibrated else []
    rows = []
    for key, line in found["end_to_end"].items():
        row = [_words(key), _number(line["measured"]), _percent(line["spread"], sign=False)]
        row += [_number(line["simulated"]), _percent(line["error"])]
        if calibrated:
            row += [_number(line["calibrated"]), _percent(line["calibrated_error"])]
        rows.append(row)
    runs = "1 run" if found["runs"] == 1 else f"{found['runs']} runs"
    what = f"{found['scheduler']}, {runs} of {found['requests']} requests"
    return Section(f"End to end, {what}", heads, rows)


def _structure(found: Found) -> Section:
    """Give each run its column; the share of equal micro-batches first."""
    layers = found["structure"]
    same = [_percent(each["same_micro_batches"], sign=False) for each in layers]
    rows = [["equal micro-batches", *same]]
    rows.append(["first that differs", *(_first(each) for each in layers)])
    for key in (key for key in found["end_to_end"] if not key.startswith(("p50", "p90"))):
        rows.append([_words(key), *(_percent(each["metrics"].get(key)) for each in layers)])
    for name in layers[0]["requests"]:
        values = [_percent(each["requests"][name].get("p95"), sign=False) for each in layers]
        rows.append([f"a request's {name.upper()}, P95", *values])
    without = [_percent(each["at_once"].get("mean_e2el_ms")) for each in layers]
    rows.append(["E2EL mean, stages starting at once", *without])
    heads = ["", *(f"run {number + 1}" for number in range(len(layers)))]
    return Section("Structure: each run simulated from its own times", heads, rows)


def _first(layer: Found) -> str:
    parted = layer["parted_at"]
    return "none" if parted is None else f"{parted} of {layer['micro_batches']}"


def _costs(found: Found) -> Section:
    heads = ["stage", "median", "P95", "of the sum", "median repeat", "P95 repeat"]
    keys = ("median", "p95", "bias", "median_repeat", "p95_repeat")
    rows = [
        [str(stage), *(_percent(line[key], sign=key == "bias", digits=3) for key in keys)]
        for stage, line in enumerate(found["costs"])
    ]
    return Section("Costs: errors of a micro-batch's seconds on a stage", heads, rows)


def _bubbles(found: Found) -> Section:
    names = list(found["bubbles"])
    causes = list(found["bubbles"]["measured"])
    rows = [
        [cause, *(_percent(found["bubbles"][name][cause], sign=False) for name in names)]
        for cause in causes
        if any(found["bubbles"][name][cause] > 0 for name in names)
    ]
    totals = [_percent(sum(found["bubbles"][name].values()), sign=False) for name in names]
    return Section("Bubbles: share of all stages' time", ["", *names], [*rows, ["all", *totals]])


def _words(key: str) -> str:
    if key in WORDS:
        return WORDS[key]
    statistic, name, _ = key.split("_")
    return f"{name.upper()} {statistic if statistic == 'mean' else statistic.upper()} (ms)"


def _number(value: float) -> str:
    """Return four digits of a number, without an exponent."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def _percent(value: float | None, *, sign: bool = True, digits: int = 2) -> str:
    if value is None:
        return "-"
    value = round(100 * value, digits) + 0.0  # no minus before a zero
    return f"{value:{'+' if sign and value else ''}.{digits}f}%"
