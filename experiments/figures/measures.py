"""Measures of a run for figures, besides its summary. Knows no figure and no picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenflow.report.data import covered, present, used_share
from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.outcome import Outcome
from evenflow.results.run import Floats, Ints, RunResult
from evenflow.sums import plain_sum


def overview(outcome: Outcome) -> dict[str, Any]:
    deployment = outcome.result.provenance["deployment"]
    return {**outcome.summary, "kv_pages": deployment.get("kv_pages")}


def shares(outcome: Outcome) -> dict[str, Any]:
    """Return the share of stage time that is busy, and that of each cause of idle time."""
    every = [part.idle for part in outcome.parts.values()]
    total_s = plain_sum(each.busy_s + each.idle_s for each in every)
    idle = {cause: plain_sum(each.totals()[cause] for each in every) / total_s for cause in CAUSES}
    return {**overview(outcome), "busy": 1 - plain_sum(idle[cause] for cause in CAUSES), **idle}


def within(outcome: Outcome, limits: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the share of requests within each pair of limits in ms, of TTFT and TPOT (NaN: in)."""
    latency = request_metrics(outcome.result)
    ttft_ms, tpot_ms = 1e3 * latency.ttft_s, 1e3 * np.nan_to_num(latency.tpot_s)
    attained = [float(((ttft_ms <= ttft) & ~(tpot_ms > tpot)).mean()) for ttft, tpot in limits]
    return {**overview(outcome), "attained": attained}


def seat_use(outcome: Outcome, seats: int) -> dict[str, Any]:
    """Return the share of `seats` x time in which a seat's request gets a token.

    `mean_over_max` is what a static batch makes of its decode steps.
    """
    result = outcome.result
    seconds = result.end_s[:, -1] - result.start_s[:, 0]
    used = float((result.sampled_rows * seconds).sum() / (seats * seconds.sum()))
    bound = mean_over_max(result.output_tokens, seats)
    return {**overview(outcome), "seat_use": used, "mean_over_max": bound}


def mean_over_max(output_tokens: Ints, seats: int) -> float:
    """Return the steps that members need over those their batches take: sum over sum of longest.

    Batches of `seats` requests in their order; each decodes until its longest output ends.
    """
    batches = [output_tokens[at : at + seats] for at in range(0, len(output_tokens), seats)]
    return float(output_tokens.sum() / (seats * sum(int(batch.max()) for batch in batches)))


def waste(outcome: Outcome) -> dict[str, Any]:
    """Return the percentage of held token slots that hold no token.

    `known`: that of reserving each request's own final length, were it known in advance.
    """
    known = known_in_advance(outcome.result.prompt_tokens, outcome.result.output_tokens)
    held = outcome.summary["kv_waste_share"]
    return {**overview(outcome), "waste": 100 * held, "known": 100 * known}


def known_in_advance(prompt_tokens: Ints, output_tokens: Ints) -> float:
    """Return the empty share of reservations of each request's own final length.

    A request with a token a step fills prompt + output / 2 of its prompt + output slots on average.
    It holds them for a time in proportion to its output.
    """
    output: Floats = output_tokens.astype(float)
    filled = (output * (prompt_tokens + output / 2)).sum()
    return float(1 - filled / (output * (prompt_tokens + output)).sum())


def micro_batches(
    outcome: Outcome,
    columns: Sequence[str],
    first: int | None = None,
    batches: int | None = None,
    bins: int = 0,
) -> dict[str, Any]:
    """Return a run's overview, and columns of its micro-batches.

    They are of all, or of `batches` from number `first` on (None: in the middle of the run).

    `batch` is their number, `used` the share of KV pages held; others are of `RunResult`.
    `mean_change`: how many tokens one differs from that before it, in the mean. With `bins`,
    `time_s` and `busy` are the share of stages that compute in equal parts of the time shown. If
    that is all, they are of the whole run.
    """
    result = outcome.result
    total = len(result.scheduled_s)
    count = total if batches is None else batches
    start = max(0, (total - count) // 2) if first is None else first
    shown = slice(start, start + count)
    tokens = (result.prefill_tokens + result.decode_tokens)[shown]
    values = {
        **overview(outcome),
        "mean_change": float(np.abs(np.diff(tokens)).mean()) if len(tokens) > 1 else 0.0,
        **{name: _column(result, name)[shown].tolist() for name in columns},
    }
    if bins:
        times_s = result.scheduled_s[shown]
        start_s, end_s = (0.0, result.returned_s[-1]) if batches is None else times_s[[0, -1]]
        edges = np.linspace(start_s, end_s, bins + 1)
        values["time_s"] = edges[:-1].tolist()
        values["busy"] = busy_over_time(result, edges).tolist()
    return values


def _column(result: RunResult, name: str) -> Any:
    if name == "batch":
        return np.arange(len(result.scheduled_s))
    return used_share(result).round(4) if name == "used" else getattr(result, name)


def busy_over_time(result: RunResult, edges: Floats) -> Floats:
    """Return the share of stages that compute, a mean over each interval between `edges` (s)."""
    stages = zip(result.start_s.T, result.end_s.T, strict=True)
    busy_s = np.sum([covered(*times_s, edges) for times_s in stages], axis=0)
    return np.asarray(busy_s / (np.diff(edges) * result.depth))


def phases(outcome: Outcome, columns: Sequence[str]) -> dict[str, Any]:
    """Return columns of a run's micro-batches, and where each series of one kind starts.

    `kv_before` and `kv_after` are the shares of KV pages held there; `phases`: how many prefill.
    """
    kept = micro_batches(outcome, columns)
    held, start_s = used_share(outcome.result).round(4), outcome.result.start_s[:, 0]
    prefills: Ints = (outcome.result.prefill_tokens > 0).astype(int)
    first = np.flatnonzero(np.diff(prefills, prepend=1 - prefills[0]))
    last = np.append(first[1:], len(prefills)) - 1
    found = {
        "phase": np.arange(len(first)),
        "kind": np.where(prefills[first] == 1, "prefill", "decode"),
        "first_step": first,
        "steps": last - first + 1,
        "start_s": start_s[first],
        "kv_before": np.where(first > 0, held[first - 1], 0.0),
        "kv_after": held[last],
    }
    told = {name: values.tolist() for name, values in found.items()}
    return {**kept, "phases": told["kind"].count("prefill"), **told}


def stalls(outcome: Outcome) -> dict[str, Any]:
    """Return a run's overview and its longest time between two micro-batches that yield tokens.

    `returned_s` and `tokens` are those micro-batches, thinned where more than 10 come in a second.
    The time in which no request has its first token yet, or all are done, is no stall.
    """
    result = outcome.result
    yields = result.sampled_rows > 0
    returned_s, rows = result.returned_s[yields], result.sampled_rows[yields]
    gaps_s = np.diff(returned_s)
    waits = present(result.first_token_s, result.completion_s, returned_s[:-1]) > 0
    longest = int(np.argmax(np.where(waits, gaps_s, 0.0)))
    tenth = np.unique(np.floor(returned_s * 10), return_index=True)[1]
    return {
        **overview(outcome),
        "longest_stall_s": float(gaps_s[longest]),
        "stall_start_s": float(returned_s[longest]),
        "returned_s": returned_s[tenth].tolist(),
        "tokens": np.cumsum(rows)[tenth].tolist(),
    }
