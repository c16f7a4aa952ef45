"""Token Throttling against gLLM's equations 1 to 4, and its case studies (figures 7 and 8)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.schedulers.token_throttling import (
    AdaptiveReserve,
    Throttle,
    TokenThrottling,
    decode_budget,
    unblock,
)
from evenflow.sim import World, simulate
from evenflow.types import Plan, Prefill, Request, View
from tests.worlds import engine_of, send, small_world

THROTTLES: dict[str, Any] = {"max_prefill": 2048, "min_prefill": 32, "use_wt": True, "use_ut": True}

waiting = st.integers(0, 200_000)
idle = st.floats(0, 1)


@given(waiting, idle, st.integers(1, 16))
def test_alone_wt_is_equation_1_and_ut_is_equation_2_where_the_floor_does_not_act(
    waiting_tokens: int, idle_rate: float, iterations: int
) -> None:
    def budget(**throttles: Any) -> int:
        given = THROTTLES | {"iterations": 8} | throttles
        return Throttle(**given).read(waiting_tokens, idle_rate, 0.0)

    equation_1 = min(max(waiting_tokens / iterations, 32), 2048)
    assert equation_1 - 1 < budget(iterations=iterations, use_ut=False) <= equation_1
    assert abs(budget(use_wt=False) - 2048 * idle_rate) <= 0.5


@given(waiting, idle, st.integers(1, 16), st.floats(0, 0.5))
def test_both_are_equation_3_with_the_floor_on_wt_only(
    waiting_tokens: int, idle_rate: float, iterations: int, thresh: float
) -> None:
    throttle = Throttle(iterations=iterations, **THROTTLES)
    budget = throttle.read(waiting_tokens, idle_rate, thresh)
    if idle_rate < thresh:
        assert budget == 0
        return
    ramp = 2048 * (idle_rate - thresh) / (1 - thresh)
    equation_3 = max(min(waiting_tokens / iterations, ramp), 32)
    if ramp >= 32:
        assert equation_3 - 1 < budget <= equation_3 + 0.5
    else:  # the public code lets UT push the budget below MinP, the equation does not
        assert abs(budget - min(ramp, max(waiting_tokens / iterations, 32))) <= 0.5


@given(waiting, idle, st.integers(1, 16), st.floats(0, 0.5))
def test_as_printed_the_floor_is_outermost(
    waiting_tokens: int, idle_rate: float, iterations: int, thresh: float
) -> None:
    def budget(**throttles: bool) -> int:
        given = THROTTLES | {"iterations": iterations} | throttles
        return Throttle(**given).printed(waiting_tokens, idle_rate, thresh)

    share = waiting_tokens / iterations
    ramp = 2048 * (idle_rate - thresh) / (1 - thresh)
    equation_3 = max(int(min(share, ramp)), 32) if idle_rate >= thresh else 0
    assert budget() == equation_3
    assert budget(use_ut=False) == min(max(int(share), 32), 2048)
    assert budget(use_wt=False) == max(int(2048 * idle_rate), 32)
    assert budget(use_wt=False, use_ut=False) == 2048


@given(st.integers(0, 5_000), st.integers(1, 16), st.integers(0, 100))
def test_decodes_are_equation_4_with_the_remainder_spread(
    running: int, depth: int, turn: int
) -> None:
    budgets = [decode_budget(running, depth, turn + offset) for offset in range(depth)]
    if running >= depth:
        assert sum(budgets) == running
        assert max(budgets) - min(budgets) <= 1
    else:
        assert budgets == [1] * depth


def world(requests: list[Request], depth: int, **params: object) -> World:
    sizes = {"depth": depth, "total_pages": 100_000, "max_model_len": 8192}
    return small_world(requests, "token_throttling", params, times_s=(0.01, 0.0), **sizes)


def test_figure_7_arriving_prompts_are_spread_over_the_next_micro_batches() -> None:
    """pp = 2, T = 3: 900 tokens wait, so 300, then 1/3 of what is left, and so on to the floor.

    The third micro-batch ends the first prompt; it returns as the fifth is scheduled, which
    therefore decodes it.
    """
    prompts = [Request(0, 0.0, 600, 2), Request(1, 0.0, 300, 2)]
    result = simulate(world(prompts, depth=2, iterations=3))
    assert result.prefill_tokens.tolist() == [300, 200, 133, 89, 59, 39, 32, 32, 16, 0]
    assert result.decode_tokens.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    coupled = simulate(world(prompts, depth=2, coupled=True))
    assert coupled.prefill_tokens.tolist() == [900, 0], "w/ CK the first micro-batch takes it all"


@pytest.mark.parametrize(
    ("variant", "tokens"),
    [
        ("paper", [64, 61, 58, 55, 18]),
        ("reading", [64, 61, 59, 56, 16]),
        ("code", [64, 61, 59, 56, 16]),
    ],
)
def test_the_budget_falls_with_the_free_share_of_the_pages(variant: str, tokens: list[int]) -> None:
    """Of 100 pages 100, 96, 92, 88 and 85 are free: 64 tokens x (0.96 - 0.05) / 0.95 = 61.3."""
    params = {"variant": variant, "iterations": 1, "max_prefill": 64, "min_prefill": 1}
    small = replace(world([Request(0, 0.0, 256, 1)], depth=2, **params), total_pages=100)
    assert simulate(small).prefill_tokens.tolist() == tokens


def test_an_adaptive_reserve_is_also_where_prefill_stops() -> None:
    """After 50 calls 0.6 of 350 tokens are 13 pages of 100: 64 x (0.95 - 0.13) / 0.87 = 60.3."""
    params = {"reserve": "adaptive", "iterations": 1, "max_prefill": 64, "min_prefill": 1}
    asked = [Request(0, 0.0, 16, 400, 400), Request(1, 1.0, 256, 1, 1)]
    small = replace(world(asked, depth=2, **params), total_pages=100)
    tokens = simulate(small).prefill_tokens
    assert tokens[tokens > 0].tolist() == [16, 60, 57, 54, 52, 33]


@pytest.mark.parametrize("variant", ["reading", "code"])
def test_on_one_stage_prefill_takes_the_pages_above_the_reserve(variant: str) -> None:
    """Of 20 pages a quarter is kept for decodes; then 15 pages are all there is to take."""
    policy = create("token_throttling", {"variant": variant, "kv_thresh": 0.25})
    batcher = engine_of(policy, 20, [(300, 2), (10, 2)], depth=1)
    assert send(batcher, 0.0).prefill_tokens == 15 * 16
    assert batcher.next(0.0) is None


def test_the_output_still_expected_is_as_predicted_or_else_the_mean_of_what_has_ended() -> None:
    """Two end, with 2 and 6 tokens; the others have 1, and 9, nothing and 0 are predicted."""
    batcher = engine_of(create("sarathi", {}), 99, [(5, 2), (5, 6)])
    seen = []
    for _ in range(6):
        batcher.complete(send(batcher, 0.0), 1.0)
        seen.append(batcher.view.expected_output_tokens)
    assert seen == [0, 0, 0, 0, 0, 0], "until one has ended; then the mean is 2"
    for number, predicted in enumerate((9, None, 0)):
        batcher.add(Request(2 + number, 2.0, 5, 50, predicted))
    batcher.complete(send(batcher, 2.0), 3.0)
    assert batcher.view.expected_output_tokens == 8 + 3 + 0


@pytest.mark.parametrize(
    ("params", "decodes", "whole"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"reserve": "adaptive"}, 1, False),
        ({"coupled": True}, 1, False),
        ({"variant": "code"}, 1, False),
    ],
)
def test_only_an_even_share_of_the_decodes_goes_without_a_question(
    params: Any, decodes: int, whole: bool
) -> None:
    """Of four that run on four stages; an adaptive reserve changes with each question."""
    assert TokenThrottling(**params).sends_whole(decodes, 4, 4) == whole


class Chunks:
    """Plans a page's tokens of three prompts."""

    def schedule(self, view: View) -> Plan:
        return Plan([Prefill(number, 16) for number in range(3)])


