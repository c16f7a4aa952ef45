"""The output of a validation: tables in a terminal and as Markdown, the figure, the files.

Knows what `validate` returns; computes nothing but worst cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenflow.config.provenance import wall_clock
from evenflow.experiments.validation import AROUND_MS, Validation
from evenflow.report.plots import finish, key, plain_decades, save
from evenflow.report.shown import Table
from evenflow.report.style import BAND, DECODE, PREFILL, SCHEDULER_COLOURS, blend
from evenflow.report.tables import markdown_table, number, percent, write_json
from evenflow.report.words import metric_words
from evenflow.results.metrics import request_metrics
from evenflow.results.run import Floats, RunResult
from evenflow.runtime.kinds import notes_of
from evenflow.study.fair import Side, alone, marked
from evenflow.sums import plain_sum

Found = Mapping[str, Any]

OVERVIEW = (
    *(f"{part}_{name}_ms" for name in ("ttft", "tpot", "e2el") for part in ("mean", "p99")),
    "output_throughput",
    "busy_share",
)
"""The columns of a table of several validations."""

SHOWN = 14
"""Micro-batches in the window of the timelines."""

KINDS = (
    ("simulated from the run's own times", SCHEDULER_COLOURS[2], "x"),
    ("predicted", SCHEDULER_COLOURS[1], "o"),
)
"""How `again` and `predicted` of a validation are drawn."""


def write_validation(folder: Path, validation: Validation, title: str) -> None:
    """Write validation.json, wall_clock.json and the figure."""
    folder.mkdir(exist_ok=True)
    found = dict(validation.found)
    write_json(folder / "wall_clock.json", wall_clock(found.pop("seconds")))
    write_json(folder / "validation.json", found)
    if validation.again is not None:
        save(draw_validation(validation, f"{title}, {found['scheduler']}"), folder / "validation")


def told(found: Found) -> Iterator[str | Table]:
    """Yield the layers, and what the driver and the messages took."""
    yield from sections(found)
    yield from notes(found)


def markdown(validations: Sequence[Found]) -> str:
    """Return the tables of validations as Markdown: of all, then of each under a heading."""
    parts = [_as_markdown(overview(validations))]
    for found in validations:
        parts.append(f"### {found['scheduler']}\n")
        parts += map(_as_markdown, sections(found))
        parts.append("".join(f"- {line}\n" for line in notes(found)))
    return "\n".join(parts)


def _as_markdown(table: Table) -> str:
    return f"{table.title}:\n\n{markdown_table(table.heads, table.rows, right=True)}"


def overview(validations: Sequence[Found]) -> Table:
    """Return the errors of several validations, a line for each layer of each."""
    rows = []
    for found in validations:
        name, none = found["scheduler"], {"spread": None, "error": None}
        lines = [found["end_to_end"].get(metric, none) for metric in OVERVIEW]
        rows.append(_shares(f"{name}, spread of runs", (line["spread"] for line in lines)))
        rows.append(_errors(f"{name}, simulated", (line["error"] for line in lines)))
        if found["calibration"] is not None:
            errors = (line["calibrated_error"] for line in lines)
            rows.append(_errors(f"{name}, calibrated", errors))
        if "structure" not in found:
            continue
        worst = (
            max((layer["metrics"].get(metric, 0.0) for layer in found["structure"]), key=abs)
            for metric in OVERVIEW
        )
        rows.append(_errors(f"{name}, structure, worst run", worst))
    heads = ["", *(_words(metric).removesuffix(" (ms)") for metric in OVERVIEW)]
    return Table(heads, rows, title="Errors")


def sections(found: Found) -> list[Table]:
    parts = [_end_to_end, *([_structure, _costs, _bubbles] if "structure" in found else [])]
    return [part(found) for part in parts]


def notes(found: Found) -> list[str]:
    """Return notes beside the tables: times around the stages, calibration, load."""
    if "structure" in found:
        lines = [f"around the stages, on average: {_around(found['overheads'])}"]
    else:
        counts = ", ".join(f"{count:,}" for count in found["decisions"])
        lines = [f"micro-batches whose decisions replay, all of each run's: {counts}"]
        lines.append(found["left_out"])
    calibration = found["calibration"]
    if calibration is None:
        lines.append("not calibrated: the simulator knows only the configuration")
    else:
        lines.append(
            f"calibrated on {calibration['requests']} other requests (seed {calibration['seed']}, "
            f"{calibration['micro_batches']} micro-batches, {calibration['seconds']:.0f} s): "
            + _around(calibration)
        )
        host_s = (calibration["freed_ms"] + calibration["schedule_ms"]) / 1e3
        lines.append(
            f"what that costs stage 0 in a simulation: runtime: {{schedule_s: {host_s:.6f}}}"
        )
    failed = {"completed": found["requests"] - found["failed"], "failed": found["failed"]}
    side = Side(failed, found["provenance"])
    doubts = marked(alone("the simulation", side))
    causes = [*off_by_a_factor(found), *worse_when_calibrated(found)]
    return [*lines, *notes_of(found["provenance"]), *doubts, *causes, verdict(found)]


FACTOR = 1.25
"""Costs that are off by more are no prediction, whatever the other layers say."""


def off_by_a_factor(found: Found) -> Iterator[str]:
    """Say by which factor the run's `costs` are off, where they are, and what is right."""
    factors = [1 + line["bias"] for line in found.get("costs", ())]
    stage = max(range(len(factors)), key=lambda at: _times_off(factors[at]), default=None)
    if stage is None or (times := _times_off(factors[stage])) <= FACTOR:
        return
    way = "slow" if factors[stage] > 1 else "fast"
    config = found["provenance"]["config"]
    kind, served = config["costs"]["kind"], config["workers"]["kind"]
    right = "a profile of these workers is right"
    if served == "torch":
        right = "--profile FILE measures them, and takes that in their place"
    yield (
        f"NOTE: costs: {kind} are {number(times)} times too {way} (stage {stage}), and every "
        f"prediction rests on them; {right}"
    )


