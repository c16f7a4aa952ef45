"""What the report says in words: the verdict, the table of metrics, the names of causes.

Works from summaries and shares alone. Does not know the figures, nor how a run was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

import numpy as np

from evenflow.results.bubbles import CAUSES
from experiments.report.data import Run, shares
from experiments.report.tables import is_number

ALIKE = 0.02
"""Two values that differ by less than this share of the better one are called alike."""

CAUSE_WORDS = {
    "fill_drain": ("fill and drain", "the pipeline is not full yet, or empties at the end"),
    "starvation": ("nothing to run", "fewer requests than stages, all of them in flight"),
    "kv_limited": ("KV-limited", "work waited, the free KV pages did not suffice"),
    "policy": (
        "held back",
        "work waited, or sat in fewer micro-batches than stages: the scheduler's choice",
    ),
    "uneven_prefill": ("uneven prefill", "micro-batches differ in prefill tokens"),
    "prefill_decode": ("prefill against decode", "a prefill and a decode step differ in time"),
    "uneven_decode": ("uneven decode", "decode steps differ in rows or context"),
    "uneven_stages": ("uneven stages", "one stage is slower than another"),
    "link": ("link", "the activation was on its way"),
    "cpu": ("CPU", "the CPU was scheduling or preparing inputs"),
}


class Metric(NamedTuple):
    """A row of the table: `best` is "high", "low", or "" where more is neither good nor bad."""

    key: str
    label: str
    unit: str
    best: str
    meaning: str
    scale: float = 1.0


METRICS = (
    Metric("output_throughput", "Output tokens", "tok/s", "high", "generated tokens per second"),
    Metric(
        "total_token_throughput", "All tokens", "tok/s", "high", "prompt + generated, whole run"
    ),
    Metric(
        "steady_total_token_throughput",
        "All tokens, steady",
        "tok/s",
        "high",
        "the same without the start and the end of the run",
    ),
    *(
        Metric(f"{statistic}_{key}_ms", f"{label}, {word}", unit, "low", text, scale)
        for key, label, unit, scale, meaning in (
            ("ttft", "TTFT", "s", 1e-3, "time to first token: first token - arrival"),
            ("tpot", "TPOT", "ms", 1.0, "time per output token after the first, per request"),
            ("itl", "ITL", "ms", 1.0, "inter-token latency: every gap between two tokens"),
            ("e2el", "E2EL", "s", 1e-3, "end to end: last token - arrival"),
        )
        for statistic, word, text in (("mean", "mean", meaning), ("p99", "P99", ""))
    ),
    Metric("completed", "Completed", "requests", "high", "requests served to the end"),
    Metric("rejected", "Rejected", "requests", "low", "could never fit: refused on arrival"),
    Metric("preemptions", "Preemptions", "times", "low", "thrown out for lack of KV pages, redone"),
    Metric("mean_transfer_wait_ms", "KV transfer wait, mean", "ms", "low", "first token to start"),
    Metric("backpressure_s", "KV back-pressure", "s", "low", "no room on the decode side"),
    Metric("busy_share", "Stages busy", "%", "high", "share of stage time spent computing", 100.0),
)


ROWS = (
    ("completed", "requests completed", "{:.0f}"),
    ("failed", "requests rejected or aborted", "{:.0f}"),
    ("duration", "duration (s)", "{:.1f}"),
    ("output_throughput", "output tokens/s", "{:.1f}"),
    ("total_token_throughput", "all tokens/s", "{:.1f}"),
    ("steady_total_token_throughput", "all tokens/s, steady", "{:.1f}"),
    ("request_goodput", "requests/s within limits", "{:.2f}"),
    ("median_queue_ms", "scheduling delay median (ms)", "{:.1f}"),
    ("mean_ttft_ms", "TTFT mean (ms)", "{:.1f}"),
    ("p99_ttft_ms", "TTFT P99 (ms)", "{:.1f}"),
    ("mean_tpot_ms", "TPOT mean (ms)", "{:.1f}"),
    ("p99_tpot_ms", "TPOT P99 (ms)", "{:.1f}"),
    ("p99_itl_ms", "ITL P99 (ms)", "{:.1f}"),
    ("mean_e2el_ms", "E2EL mean (ms)", "{:.1f}"),
    ("busy_share", "stages busy", "{:.1%}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("mean_transfer_wait_ms", "KV transfer wait mean (ms)", "{:.1f}"),
    ("backpressure_s", "KV back-pressure (s)", "{:.1f}"),
)
"""What a terminal says of a run: keys of the summary, in words, and how a value is written."""


def metric_words(key: str) -> str:
    """Return the words for a key of the summary; the key itself where there are none."""
    return next((words for known, words, _ in ROWS if known == key), key)


def cause_label(cause: str) -> str:
    """Return the words for one cause of idle time."""
    return CAUSE_WORDS[cause][0] if cause in CAUSE_WORDS else cause.replace("_", " ")


def figures_of(run: Run) -> dict[str, float]:
    """Return the summary's numbers, and those of the columns that the table shows beside them."""
    busy, _ = shares(run)
    columns = {
        "completed": run.result.status.count("completed"),
        "rejected": run.result.status.count("rejected"),
        "preemptions": int(run.result.preemptions.sum()),
        "busy_share": busy,
    }
    return {key: value for key, value in run.summary.items() if is_number(value)} | columns