def test_of_half_computed_prompts_without_room_the_latest_gives_way() -> None:
    engine = engine_of(Chunks(), 3, [(40, 1)] * 3)
    engine.complete(send(engine, 0.0), 1.0)
    assert unblock(engine.view, []) == Plan(preempt=[2])


def decodes_after_warm_up(result: RunResult) -> np.ndarray:
    everyone_decodes_s = result.first_token_s.max()
    last_to_leave_s = result.completion_s.min()
    steady = (result.scheduled_s > everyone_decodes_s) & (result.scheduled_s < last_to_leave_s)
    return result.decode_tokens[steady]


@pytest.mark.parametrize("variant", ["reading", "code"])
@pytest.mark.parametrize(("running", "expected"), [(40, {10}), (42, {10, 11}), (5, {1, 2})])
def test_figure_8_decodes_are_even_over_four_stages(
    variant: str, running: int, expected: set[int]
) -> None:
    """pp = 4: whatever order they started in, successive micro-batches differ by at most one."""
    prompts = [Request(i, 0.004 * i, 64, 200) for i in range(running)]
    throttled = world(prompts, depth=4, variant=variant)
    counts = decodes_after_warm_up(simulate(throttled))
    assert len(counts) > 100
    assert set(counts.tolist()) == expected
    sarathi = partial(create, "sarathi", {"token_budget": 2048})
    clumped = decodes_after_warm_up(simulate(replace(throttled, make_scheduler=sarathi)))
    assert (clumped.max() - clumped.min() > 1) == (running >= 40), "they clump without"


def test_the_adaptive_reserve_decays_and_preemptions_push_it_up() -> None:
    reserve = AdaptiveReserve()

    def pages_at_the_next_call(preemptions: int = 0) -> int:
        reserve.ask(preemptions)
        return reserve.pages(1_600.0, 16)

    assert pages_at_the_next_call() == 70  # 0.7 x 1600 / 16
    assert pages_at_the_next_call() == 69  # 0.698
    assert reserve.pages(1_600.0, 16) == 69, "looking does not move it"
    for _ in range(500):
        reserve.ask(0)
    assert pages_at_the_next_call() == 10  # the floor, 0.1
    assert pages_at_the_next_call(4) == 30  # 0.1 + 4 x 0.05
    assert pages_at_the_next_call(100) == 100
    assert pages_at_the_next_call(100) == 99, "what is above 1 is forgotten"


def test_the_adaptive_reserve_decays_at_every_call() -> None:
    """Also while nothing waits: of 64 tokens, one call prefills and 63 decode."""
    policy = TokenThrottling(reserve="adaptive")
    simulate(replace(world([Request(0, 0.0, 16, 64)], depth=1), make_scheduler=lambda: policy))
    assert policy.adaptive.ratio == pytest.approx(0.7 - 0.002 * 63)