def _times_off(factor: float) -> float:
    return max(factor, 1 / factor if factor > 0 else math.inf)


def worse_when_calibrated(found: Found) -> Iterator[str]:
    """Say why what is calibrated is further off than what is simulated, where it is."""
    lines = [(key, found["end_to_end"].get(key)) for key in OVERVIEW]
    known = [
        (abs(line["calibrated_error"]) - abs(line["error"]), name, line)
        for name, line in lines
        if None not in (found["calibration"], line) and "costs" in found
        if line["error"] is not None
    ]
    if not known or plain_sum(more for more, _, _ in known) <= WORSE * len(known):
        return
    _, name, line = max(known, key=lambda each: each[0])
    errors = (percent(line[of], 1) for of in ("error", "calibrated_error"))
    apart = "simulated {}, calibrated {}".format(*errors)
    yield f"NOTE: calibrated is further off ({_words(name)}: {apart}): {_why_worse(found)}"


WORSE = 0.01
"""The mean error by which what is calibrated has to be larger to be called worse."""


def _why_worse(found: Found) -> str:
    biases = [line["bias"] for line in found["costs"]]
    bias = max(biases, key=abs)
    before_ms, in_runs_ms = (
        plain_sum(times[name] for name in AROUND_MS)
        for times in (found["calibration"], found["overheads"])
    )
    around = f"{before_ms:.2f} ms around a micro-batch in the calibration run"
    if bias > BAND:
        return (
            f"costs that are {percent(bias, 0, sign=False)} too slow already stood for the "
            f"{around}, which now come on top; right costs are better with it (--profile FILE)"
        )
    if before_ms > (1 + BAND) * in_runs_ms:
        return (
            f"there were {around}, and {in_runs_ms:.2f} ms in the runs themselves: the machine did "
            "something else then; the same command again, or more requests (--calibrate), is right"
        )
    return (
        f"not for the costs ({percent(bias, 0)}) and not for the {around} ({in_runs_ms:.2f} ms in "
        "the runs): micro-batches form in another way, see Structure"
    )


