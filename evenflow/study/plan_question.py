"""The question of a plan: what is asked, the settings to try, the points and their cases.

A setting is a layout of one pipeline, a scheduler and its budget. A point is a setting with a
number of replicas. Simulates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document, Patch, value_of
from evenflow.errors import UsageError
from evenflow.results.outcome import Served
from evenflow.study.bounds import Refuted
from evenflow.study.deployments import Candidate, Layout, budget_key
from evenflow.study.early import MISSED
from evenflow.study.rates import Probe, TriedRate, rate_patch, rounded, tried
from evenflow.study.slo import (
    KEEPS_UP,
    Condition,
    allowed,
    checked_price,
    levels_of,
    missed,
    service_levels,
    shares_beyond,
)
from evenflow.study.trials import Parts, Study, Trial, Variant, replications

DIGITS = 10
"""No budget has more."""

TOLERANCE = 0.05
"""From one step of the rate to the next."""

CHANGE = "change"
"""The label of what is not of the plan: a change that would be needed."""

WIDER = "wider_than"
"""The label of a margin: a simulation that ended early has no wider one, and may keep the SLO."""

RATE = "requests_per_s"
"""The label of a rate that is not the one asked for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of a plan, beside the run. None: chosen here.

    `rate`: requests/s, or a multiple of the run's own ("2x"); `price`: dollars of a GPU an hour.
    `joining`: processes for each simulation, as the key `processes` has them.
    `allow_refused`: answer though too many requests are refused. `intervals`: say them, too.
    """

    slo: tuple[Condition, ...]
    gpus: tuple[int, ...]
    rate: str | None = None
    price: float | None = None
    schedulers: Sequence[str] | None = None
    budgets: Sequence[int] | None = None
    joining: Sequence[Mapping[str, Any]] = ()
    replications: int = 1
    exhaustive: bool = False
    allow_refused: bool = False
    intervals: bool = False

    def __post_init__(self) -> None:
        if self.price is not None:
            checked_price(self.price)
        if self.replications < 1:
            raise UsageError(f"--replications {self.replications}: should be at least 1")
        for budget in self.budgets or ():
            if budget < 1:
                raise UsageError(f"--budgets {budget}: should be at least 1")


@dataclass(frozen=True, slots=True)
class Setting:
    """A pipeline of `gpus` GPUs with a policy, and the numbers of replicas that there may be."""

    candidate: Candidate
    dispatch: str | None
    gpus: int
    counts: tuple[int, ...]

    def patch(self, count: int) -> Patch:
        """Return the keys that make a run `count` replicas of this setting."""
        return {**self.candidate.patch, "dispatch": self.dispatch, "replicas.count": count}

    @property
    def name(self) -> str:
        """Label in tables: PP2 x TP4, sarathi 1024; the number is the policy's budget."""
        params = self.candidate.params
        key = budget_key(params)
        words = self.candidate.scheduler + ("" if key is None else f" {params[key]}")
        return f"{self.candidate.layout.short}, {words}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the trace: its number of requests, and those skipped.

    As many of its requests may miss a limit as of the whole trace: for P99 a hundredth of all.
    """

    requests: int
    skip: int


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A checked question: the run at the rate asked for, the settings to try, and the requests.

    `parts` are the parts of the trace that a point has to pass, the whole last. `rate` is the
    arrivals' in requests/s, None where they have none. `left_out` are impossible layouts.
    `served`: the requests of all seeds, and how many no deployment refuses. `trace` is what the
    provenance says of it; `is_cut`: whether it has more requests than are simulated. `unchosen`:
    keys of the run that nobody chose. `bounds`: the points, by setting and replicas, that cannot
    keep the SLO by a bound.
    """

    ask: Ask
    document: Document
    beside: Path
    settings: Mapping[str, Setting]
    left_out: tuple[Layout, ...]
    parts: tuple[Stretch, ...]
    rate: float | None
    served: Served
    trace: Mapping[str, Any]
    is_cut: bool
    unchosen: tuple[str, ...]
    bounds: Mapping[tuple[str, int], Refuted]

    @property
    def config(self) -> RunConfig:
        return configured(self.document)

    @property
    def slo(self) -> tuple[Condition, ...]:
        return self.ask.slo

    @property
    def requests(self) -> int:
        return self.parts[-1].requests

    @property
    def num_points(self) -> int:
        return sum(len(setting.counts) for setting in self.settings.values())

    @property
    def study(self) -> Study:
        """The run, and its summary with what the SLO of each part needs."""
        config = self.config
        more = levels_of(self.slo, config)
        parts = replications_of(config, self.ask)
        return Study(self.document, self.beside, parts, service_levels, more)

    def case(
        self,
        setting: Setting,
        count: int,
        part: Stretch | None = None,
        rate: float | None = None,
        *,
        ends: bool = False,
        wider: float = 0.0,
    ) -> Variant:
        """Return a point on a part of the requests (None: all), at another rate if one is given.

        `ends`: the run ends once the SLO cannot be kept with a margin as wide as `wider`; never
        with several seeds, of which the mean counts.
        """
        part = part or self.parts[-1]
        limits = allowed(self.slo, self.requests) if ends and self.ask.replications == 1 else ()
        limits = tuple(each._replace(limit_ms=each.limit_ms * (1 - wider)) for each in limits)
        labels: dict[str, Any] = {
            "setting": setting.name,
            "replicas": count,
            "gpus": count * setting.gpus,
            "requests": part.requests,
            **({WIDER: wider} if wider else {}),
        }
        of_part = {"workload.requests": part.requests, "workload.skip": part.skip}
        patch = {**setting.patch(count), **of_part}
        if rate is not None:
            assert self.rate is not None  # there is another to put in its place
            labels[RATE] = rate
            patch |= rate_patch(self.config.workload.arrivals, rate, self.rate)
        return Variant(labels, patch, limits)

    def at_step(self, setting: Setting, count: int, step: int, part: Stretch) -> Variant:
        """Return a point, `step` rate steps above the one asked for, that ends on a missed SLO."""
        rate = self.rate and step and rounded(self.rate * (1 + TOLERANCE) ** step)
        return self.case(setting, count, part, rate or None, ends=True)

    def rate_of(self, trial: Trial) -> float:
        """Return the rate that a trial was simulated at, in requests/s."""
        assert self.rate is not None
        return float(trial.labels.get(RATE, rounded(self.rate)))

    def tried(self, trial: Trial) -> TriedRate:
        """Return what a trial says of its rate: refusing more than others do breaks a limit."""
        found = tried(trial, self.rate_of(trial), (*self.slo, KEEPS_UP))
        lost = trial.served.failed > self.served.failed
        return replace(found, failed=(*found.failed, "failed")) if lost else found

    def probe(self, trial: Trial) -> Probe | None:
        """Return what a trial says of its point's rate; None for a part that was kept, a change.

        A part that misses the SLO misses it for the whole.
        """
        if CHANGE in trial.labels or self.is_beaten(trial):
            return None
        requests = trial.labels["requests"]
        if trial.is_missed:
            limit = trial.records[0].values[MISSED]
            return Probe(self.rate_of(trial), (limit,), 0.0, requests)
        return self.tried(trial) if requests == self.requests else None

    def point(self, trial: Trial) -> tuple[Setting, int]:
        """Return the setting of a trial, and its number of replicas."""
        return self.settings[trial.labels["setting"]], trial.labels["replicas"]

    def is_planned(self, trial: Trial) -> bool:
        """Say whether a trial is of a point of the plan, at the rate that is asked."""
        return trial.labels.keys().isdisjoint((RATE, CHANGE)) and not self.is_beaten(trial)

    def is_beaten(self, trial: Trial) -> bool:
        """Say whether a trial ended as its margin is too narrow, which breaks no limit."""
        return WIDER in trial.labels and trial.is_missed

    def is_whole(self, trial: Trial) -> bool:
        """Say whether a trial is of a point of the plan on all requests."""
        return self.is_planned(trial) and trial.labels["requests"] == self.requests

    def keeps(self, trial: Trial) -> bool:
        """Say whether a trial keeps the SLO; one of a part does if it came to its end."""
        if trial.labels["requests"] == self.requests:
            return self.excess(trial) <= 0
        return not (trial.errors or trial.is_missed)

    def excess(self, trial: Trial) -> float:
        """Return the sum of relative excesses over missed limits; inf for a failed trial.

        An overloaded run counts as a limit missed by 100 %.
        """
        if trial.errors or trial.is_missed or trial.served.failed > self.served.failed:
            return math.inf
        return missed([*shares_beyond(self.slo, trial.mean), float(not trial.keeps_up)])

    def margin(self, trial: Trial) -> float:
        """Return the least share of a limit that is left; below 0 where it is missed."""
        return -max(shares_beyond(self.slo, trial.mean))


