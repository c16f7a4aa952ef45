"""Pictures of a simulated run for a page, as plain data: numbers, figures and timelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from evenflow.config.run import RunConfig
from evenflow.core.batch import MicroBatch
from evenflow.core.world import World
from evenflow.report.data import pipelines, timeline_data
from evenflow.report.run_page import causes, kv_usage, latency, queues, tokens
from evenflow.report.tables import is_number
from evenflow.report.words import metrics, overload, refusals, too_short
from evenflow.results.outcome import Outcome
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import Condition, levels_of, request_limits, service_levels

TILES = (
    *("output_throughput", "request_goodput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms", "busy_share", "preemptions"),
)
"""The numbers of a run that a page shows, beside the limited ones."""

Prompts = list[list[int]]


class Watched:
    """The costs of a world, which note whose prompts are in each micro-batch they are asked of."""

    def __init__(self, costs: Any) -> None:
        self._costs = costs
        self.prompts: Prompts = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def times(self, batch: Any) -> list[float]:
        if isinstance(batch, MicroBatch):
            self.prompts.append([each.sequence.request.request_id for each in batch.chunks])
        seconds: list[float] = self._costs.times(batch)
        return seconds


def simulated(
    job: Job, on_done: Callable[[int], None] | None = None
) -> tuple[Outcome, Prompts | None]:
    """Simulate a job; return also whose prompts each micro-batch has, where that is known."""
    built = job.built()
    if not isinstance(built.world, World) or built.world.replicas > 1:
        return run_job(job, on_done, built=built), None
    watched = Watched(built.world.costs)
    seen = built._replace(world=replace(built.world, costs=watched))
    outcome = run_job(job, on_done, built=seen)
    known = len(watched.prompts) == len(outcome.result.scheduled_s)
    return outcome, watched.prompts if known else None


def picture(
    outcome: Outcome,
    prompts: Prompts | None,
    config: RunConfig,
    slo: Sequence[Condition],
    most: int,
) -> dict[str, Any]:
    """Return what a page shows of a run; its timelines have `most` micro-batches one by one."""
    lines = pipelines(outcome.parts)
    found = {
        "label": outcome.label,
        "requests": len(outcome.result.request_id),
        "summary": numbers(outcome, config, slo),
        "notes": _notes(outcome),
        "setup": outcome.result.provenance.get("setup", ""),
    }
    if not all(len(run.result.scheduled_s) for run in lines.values()):
        return found | {"figures": [], "timelines": []}
    limits = dict(request_limits(slo, config.goodput))
    return found | {
        "figures": [
            ("causes", causes(lines), ""),
            *tokens(lines),
            *latency(outcome.parts, limits),
            *queues(outcome.parts),
            ("kv", kv_usage(lines), ""),
        ],
        "timelines": [
            (name, timeline_data(run, most, prompts if len(lines) == 1 else None))
            for name, run in lines.items()
        ],
    }


def shown_metrics(slo: Sequence[Condition]) -> list[dict[str, Any]]:
    """Return what a page's tiles are called, in which unit, what is better, and the limits."""
    limits = {each.metric: each for each in slo}
    known = {each.key: each for each in metrics()}
    found = []
    for key in dict.fromkeys([*TILES, *limits]):
        words = known[key].words if key in known else key.replace("_", " ")
        better = known[key].best if key in known else "low"
        bound = limits[key].limit if key in limits else None
        least = key in limits and limits[key].at_least
        row = {"key": key, "words": words, "best": better}
        found.append(row | {"bound": bound, "least": least})
    return found


def numbers(outcome: Outcome, config: RunConfig, slo: Sequence[Condition]) -> dict[str, float]:
    """Return the numbers of a run that tiles show, as far as it has them."""
    levels = service_levels(outcome, **dict(levels_of(slo, config)))
    keys = dict.fromkeys([*TILES, *(each.metric for each in slo)])
    known = {key: float(levels[key]) for key in keys if is_number(levels.get(key))}
    return {key: value for key, value in known.items() if math.isfinite(value)}


def _notes(outcome: Outcome) -> list[str]:
    lost = refusals({outcome.label: outcome.served})
    told = [overload(outcome.summary), too_short(outcome.summary)]
    return [*lost, *(each for each in told if each)]
