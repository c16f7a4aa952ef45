"""What the papers' figures keep of a run, besides its summary. Knows no figure and no picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import request_metrics
from evenflow.results.run import Floats, Ints
from experiments.figures.study import overview
from experiments.outcome import Outcome

__all__ = [
    "known_in_advance",
    "mean_over_max",
    "overview",
    "prepared",
    "seat_use",
    "shares",
    "waste",
    "within",
]


def prepared(outcome: Outcome) -> dict[str, Any]:
    """Return a run's summary, and its CPU work before executions over its execution time."""
    result = outcome.result
    free_s = result.end_s.copy()
    free_s[1:], free_s[0] = result.end_s[:-1], 0.0
    waited_s = result.start_s - result.available_s.clip(free_s)
    executed_s = result.end_s - result.start_s
    share = float(waited_s.sum() / executed_s.sum()) if len(executed_s) else 0.0
    return {**overview(outcome), "prepare_over_execute": share}


def shares(outcome: Outcome) -> dict[str, Any]:
    """Return the share of stage time that is busy, and that of each cause of idle time."""
    every = [part.idle for part in outcome.parts.values()]
    total_s = sum(each.busy_s + each.idle_s for each in every)
    idle = {cause: sum(each.totals()[cause] for each in every) / total_s for cause in CAUSES}
    return {**overview(outcome), "busy": 1 - sum(idle[cause] for cause in CAUSES), **idle}


def within(outcome: Outcome, limits: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the share of requests within each pair of limits; a TPOT that is none is within.

    A pair is milliseconds of TTFT and of TPOT.
    """
    latency = request_metrics(outcome.result)
    attained = []
    for ttft_ms, tpot_ms in limits:
        in_time = 1e3 * latency.ttft_s <= ttft_ms
        attained.append(float((in_time & ~(1e3 * np.nan_to_num(latency.tpot_s) > tpot_ms)).mean()))
    return {**overview(outcome), "attained": attained}


def seat_use(outcome: Outcome, seats: int) -> dict[str, Any]:
    """Return the share of `seats` x time in which a seat's request gets a token.

    `mean_over_max` is what a static batch makes of its decode steps.
    """
    result = outcome.result
    seconds = result.end_s[:, -1] - result.start_s[:, 0]
    used = float((result.sampled_rows * seconds).sum() / (seats * seconds.sum()))
    return {
        **overview(outcome),
        "seat_use": used,
        "mean_over_max": mean_over_max(result.output_tokens, seats),
    }


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
    result = outcome.result
    return {
        **overview(outcome),
        "waste": 100 * outcome.summary["kv_waste_share"],
        "known": 100 * known_in_advance(result.prompt_tokens, result.output_tokens),
    }


def known_in_advance(prompt_tokens: Ints, output_tokens: Ints) -> float:
    """Return the empty share of reservations of each request's own final length.

    A request that decodes a token a step fills prompt + output / 2 of its prompt + output slots on
    average, and holds them for a time in proportion to its output.
    """
    output: Floats = output_tokens.astype(float)
    filled = (output * (prompt_tokens + output / 2)).sum()
    return float(1 - filled / (output * (prompt_tokens + output)).sum())
