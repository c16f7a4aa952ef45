"""What would keep an SLO that no point of a plan keeps: the nearest points, and changes to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Patch
from evenflow.specs.gpu import gpus, links
from evenflow.study.advice import faster_links
from evenflow.study.deployments import why_fixed
from evenflow.study.plan_question import CHANGE, PlanQuestion
from evenflow.study.plan_rates import at_rate, probe
from evenflow.study.rates import bisect, rounded
from evenflow.study.searches import side_by_side
from evenflow.study.trials import Search, Trial, Variant

NEAREST = 5
"""The number of layouts that miss and are simulated on the whole trace."""

CONTENDERS = 3
"""The number of layouts that miss and are simulated with changes."""

TIMES = (4, 16)
"""The factor by which more GPUs are tried where the allowed ones do not suffice."""

ROUGHLY = 0.25
"""How exactly a rate is found there."""


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
        found = [bisect(start, ROUGHLY, partial(at_rate, question, each), at) for each in best]
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
