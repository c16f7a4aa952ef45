"""What makes a comparison of runs unfair, or weak, in a sentence each; every command that compares
asks here.

Knows summaries and where they come from; not how the runs were made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.report.tables import percent
from experiments.report.words import listed

if TYPE_CHECKING:
    from experiments.study.trials import Trial

NUMBER = re.compile(r"[\d.,]+")

FEW = 50
"""Of fewer requests nearly nothing follows for others."""

SATURATED = 0.95
"""Stages that compute for more of the time are within 5 % of what they can do."""

TOLD_SHARE = 0.1
"""A run says so when more of its predicted time was extrapolated or filled in."""


class Side(NamedTuple):
    """A run of a comparison: its summary and, where it is known, its provenance."""

    summary: Mapping[str, Any]
    provenance: Mapping[str, Any] = {}

    def key(self, name: str) -> Any:
        """Return a key of the run's configuration, such as `kv.prefix_cache`; None if unknown."""
        value: Any = self.provenance.get("config", {})
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


Sides = Mapping[str, Side]


def doubts(sides: Sides) -> list[str]:
    """Return what makes a comparison of these runs, by name, unfair or weak; nothing of one run."""
    return [line for rule in RULES for line in rule(sides)] if len(sides) > 1 else []


def of_trials(trials: Mapping[str, Trial]) -> list[str]:
    """Return the same of trials that were completed, on the first part of each, marked as such."""
    done = {name: of_trial(trial) for name, trial in trials.items() if not trial.errors}
    return marked(doubts(done))


def of_trial(trial: Trial) -> Side:
    """Return a trial as a side, by its first part; all trials of a study are of one version."""
    first, config = trial.records[0], trial.config
    resolved = {} if config is None else config.resolved()
    return Side(first.values, {"config": resolved, "cost_source": first.cost_source})


def alone(name: str, side: Side) -> list[str]:
    """Return what makes one run weak that is held against a limit, or a measurement."""
    return [line for rule in (_few, _extrapolated) for line in rule({name: side})]


def alike(lines: Sequence[str]) -> list[str]:
    """Return lines that differ in their numbers only as one, the first, with how many they are."""
    forms = [NUMBER.sub("", line) for line in lines]
    first = dict(zip(reversed(forms), reversed(lines), strict=True))
    return [
        f"{first[form]} ({count} times)" if count > 1 else first[form]
        for form, count in Counter(forms).items()
    ]


def marked(lines: Iterable[str]) -> list[str]:
    """Return lines as they stand among other sentences."""
    return [f"NOT FAIR: {line}" for line in lines]


def _few(sides: Sides) -> Iterator[str]:
    counts = {name: int(side.summary.get("completed", FEW)) for name, side in sides.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} with {name}" for name, count in counts.items())
        yield f"not as many requests were completed: {told}"
    if min(counts.values()) < FEW:
        yield f"{min(counts.values())} requests are few: others may tell otherwise"


def _caches(sides: Sides) -> Iterator[str]:
    for words, key in (("warm", "workload.after"), ("on", "kv.prefix_cache")):
        able = [name for name, side in sides.items() if side.key(key)]
        others = [name for name in sides if name not in able]
        if able and others:
            yield f"prefix caches are {words} with {listed(able)}, and not with {listed(others)}"


def _saturated(sides: Sides) -> Iterator[str]:
    arriving = {name: side for name, side in sides.items() if "overloaded" in side.summary}
    shares = {name: side.summary.get("busy_share", 0.0) for name, side in arriving.items()}
    near = [name for name, share in shares.items() if share > SATURATED]
    if near:
        yield (
            f"within 5 % of saturation with {listed(near)} (stages compute "
            f"{percent(max(shares.values()), 0, sign=False)} of the time): latencies follow from "
            "the last per cents"
        )


def _extrapolated(sides: Sides) -> Iterator[str]:
    for name, side in sides.items():
        share = side.provenance.get("cost_source", {}).get("extrapolated_share", 0.0)
        if share > TOLD_SHARE:
            told = percent(share, 0, sign=False)
            yield f"{told} of the time predicted with {name} rests on no measurement"


def _versions(sides: Sides) -> Iterator[str]:
    known = [side.provenance for side in sides.values()]
    versions = {version_of(each) for each in known if "evenflow_version" in each}
    if len(versions) > 1:
        yield f"made by other versions of evenflow: {listed(sorted(versions))}"
    runtimes = [side.key("runtime") for side in sides.values()]
    names = sorted({each for each in runtimes if isinstance(each, str)})
    engines = [name.rpartition("-")[0] for name in names if "-" in name]
    if len(set(engines)) < len(engines):
        yield f"the CPU time of other versions of an engine: {listed(names)}"


RULES: Sequence[Callable[[Sides], Iterator[str]]] = (
    *(_few, _caches, _saturated, _extrapolated, _versions),
)


def version_of(provenance: Mapping[str, Any]) -> str:
    """Return the version and commit that made a run."""
    commit, dirty, _ = str(provenance.get("git_commit") or "none").partition("-dirty")
    return f"{provenance.get('evenflow_version')} (commit {commit[:12]}{dirty})"
