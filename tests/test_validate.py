"""Validation on runs whose times are known: simulated ones, in the place of real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow.costs import AffineCost, prefill_work
from evenflow.schedulers import create
from evenflow.types import Request
from experiments.validate import (
    RecordedCost,
    compared,
    measured_overheads,
    structure_of,
    with_measured_times,
)
from sim import Link, RuntimeOverheads, World, simulate

WORLD = World(
    [Request(i, 0.013 * i, 30 + 11 * i % 80, 1 + 7 * i % 40) for i in range(60)],
    lambda: create("sarathi", {"token_budget": 64}),
    AffineCost(0.01, 1e-5, 3),
    depth=3,
    total_pages=400,
    max_model_len=500,
    max_in_flight=3,
)
SLOWER = replace(
    WORLD,
    link=Link(per_token_s=1e-6, latency_s=0.0004),
    overheads=RuntimeOverheads(schedule_s=0.0007),
)


def test_overheads_are_found_again() -> None:
    found = measured_overheads(simulate(SLOWER), replace(WORLD, link=Link(1e-6, 0.0)))
    assert found.schedule_s == pytest.approx(0.0007)
    assert found.hops_s == pytest.approx((0.0004, 0.0004))


def test_with_its_own_times_a_run_is_itself() -> None:
    layer = structure_of(WORLD, simulate(WORLD))
    assert layer.pop("same_micro_batches") == 1
    assert all(error == pytest.approx(0, abs=1e-9) for error in layer.values())
    result = simulate(SLOWER)
    layer = structure_of(replace(WORLD, link=Link(1e-6, 0.0)), result)
    assert layer.pop("same_micro_batches") == 1
    assert all(error == pytest.approx(0, abs=1e-6) for error in layer.values())


def test_a_micro_batch_gets_the_times_of_one_of_its_size() -> None:
    recorded = simulate(WORLD)
    cost = RecordedCost(recorded, AffineCost(0.005, 0.5e-5, 3))
    size = int(recorded.prefill_tokens[0])
    alike = [i for i, tokens in enumerate(recorded.prefill_tokens) if tokens == size]
    alike = [i for i in alike if not recorded.decode_tokens[i]]
    for index in (*alike, alike[0]):
        expected = recorded.end_s[index] - recorded.start_s[index]
        assert cost.times(prefill_work(size)) == pytest.approx(expected.tolist())
    unheard_of = 0.005 + 0.5e-5 * 5000
    assert cost.times(prefill_work(5000)) == pytest.approx([2 * unheard_of] * 3)


def test_a_run_s_own_times_matter_and_not_those_of_the_costs() -> None:
    recorded = simulate(WORLD)
    dearer = replace(WORLD, costs=AffineCost(1.0, 0.0, 3))
    again = simulate(with_measured_times(dearer, recorded))
    assert again.completion_s == pytest.approx(recorded.completion_s)


def test_one_metric_of_several_runs() -> None:
    line = compared("duration", [{"duration": 9.0}, {"duration": 11.0}], {"duration": 9.5})
    assert line == {
        "measured": 10.0,
        "least": 9.0,
        "most": 11.0,
        "spread": 0.2,
        "simulated": 9.5,
        "error": pytest.approx(-0.05),
    }
    nothing = compared("mean_tpot_ms", [{"mean_tpot_ms": 0.0}], {"mean_tpot_ms": 0.0})
    assert (nothing["error"], nothing["spread"]) == (None, None)
