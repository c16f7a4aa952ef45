"""Words of a report: the verdict, the table of metrics, the names of causes.

Works from summaries and shares alone. Does not know the figures, nor how a run was made.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.report.data import shares
from evenflow.report.style import CAUSE_LOOKS
from evenflow.report.tables import Html, html_table, is_number, number
from evenflow.results.outcome import Outcome, Served

DIGITS = 3
LOAD = ("offered_requests_per_s", "served_requests_per_s", "queue_growth_per_s", "overloaded")
"""The numbers of a summary that say whether all is served that arrives."""

NOT_FAIR = "NOT FAIR: "
"""What a sentence begins with that says why an answer is unfair, or weak."""

ALIKE = 0.02
"""Two values that differ by less than this share of the better one are called alike."""
LEAST_SHARE = 0.005
"""Causes below this share of the stage time have no entry in a key, and no place over time."""

CAUSE_WORDS = {cause: (row["words"], row["meaning"]) for cause, row in CAUSE_LOOKS.items()}


class Metric(NamedTuple):
    """A key of the summary: its words and unit, how a terminal writes a value, what is best.

    `best` is "high", "low", or "" where more is neither good nor bad; `meaning` is for the page.
    """

    key: str
    words: str
    form: str
    best: str
    meaning: str

    def cell(self, value: float | None) -> str:
        """Return a value as a terminal shows it; a dash for none."""
        return "-" if value is None or math.isnan(value) else self.form.format(value)


@cache
def metrics() -> tuple[Metric, ...]:
    """Return what is said of a run (metrics.csv), in order; without a row where no run has it."""
    text = Path(__file__).with_name("metrics.csv").read_text(encoding="utf-8")
    return tuple(Metric(**row) for row in csv.DictReader(text.splitlines()))


LATENCY = re.compile("(mean|median|p[0-9.]+)_(ttft|tpot|itl|e2el|queue)_ms")


def metric_words(key: str) -> str:
    """Return the words for a key of the summary; the key itself where there are none."""
    words = {metric.key: metric.words for metric in metrics()}
    if key in words or (of := LATENCY.fullmatch(key)) is None:
        return words.get(key, key)
    name = "scheduling delay" if of[2] == "queue" else of[2].upper()
    return f"{name} {of[1].replace('p', 'P')} (ms)"


def cause_label(cause: str) -> str:
    """Return the words for one cause of idle time, or for `computing`."""
    return CAUSE_WORDS[cause][0] if cause in CAUSE_WORDS else cause.replace("_", " ")


def meaning(part: str) -> str:
    """Return what a cause of idle time means; nothing of `computing`."""
    return CAUSE_WORDS[part][1] if part in CAUSE_WORDS else ""


def refusals(served: Mapping[str, Served]) -> list[str]:
    """Return a sentence for each run, by name, that did not complete all requests."""
    groups: dict[Served, list[str]] = {}
    for name, each in served.items():
        if each.failed:
            groups.setdefault(each, []).append(name)
    return [
        (NOT_FAIR if each.is_unfair else "")
        + ("" if len(names) == len(served) else f"with {listed(names)}, ")
        + str(each)
        for each, names in groups.items()
    ]


def rows_left_out(trace: Mapping[str, Any]) -> list[str]:
    """Return the reasons why rows of traces are left out, and doubts of how others were read.

    `trace` is what the provenance says of one, and of the traces before it.
    """
    parts = [trace, *trace.get("after", [])]
    left_out = [
        f"dropped {count:,} rows of the trace: {reason}"
        for part in parts
        for reason, count in part.get("dropped", {}).items()
    ]
    return left_out + [f"trace: {doubt}" for part in parts for doubt in part.get("doubts", ())]


def figures_of(run: Outcome) -> dict[str, float]:
    """Return the numbers of a run's summary that the run is long enough for."""
    return {key: value for key, value in sure_numbers(run.summary).items() if is_number(value)}


