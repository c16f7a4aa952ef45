"""Check whether the gain of a sweep's best point holds on requests that it has not seen.

The best of many points is partly luck, which other requests do not share. The best point and the
default see the same of them in pairs, so that what those do to both drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Patch
from evenflow.errors import UsageError
from evenflow.report.tables import number
from evenflow.report.words import metric_words, refusals
from evenflow.study.fair import Interval, paired_difference, signed
from evenflow.study.slo import Condition
from evenflow.study.sweep_file import Sweep
from evenflow.study.trials import Replication, Simulator, Trial, Variant, redrawn, seed_matters

PARTS = 8
"""How many unseen parts of each kind, at most; of one alone there is no interval."""

SEEDS, WINDOWS = "fresh seeds", "later windows"


@dataclass(frozen=True, slots=True)
class Check:
    """The best point and the default, simulated on the same unseen parts of one `kind`."""

    kind: str
    best: Trial
    default: Trial

    def gain(self, metric: str) -> Interval:
        """Return by how much a metric is above the default's, part by part."""
        return paired_difference(self.best.values(metric), self.default.values(metric))


def unseen(sweep: Sweep, config: RunConfig) -> dict[str, list[Replication]]:
    """Return parts of a run that none of the sweep's replications has, by kind.

    Fresh seeds draw another sample; of a file, where the sweep does so, other arrivals. Later
    windows begin where the trace was read up to, `workload.requests` each, as far as it reaches.
    """
    own, seen = config.workload, sweep.study.parts(config)
    seeds = range(seen[-1].seed + 1, seen[-1].seed + 1 + PARTS)
    found = {}
    if seed_matters(config) and redrawn(config, sweep.config.replicate) == "seeds":
        found[SEEDS] = [Replication(seed, own.skip) for seed in seeds]
    if (size := own.requests) is not None:
        read = seen[-1].skip - own.skip + size
        wanted = read + PARTS * size
        rows = wanted if own.is_drawn else len(own.rows(sweep.beside, wanted))
        count = max(rows - read, 0) // size
        starts = (own.skip + read + index * size for index in range(count))
        found[WINDOWS] = list(map(Replication, seeds, starts))
    return {kind: parts for kind, parts in found.items() if len(parts) > 1}


def require_unseen(sweep: Sweep) -> int:
    """Return how many simulations a check takes, at most; UsageError where there can be none."""
    if len(sweep.config.objectives) > 1:
        raise UsageError("--check: one objective is right: a Pareto front has no best point")
    if sweep.default is None:
        raise UsageError("--check: the run has to say what every parameter is by default")
    parts = unseen(sweep, sweep.study.config(sweep.default))
    if not parts:
        raise UsageError(
            "--check: nothing is left that the sweep does not see: its seeds draw nothing, and the "
            "trace has no two windows of workload.requests more"
        )
    return 2 * sum(map(len, parts.values()))


def check(sweep: Sweep, best: Patch, default: Patch, simulator: Simulator) -> list[Check]:
    """Simulate the best point and the default on unseen parts, of each kind that both have."""
    cases = [Variant(best, best), Variant(default, default)]
    first, second = (unseen(sweep, sweep.study.config(case.patch)) for case in cases)
    checks = []
    for kind in (each for each in first if each in second):
        count = min(len(first[kind]), len(second[kind]))
        study = replace(sweep.study, parts=partial(_parts, sweep, kind, count))
        checks.append(Check(kind, *simulator.trials(study, cases)))
    return checks


def _parts(sweep: Sweep, kind: str, count: int, config: RunConfig) -> list[Replication]:
    return unseen(sweep, config)[kind][:count]


def verdict(each: Check, sweep: Sweep, *, allow_refused: bool) -> str:
    """Say in a sentence whether the gain holds, with its interval, and which limits are missed."""
    objective = sweep.config.objectives[0]
    if why := _no_answer(each, allow_refused=allow_refused):
        return f"{each.kind}: whether the gain holds cannot be said: {why}."
    gain, before = each.gain(objective.metric), each.default.mean(objective.metric)
    words = "the gain holds" if _holds(each, sweep) else "THE GAIN DOES NOT HOLD"
    share = f", {gain.mean / before:+.1%}" if before else ""
    told = f"{metric_words(objective.metric)} {signed(gain)} (95 %, n = {gain.n}{share})"
    missed = "".join(
        f"; {limit.metric} is {number(each.best.mean(limit.metric))}, not {limit.words}"
        for limit in _missed(each.best, sweep.config.conditions)
    )
    return f"{each.kind}: {words}: {told} against the default{missed}."


def facts(checks: Sequence[Check], sweep: Sweep) -> dict[str, Any]:
    """Return what the checks came to, by kind, for sweep.json."""
    metric = sweep.config.objectives[0].metric
    gains = {each.kind: (each, each.gain(metric)) for each in checks}
    return {
        kind: {
            "holds": _holds(each, sweep),
            "gain": gain.mean,
            "half_width_95": gain.half_width,
            "parts": [part._asdict() for part in each.best.parts],
            "missed": [str(limit) for limit in _missed(each.best, sweep.config.conditions)],
        }
        for kind, (each, gain) in gains.items()
    }


def _holds(each: Check, sweep: Sweep) -> bool:
    objective = sweep.config.objectives[0]
    gain = each.gain(objective.metric)
    return gain.is_below_zero if objective.goal == "minimize" else gain.is_above_zero


def _missed(trial: Trial, limits: Sequence[Condition]) -> list[Condition]:
    means: Mapping[str, float] = {each.metric: trial.mean(each.metric) for each in limits}
    return [each for each in limits if not each.holds(means)]


def _no_answer(each: Check, *, allow_refused: bool) -> str:
    """Return why a check says nothing: a run failed, or refused too much; "" where it does."""
    for trial in (each.best, each.default):
        if trial.errors:
            return trial.errors[0]
    sides = {"the best point": each.best.served, "the default": each.default.served}
    lost = {name: served for name, served in sides.items() if served.is_no_answer}
    return "" if allow_refused else " and ".join(refusals(lost)).replace("NOT FAIR: ", "")
