"""A sweep from its file to its folder: simulate it, check its best point on unseen requests."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenflow.config.provenance import wall_clock
from evenflow.config.yaml_file import Patch
from evenflow.errors import DoesNotFitError, UsageError
from evenflow.report.tables import write_json
from evenflow.study import unseen
from evenflow.study.points import HEADER, Store
from evenflow.study.searches import Optuna, Score, identity, optuna, proposed
from evenflow.study.sweep_file import Sweep, SweepConfig, check
from evenflow.study.sweep_findings import answers
from evenflow.study.sweep_page import write_findings
from evenflow.study.sweep_words import Swept, replications_words, setting
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
    with how.simulator("points", asked.num_simulations + more) as who:
        findings = run_sweep(asked, who, allow_refused=allow_refused)
        if on_unseen:
            findings = checked(findings, who)

        def write(folder: Path) -> None:
            write_findings(folder, findings, Path(asked.document.name).name)
            clock = wall_clock(time.perf_counter() - started)
            write_json(folder / "wall_clock.json", clock | {"executor": how.executor})

        how.write(write)
    return findings


def run_sweep(asked: Sweep, simulator: Simulator, *, allow_refused: bool = False) -> Swept:
    """Simulate all points of a sweep that the store does not have.

    The findings depend on the sweep only, not on the executor nor on the store's contents.
    """
    known = asked.known
    tried = run(asked.study, simulator, _search(asked, known, allow_refused))
    trials = list({identity(trial.labels): trial for trial in tried}.values())
    default = asked.default
    if default is None:
        return Swept(asked, trials, None, allow_refused=allow_refused)
    chosen = asked.chosen or [trial.labels for trial in tried[len(known) :]]
    where = [identity(trial.labels) for trial in trials].index(identity(default))
    extra = identity(default) not in map(identity, chosen)
    return Swept(asked, trials, where, extra, allow_refused)


def checked(findings: Swept, simulator: Simulator) -> Swept:
    """Return the findings with the best point checked on unseen parts, if it beats the default."""
    best, base = findings.best, findings.base
    if best is None or base is None or best is base:
        return findings
    checks = unseen.check(findings.sweep, best.labels, base.labels, simulator)
    return replace(findings, checks=checks)


def _search(asked: Sweep, known: Sequence[Patch], allow_refused: bool) -> Search:
    """Ask for the points known beforehand, then for the points that Optuna proposes."""
    config, method = asked.config, asked.config.method
    if known:
        yield [Variant(patch, patch) for patch in known]
    if isinstance(method, Optuna):

        def propose(asked: Any) -> Variant:
            values = {name: proposed(asked, name, each) for name, each in config.parameters.items()}
            return Variant(values, values)

        def score(trial: Trial) -> Score:
            if answers(trial, allow_refused):
                return _score(config, trial)
            return [math.nan] * len(config.objectives), {}

        goals = [objective.goal for objective in config.objectives]
        yield from optuna(method, goals, propose, score)


def _score(config: SweepConfig, trial: Trial) -> Score:
    values = [trial.mean(objective.metric) for objective in config.objectives]
    excess = {
        name: max(each.excess(trial.mean(name)) for each in bounds.of(name))
        for name, bounds in config.limits.items()
    }
    return values, excess


def dry_run(asked: Sweep, how: How, *, on_unseen: bool = False) -> list[str]:
    """Return what a sweep would simulate, in sentences; simulates nothing and writes nothing.

    UsageError for a mistake in the file, as `sweep`.
    """
    check(asked)
    to_check = unseen.require_unseen(asked) if on_unseen else 0
    known, method = asked.known, asked.config.method
    count, repeated = len(known), asked.config.replications
    more = (
        f", and up to {method.trials} that the search asks for"
        if isinstance(method, Optuna)
        else ""
    )
    stored = 0
    if how.out is not None and how.resume and (how.out / STORE / HEADER).exists():
        store = Store(how.out / STORE)
        keys = {point.key for point in asked.study.points(known)}
        stored = sum(store.get(key) is not None for key in keys)
    lost: dict[str, list[int]] = {}
    for index, patch in enumerate(known):
        if why := _does_not_fit(asked, patch):
            lost.setdefault(why, []).append(index)
    done = f", of which {stored} are done" if stored else ""
    total = f"{asked.num_simulations} simulations"
    total += f", and up to {to_check} that check the best point" if to_check else ""
    return [
        f"{count} points{more}, {replications_words(repeated)}: {total}{done}",
        f"{count - sum(map(len, lost.values()))} of the {count} fit in memory",
        *(
            f"{len(places)} not, such as point {places[0]} "
            f"({setting(known[places[0]], asked.config.tied)}): {why}"
            for why, places in lost.items()
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
