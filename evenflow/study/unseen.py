"""Check whether the gain of a sweep's best point holds on requests that it has not seen.

The best of many points is partly luck, which other requests do not share. The best point and the
default see the same of them in pairs. What those do to both drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Patch
from evenflow.errors import UsageError
from evenflow.report.tables import number
from evenflow.report.words import metric_words, refusals
from evenflow.study.fair import Interval, paired_difference, signed
from evenflow.study.slo import Condition, Objective
from evenflow.study.sweep_file import Sweep
from evenflow.study.trials import Replication, Simulator, Trial, Variant, redrawn, seed_matters

PARTS = 8
"""How many unseen parts of each kind, at most; of one alone there is no interval."""

SEEDS, WINDOWS = "fresh seeds", "later windows"


@dataclass(frozen=True, slots=True)
class Check:
    """The best point and the default of a sweep, simulated on the same unseen parts of a `kind`."""

    sweep: Sweep
    kind: str
    best: Trial
    default: Trial

    @property
    def objective(self) -> Objective:
        return self.sweep.config.objectives[0]

    @property
    def gain(self) -> Interval:
        """By how much the objective's metric is above the default's, part by part."""
        metric = self.objective.metric
        return paired_difference(self.best.values(metric), self.default.values(metric))

    @property
    def holds(self) -> bool:
        less = self.objective.goal == "minimize"
        return self.gain.is_below_zero if less else self.gain.is_above_zero

    @property
    def missed(self) -> list[Condition]:
        """The limits that the best point misses."""
        limits = self.sweep.config.conditions
        means = {limit.metric: self.best.mean(limit.metric) for limit in limits}
        return [limit for limit in limits if not limit.holds(means)]

    def verdict(self, *, allow_refused: bool) -> str:
        """Say in a sentence whether the gain holds, with its interval, and what is missed."""
        if why := self._no_answer(allow_refused=allow_refused):
            return f"{self.kind}: whether the gain holds cannot be said: {why}."
        metric, gain = self.objective.metric, self.gain
        before = self.default.mean(metric)
        is_gain = gain.mean < 0 if self.objective.goal == "minimize" else gain.mean > 0
        lost = "THE GAIN IS NOT CERTAIN" if is_gain else "THE GAIN DOES NOT HOLD"
        words = "the gain holds" if self.holds else lost
        share = f", {gain.mean / before:+.1%}" if before else ""
        told = f"{metric_words(metric)} {signed(gain)} (95 %, n = {gain.n}{share})"
        missed = "".join(
            f"; {limit.metric} is {number(self.best.mean(limit.metric))}, not {limit.words}"
            for limit in self.missed
        )
        return f"{self.kind}: {words}: {told} against the default{missed}."

    def _no_answer(self, *, allow_refused: bool) -> str:
        """Return why there is no verdict: a run failed, or refused too much; else ""."""
        sides = {"the best point": self.best, "the default": self.default}
        if errors := [error for trial in sides.values() for error in trial.errors]:
            return errors[0]
        lost = {name: each.served for name, each in sides.items() if each.served.is_no_answer}
        return "" if allow_refused else " and ".join(refusals(lost)).replace("NOT FAIR: ", "")

    @property
    def facts(self) -> dict[str, Any]:
        """Result of the check, for sweep.json."""
        gain = self.gain
        return {
            "holds": self.holds,
            "gain": gain.mean,
            "half_width_95": gain.half_width,
            "parts": [part._asdict() for part in self.best.parts],
            "missed": list(map(str, self.missed)),
        }


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
        checks.append(Check(sweep, kind, *simulator.trials(study, cases)))
    return checks


def _parts(sweep: Sweep, kind: str, count: int, config: RunConfig) -> Sequence[Replication]:
    return unseen(sweep, config)[kind][:count]
