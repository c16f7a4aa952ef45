"""Search the cheapest deployment that keeps an SLO: the candidates, and which are simulated.

A setting is a layout of one pipeline, a scheduler and its budget; a point is a setting with a
number of replicas. There is one way to search, `_highest`: up to which step a point keeps the SLO,
fewer replicas or a higher rate, on one part of the trace after the other. What bounds refute is not
simulated, and a run ends once it cannot keep the SLO. It takes it that a step after one that breaks
the SLO breaks it, and that an SLO which a part breaks the whole breaks too. `exhaustive` takes
nothing for granted of points. Knows no words and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from evenflow.config.build import Workload, build, load_workload
from evenflow.config.files import make_importable
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured, memory_of_all, with_
from evenflow.config.yaml_file import Document, Patch, patched, value_of
from evenflow.core.world import World
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError
from evenflow.results.outcome import Served
from evenflow.schedulers import POOLED
from evenflow.specs.gpu import gpus, links
from evenflow.study.advice import faster_links
from evenflow.study.bounds import Least, Refuted, least, refuted
from evenflow.study.deployments import (
    Candidate,
    Layout,
    budget_key,
    dispatch_of,
    layouts,
    policies_to_try,
    why_fixed,
)
from evenflow.study.early import allowed
from evenflow.study.fair import require_served
from evenflow.study.rates import TriedRate, bisect, own_rate, rate_patch, rounded, tried
from evenflow.study.searches import side_by_side
from evenflow.study.slo import (
    KEEPS_UP,
    Condition,
    check_slo,
    levels_of,
    missed,
    service_levels,
    shares_beyond,
)
from evenflow.study.trials import (
    Parts,
    Search,
    Study,
    Trial,
    Variant,
    dry_run,
    replications,
    why_alike,
)
from evenflow.traces import Replay
from evenflow.types import Request

DIGITS = 10
"""No budget has more."""

MOST_REQUESTS = 8000
"""How much of a longer trace is simulated, where the run does not say."""

BUDGETS = (512, 1024, 2048)
"""The most tokens, or prompt tokens, of a micro-batch."""

DEGREES = (1, 2, 4, 8)
"""Stages, and tensor-parallel GPUs of a stage, beside those of the run."""

SHARE = 1 / 16
"""The part of the requests on which a point is tried before the whole."""

LEAST_REQUESTS = 200
"""The part has no fewer."""

WIDTH = 8
"""Settings that are tried side by side. The answer follows from it, not from the executor."""

NEAREST = 5
"""The number of layouts that miss and are simulated on the whole trace."""

CONTENDERS = 3
"""The number of layouts that miss and are simulated with changes."""

TOLERANCE = 0.05
"""From one step of the rate to the next."""

STEPS = 32
"""The most steps by which the rate is raised, to 4.8 times what is asked."""

CHANGE = "change"
"""The label of what is not of the plan: a change that would be needed."""

TIMES = (4, 16)
"""The factor by which more GPUs are tried where the allowed ones do not suffice."""

ROUGHLY = 0.25
"""How exactly a rate is found there."""


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
        if self.price is not None and not 0 < self.price < math.inf:
            raise UsageError(f"--price {self.price:g}: should be dollars of a GPU an hour, above 0")
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
        """What tables call it: PP2 x TP4, sarathi 1024; the number is the policy's budget."""
        params = self.candidate.params
        key = budget_key(params)
        words = self.candidate.scheduler + ("" if key is None else f" {params[key]}")
        return f"{self.candidate.layout.short}, {words}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the trace: its number of requests, and those skipped.

    It may have as many requests beyond a limit as all requests: of P99 a hundredth of all.
    """

    requests: int
    skip: int


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """A checked question: the run at the rate asked for, the settings to try, and the requests.

    `parts` are the parts of the trace that a point has to pass, the whole last. `rate` is the
    arrivals' in requests/s, None where they have none. `left_out` are impossible layouts.
    `served`: the requests of all seeds, and how many no deployment refuses. `trace` is what the
    provenance says of it; `is_cut`: whether it has more requests than are simulated. `bounds`: the
    points, by setting and replicas, that cannot keep the SLO by a bound.
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
        parts = _replications(config, self.ask)
        return Study(self.document, self.beside, parts, service_levels, more)

    def case(
        self,
        setting: Setting,
        count: int,
        part: Stretch | None = None,
        patch: Patch | None = None,
        *,
        ends: bool = False,
    ) -> Variant:
        """Return a point on a part of the requests (None: all), with other keys changed too.

        `ends`: the run ends once the SLO cannot be kept; never with several seeds, of which the
        mean counts.
        """
        part = part or self.parts[-1]
        limits = allowed(self.slo, self.requests) if ends and self.ask.replications == 1 else ()
        labels = {
            "setting": setting.name,
            "replicas": count,
            "gpus": count * setting.gpus,
            "requests": part.requests,
            **(patch or {}),
        }
        of_part = {"workload.requests": part.requests, "workload.skip": part.skip}
        return Variant(labels, {**setting.patch(count), **of_part, **(patch or {})}, limits)

    def at_rate(
        self, setting: Setting, count: int, step: int, part: Stretch | None = None, *, ends: bool
    ) -> Variant:
        """Return a point at a rate `step` steps above the one asked for."""
        patch = None
        if step:
            assert self.rate is not None  # there are steps of it only
            rate = rounded(self.rate * (1 + TOLERANCE) ** step)
            patch = rate_patch(self.config.workload.arrivals, rate, self.rate)
        return self.case(setting, count, part, patch, ends=ends)

    def point(self, trial: Trial) -> tuple[Setting, int]:
        """Return the setting of a trial, and how many replicas of it there were."""
        return self.settings[trial.labels["setting"]], trial.labels["replicas"]

    def is_planned(self, trial: Trial) -> bool:
        """Say whether a trial is of a point of the plan, at the rate that is asked."""
        return set(trial.labels) == {"setting", "replicas", "gpus", "requests"}

    def is_whole(self, trial: Trial) -> bool:
        """Say whether a trial is of a point of the plan on all requests."""
        return self.is_planned(trial) and trial.labels["requests"] == self.requests

    def keeps(self, trial: Trial) -> bool:
        """Say whether a trial keeps the SLO; one of a part does if it came to its end."""
        if trial.labels["requests"] == self.requests:
            return self.excess(trial) <= 0
        return not (trial.errors or trial.is_missed)

    def excess(self, trial: Trial) -> float:
        """Return the shares of their limits by which limits are missed, added up; inf: failed.

        More that arrives than is served counts as a limit missed by all of it.
        """
        if trial.errors or trial.is_missed or trial.served.failed > self.served.failed:
            return math.inf
        return missed([*shares_beyond(self.slo, trial.mean), float(not trial.keeps_up)])

    def margin(self, trial: Trial) -> float:
        """Return the least share of a limit that is left; below 0 where it is missed."""
        return -max(shares_beyond(self.slo, trial.mean))


