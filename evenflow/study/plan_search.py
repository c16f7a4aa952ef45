"""Search the cheapest deployment that keeps an SLO: which points are simulated, and on what.

What bounds refute is not simulated, and a part of the trace comes before the whole. A run ends once
it cannot keep the SLO. Two things are taken for granted. Fewer replicas or more traffic than break
the SLO break it, too. An SLO that a part breaks, the whole breaks. `exhaustive` takes nothing for
granted of points. Knows no words and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Patch
from evenflow.specs.gpu import gpus, links
from evenflow.study.advice import faster_links
from evenflow.study.deployments import why_fixed
from evenflow.study.plan_question import CHANGE, PlanQuestion, Setting, Stretch, name_of
from evenflow.study.rates import bisect, rounded
from evenflow.study.searches import side_by_side
from evenflow.study.trials import Search, Trial, Variant

STEPS = 32
"""The most steps by which the rate is raised, to 4.8 times what is asked."""

NEAREST = 5
"""The number of layouts that miss and are simulated on the whole trace."""

CONTENDERS = 3
"""The number of layouts that miss and are simulated with changes."""

TIMES = (4, 16)
"""The factor by which more GPUs are tried where the allowed ones do not suffice."""

ROUGHLY = 0.25
"""How exactly a rate is found there."""

MORE = 1 / 8
"""The share of GPUs that is added where these do not keep the SLO; then twice as many each time."""

TOGETHER = 3
"""The most settings that all requests decide on at once, after the likeliest has failed."""

Point: TypeAlias = tuple[Setting, int]
"""A setting and its number of replicas."""

Case: TypeAlias = Callable[[int, Stretch], Variant]
"""Returns the case that decides whether a step keeps the SLO on a part."""

FoundT = TypeVar("FoundT")
Asking: TypeAlias = Generator[Sequence[Variant], list[Trial], FoundT]
"""A search that returns what it found."""


def _highest(
    question: PlanQuestion, case: Case, parts: Sequence[Stretch], most: int, *, width: int = 1
) -> Asking[int]:
    """Find the highest step of 1 to `most` that keeps the SLO on all parts; 0 where none does.

    One part after the other lowers it, by halving; `width` steps are tried at once. What is likely
    comes first: that a cheap part refutes all steps, and that what it left keeps the SLO.
    """
    for part in parts:
        low, likely = 0, 1 if part is question.parts[0] else most
        while low < most:
            size = most - low
            steps = {likely or low + -(-size * k // (width + 1)) for k in range(1, width + 1)}
            likely, trials = 0, (yield [case(step, part) for step in sorted(steps)])
            for step, trial in zip(sorted(steps), trials, strict=True):
                if not question.keeps(trial):
                    most = step - 1
                    break
                low = step
    return most


@dataclass(slots=True)
class _Race:
    """State of a search: the replicas that may keep the SLO, by setting, and the best.

    `best` is the fewest GPUs with which a point kept it; at first, one more than there may be.
    """

    question: PlanQuestion
    left: dict[str, list[int]]
    best: int

    def least(self, setting: Setting) -> int:
        """Return the fewest GPUs with which a setting may keep the SLO; the best where not less."""
        return min([self.best, *(each * setting.gpus for each in self.left[setting.name])])

    def narrow(self, setting: Setting, parts: Sequence[Stretch], gpus: int) -> Search:
        """Ask with how few replicas, up to `gpus` GPUs, a setting keeps the SLO of some parts."""
        question, name = self.question, setting.name
        counts = [each for each in self.left[name] if each * setting.gpus <= gpus]

        def case(step: int, part: Stretch) -> Variant:
            return question.case(setting, counts[-step], part, ends=True)

        step = yield from _highest(question, case, parts, len(counts))
        del self.left[name][: len(counts) - step]
        if step and parts[-1] is question.parts[-1]:
            self.best = min(self.best, self.least(setting))

    def scout(self, settings: Sequence[Setting], part: Stretch) -> Asking[tuple[Setting, int]]:
        """Return which of some settings keeps a part with the fewest GPUs, and how many.

        The GPUs are halved for all together; the first setting and `best` where none keeps it.
        """
        found, fewest = settings[0], self.best
        while (low := min(map(self.least, settings))) < fewest:
            kept = yield from self._keeping(settings, (low + fewest) // 2, part)
            if kept:
                settings = [setting for setting, _ in kept]
                found, fewest = min(kept, key=lambda each: each[1])
        return found, fewest

    def _keeping(
        self, settings: Sequence[Setting], gpus: int, part: Stretch
    ) -> Asking[list[tuple[Setting, int]]]:
        """Try settings on as many of `gpus` GPUs as fit; return which keep a part, on how many."""
        points = []
        for each in settings:
            if counts := [n for n in self.left[each.name] if n * each.gpus <= gpus]:
                points.append((each, counts))
        trials = yield [self.question.case(each, n[-1], part, ends=True) for each, n in points]
        kept = []
        for (setting, counts), trial in zip(points, trials, strict=True):
            if self.question.keeps(trial):
                kept.append((setting, counts[-1] * setting.gpus))
            else:
                del self.left[setting.name][: len(counts)]
        return kept


def search(question: PlanQuestion) -> Search:
    """Find the fewest GPUs with which a setting keeps the SLO; `exhaustive`: ask for all points.

    A stretch of the trace finds which setting of the run's own policy needs the fewest GPUs. With
    this number, stretches refute others, while all requests decide on it. All requests decide on
    the rest, the cheapest first, of these what a stretch breaks at the highest rate, and up to
    which rate. Where it does not keep the SLO, some are tried at a time; then GPUs are added.
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
    most = question.ask.gpus[-1]
    race, first, gpus = _Race(question, left, most + 1), settings[0], most
    if stretches:
        scouts = [each for each in settings if each.candidate.policy == first.candidate.policy]
        first, gpus = yield from race.scout(scouts, stretches[-1])
    asked, more = [race.narrow(first, [whole], gpus)], 0
    rest = [each for each in settings if stretches and each is not first]
    while (least := min(map(race.least, settings))) < race.best:
        gpus = max(gpus, least)
        asked += [race.narrow(each, stretches, gpus) for each in rest]
        yield from side_by_side(asked)
        rest = [each for each in rest if race.least(each) > gpus]  # the others kept the stretches
        together = 1
        while (least := min(map(race.least, settings))) < min(gpus + 1, race.best):
            points = [(each, least // each.gpus) for each in settings if race.least(each) == least]
            broken = yield from _broken_together(question, points)
            likely = sorted(range(len(points)), key=lambda at: -broken[at])[:together]
            asked = [race.narrow(points[at][0], [whole], min(gpus, race.best - 1)) for at in likely]
            ahead = _reached(question, points[likely[0]], broken[likely[0]] - 1)
            yield from side_by_side([*asked, ahead])
            together = TOGETHER
        more = 2 * more or math.ceil(MORE * gpus)
        asked, gpus = [], gpus + more


def equals(question: PlanQuestion, trials: Sequence[Trial]) -> list[tuple[Setting, int]]:
    """Return the points that may keep the SLO with the fewest GPUs, in the settings' order."""
    gpus = ranked(question, trials)[0].labels["gpus"]
    beaten = [each for each in trials if question.is_planned(each) and not question.keeps(each)]
    broken = {(each.labels["setting"], each.labels["replicas"]) for each in beaten}
    points = [(each, gpus // each.gpus) for each in question.settings.values()]

    def is_open(setting: Setting, count: int) -> bool:
        if count * setting.gpus != gpus or count not in setting.counts:
            return False
        more = [count] if question.ask.exhaustive else [n for n in setting.counts if n >= count]
        return broken.union(question.bounds).isdisjoint((setting.name, n) for n in more)

    return [point for point in points if is_open(*point)]


def ranked(question: PlanQuestion, trials: Sequence[Trial]) -> list[Trial]:
    """Return the points that keep the SLO, the cheapest first, of those the widest margin first."""
    kept = {}
    for trial in trials:
        if question.is_whole(trial) and question.excess(trial) <= 0:
            kept[trial.labels["setting"], trial.labels["replicas"]] = trial
    order = list(question.settings)

    def place(trial: Trial) -> tuple[int, float, int]:
        name = trial.labels["setting"]
        return trial.labels["gpus"], -question.margin(trial), order.index(name)

    return sorted(kept.values(), key=place)


def climb(question: PlanQuestion, trials: Sequence[Trial]) -> Search:
    """Find which point of the fewest GPUs keeps the SLO at the highest rate, in steps of TOLERANCE.

    Of equal ones it is that with the widest margin at the rate asked for, then the first; without a
    rate all are simulated on all requests. The longest stretch shows which may be best, and up to
    which step; all requests decide: on one that is likely, then on what may beat it.
    """
    points = equals(question, trials)
    if question.rate is None:
        yield [question.case(*point, ends=True) for point in points]
        return
    known = {name_of(each): question.margin(each) for each in ranked(question, trials)}
    margins = [known.get(f"{count} x {setting.name}") for setting, count in points]
    broken = yield from _broken_together(question, points)
    left = [at for at, step in enumerate(broken) if step]
    left.sort(key=lambda at: (-broken[at], -(margins[at] or 0.0)))
    while left:
        at = left.pop(0)
        if best := (yield from _reached(question, points[at], broken[at] - 1)):
            rivals = [
                _rival(question, points[each], broken[each] - 1, margins[each], best)
                for each in left
            ]
            yield from side_by_side(rivals)
            return


def _broken_together(question: PlanQuestion, points: Sequence[Point]) -> Asking[list[int]]:
    """Return for each point a step that breaks the SLO on the longest stretch, or one more.

    The points are raised together, by doubling and halving, while one keeps the SLO.
    """
    left, top, end = list(range(len(points))), -1, STEPS + 1
    broken = [end for _ in points]
    for part in question.parts[-2:-1]:
        while top + 1 < end:
            step = max(top + 1, min(2 * top, (top + end) // 2))
            trials = yield [question.at_step(*points[at], step, part) for at in left]
            kept = [at for at, trial in zip(left, trials, strict=True) if question.keeps(trial)]
            for at in set(left).difference(kept):
                broken[at] = step
            left, top, end = (kept, step, end) if kept else (left, top, step)
    return broken


def _reached(question: PlanQuestion, point: Point, most: int) -> Asking[tuple[int, float] | None]:
    """Return the highest step up to `most` at which a point keeps the SLO, and its margin at 0."""
    whole = question.parts[-1]
    case = partial(question.at_step, *point)
    steps = sorted({0, *range(most + 1)[-2:]} if question.parts[:-1] else {0})
    trials = yield [case(step, whole) for step in steps]
    if not question.keeps(trials[0]):
        return None
    found = yield from _highest(question, case, [whole], most, width=2)
    return found, question.margin(trials[0])


def _rival(
    question: PlanQuestion,
    point: Point,
    most: int,
    margin: float | None,
    best: tuple[int, float],
) -> Search:
    """Ask whether a point beats the best, which keeps the SLO up to a step and has a margin.

    It keeps it up to a higher step, `most` at most, or up to this one with more margin. `margin` is
    its own, where it is known.
    """
    whole, case, (top, least) = question.parts[-1], partial(question.at_step, *point), best

    def above(step: int, part: Stretch) -> Variant:
        return case(top + step, part)

    if most > top and (yield from _highest(question, above, [whole], most - top)):
        yield [case(0, whole)]
        return
    if most < top or (margin is not None and margin < least):
        return
    for part in question.parts[-2:] if margin is None else ():
        wider = least * (1 - 1e-9)  # equal margins are rounded
        (trial,) = yield [question.case(*point, part, ends=True, wider=wider)]
        if not question.keeps(trial):
            return
    if top:
        yield [case(top, whole)]


# -- where nothing keeps the SLO: the nearest points, and changes to them -------------------------


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
    """Simulate what may make the nearest points keep the SLO: other GPUs, or more of them."""
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


def less_traffic(question: PlanQuestion, misses: Sequence[Trial]) -> Search:
    """Find which lower rate the nearest points hold; nothing without a rate."""
    if question.rate is not None:
        start = rounded(question.rate / TIMES[0])
        cases_of = [partial(question.case, *question.point(each), None) for each in misses]
        yield from side_by_side([bisect(start, ROUGHLY, of, question.tried) for of in cases_of])


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