def replications_of(config: RunConfig, ask: Ask) -> Parts:
    """Return the replications of a point; a part's begin where the whole's do."""
    return replications(ask.replications, window=config.workload.requests)


def name_of(trial: Trial) -> str:
    """Return what a point is called: 10 x TP4, sarathi 1024."""
    return f"{trial.labels['replicas']} x {trial.labels['setting']}"


def parse_budgets(text: str) -> tuple[int, ...]:
    """Return the numbers of `512,1024`; UsageError for other texts."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < DIGITS for part in parts):
        raise UsageError(f"--budgets {text}: should be numbers of tokens, like 512,1024")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_with(given: Mapping[str, Mapping[str, Any]] | Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes of `name={key: value}` texts; UsageError for other ones."""
    if isinstance(given, Mapping):
        return [{"name": name, **keys} for name, keys in given.items()]
    return [_process(text) for text in ([given] if isinstance(given, str) else given)]


def _process(text: str) -> dict[str, Any]:
    name, _, keys = text.partition("=")
    params = value_of(keys or "{}", f"--with {text}")
    if not name.strip() or not isinstance(params, dict):
        right = "outage={mtbf_s: 86400, restart_s: 120}"
        raise UsageError(f"--with {text}: should be PROCESS=KEYS, like {right}")
    return {"name": name.strip(), **params}
