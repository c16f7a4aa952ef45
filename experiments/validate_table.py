"""What a validation found, as tables: in a terminal and as Markdown, the same rows in both.

Knows the mapping that `experiments.validate` makes; computes nothing but worst cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

Found = Mapping[str, Any]


class Section(NamedTuple):
    """A table: its title, the heads of its columns, its rows."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def print_validation(found: Found) -> None:
    """Print the layers, and what the driver and the messages took."""
    console = Console()
    for section in sections(found):
        table = Table(title=section.title, title_justify="left")
        for index, head in enumerate(section.heads):
            table.add_column(head, justify="right" if index else "left")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    for line in notes(found):
        console.print(line, highlight=False)


def markdown(validations: Sequence[Found]) -> str:
    """Return the tables of several validations as Markdown, a heading each."""
    parts = []
    for found in validations:
        parts.append(f"### {found['scheduler']}\n")
        for title, heads, rows in sections(found):
            rules = ["---", *["---:"] * (len(heads) - 1)]
            lines = [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
            parts.append("\n".join([f"{title}:\n", *lines, ""]))
        parts.append("\n".join(f"- {line}" for line in notes(found)) + "\n")
    return "\n".join(parts)


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
    heads = ["", "measured", "least", "most", "spread", "simulated", "error"]
    heads += ["calibrated", "error", "its spread"] if calibrated else []
    rows = []
    for key, line in found["end_to_end"].items():
        row = [key, *(f"{line[name]:.4g}" for name in ("measured", "least", "most"))]
        row += [_percent(line["spread"], sign=False), f"{line['simulated']:.4g}"]
        row.append(_percent(line["error"]))
        if calibrated:
            row += [f"{line['calibrated']:.4g}", _percent(line["calibrated_error"])]
            row.append(_percent(line["calibrated_spread"], sign=False))
        rows.append(row)
    title = (
        f"End to end, {found['scheduler']}: {found['runs']} runs of {found['requests']} requests"
    )
    return Section(title, heads, rows)


def _structure(found: Found) -> Section:
    """Give each run its column; the share of equal micro-batches first."""
    layers = found["structure"]
    rows = [
        [
            "equal micro-batches",
            *(_percent(each["same_micro_batches"], sign=False) for each in layers),
        ],
        ["first that differs", *(_first(each) for each in layers)],
    ]
    for key in found["end_to_end"]:
        rows.append([key, *(_percent(each["metrics"].get(key)) for each in layers)])
    without = [_percent(each["at_once"].get("mean_e2el_ms")) for each in layers]
    rows.append(["mean_e2el_ms, stages starting at once", *without])
    for name in layers[0]["requests"]:
        for part, words in (("median", "median"), ("p95", "P95"), ("most", "most")):
            values = [_percent(each["requests"][name].get(part), sign=False) for each in layers]
            rows.append([f"a request's {name}, {words} error", *values])
    heads = ["", *(f"run {number + 1}" for number in range(len(layers)))]
    return Section("Structure: each run simulated from its own times", heads, rows)


def _first(layer: Found) -> str:
    parted = layer["parted_at"]
    return "none" if parted is None else f"{parted} of {layer['micro_batches']}"


def _costs(found: Found) -> Section:
    heads = [
        "stage",
        "median error",
        "P95 error",
        "error of the sum",
        "median repeat",
        "P95 repeat",
    ]
    keys = ("median", "p95", "bias", "median_repeat", "p95_repeat")
    rows = [
        [str(stage), *(_percent(line[key], sign=key == "bias", digits=3) for key in keys)]
        for stage, line in enumerate(found["costs"])
    ]
    return Section("Costs: a micro-batch on a stage, predicted and measured", heads, rows)


def _bubbles(found: Found) -> Section:
    names = list(found["bubbles"])
    causes = list(found["bubbles"]["measured"])
    rows = [
        [cause, *(f"{100 * found['bubbles'][name][cause]:.2f} %" for name in names)]
        for cause in causes
        if any(found["bubbles"][name][cause] > 0 for name in names)
    ]
    totals = [f"{100 * sum(found['bubbles'][name].values()):.2f} %" for name in names]
    return Section("Bubbles: share of all stages' time", ["", *names], [*rows, ["all", *totals]])


def _percent(value: float | None, *, sign: bool = True, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %"