def table(runs: Mapping[str, Run]) -> str:
    """Return the summary table as HTML: a column a run, the best values of a row in bold."""
    numbers = {name: figures_of(run) for name, run in runs.items()}
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in runs)
    rows = []
    for metric in METRICS:
        values = [own.get(metric.key, math.nan) for own in numbers.values()]
        if all(math.isnan(value) for value in values):
            continue
        cells = "".join(
            _cell(number(value * metric.scale), best)
            for value, best in zip(values, _best(metric, values), strict=True)
        )
        rows.append(
            f'<tr><th scope="row">{metric.label} <span class="unit">{metric.unit}</span>'
            f"{f'<small>{metric.meaning}</small>' if metric.meaning else ''}</th>{cells}</tr>"
        )
    return f"<table><thead><tr><th></th>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table>"


def _cell(text: str, best: bool) -> str:
    return f'<td class="best">{text}</td>' if best else f"<td>{text}</td>"


def number(value: float) -> str:
    """Return a number with three significant digits or more, thousands apart; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1}f}"


def verdict(runs: Mapping[str, Run]) -> list[str]:
    """Return the sentences of the verdict as HTML: throughput first, then latency, then bubbles."""
    numbers = {name: figures_of(run) for name, run in runs.items()}
    if len(runs) == 1:
        sentences = [_alone(name, own) for name, own in numbers.items()]
    else:
        sentences = [_throughput(numbers), *_latency(numbers)]
    return [*sentences, _bubbles(runs), *_refused(numbers)]


def _alone(name: str, own: Mapping[str, float]) -> str:
    if not own["completed"]:
        return f"{_name(name)} completed no request."
    return (
        f"{_name(name)} serves {number(own['total_token_throughput'])} tokens per second "
        f"({number(own['output_throughput'])} of them generated): a first token after "
        f"{_seconds(own['mean_ttft_ms'])} on average, then one every "
        f"{_seconds(own['mean_tpot_ms'])}."
    )


def _throughput(numbers: Mapping[str, Mapping[str, float]]) -> str:
    ranked = _ranked(numbers, "total_token_throughput", descending=True)
    best = ranked[0][1]
    leaders = [_name(name) for name, value in ranked if best - value <= ALIKE * best]
    if len(leaders) == len(ranked):
        return (
            f"All serve this traffic at the same pace, {number(best)} tokens per second (prompt + "
            "output): the load sets the throughput, so latency decides."
        )
    rest = [
        f"{100 * (best / value - 1):.0f} % more than {_name(name)}"
        for name, value in ranked[len(leaders) :]
        if value > 0
    ]
    verb = "serves" if len(leaders) == 1 else "serve"
    more = f", {_and(rest)}" if rest else ""
    return f"{_and(leaders)} {verb} the most tokens: {number(best)} per second{more}."


def _latency(numbers: Mapping[str, Mapping[str, float]]) -> list[str]:
    sentences = []
    for key, words, label in (
        ("mean_ttft_ms", "First token soonest", "mean TTFT"),
        ("p99_itl_ms", "Shortest stalls between tokens", "P99 ITL"),
        ("mean_e2el_ms", "Whole request soonest", "mean E2EL"),
    ):
        ranked = _ranked(numbers, key, descending=False)
        if len(ranked) < 2:
            continue
        (first, best), *others = ranked
        rest = _and([f"{_seconds(value)} with {_name(name)}" for name, value in others])
        level = others[0][1] - best <= ALIKE * others[0][1]
        remark = f" (level with {_name(others[0][0])})" if level else ""
        sentences.append(
            f"{words}: {_name(first)}{remark}, {label} {_seconds(best)}, against {rest}."
        )
    return sentences


def _bubbles(runs: Mapping[str, Run]) -> str:
    parts = []
    for name, run in runs.items():
        busy, idle = shares(run)
        worst = int(np.argmax(idle))
        loss = ""
        if idle[worst] >= 0.001:
            loss = f" (largest loss: {cause_label(CAUSES[worst])}, {100 * idle[worst]:.1f} %)"
        parts.append(f"{100 * busy:.0f} % of the time with {_name(name)}{loss}")
    return f"Stages compute {_and(parts)}."


def _refused(numbers: Mapping[str, Mapping[str, float]]) -> list[str]:
    counts = {name: int(own["rejected"]) for name, own in numbers.items()}
    if not any(counts.values()):
        return []
    if len(set(counts.values())) == 1:
        return [f"Requests refused because they can never fit: {max(counts.values())}."]
    parts = _and([f"{count} with {_name(name)}" for name, count in counts.items()])
    return [f"Requests refused because they can never fit: {parts}."]


def _ranked(
    numbers: Mapping[str, Mapping[str, float]], key: str, descending: bool
) -> list[tuple[str, float]]:
    values = [(name, own.get(key, math.nan)) for name, own in numbers.items()]
    known = [(name, value) for name, value in values if not math.isnan(value)]
    return sorted(known, key=lambda pair: pair[1], reverse=descending)


def _best(metric: Metric, values: list[float]) -> list[bool]:
    """Mark the best values, and those alike; none where all are alike or more is not better."""
    known = [value for value in values if not math.isnan(value)]
    if not metric.best or not known:
        return [False] * len(values)
    best = max(known) if metric.best == "high" else min(known)
    marks = [abs(value - best) <= ALIKE * max(abs(value), abs(best)) for value in values]
    return [mark and not all(marks) for mark in marks]


def _seconds(milliseconds: float) -> str:
    if milliseconds < 1000:
        return f"{number(milliseconds)} ms"
    return f"{number(milliseconds / 1000)} s"


def _name(name: str) -> str:
    return f"<b>{escape(name)}</b>"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
