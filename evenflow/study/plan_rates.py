"""Rates of the points of a plan: what each trial says of the rate that it was simulated at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenflow.study.early import MISSED
from evenflow.study.plan_question import CHANGE, PlanQuestion, name_of
from evenflow.study.rates import Probe, TriedRate, rate_patch, rounded, tried
from evenflow.study.slo import KEEPS_UP
from evenflow.study.trials import Trial, Variant
from evenflow.traces import Replay


def probe(question: PlanQuestion, trial: Trial) -> TriedRate:
    """Return what a trial says of its rate; one that refuses more than others do breaks a limit."""
    found = tried(trial, rate_of(question, trial), (*question.slo, KEEPS_UP))
    lost = trial.served.failed > question.served.failed
    return replace(found, failed=(*found.failed, "failed")) if lost else found


def at_rate(question: PlanQuestion, trial: Trial, rate: float) -> Variant:
    """Return the point of a trial with the run's arrivals at another rate."""
    assert question.rate is not None
    patch = rate_patch(question.config.workload.arrivals, rate, question.rate)
    return question.case(*question.point(trial), None, patch)


def rate_of(question: PlanQuestion, trial: Trial) -> float:
    """Return the rate that a trial was simulated at."""
    arrivals = question.config.workload.arrivals
    assert question.rate is not None
    if isinstance(arrivals, Replay):
        scale = trial.labels.get("workload.arrivals.scale", arrivals.scale)
        return float(rounded(question.rate * scale / arrivals.scale))
    return float(trial.labels.get("workload.arrivals.rate", question.rate))


def at_rates(question: PlanQuestion, trials: Sequence[Trial]) -> list[TriedRate]:
    """Return what was tried of the points of the plan on all requests, at any rate."""
    return [
        probe(question, trial)
        for trial in trials
        if CHANGE not in trial.labels
        and trial.labels["requests"] == question.requests
        and not trial.is_missed
    ]


def missed_at(question: PlanQuestion, trials: Sequence[Trial], name: str) -> list[Probe]:
    """Return the rates at which runs of a point ended early, with the limit that each missed."""
    missed = [each for each in trials if each.is_missed and name_of(each) == name]
    found = ((each, rate_of(question, each), each.records[0].values[MISSED]) for each in missed)
    return [Probe(rate, (limit,), 0.0, each.labels["requests"]) for each, rate, limit in found]


def up_to(question: PlanQuestion, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the highest rate at which each point was seen to keep the SLO, by name."""
    found: dict[str, float] = {}
    for each in at_rates(question, trials):
        if each.passes:
            name = name_of(each.trial)
            found[name] = max(found.get(name, 0.0), each.rate)
    return found
