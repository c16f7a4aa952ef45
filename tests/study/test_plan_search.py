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
from evenflow.study.plan_question import RATE, TOLERANCE, WIDER, PlanQuestion, Stretch, name_of
from evenflow.study.plan_search import STEPS
from evenflow.study.points import Record
from evenflow.study.slo import parse_slo
from evenflow.study.trials import Study, Trial, Variant
from tests.amounts import many
from tests.study.test_plan import SHORT, asked

MOST, LIMIT_MS = 24, 10
PARTS = (Stretch(8, 0), Stretch(12, 0), Stretch(24, 0))


@dataclass(frozen=True)
class Fate:
    """What a setting keeps: from how many GPUs on each part, and up to which step."""

    least: tuple[int, int, int]
    steps: tuple[int, int, int]
    ttft_ms: float = 1.0

    @classmethod
    def drawn(cls, random: Random) -> Fate:
        """Draw one: a part is no harder than the whole."""
        least = sorted(random.choice([4, 8, 12, 16, 24, 99]) for _ in PARTS)
        steps = sorted((random.randint(0, 4) for _ in range(2)), reverse=True)
        parts = (least[0], least[1], least[2]), (STEPS, steps[0], steps[1])
        return cls(*parts, float(random.randint(1, 4)))


class World:
    """Answers for what would be simulated; keeps the labels of what is asked of all requests."""

    def __init__(self, question: PlanQuestion, fates: Mapping[str, Fate]) -> None:
        self.question, self.fates = question, fates
        self.whole: list[Mapping[str, Any]] = []

    def trials(self, study: Study, cases: Sequence[Variant]) -> list[Trial]:
        return [self._trial(case.labels) for case in cases]

    def _trial(self, labels: Mapping[str, Any]) -> Trial:
        fate, rate = self.fates[labels["setting"]], self.question.rate
        assert rate is not None
        part = [each.requests for each in PARTS].index(labels["requests"])
        self.whole += [labels] * (part == 2)
        step = round(math.log(labels.get(RATE, rate) / rate) / math.log(1 + TOLERANCE))
        kept = labels["gpus"] >= fate.least[part] and step <= fate.steps[part]
        kept = kept and fate.ttft_ms <= LIMIT_MS * (1 - labels.get(WIDER, 0.0))
        values = {"completed": 24, "failed": 0, "p90_ttft_ms": fate.ttft_ms}
        return Trial(labels, (Record("", values if kept else {"missed": "ttft", "done": 1}),))


@cache
def question(*, exhaustive: bool) -> PlanQuestion:
    slo = tuple(parse_slo([f"p90_ttft_ms={LIMIT_MS}"]))
    wish: dict[str, Any] = {"gpus": tuple(range(1, MOST + 1)), "budgets": (512,)}
    wish |= {"schedulers": ("sarathi", "vllm_v1"), "exhaustive": exhaustive}
    found: PlanQuestion = asked(SHORT, slo, **wish)
    return replace(found, parts=PARTS[2:] if exhaustive else PARTS, bounds={})


@given(st.integers(0).map(Random))
@settings(max_examples=many(100), deadline=None)
def test_the_best_point_of_any_world_is_found(random: Random) -> None:
    """The fewest GPUs, of these the highest rate, then the widest margin, then the first."""
    few, all_ = question(exhaustive=False), question(exhaustive=True)
    fates = {name: Fate.drawn(random) for name in few.settings}
    keeping = [
        (count * each.gpus, -fates[name].steps[2], fates[name].ttft_ms, place, f"{count} x {name}")
        for place, (name, each) in enumerate(few.settings.items())
        for count in each.counts
        if count * each.gpus >= fates[name].least[2]
    ]
    if keeping:
        fewer, tried = World(few, fates), World(all_, fates)
        for found in (answered(few, fewer), answered(all_, tried)):  # type: ignore[arg-type]
            assert name_of(found.best) == min(keeping)[-1]
        assert len(fewer.whole) < len(tried.whole)


HOPELESS = Fate((99, 99, 99), (STEPS, 0, 0))
MISSES = Fate((8, 8, 16), (STEPS, 0, 0))
"""All requests need twice as many GPUs as a stretch."""


def searched(fates: Mapping[str, Fate]) -> tuple[str, World]:
    """Return the best point of a world, in which all other settings are hopeless."""
    asked_for = question(exhaustive=False)
    world = World(asked_for, {**dict.fromkeys(asked_for.settings, HOPELESS), **fates})
    return name_of(answered(asked_for, world).best), world  # type: ignore[arg-type]


def test_what_needs_as_few_gpus_is_decided_before_more_gpus_are_tried() -> None:
    keeps = Fate((8, 8, 8), (STEPS, 0, 0))
    best, world = searched({"PP1, sarathi 512": MISSES, "PP1, vllm_v1 512": keeps})
    assert best == "8 x PP1, vllm_v1 512"
    assert {each["gpus"] for each in world.whole} == {8}


def test_a_point_whose_margin_is_known_to_be_narrower_is_not_raised_as_far() -> None:
    narrow, wide = Fate((8, 8, 8), (STEPS, 1, 1), 5.0), Fate((8, 8, 8), (STEPS, 2, 1), 1.0)
    both = {"PP1, vllm_v1 512": narrow, "PP2, vllm_v1 512": wide}
    best, world = searched({"PP1, sarathi 512": MISSES, **both})
    assert best == "4 x PP2, vllm_v1 512"
    assert {each["setting"] for each in world.whole if RATE in each} == {"PP2, vllm_v1 512"}


def test_of_points_that_keep_the_slo_as_far_the_widest_margin_wins() -> None:
    layouts = ("PP1", "PP2", "PP4", "TP2", "TP4")
    alike = {f"{each}, vllm_v1 512": Fate((8, 8, 8), (STEPS, 1, 1), 5.0) for each in layouts}
    best, _ = searched(alike | {"TP4, vllm_v1 512": Fate((8, 8, 8), (STEPS, 1, 1), 4.0)})
    assert best == "2 x TP4, vllm_v1 512"