def parse_budgets(text: str) -> tuple[int, ...]:
    """Return the numbers of `512,1024`; UsageError for what is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < DIGITS for part in parts):
        raise UsageError(f"--budgets {text}: should be numbers of tokens, like 512,1024")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_with(given: Mapping[str, Mapping[str, Any]] | Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes of `name={key: value}` texts; UsageError for what is none."""
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


def prepare(document: Document, beside: Path, ask: Ask) -> PlanQuestion:
    """Return the checked question; UsageError naming what is wrong with the run or `ask`."""
    if ask.joining:
        own = [each.written for each in configured(document).processes or ()]
        document = patched(document, {"processes": [*own, *ask.joining]})
    make_importable([document.data, list(ask.schedulers or ())], Path.cwd(), beside)
    document, is_cut = _with_requests(document, beside, ask.replications)
    config = configured(document)
    tried = [{"scheduler": {"name": name}} for name in policies_to_try(ask.schedulers, config)]
    document = patched(document, memory_of_all([config, *(with_(config, each) for each in tried)]))
    config = configured(document)
    if why := why_alike(config, beside, ask.replications):
        raise UsageError(f"--replications {ask.replications}: {why}")
    workload = load_workload(config, beside)
    document, rate = _asked_rate(document, config, workload, ask.rate)
    found = _layouts(document, config, workload, beside, ask)
    fitting = [each for each in found if not each.reason]
    if not fitting:
        raise UsageError(f"--gpus: no layout fits: {found[0].short}: {found[0].reason}")
    outcome = dry_run(with_(document, fitting[0].keys), workload, beside)
    check_slo(ask.slo, outcome, config)
    served = _served(outcome.result.provenance["deployment"], config, beside, ask)
    require_served({"": served}, allowed=ask.allow_refused)
    settings = {each.name: each for each in _settings(config, fitting, ask)}
    if not settings:
        least = min(_gpus_of(config, each) for each in fitting)
        raise UsageError(
            f"--gpus: no number of replicas has so many GPUs: the smallest pipeline has {least}"
        )
    return PlanQuestion(
        ask=ask,
        document=document,
        beside=beside,
        settings=settings,
        left_out=tuple(each for each in found if each.reason),
        parts=tuple(_parts(config, workload.requests, ask)),
        rate=rate,
        served=served,
        trace=workload.trace,
        is_cut=is_cut,
        bounds={} if ask.exhaustive else _bounds(document, beside, settings, ask),
    )


