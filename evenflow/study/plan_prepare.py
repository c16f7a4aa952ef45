"""The question of a plan from a run: layouts that fit, parts of the trace, what bounds refute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.config.build import Workload, build
from evenflow.config.files import make_importable
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured, engine_of_all, with_
from evenflow.config.yaml_file import Document, patched
from evenflow.core.world import World
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError
from evenflow.results.outcome import Served
from evenflow.schedulers import POOLED
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
from evenflow.study.fair import require_served
from evenflow.study.plan_question import Ask, PlanQuestion, Setting, Stretch, replications_of
from evenflow.study.points import loaded
from evenflow.study.rates import own_rate, rate_patch
from evenflow.study.slo import allowed, check_slo
from evenflow.study.trials import dry_run, why_alike
from evenflow.traces import Replay
from evenflow.types import Request

MOST_REQUESTS = 8000
"""How much of a longer trace is simulated, where the run does not say."""

BUDGETS = (512, 1024, 2048)
"""The most tokens, or prompt tokens, of a micro-batch."""

DEGREES = (1, 2, 4, 8)
"""Stages, and tensor-parallel GPUs of a stage, tried beside the run's."""

SHARES = (1 / 25, 1 / 16)
"""The parts of the requests on which a point is tried before the whole: the shorter refutes most
points in less time, the longer more of them."""

LEAST_REQUESTS = 200
"""A part has no fewer."""


def prepare(document: Document, beside: Path, ask: Ask) -> PlanQuestion:
    """Return the checked question; UsageError naming what is wrong with the run or `ask`."""
    document = _to_try(document, ask)
    make_importable([document.data, list(ask.schedulers or ())], beside)
    document, is_cut = _with_requests(document, beside, ask.replications)
    config = configured(document)
    tried = [{"scheduler": {"name": name}} for name in policies_to_try(ask.schedulers, config)]
    shared = engine_of_all([config, *(with_(config, each) for each in tried)])
    document = patched(document, shared)
    config = configured(document)
    if why := why_alike(config, beside, ask.replications):
        raise UsageError(f"--replications {ask.replications}: {why}")
    workload = loaded(config, beside)
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
        unchosen=tuple(shared),
        bounds={} if ask.exhaustive else _bounds(document, beside, settings, ask),
    )


def _to_try(document: Document, ask: Ask) -> Document:
    """Return the run with the processes that join it; one stage where a model's run says none."""
    if document.data.get("model") and "stages" not in document.data:
        document = patched(document, {"stages": 1})
    if ask.joining:
        own = [each.written for each in configured(document).processes or ()]
        document = patched(document, {"processes": [*own, *ask.joining]})
    return document


def _with_requests(document: Document, beside: Path, replications: int) -> tuple[Document, bool]:
    """Return the run with replicas and, unless it has a number, at most MOST_REQUESTS requests.

    Each replication takes this number of a file. Also return whether the trace has more.
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
    stages = layout.keys.get("stages", config.num_stages)
    return int(stages * layout.keys.get("tensor_parallel", config.tensor_parallel))


def _settings(config: RunConfig, fitting: Sequence[Layout], ask: Ask) -> Iterator[Setting]:
    """Yield the settings, the run's first, grouped by policy."""
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


def _served(deployment: Mapping[str, Any], config: RunConfig, beside: Path, ask: Ask) -> Served:
    """Return how many requests of all seeds are no longer than the model takes.

    No deployment serves the others.
    """
    most = deployment.get("max_model_len", math.inf)
    sizes = [
        each.prompt_tokens + each.output_tokens
        for part in replications_of(config, ask)(config)
        for each in loaded(with_(config, part.patch), beside).requests
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
    if plain and open_loop and allowed(ask.slo, total):
        for count in (math.ceil(share * total) for share in SHARES):
            if count >= LEAST_REQUESTS:
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
    workload = loaded(config, beside)
    requests, first = workload.requests, workload._replace(requests=workload.requests[:1])
    of_layouts: dict[str, Least] = {}
    cuts: dict[str, bool] = {}  # by policy: whether prompts are computed in part
    points, deployments = [], []
    for setting in settings.values():
        candidate, layout = setting.candidate, setting.candidate.layout.label
        policy = str(candidate.policy)
        if layout not in of_layouts or policy not in cuts:
            built = build(with_(config, setting.patch(1)), beside, first)
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