def sure_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary, without the served load where the run is too short to tell."""
    hidden = LOAD[1:3] if summary.get("overloaded", 0) is None else ()
    return {key: value for key, value in summary.items() if key not in hidden}


def table(runs: Mapping[str, Outcome]) -> str:
    """Return the summary table as HTML: a column a run, the best values of a row in bold."""
    numbers = [figures_of(run) for run in runs.values()]
    rows = []
    for metric in metrics():
        if any(metric.key in run.summary for run in runs.values()):
            values = [own.get(metric.key, math.nan) for own in numbers]
            label, shown = _readable(metric, values)
            meaning = f"<small>{metric.meaning}</small>" if metric.meaning else ""
            cells = zip(shown, _best(metric, values), strict=True)
            rows.append(
                [Html(label + meaning), *(Html(f"<b>{v}</b>") if b else v for v, b in cells)]
            )
    names = (Html(escape(name).replace("_", "_<wbr>")) for name in runs)  # where a phone may break
    return html_table(["", *names], rows, narrow=False)


def _readable(metric: Metric, values: Sequence[float]) -> tuple[str, list[str]]:
    """Return a row's head and cells, in a unit in which they are short: from 1 s on in seconds."""
    words, _, unit = metric.words.rstrip(")").partition(" (")
    scale = 1.0
    if metric.form.endswith("%}"):
        unit, scale = "%", 100.0
    elif unit == "ms" and min((v for v in values if not math.isnan(v)), default=0.0) >= 1000:
        unit, scale = "s", 1e-3
    head = f'{words[0].upper()}{words[1:]} <span class="unit">{unit}</span>'
    return head, [number(scale * value, DIGITS) for value in values]


def verdict(runs: Mapping[str, Outcome]) -> list[str]:
    """Return the sentences of the verdict as HTML: what was refused, pace, latency, bubbles.

    The pace of requests that arrive by themselves is whether they are served as they come. What
    drains after the last of them says nothing. Of all others it is the throughput.
    """
    numbers = {name: figures_of(run) for name, run in runs.items()}
    arriving = all("overloaded" in run.summary for run in runs.values())
    asked = [_config(run).get("workload", {}).get("arrivals", {}) for run in runs.values()]
    served = arriving and all(each.get("kind") != "closed" for each in asked)
    summaries = {name: run.summary for name, run in runs.items()}
    pace = _load(summaries) if served else _throughput(numbers)
    lost = [f"{escape(line)}." for line in refusals({k: run.served for k, run in runs.items()})]
    return [*lost, *pace, *_latency(numbers), _bubbles(runs)]


def overload(own: Mapping[str, Any]) -> str | None:
    """Return how much more arrives than is served, from an overloaded run's summary."""
    if not own.get("overloaded"):
        return None
    offered, served, grows = (number(own[key], DIGITS) for key in LOAD[:3])
    return (
        f"{offered} requests/s arrive and {served} are served: the queue grows by {grows} a "
        "second, and so does every latency with the length of the run"
    )


def too_short(own: Mapping[str, Any]) -> str | None:
    """Return that a run is too short to tell whether it keeps up, from its summary."""
    if own.get("overloaded", 0) is not None:
        return None
    offered = number(own["offered_requests_per_s"], DIGITS)
    return (
        f"the run is too short to tell whether it keeps up with the {offered} requests/s that "
        "arrive; give more requests"
    )


def headline(runs: Mapping[str, Outcome]) -> str:
    """Return the model, the GPUs and the layout of runs that share them; else nothing."""
    setups = {str(run.result.provenance.get("setup", "")) for run in runs.values()}
    told = {", ".join(setup.partition(": ")[2].split(", ")[:2]) for setup in setups}
    return told.pop() if len(told) == 1 else ""


def about(runs: Mapping[str, Outcome]) -> list[str]:
    """Return lines: real, emulated or simulated on what; trace, rate and SLO, where known."""
    setups = [str(run.result.provenance.get("setup", "")) for run in runs.values()]
    lines = [setup for setup in dict.fromkeys(setups) if setup]
    for run in list(runs.values())[:1]:
        workload = _config(run).get("workload", {})
        if workload:
            asked = arrivals_words(workload["arrivals"])
            count = len(run.result.request_id)
            rate = run.summary.get("offered_requests_per_s")
            offered = f", {number(rate, DIGITS)} requests/s offered" if rate else ""
            lines.append(f"{workload['trace']}, {count} requests, {asked}{offered}")
        lines += rows_left_out(run.result.provenance.get("trace", {}))
    return [*lines, *slo_words(runs)]


def slo_words(runs: Mapping[str, Outcome]) -> list[str]:
    """Return a line with the limits that a request must meet; none where runs have no limits."""
    told = ", ".join(f"{key.upper()} {limit:g} ms" for key, limit in slo(runs).items())
    return [f"SLO: {told}"] if told else []


