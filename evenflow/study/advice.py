"""What would help a run: changes of one kind each, simulated on the run's own requests.

Knows which changes there are, and how to compare them; what they are worth only the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenflow.config.build import load_workload
from evenflow.config.links import link_spec
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document, Patch
from evenflow.errors import UsageError
from evenflow.report.page import Addition
from evenflow.report.tables import number, percent
from evenflow.report.words import metric_words
from evenflow.schedulers import POOLED
from evenflow.specs.gpu import links
from evenflow.study.deployments import (
    LAUNCHED,
    budget_key,
    dispatch_of,
    layouts,
    pairs_of,
    why_fixed,
)
from evenflow.study.slo import larger_is_better
from evenflow.study.trials import Case, How, Study, Trial

SHOWN = 3
HELPS = 0.005
"""A change helps if it makes the metric better by more than this share."""

FASTER = 1.2
"""A link is faster if it has so many times the bandwidth."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A run as it is, and what it comes to with each change, the best first by `metric`.

    `failed` are the changes that cannot be, such as a layout that does not fit.
    """

    metric: str
    base: Trial
    changed: Sequence[Trial]
    failed: Sequence[Trial]

    def gain(self, trial: Trial) -> float:
        """Return by which share a change makes the metric better; below 0: worse."""
        before, after = self.base.mean(self.metric), trial.mean(self.metric)
        share = after / before - 1 if before else 0.0
        return share if larger_is_better(self.metric) else -share


def advise(document: Document, beside: Path, how: How) -> Advice:
    """Simulate a run with each of the changes that may help it; UsageError as for the run."""
    config = configured(document)
    cases = [Case({"change": "as it is"}, {}), *changes(document, beside)]
    with how.simulator("changes simulated", len(cases)) as who:
        base, *trials = who.trials(Study(document, beside), cases)
    for error in base.errors:
        raise UsageError(error)
    batch = config.workload.arrivals.kind in ("offline", "closed")
    metric = "total_token_throughput" if batch else "mean_e2el_ms"
    if not math.isnan(base.mean("request_goodput")):  # it is limited
        metric = "request_goodput"
    advice = Advice(metric, base, (), [trial for trial in trials if trial.errors])
    able = [trial for trial in trials if not trial.errors]
    return replace(advice, changed=sorted(able, key=advice.gain, reverse=True))


def changes(document: Document, beside: Path) -> Iterator[Case]:
    """Yield the changes: where the layers are, the policy and its budget, links, the CPU's time."""
    config = configured(document)
    found = [*_layouts(document, config, beside), *_policies(config), *faster_links(config)]
    if config.runtime != "ideal":
        found.append(("no CPU time at all (a bound)", {"runtime": "ideal"}))
    for words, patch in found:
        yield Case({"change": words}, patch)


def _layouts(document: Document, config: RunConfig, beside: Path) -> Iterator[tuple[str, Patch]]:
    if why_fixed(config) or config.scheduler.name in POOLED:
        return
    workload = load_workload(config, beside)
    pairs = pairs_of([config.pipeline_gpus])
    for each in layouts(document, workload, beside, pairs, shifts=(1, 2)):
        if each.keys and not each.reason:
            yield f"layers: {each.label}", each.keys


def _policies(config: RunConfig) -> Iterator[tuple[str, Patch]]:
    own = config.scheduler
    if own.name in POOLED:
        return
    for name in LAUNCHED:
        if name != own.name:
            patch = {"scheduler": {"name": name}, "dispatch": dispatch_of(name)}
            yield f"scheduler: {name}", patch
    given = {**defaults(own.name), **own.params}
    known = {key: value for key, value in given.items() if isinstance(value, int)}
    key = budget_key(known)
    if key is not None:
        for budget in (known[key] // 2, 2 * known[key]):
            yield f"{key}: {budget}", {f"scheduler.{key}": budget}


def faster_links(config: RunConfig) -> Iterator[tuple[str, Patch]]:
    """Yield the next faster link of the table and the fastest: between stages, of all-reduces."""
    reduced = getattr(config.costs, "all_reduce", None)
    if not isinstance(reduced, str) and not (reduced and reduced.says_which_link):
        reduced = None
    for key, given in (("link", config.link), ("costs.all_reduce", reduced)):
        if given is None:
            continue
        least = FASTER * link_spec(given).bandwidth_gb_s
        faster = [each for each in links() if each.bandwidth_gb_s >= least]
        faster.sort(key=lambda each: each.bandwidth_gb_s)
        for each in dict.fromkeys([*faster[:1], *faster[-1:]]):
            yield f"{key}: {each.name} ({each.bandwidth_gb_s:g} GB/s)", {key: each.name}


def best(advice: Advice) -> list[Trial]:
    """Return the changes that help most, the best of each kind."""
    kinds: dict[str, Trial] = {}
    for trial in advice.changed:
        if advice.gain(trial) > HELPS:
            kinds.setdefault(trial.labels["change"].partition(":")[0], trial)
    return list(kinds.values())[:SHOWN]


def told(advice: Advice) -> Addition:
    """Return the run as it is and the changes that help most; how many help, how many cannot be."""
    metrics = dict.fromkeys([advice.metric, "mean_ttft_ms", "mean_tpot_ms"])
    rows = [
        [
            str(trial.labels["change"]),
            *(number(trial.mean(metric), 3) for metric in metrics),
            "" if trial is advice.base else percent(advice.gain(trial), 1),
        ]
        for trial in (advice.base, *best(advice))
    ]
    helps = sum(advice.gain(trial) > HELPS for trial in advice.changed)
    lost = f"; {len(advice.failed)} cannot be" if advice.failed else ""
    count = len(advice.changed) + len(advice.failed)
    of_kinds = "the best of each kind is above" if helps else "none"
    sentence = f"{count} changes simulated, one at a time: {helps} would help, {of_kinds}{lost}."
    heads = ["change", *map(metric_words, metrics), "better by"]
    return Addition("What would help", sentence, heads, rows)
