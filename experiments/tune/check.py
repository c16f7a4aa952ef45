"""Does what was found on the first part of a trace hold on data that the search never saw?

Winner and baselines run on the same requests in pairs, so that what the requests do to both drops
out of the difference. Knows no search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenflow.results.bubbles import attribute
from experiments.run_file.run import configured, with_
from experiments.runs import Outcome
from experiments.study.intervals import Interval
from experiments.study.slo import larger_is_better
from experiments.study.trials import Part, Simulator, Trial, seed_matters
from experiments.tune.prepare import GLLM, is_sample, rows_of
from experiments.tune.search import Candidate, Search, Tried, Tuning, evaluate

TUNED = "tuned"
FRESH, LATER = "fresh seeds", "later parts"


@dataclass(frozen=True, slots=True)
class Check:
    """The winner (as TUNED) and baselines on the same parts, by name; `parts` the search knew not.

    The part at `parts[i]` is `trials[name].records[i]`.
    """

    name: str
    parts: tuple[Part, ...]
    trials: Mapping[str, Trial]

    def gain(self, metric: str, rival: str) -> Interval:
        """Return by how much the winner's metric is above a baseline's, pair by pair."""
        return self.trials[TUNED].above(self.trials[rival], metric)

    def mean(self, metric: str, name: str) -> Interval:
        """Return a contender's metric over the parts."""
        return self.trials[name].interval(metric)

    def survives(self, metric: str, rival: str) -> bool:
        """Say whether the winner is better than a baseline beyond the interval."""
        gain = self.gain(metric, rival)
        return gain.is_above_zero if larger_is_better(metric) else gain.is_below_zero


def unseen_parts(tuning: Tuning, checks: int) -> dict[str, tuple[Part, ...]]:
    """Return the parts to check on, by name: fresh seeds, and later requests of the trace.

    A later part has as many requests as one of the search and begins after it; each is another one
    as far as the trace reaches, then they come again with other seeds. Where a seed draws nothing
    (a file, with its own times) there are no fresh seeds, and each later part is there once. Where
    the trace is too short there are no later parts.
    """
    config = configured(tuning.document)
    seeds = range(tuning.train[-1].seed + 1, tuning.train[-1].seed + 1 + checks)
    skip = config.workload.skip
    drawn = seed_matters(config)
    wanted = tuning.requests * (1 + checks)
    rows = wanted if is_sample(config) else rows_of(config, tuning.beside, wanted)
    later = [skip + tuning.requests * (1 + i) for i in range(rows // tuning.requests - 1)]
    found = {}
    if drawn:
        found[FRESH] = tuple(Part(seed, skip) for seed in seeds)
    if later:
        count = checks if drawn else min(checks, len(later))
        found[LATER] = tuple(
            Part(seed, later[index % len(later)])
            for index, seed in enumerate(seeds)
            if index < count
        )
    return found


def run_checks(search: Search, checks: int, simulator: Simulator) -> list[Check]:
    """Simulate the winner, the run as it is and gLLM's defaults on data the search did not see."""
    contenders = _contenders(search)
    found = []
    for name, parts in unseen_parts(search.tuning, checks).items():
        trials = evaluate(search.tuning, list(contenders.values()), parts, simulator)
        found.append(Check(name, parts, dict(zip(contenders, trials, strict=True))))
    return found


def _contenders(search: Search) -> dict[str, Candidate]:
    return {TUNED: search.winner.candidate} | {each.name: each.candidate for each in rivals(search)}


def rivals(search: Search) -> list[Tried]:
    """Return the baselines that the winner is held against: the run as it is, gLLM's defaults."""
    names = (search.tuning.default, GLLM)
    return [each for each in search.tried if each.name in names]


def idle_by_cause(outcome: Outcome, *, ranks: int) -> dict[str, Any]:
    """Return the seconds that all GPUs together stand idle by cause, and those they compute.

    A stage is `ranks` GPUs; in a system of pools they are taken for as many in each.
    """
    found = [attribute(replica) for replica in outcome.replicas]
    totals = [{"computing": each.busy_s, **each.totals()} for each in found]
    return {cause: ranks * sum(each[cause] for each in totals) for cause in totals[0]}


def run_bubbles(
    search: Search, checks: Sequence[Check], simulator: Simulator
) -> dict[str, Mapping[str, Any]]:
    """Return GPU seconds by cause of the run as it is and of the winner, on one unseen part."""
    tuning = search.tuning
    part = checks[-1].parts[0] if checks else tuning.train[0]
    contenders = {tuning.default: search.default.candidate, TUNED: search.winner.candidate}
    ranks = [with_(tuning.document, each.patch).tensor_parallel for each in contenders.values()]
    points = [
        replace(point, measure=idle_by_cause, more=(("ranks", count),))
        for each, count in zip(contenders.values(), ranks, strict=True)
        for point in tuning.study([part]).points([each.patch])
    ]
    records = simulator.records(points)
    return {name: record.values for name, record in zip(contenders, records, strict=True)}
