"""The search for a plan in drawn worlds: it finds what all points would, and asks for less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.study.plan import answered
from evenflow.study.plan_question import RATE, TOLERANCE, PlanQuestion, Stretch, name_of
from evenflow.study.plan_search import STEPS
from evenflow.study.points import Record
from evenflow.study.slo import parse_slo
from evenflow.study.trials import Study, Trial, Variant
from tests.amounts import many
from tests.study.test_plan import SHORT, asked

MOST = 24
PARTS = (Stretch(8, 0), Stretch(12, 0), Stretch(24, 0))


@dataclass(frozen=True)
class Fate:
    """What a setting keeps: from how many GPUs each part, up to which step the two last parts."""

    least: tuple[int, int, int]
    steps: tuple[int, int, int]

    @classmethod
    def drawn(cls, random: Random) -> Fate:
        """Draw one: a part is no harder than the whole."""
        least = sorted(random.choice([4, 8, 12, 16, 24, 99]) for _ in PARTS)
        steps = sorted((random.randint(0, 4) for _ in range(2)), reverse=True)
        return cls((least[0], least[1], least[2]), (STEPS, steps[0], steps[1]))


class World:
    """Answers for what would be simulated; keeps the GPUs of what is asked of all requests."""

    def __init__(self, question: PlanQuestion, fates: Mapping[str, Fate]) -> None:
        self.question, self.fates = question, fates
        self.whole: list[int] = []

    def trials(self, study: Study, cases: Sequence[Variant]) -> list[Trial]:
        return [self._trial(case.labels) for case in cases]

    def _trial(self, labels: Mapping[str, Any]) -> Trial:
        fate, rate = self.fates[labels["setting"]], self.question.rate
        assert rate is not None
        part = [each.requests for each in PARTS].index(labels["requests"])
        self.whole += [labels["gpus"]] * (part == 2)
        step = round(math.log(labels.get(RATE, rate) / rate) / math.log(1 + TOLERANCE))
        kept = labels["gpus"] >= fate.least[part] and step <= fate.steps[part]
        values = {"completed": 24, "failed": 0, "p90_ttft_ms": 1.0}
        return Trial(labels, (Record("", values if kept else {"missed": "ttft", "done": 1}),))


@cache
def question(*, exhaustive: bool) -> PlanQuestion:
    slo = tuple(parse_slo(["p90_ttft_ms=10"]))
    wish: dict[str, Any] = {"gpus": tuple(range(1, MOST + 1)), "budgets": (512,)}
    found = asked(SHORT, slo, **wish, schedulers=("sarathi", "vllm_v1"), exhaustive=exhaustive)
    return replace(found, parts=PARTS[2:] if exhaustive else PARTS, bounds={})


@given(st.integers(0).map(Random))
@settings(max_examples=many(100), deadline=None)
def test_the_best_point_of_any_world_is_found(random: Random) -> None:
    """The fewest GPUs, and of these the highest rate."""
    few, all_ = question(exhaustive=False), question(exhaustive=True)
    fates = {name: Fate.drawn(random) for name in few.settings}
    keeping = [
        ((count * each.gpus, -fates[name].steps[2]), f"{count} x {name}")
        for name, each in few.settings.items()
        for count in each.counts
        if count * each.gpus >= fates[name].least[2]
    ]
    if keeping:
        best = min(keeping)[0]
        searched, tried = World(few, fates), World(all_, fates)
        for found in (answered(few, searched), answered(all_, tried)):  # type: ignore[arg-type]
            assert name_of(found.best) in [name for key, name in keeping if key == best]
        assert len(searched.whole) < len(tried.whole)


def test_what_needs_as_few_gpus_is_decided_before_more_gpus_are_tried() -> None:
    asked_for = question(exhaustive=False)
    fates = dict.fromkeys(asked_for.settings, Fate((99, 99, 99), (STEPS, 0, 0)))
    fates["PP1, sarathi 512"] = Fate((8, 8, 16), (STEPS, 0, 0))  # all requests need twice as many
    fates["PP1, vllm_v1 512"] = Fate((8, 8, 8), (STEPS, 0, 0))
    world = World(asked_for, fates)
    assert name_of(answered(asked_for, world).best) == "8 x PP1, vllm_v1 512"  # type: ignore[arg-type]
    assert set(world.whole) == {8}