def verdict(found: Found) -> str:
    """Say whether the best prediction lies within what the runs measured, the load first."""
    loads = ", ".join(f"{before:.1f} to {after:.1f}" for before, after in found["load"])
    load = f"load average of the machine, run by run: {loads}"
    how = "simulated" if found["calibration"] is None else "calibrated"
    error = "error" if found["calibration"] is None else "calibrated_error"
    lines = {
        key: line
        for key, line in found["end_to_end"].items()
        if key in OVERVIEW and math.isfinite(line["measured"])
    }
    known = {name: abs(line[error]) for name, line in lines.items() if line[error] is not None}
    if not known:
        return load
    out = [name for name, line in lines.items() if not line["least"] <= line[how] <= line["most"]]
    worst = max([name for name in known if name in out] or known, key=lambda name: known[name])
    line = lines[worst]
    off = f"{_words(worst)} is furthest off, {percent(line[error], 1)} of the mean"
    if found["runs"] == 1:
        off = f"at most {percent(known[worst], 1, sign=False)} off ({_words(worst)})"
        return f"{load}; what is {how} is {off}; one run has no spread to compare with"
    verb = "NOT WITHIN" if out else "WITHIN"
    ends = (percent(line[end] / line["measured"] - 1, 1) for end in ("least", "most"))
    return (
        f"{load}; what is {how} is {verb} the spread of the {found['runs']} runs: "
        f"{len(lines) - len(out)} of {len(lines)} numbers are between their least and most; {off} "
        f"of the runs, which go from {' to '.join(ends)}"
    )


def _around(times: Found) -> str:
    return (
        f"{times['freed_ms']:.2f} ms until the driver knows that stage 0 is free, "
        f"{times['returned_ms']:.2f} ms that a micro-batch is back, "
        f"{times['schedule_ms']:.2f} ms until stage 0 has the next ({times['driver_ms']:.2f} ms "
        f"of them the driver computes), {times['hop_ms']:.2f} ms a hop, "
        f"{times['prepare_ms']:.2f} ms until a stage starts what it could"
    )


def _end_to_end(found: Found) -> Table:
    predictions = {"simulated": "error"}
    if found["calibration"] is not None:
        predictions["calibrated"] = "calibrated_error"
    heads, rows = ["", "measured", "spread"], []
    for prediction in predictions:
        heads += [prediction, "error"]
    for metric, line in found["end_to_end"].items():
        row = [_words(metric), number(line["measured"]), percent(line["spread"], sign=False)]
        for prediction, error in predictions.items():
            row += [number(line[prediction]), percent(line[error])]
        rows.append(row)
    runs = "1 run" if found["runs"] == 1 else f"{found['runs']} runs"
    what = f"{found['scheduler']}, {runs} of {found['requests']} requests"
    return Table(heads, rows, title=f"End to end, {what}")


def _structure(found: Found) -> Table:
    """Give each run its column; the share of equal micro-batches first."""
    layers = found["structure"]
    rows = [_shares("equal micro-batches", (layer["same_micro_batches"] for layer in layers))]
    parted = ((layer["parted_at"], layer["micro_batches"]) for layer in layers)
    first = ("none" if at is None else f"{at} of {count}" for at, count in parted)
    rows.append(["first that differs", *first])
    for metric in found["end_to_end"]:
        if not metric.startswith(("p50", "p90")):
            errors = (layer["metrics"].get(metric) for layer in layers)
            rows.append(_errors(_words(metric), errors))
    for name in layers[0]["requests"]:
        most = (layer["requests"][name].get("p95") for layer in layers)
        rows.append(_shares(f"a request's {name.upper()}, P95", most))
    at_once = (layer["at_once"].get("mean_e2el_ms") for layer in layers)
    rows.append(_errors("E2EL mean, stages starting at once", at_once))
    replicas = len(layers) // found["runs"]
    heads = [""]
    for column in range(len(layers)):
        run, replica = divmod(column, replicas)
        heads.append(f"run {run + 1}" + (f", replica {replica}" if replicas > 1 else ""))
    return Table(heads, rows, title="Structure: each run simulated from its own times")


def _costs(found: Found) -> Table:
    heads = ["stage", "median", "P95", "of the sum", "median repeat", "P95 repeat"]
    names = ("median", "p95", "bias", "median_repeat", "p95_repeat")
    rows = [
        [str(stage), *(percent(line[name], sign=name == "bias", digits=3) for name in names)]
        for stage, line in enumerate(found["costs"])
    ]
    return Table(heads, rows, title="Costs: errors of a micro-batch's seconds on a stage")


def _bubbles(found: Found) -> Table:
    runs = found["bubbles"].values()
    rows = [
        _shares(cause, (shares[cause] for shares in runs))
        for cause in found["bubbles"]["measured"]
        if any(shares[cause] > 0 for shares in runs)
    ]
    rows.append(_shares("all", (plain_sum(shares.values()) for shares in runs)))
    return Table(["", *found["bubbles"]], rows, title="Bubbles: share of all stages' time")