def _with_requests(document: Document, beside: Path, replications: int) -> tuple[Document, bool]:
    """Return the run with no more than MOST_REQUESTS, unless it says how many; replicas given.

    Each replication takes as many of a file. Also whether the trace has more.
    """
    config = configured(document)
    patch: dict[str, Any] = {}
    total = 0
    if config.replicas is None:
        patch["replicas"] = {"count": 1, "router": "least_outstanding"}
    if config.workload.requests is None:
        limit = None if config.workload.is_drawn else MOST_REQUESTS + 1
        total = len(config.workload.rows(beside, limit))
        most = total if config.workload.is_drawn else total // replications
        patch["workload.requests"] = max(min(most, MOST_REQUESTS), 1)
    return patched(document, patch), total > MOST_REQUESTS


def _asked_rate(
    document: Document, config: RunConfig, workload: Workload, wish: str | None
) -> tuple[Document, float | None]:
    """Return the run at the rate asked for, and that rate; None: at its own."""
    arrivals = config.workload.arrivals
    try:
        own = own_rate(arrivals, workload.requests)
    except UsageError:
        if wish is not None:
            raise
        return document, None
    if wish is None:
        return document, own
    try:
        rate = own * float(wish[:-1]) if wish.endswith("x") else float(wish)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UsageError(f"--rate {wish}: should be requests/s, above 0, or a multiple such as 2x")
    return patched(document, rate_patch(arrivals, rate, own)), rate


def _layouts(
    document: Document, config: RunConfig, workload: Workload, beside: Path, ask: Ask
) -> list[Layout]:
    """Return the layouts of one pipeline, without layouts of more GPUs than asked for."""
    if why_fixed(config):
        return layouts(document, workload, beside)
    most, node = ask.gpus[-1], math.inf if config.nodes is None else config.nodes.gpus
    own = (config.num_stages, config.tensor_parallel)
    pairs = [(stages, ranks) for ranks in DEGREES if ranks <= node for stages in DEGREES]
    if len(ask.gpus) == 1:  # a number such as 6 has layouts of its own
        divisors = [n for n in range(1, min(most, 2 * DEGREES[-1]) + 1) if most % n == 0]
        pairs += [(stages, 1) for stages in divisors]
        pairs += [(1, ranks) for ranks in divisors if ranks <= node]
    fitting = [pair for pair in dict.fromkeys([own, *pairs]) if pair[0] * pair[1] <= most]
    return layouts(document, workload, beside, fitting, shifts=())


