"""A sweep from its file to its folder: simulate it, check its best point on unseen requests."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenflow.config.provenance import wall_clock
from evenflow.config.yaml_file import Patch
from evenflow.errors import DoesNotFitError, UsageError
from evenflow.report.tables import write_json
from evenflow.study import unseen
from evenflow.study.points import Store
from evenflow.study.searches import Optuna, Score, identity, optuna, proposed
from evenflow.study.sweep_file import Sweep, check
from evenflow.study.swept import Swept, answers, replications_words, setting
from evenflow.study.trials import STORE, How, Search, Simulator, Trial, Variant, run


def sweep(asked: Sweep, how: How, *, on_unseen: bool = False, allow_refused: bool = False) -> Swept:
    """Simulate all points of a sweep, checked first; return what was found.

    `on_unseen`: the best point and the default are simulated on requests that the sweep has not
    seen, too. `allow_refused`: points count however many of their requests are refused. UsageError
    for a mistake in the file, before anything is simulated.
    """
    started = time.perf_counter()
    check(asked)
    more = unseen.require_unseen(asked) if on_unseen else 0
    total = asked.num_simulations + more
    with how.simulator("points", total, "evenflow.study.sweep_page") as who:
        findings = run_sweep(asked, who, allow_refused=allow_refused)
        if on_unseen:
            findings = checked(findings, who)

        def write(folder: Path) -> None:
            from evenflow.study.sweep_page import write_findings

            write_findings(folder, findings, Path(asked.document.name).name)
            clock = wall_clock(time.perf_counter() - started)
            write_json(folder / "wall_clock.json", clock | {"executor": how.executor})

        how.write(write)
    return findings


def run_sweep(asked: Sweep, simulator: Simulator, *, allow_refused: bool = False) -> Swept:
    """Simulate all points of a sweep that the store does not have.

    The findings depend on the sweep only, not on the executor nor on the store's contents.
    """
    tried = run(asked.study, simulator, _search(asked, allow_refused))
    trials = {identity(trial.labels): trial for trial in tried}
    default, where, extra = asked.default, None, False
    if default is not None:
        chosen = asked.chosen or [trial.labels for trial in tried[len(asked.known) :]]
        where = list(trials).index(identity(default))
        extra = identity(default) not in map(identity, chosen)
    return Swept(asked, list(trials.values()), where, extra, allow_refused)


def checked(findings: Swept, simulator: Simulator) -> Swept:
    """Return the findings with the best point checked on unseen parts, if it beats the default."""
    best, base = findings.best, findings.base
    if best is None or base is None or best is base:
        return findings
    checks = unseen.check(findings.sweep, best.labels, base.labels, simulator)
    return replace(findings, checks=checks)


def _search(asked: Sweep, allow_refused: bool) -> Search:
    """Ask for the points known beforehand, then for the points that Optuna proposes."""
    config, method = asked.config, asked.config.method
    if asked.known:
        yield [Variant(patch, patch) for patch in asked.known]
    if not isinstance(method, Optuna):
        return

    def propose(trial: Any) -> Variant:
        values = {name: proposed(trial, name, each) for name, each in config.parameters.items()}
        return Variant(values, values)

    def score(trial: Trial) -> Score:
        if not answers(trial, allow_refused):
            return [math.nan] * len(config.objectives), {}
        excess = {
            name: max(each.excess(trial.mean(name)) for each in bounds.of(name))
            for name, bounds in config.limits.items()
        }
        return [trial.mean(objective.metric) for objective in config.objectives], excess

    yield from optuna(method, [each.goal for each in config.objectives], propose, score)


def dry_run(asked: Sweep, how: How, *, on_unseen: bool = False) -> list[str]:
    """Return what a sweep would simulate, in sentences; simulates nothing and writes nothing.

    UsageError for a mistake in the file, as `sweep`.
    """
    check(asked)
    known, method = asked.known, asked.config.method
    points, total = f"{len(known)} points", f"{asked.num_simulations} simulations"
    if isinstance(method, Optuna):
        points += f", and up to {method.trials} that the search asks for"
    if on_unseen:
        total += f", and up to {unseen.require_unseen(asked)} that check the best point"
    if how.out is not None and how.resume and (how.out / STORE).exists():
        store = Store(how.out / STORE)
        stored = {point.key for point in asked.study.points(known) if store.get(point.key)}
        total += f", of which {len(stored)} are done" if stored else ""
    lost: dict[str, list[Patch]] = {}
    for patch in known:
        if why := _does_not_fit(asked, patch):
            lost.setdefault(why, []).append(patch)
    fitting = len(known) - sum(map(len, lost.values()))
    return [
        f"{points}, {replications_words(asked.config.replications)}: {total}",
        f"{fitting} of the {len(known)} fit in memory",
        *(
            f"{len(patches)} not, such as point {known.index(patches[0])} "
            f"({setting(patches[0], asked.config.tied)}): {why}"
            for why, patches in lost.items()
        ),
    ]


def _does_not_fit(asked: Sweep, patch: Patch) -> str:
    try:
        asked.study.build(patch)
    except DoesNotFitError as error:
        return str(error)
    except UsageError:  # a point that is recorded as failed, for another reason
        pass
    return ""