def _errors(label: str, errors: Iterable[float | None]) -> list[str]:
    return [label, *map(percent, errors)]


def _shares(label: str, shares: Iterable[float | None]) -> list[str]:
    return [label, *(percent(share, sign=False) for share in shares)]


def _words(metric: str) -> str:
    """Return a row's name: by rule where the summary in a terminal does not have it."""
    if metric == "bubble_share":
        return "stages idle"
    words = metric_words(metric)
    if words != metric:
        return words
    statistic, name, _ = metric.split("_")
    return f"{name.upper()} {statistic if statistic == 'mean' else statistic.upper()} (ms)"


def draw_validation(validation: Validation, title: str) -> Figure:
    """Draw each request measured against simulated, and the timelines."""
    measured, again, predicted = validation.measured, validation.again, validation.predicted
    assert again is not None
    figure = Figure(figsize=(10, 8.4), layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=[3.4, 1, 1, 1])
    for column, name in enumerate(("ttft", "e2el")):
        latencies_s = [
            getattr(request_metrics(result), f"{name}_s") for result in (measured, again, predicted)
        ]
        _scatter(figure.add_subplot(grid[0, column]), name.upper(), *latencies_s)
    window = _window(measured)
    rows = {"measured": measured, "from its own times": again, "predicted": predicted}
    first: Axes | None = None
    for row, (label, result) in enumerate(rows.items(), start=1):
        axes = figure.add_subplot(grid[row, :], sharex=first)
        first = first or axes
        _timeline(axes, label, result, window)
        axes.tick_params(labelbottom=row == len(rows))
    axes.set(xlabel="time (s)", xlim=window)
    keys = [Patch(color=PREFILL, label="all prefill"), Patch(color=DECODE, label="all decode")]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def _scatter(axes: Axes, name: str, real_s: Floats, *simulated_s: Floats) -> None:
    """Draw every request, on logarithmic scales, with the diagonal and the band around it."""
    seen_s = np.concatenate([real_s, *simulated_s])
    seen_s = seen_s[seen_s > 0]
    ends = np.array([seen_s.min(), seen_s.max()]) * [0.9, 1.1]
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="0.88", linewidth=0)
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    for (label, shade, mark), theirs_s in zip(KINDS, simulated_s, strict=True):
        apart = np.abs(theirs_s / real_s - 1)
        inside = np.mean(apart[np.isfinite(apart)] <= BAND)
        look: dict[str, Any] = {"markersize": 3, "markeredgewidth": 0.6, "markerfacecolor": "none"}
        words = f"{label}: {inside:.0%} within 5 %"
        axes.plot(real_s, theirs_s, mark, color=shade, label=words, zorder=3, **look)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel=f"{name} measured (s)", ylabel=f"{name} simulated (s)")
    for axis in (axes.xaxis, axes.yaxis):
        plain_decades(axis)
    key(axes, loc="upper left", handletextpad=0.2)
    finish(axes, grid="")


def _window(result: RunResult) -> tuple[float, float]:
    """Return the time of a few micro-batches in the middle of a run."""
    first = max(0, (len(result.scheduled_s) - SHOWN) // 2)
    last = min(first + SHOWN, len(result.scheduled_s)) - 1
    return float(result.start_s[first, 0]), float(result.end_s[last, -1])


def _timeline(axes: Axes, label: str, result: RunResult, window: tuple[float, float]) -> None:
    """Draw what each stage computes; the first stage is on top."""
    tokens = result.prefill_tokens + result.decode_tokens
    shares = result.prefill_tokens / np.maximum(tokens, 1)
    for stage in range(result.depth):
        start_s, end_s = result.start_s[:, stage], result.end_s[:, stage]
        seen = np.flatnonzero((end_s > np.maximum(start_s, window[0])) & (start_s < window[1]))
        axes.broken_barh(
            list(zip(start_s[seen], (end_s - start_s)[seen], strict=True)),
            (stage - 0.42, 0.84),
            facecolors=[blend(share) for share in shares[seen].tolist()],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set(ylim=(result.depth - 0.5, -0.5), yticks=range(result.depth), ylabel="stage")
    finish(axes, label, grid="")