def _gpus_of(config: RunConfig, layout: Layout) -> int:
    """Return the GPUs of one pipeline."""
    stages = layout.keys.get("stages", config.num_stages)
    return int(stages * layout.keys.get("tensor_parallel", config.tensor_parallel))


def _settings(config: RunConfig, fitting: Sequence[Layout], ask: Ask) -> Iterator[Setting]:
    """Yield the settings, the run's own first; those of one policy side by side."""
    for scheduler, params in _policies(config, ask):
        own = scheduler == config.scheduler.name
        dispatch = config.dispatch if own else dispatch_of(scheduler)
        for layout in fitting:
            gpus = _gpus_of(config, layout)
            counts = tuple(total // gpus for total in ask.gpus if total % gpus == 0)
            if counts:
                yield Setting(Candidate(scheduler, params, layout), dispatch, gpus, counts)


def _policies(config: RunConfig, ask: Ask) -> Iterator[tuple[str, dict[str, Any]]]:
    own = config.scheduler
    for name in policies_to_try(ask.schedulers, config):
        if name in POOLED:
            raise UsageError(f"--schedulers {name}: is a system of pools, which plan cannot divide")
        given = own.params if name == own.name else {}
        known = defaults(name)
        key = budget_key(known)
        wanted = list(ask.budgets or BUDGETS)
        if key in given and ask.budgets is None:
            wanted = list(dict.fromkeys([given[key], *wanted]))
        for params in [{**given, key: budget} for budget in wanted] if key else [dict(given)]:
            yield name, params


def _replications(config: RunConfig, ask: Ask) -> Parts:
    """Return the replications of a point; those of a part of the requests begin as the whole's."""
    return replications(ask.replications, window=config.workload.requests)


def _served(deployment: Mapping[str, Any], config: RunConfig, beside: Path, ask: Ask) -> Served:
    """Return how many requests of all seeds are no longer than the model takes.

    No deployment serves the others.
    """
    most = deployment.get("max_model_len", math.inf)
    sizes = [
        each.prompt_tokens + each.output_tokens
        for part in _replications(config, ask)(config)
        for each in load_workload(with_(config, part.patch), beside).requests
    ]
    longer = [size for size in sizes if size > most]
    why = f"{longer[0]} tokens exceed max_model_len {most}" if longer else ""
    return Served(len(sizes), len(sizes) - len(longer), why)


def _parts(config: RunConfig, requests: Sequence[Request], ask: Ask) -> Iterator[Stretch]:
    """Yield the parts of the requests that a point has to pass, the whole last.

    Of a trace with its own times, the stretch with the most tokens a second; else the beginning.
    """
    total, skip, own = len(requests), config.workload.skip, config.workload
    plain = not (own.conversations or own.after or config.kv.prefix_cache or ask.exhaustive)
    open_loop = own.arrivals.kind not in ("closed", "offline") and ask.replications == 1
    count = math.ceil(SHARE * total)
    if plain and open_loop and count >= LEAST_REQUESTS and allowed(ask.slo, total):
        first = _busiest(requests, count) if isinstance(own.arrivals, Replay) else 0
        yield Stretch(count, skip + first)
    yield Stretch(total, skip)


def _busiest(requests: Sequence[Request], count: int) -> int:
    """Return where the `count` requests in a row begin that bring the most tokens a second."""
    times_s = np.array([each.arrival_s for each in requests])
    tokens = np.cumsum([0, *(each.prompt_tokens + each.output_tokens for each in requests)])
    spans_s = times_s[count - 1 :] - times_s[: len(times_s) - count + 1]
    brought = tokens[count:] - tokens[:-count]
    return int(np.argmax(brought / np.maximum(spans_s, 1e-9)))


def _bounds(
    document: Document, beside: Path, settings: Mapping[str, Setting], ask: Ask
) -> dict[tuple[str, int], Refuted]:
    """Return the points that cannot keep the SLO, by a bound; {} where none is proved.

    That is for costs that do not fall with tokens, when prompts are computed whole, each token
    takes a step, and the times of arrival are given.
    """
    config = configured(document)
    plain = config.costs.kind in ("affine", "roofline") and config.data_parallel == 1
    cached = config.kv.prefix_cache or config.kv.swap or config.workload.after
    known = config.workload.concurrency is None and ask.replications == 1
    if cached or config.speculative or not (plain and known):
        return {}
    requests = load_workload(config, beside).requests
    of_layouts: dict[str, Least] = {}
    cuts: dict[tuple[str, str], bool] = {}  # by policy: whether prompts are computed in part
    points, deployments = [], []
    for setting in settings.values():
        candidate, layout = setting.candidate, setting.candidate.layout.label
        policy = candidate.scheduler, str(candidate.params)
        if layout not in of_layouts or policy not in cuts:
            built = build(with_(config, setting.patch(1)), requests[:1], beside)
            assert built.costs is not None  # there are no pools
            assert isinstance(built.world, World)
            of_layouts[layout] = of_layouts.get(layout) or least(built.costs.cost)
            cuts[policy] = EngineRules.of(built.world.make_scheduler()).cuts
        if not cuts[policy]:
            points += [(setting, count) for count in setting.counts]
            deployments += [(of_layouts[layout], count) for count in setting.counts]
    limits = allowed(ask.slo, len(requests))
    found = zip(points, refuted(limits, requests, deployments), strict=True)
    return {(setting.name, count): why for (setting, count), why in found if why}


Case: TypeAlias = Callable[[int, Stretch], Variant]
"""Returns the case that decides whether a step keeps the SLO on a part."""


def _highest(
    question: PlanQuestion, case: Case, parts: Sequence[Stretch], most: int, *, width: int = 1
) -> Generator[Sequence[Variant], list[Trial], int]:
    """Find the highest step of 1 to `most` that keeps the SLO on all parts; 0 where none does.

    One part after the other lowers it, by halving; `width` steps are tried at once. What is likely
    comes first: that a cheap part refutes all steps, and that what it left keeps the SLO.
    """
    for part in parts:
        low, likely = 0, 1 if part is question.parts[0] else most
        while low < most:
            size = most - low
            steps = {likely, *(low + -(-size * k // (width + 1)) for k in range(1, width + 1))}
            steps = {likely} if likely and width == 1 else {each for each in steps if each > low}
            likely, trials = 0, (yield [case(step, part) for step in sorted(steps)])
            for step, trial in zip(sorted(steps), trials, strict=True):
                if not question.keeps(trial):
                    most = step - 1
                    break
                low = step
    return most


@dataclass(slots=True)
class _Race:
    """What is known of a search: the replicas that may keep the SLO, by setting, and the best.

    `best` is the fewest GPUs with which a point kept it; at first, one more than there may be.
    """

    question: PlanQuestion
    left: dict[str, list[int]]
    best: int

    def least(self, setting: Setting) -> int:
        """Return the fewest GPUs with which a setting may keep the SLO; the best where not less."""
        return min([self.best, *(each * setting.gpus for each in self.left[setting.name])])

    def narrow(self, setting: Setting, parts: Sequence[Stretch]) -> Search:
        """Ask with how few replicas a setting keeps the SLO of some parts, if those are cheaper."""
        question, name = self.question, setting.name
        counts = [each for each in self.left[name] if each * setting.gpus < self.best]

        def case(step: int, part: Stretch) -> Variant:
            return question.case(setting, counts[-step], part, ends=True)

        step = yield from _highest(question, case, parts, len(counts))
        self.left[name] = counts[len(counts) - step :]
        if parts[-1] is question.parts[-1]:  # nothing more is to ask
            self.best = self.least(setting)
            self.left[name] = []


def search(question: PlanQuestion) -> Search:
    """Find the fewest GPUs with which a setting keeps the SLO; `exhaustive`: ask for all points.

    The first setting finds how many suffice. Stretches of the trace refute most others with fewer;
    all requests decide on the rest, two at a time, the cheapest first.
    """
    settings = list(question.settings.values())
    if question.ask.exhaustive:
        yield [question.case(each, count) for each in settings for count in each.counts]
        return
    *stretches, whole = question.parts
    left = {
        each.name: [n for n in each.counts if (each.name, n) not in question.bounds]
        for each in settings
    }
    race = _Race(question, left, question.ask.gpus[-1] + 1)
    yield from race.narrow(settings[0], question.parts)
    for at in range(1, len(settings), WIDTH) if stretches else ():
        yield from side_by_side([race.narrow(e, stretches) for e in settings[at : at + WIDTH]])
    while cheaper := [each for each in settings if race.least(each) < race.best]:
        first = sorted(cheaper, key=race.least)[:2]
        yield from side_by_side([race.narrow(each, [whole]) for each in first])


def equals(question: PlanQuestion, trials: Sequence[Trial]) -> list[tuple[Setting, int]]:
    """Return the points that may keep the SLO with the fewest GPUs, in the settings' order."""
    gpus = ranked(question, trials)[0].labels["gpus"]
    beaten = [each for each in trials if not question.keeps(each)]
    broken = {(each.labels["setting"], each.labels["replicas"]) for each in beaten}
    points = [(each, gpus // each.gpus) for each in question.settings.values()]

    def is_open(setting: Setting, count: int) -> bool:
        if count * setting.gpus != gpus or count not in setting.counts:
            return False
        more = [count] if question.ask.exhaustive else [n for n in setting.counts if n >= count]
        return broken.union(question.bounds).isdisjoint((setting.name, n) for n in more)

    return [point for point in points if is_open(*point)]


def name_of(trial: Trial) -> str:
    """Return what a point is called: 10 x TP4, sarathi 1024."""
    return f"{trial.labels['replicas']} x {trial.labels['setting']}"


def ranked(question: PlanQuestion, trials: Sequence[Trial]) -> list[Trial]:
    """Return the points that keep the SLO, the cheapest first, of those the widest margin first."""
    kept = {}
    for trial in trials:
        if question.is_whole(trial) and question.excess(trial) <= 0:
            kept[trial.labels["setting"], trial.labels["replicas"]] = trial
    return sorted(kept.values(), key=lambda each: (each.labels["gpus"], -question.margin(each)))


def climb(question: PlanQuestion, points: Sequence[tuple[Setting, int]]) -> Search:
    """Find which of some points keeps the SLO at the highest rate, in steps of TOLERANCE.

    Of equal ones the first; without a rate all are simulated on all requests. A step above the
    winner's is simulated to its end, as it shows what would break it.
    """
    top = -1
    best: tuple[Setting, int] | None = None
    for at in range(0, len(points), WIDTH):
        several = points[at : at + WIDTH]
        for part in question.parts[:-1]:
            step = top + 1
            trials = yield [question.at_rate(*each, step, part, ends=True) for each in several]
            pairs = zip(several, trials, strict=True)
            several = [each for each, trial in pairs if question.keeps(trial)]
        for point in several:
            reached = yield from _raised(question, point, top)
            if reached > top:
                best, top = point, reached if question.rate else -1
    if best is not None and top < STEPS and question.rate:
        yield [question.at_rate(*best, top + 1, ends=False)]


def _raised(
    question: PlanQuestion, point: tuple[Setting, int], top: int
) -> Generator[Sequence[Variant], list[Trial], int]:
    """Return up to which step a point keeps the SLO if it is above `top`; else `top`."""
    least, (*stretches, whole) = top + 1, question.parts

    def case(step: int, part: Stretch) -> Variant:
        return question.at_rate(*point, least + step, part, ends=True)

    # The numbers to tell are those at the rate asked for, step 0.
    for cases in ([case(0, part) for part in stretches], [case(0, whole), case(-least, whole)]):
        if not all(map(question.keeps, (yield cases))):
            return top
    if question.rate is None:
        return least
    more = yield from _highest(question, case, question.parts, STEPS - least, width=2)
    return least + more


def probe(question: PlanQuestion, trial: Trial) -> TriedRate:
    """Return what a trial says of its rate; one that refuses more than others do breaks a limit."""
    found = tried(trial, rate_of(question, trial), (*question.slo, KEEPS_UP))
    lost = trial.served.failed > question.served.failed
    return replace(found, failed=(*found.failed, "failed")) if lost else found


def _at_rate(question: PlanQuestion, trial: Trial, rate: float) -> Variant:
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


def up_to(question: PlanQuestion, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the highest rate at which each point was seen to keep the SLO, by name."""
    found: dict[str, float] = {}
    for each in at_rates(question, trials):
        if each.passes:
            name = name_of(each.trial)
            found[name] = max(found.get(name, 0.0), each.rate)
    return found


def nearest(question: PlanQuestion, trials: Sequence[Trial]) -> Search:
    """Simulate on all requests the settings that miss least, one a layout, as large as may be."""
    misses: dict[str, tuple[float, ...]] = {
        name: (0.0, why.beyond) for (name, _), why in question.bounds.items()
    }
    for trial in trials:
        setting, count = question.point(trial)
        if count == setting.counts[-1]:
            done = min(each.values.get("done", math.inf) for each in trial.records)
            # Who passed more of the trace is nearer, and who came further in it.
            misses[setting.name] = (-trial.labels["requests"], -done, question.excess(trial))
    order = [question.settings[name] for name in sorted(misses, key=lambda name: misses[name])]
    of_layouts = {each.candidate.layout.parallel: each for each in reversed(order)}
    settings = [each for each in order if each in of_layouts.values()][:NEAREST]
    yield [question.case(each, each.counts[-1]) for each in settings]


def remedies(question: PlanQuestion, misses: Sequence[Trial]) -> Search:
    """Simulate what may make the nearest points keep the SLO: other GPUs or more, less traffic."""
    best = misses[:CONTENDERS]
    cases = [_changed(question, each, "", {}, times) for each in best for times in TIMES]
    config = question.config
    if config.gpus and not why_fixed(config):
        own = config.gpus[0].bytes_per_s
        faster = sorted((each.bytes_per_s, each.name) for each in gpus() if each.bytes_per_s > own)
        cases += [
            _changed(question, each, *_other_gpu(config, name), times)
            for _, name in faster[-2:]
            for each in best
            for times in (1, *TIMES)
        ]
    cases += [_changed(question, best[0], *change) for change in faster_links(config)]
    yield cases
    if question.rate is not None:
        start, at = rounded(question.rate / TIMES[0]), partial(probe, question)
        found = [bisect(start, ROUGHLY, partial(_at_rate, question, each), at) for each in best]
        yield from side_by_side(found)


def _other_gpu(config: RunConfig, name: str) -> tuple[str, Patch]:
    """Return the words and the keys of another GPU, over the fastest link where there are links."""
    if config.link is None:
        return name, {"gpu": name}
    fastest = max(links(), key=lambda each: each.bandwidth_gb_s).name
    own = {} if getattr(config.costs, "all_reduce", None) is None else {"costs.all_reduce": fastest}
    return f"{name} over {fastest}", {"gpu": name, "link": fastest, **own}


def _changed(
    question: PlanQuestion, trial: Trial, words: str, patch: Patch, times: int = 1
) -> Variant:
    """Return a point with `times` as many replicas and other keys changed."""
    setting, count = question.point(trial)
    plain = question.case(setting, times * count)
    return Variant({**plain.labels, CHANGE: words}, {**plain.patch, **patch})
