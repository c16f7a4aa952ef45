"""Simulate what may help a run, on its own requests: changes, and one cause of bubbles removed.

Knows the changes and how to compare them; only the simulation says what they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenflow.config.build import load_workload
from evenflow.config.links import link_spec
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document, Patch
from evenflow.report.page import Addition
from evenflow.report.tables import number, percent, write_summaries
from evenflow.report.words import metric_words
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.results.run import merged
from evenflow.schedulers import POOLED
from evenflow.sim.counterfactual import counterfactuals
from evenflow.specs.gpu import links
from evenflow.study.deployments import (
    LAUNCHED,
    budget_key,
    dispatch_of,
    layouts,
    pairs_of,
    why_fixed,
)
from evenflow.study.runs import Job
from evenflow.study.slo import larger_is_better
from evenflow.study.trials import How, Study, Variant

SHOWN = 3
HELPS = 0.005
"""Share by which a change has to better the metric to count as a help."""

FASTER = 1.2
"""A link is faster if it has this many times the bandwidth."""


BOUNDS = {
    "link": "links take no time",
    "cpu": "no CPU time",
    "kv_limited": "pages never run out",
    "uneven_stages": "stages equally fast",
    "uneven_batches": "micro-batches equally long",
}
"""What a run without a cause of bubbles has, by the cause: a bound on what helps."""

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    """Summaries by words: of a run, with each change, and without each cause of bubbles.

    `changed` has the best first, by `metric`; `failed` counts the impossible changes, such as a
    layout that does not fit.
    """

    metric: str
    base: Summary
    changed: Mapping[str, Summary]
    bounds: Mapping[str, Summary]
    failed: int = 0

    def gain(self, summary: Summary) -> float:
        """Return the share by which a summary is better than the run's; below 0: worse.

        -inf for a summary with fewer completed requests.
        """
        before, after = self.base[self.metric], summary[self.metric]
        if after is None or summary["completed"] < self.base["completed"]:
            return -math.inf
        if before is None:
            return math.inf
        share = after / before - 1 if before else 0.0
        return share if larger_is_better(self.metric) else -share

    @property
    def rows(self) -> dict[str, Summary]:
        """The run, what helps most, the best of each kind, and the bounds."""
        kinds: dict[str, str] = {}
        for words, summary in self.changed.items():
            if self.gain(summary) > HELPS:
                kinds.setdefault(words.partition(":")[0], words)
        best = {words: self.changed[words] for words in list(kinds.values())[:SHOWN]}
        return {"as it is": self.base, **best, **self.bounds}

    @property
    def addition(self) -> Addition:
        """The run, what helps most and the bounds as a table; how many help, how many fail."""
        metrics = dict.fromkeys([self.metric, "duration", "mean_ttft_ms", "mean_tpot_ms"])
        rows = [
            [
                words,
                *(number(summary[metric], 3) for metric in metrics),
                "" if summary is self.base else percent(self.gain(summary), 1),
            ]
            for words, summary in self.rows.items()
        ]
        helps = sum(self.gain(summary) > HELPS for summary in self.changed.values())
        lost = f"; {self.failed} cannot be" if self.failed else ""
        of_kinds = "the best of each kind is above" if helps else "none"
        sentence = (
            f"{len(self.changed) + self.failed} changes simulated, one at a time: {helps} would "
            f"help, {of_kinds}{lost}. A bound is the run without one cause of its bubbles."
        )
        heads = ["change", *map(metric_words, metrics), "better by"]

        def write(folder: Path) -> None:
            every = {"as it is": self.base, **self.changed, **self.bounds}
            write_summaries(folder / "advice.csv", "change", every)

        return Addition("What would help", sentence, heads, rows, write)


def advise(job: Job, outcome: Outcome, how: How) -> Advice:
    """Simulate a job with each change that may help it, and without each cause of its bubbles."""
    config = job.config
    document = config.document(job.label)
    cases = list(changes(document, job.beside))
    with how.simulator("changes simulated", len(cases)) as who:
        trials = who.trials(Study(document, job.beside), cases)
    worlds = counterfactuals(job.built().world, outcome.result)
    bounds = {
        f"bound: {BOUNDS[cause]}": summarize(merged(job.simulate(world)), config.goodput)
        for cause, world in worlds.items()
    }
    batch = config.workload.arrivals.kind in ("offline", "closed")
    metric = "total_token_throughput" if batch else "mean_e2el_ms"
    if outcome.summary.get("request_goodput") is not None:  # it is limited
        metric = "request_goodput"
    able = {str(t.labels["change"]): t.records[0].values for t in trials if not t.errors}
    advice = Advice(metric, outcome.summary, able, bounds, len(trials) - len(able))
    ordered = sorted(able.items(), key=lambda item: advice.gain(item[1]), reverse=True)
    return replace(advice, changed=dict(ordered))


def changes(document: Document, beside: Path) -> Iterator[Variant]:
    """Yield the changes to try: division of layers, policies and budgets, links."""
    config = configured(document)
    found = [*_layouts(document, config, beside), *_policies(config), *faster_links(config)]
    for words, patch in found:
        yield Variant({"change": words}, patch)


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
    given = {**defaults(own.name), **config.params}
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
        known = [each for each in links() if key != "link" or not each.low_latency_us]
        faster = [each for each in known if each.bandwidth_gb_s >= least]
        faster.sort(key=lambda each: each.bandwidth_gb_s)
        for each in dict.fromkeys([*faster[:1], *faster[-1:]]):
            yield f"{key}: {each.name} ({each.bandwidth_gb_s:g} GB/s)", {key: each.name}