def arrivals_words(arrivals: Mapping[str, Any]) -> str:
    """Return how requests arrive: poisson arrivals (rate 4)."""
    keys = (f"{k} {v}" for k, v in arrivals.items() if k != "kind" and v not in (None, False))
    words = ", ".join(keys)
    return f"{arrivals['kind']} arrivals{f' ({words})' if words else ''}"


def slo(runs: Mapping[str, Outcome]) -> dict[str, float]:
    """Return the limits in ms that a request must meet, by latency, where runs have them."""
    return next(
        (dict(found) for run in runs.values() if (found := _config(run).get("goodput"))), {}
    )


def _config(run: Outcome) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.result.provenance.get("config", {})
    return found


def _load(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    told = [
        *(f"{_name(name)} is overloaded: {each}." for name, each in _said(summaries, overload)),
        *(f"{_name(name)}: {each}." for name, each in _said(summaries, too_short)),
    ]
    able = [_name(name) for name, own in summaries.items() if own["overloaded"] == 0]
    if not able:
        return told
    offered = number(max(own["offered_requests_per_s"] for own in summaries.values()), DIGITS)
    verb = "keeps" if len(able) == 1 else "keep"
    decides = ": latency decides" if len(able) > 1 else ""
    return [*told, f"{listed(able)} {verb} up with the {offered} requests/s that arrive{decides}."]


def _said(
    summaries: Mapping[str, Mapping[str, Any]], say: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[tuple[str, str]]:
    return ((name, told) for name, own in summaries.items() if (told := say(own)))


def _throughput(numbers: Mapping[str, Mapping[str, float]]) -> list[str]:
    ranked = _ranked(numbers, "total_token_throughput", descending=True)
    if not ranked:
        return []
    best = ranked[0][1]
    leaders = [_name(name) for name, value in ranked if best - value <= ALIKE * best]
    if 1 < len(leaders) == len(ranked):
        return [
            f"All serve this traffic at the same pace, {number(best, DIGITS)} tokens per second "
            "(prompt + output): the load sets the throughput, so latency decides."
        ]
    rest = [
        f"{100 * (best / value - 1):.0f} % more than {_name(name)}"
        for name, value in ranked[len(leaders) :]
        if value > 0
    ]
    verb = "serves" if len(leaders) == 1 else "serve"
    most = "the most tokens: " if len(ranked) > 1 else "tokens: "
    more = f", {listed(rest)}" if rest else ""
    return [f"{listed(leaders)} {verb} {most}{number(best, DIGITS)} per second{more}."]


def _alone(name: str, own: Mapping[str, float]) -> str:
    if not own.get("completed"):
        return f"{_name(name)} completed no request."
    then = f", then one every {_seconds(own['mean_tpot_ms'])}" if "mean_tpot_ms" in own else ""
    return f"A first token comes after {_seconds(own['mean_ttft_ms'])} on average{then}."


def _latency(numbers: Mapping[str, Mapping[str, float]]) -> list[str]:
    if len(numbers) == 1:
        return [_alone(*next(iter(numbers.items())))]
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
        rest = listed([f"{_seconds(value)} with {_name(name)}" for name, value in others])
        level = others[0][1] - best <= ALIKE * others[0][1]
        remark = f" (level with {_name(others[0][0])})" if level else ""
        sentences.append(
            f"{words}: {_name(first)}{remark}, {label} {_seconds(best)}, against {rest}."
        )
    return sentences


def _bubbles(runs: Mapping[str, Outcome]) -> str:
    parts = []
    for name, run in runs.items():
        idle = shares(run)
        busy = idle.pop("computing")
        worst = max(idle, key=lambda cause: idle[cause])
        loss = ""
        if idle[worst] >= 0.001:
            loss = f" (largest loss: {cause_label(worst)}, {100 * idle[worst]:.1f} %)"
        parts.append(f"{100 * busy:.0f} % of the time with {_name(name)}{loss}")
    return f"Stages compute {listed(parts)}."


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
        return f"{number(milliseconds, DIGITS)} ms"
    return f"{number(milliseconds / 1000, DIGITS)} s"


def _name(name: str) -> str:
    return f"<b>{escape(name)}</b>"


def listed(parts: Sequence[str]) -> str:
    """Return parts as an English list: a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
