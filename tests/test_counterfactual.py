"""Removing a cause removes its bubbles, and nothing it did not cause."""

from __future__ import annotations

import pytest

from evenflow.bubbles import attribute
from evenflow.costs import AffineCost
from evenflow.costs.base import BatchShape
from evenflow.schedulers import create
from evenflow.types import Request
from sim import RUNTIMES, Link, World, simulate
from sim.counterfactual import counterfactuals


class SlowLast(AffineCost):
    """The last stage takes three times as long."""

    def times(self, batch: BatchShape) -> list[float]:
        times = super().times(batch)
        return [*times[:-1], 3 * times[-1]]


def troubled() -> World:
    """A world in which every cause acts: slow link, coupled runtime, few pages, slow stage."""
    return World(
        requests=[Request(i, 0.01 * i, 40 + 37 * i % 300, 20 + 11 * i % 50) for i in range(60)],
        make_scheduler=lambda: create("sarathi", {"token_budget": 256}),
        costs=SlowLast(0.01, 0.0001, 4),
        depth=4,
        total_pages=60,
        max_model_len=900,
        max_in_flight=4,
        overheads=RUNTIMES["vllm"],
        link=Link(per_token_s=2e-5, latency_s=0.002),
    )


CAUSES_OF = {
    "link": ["link"],
    "cpu": ["cpu"],
    "kv_limited": ["kv_limited"],
    "uneven_stages": ["uneven_stages"],
    "uneven_batches": ["uneven_prefill", "prefill_decode", "uneven_decode"],
}


@pytest.mark.parametrize("cause", CAUSES_OF)
def test_without_a_cause_there_is_no_idle_time_due_to_it(cause: str) -> None:
    world = troubled()
    result = simulate(world)
    before = attribute(result).totals()
    assert sum(before[name] for name in CAUSES_OF[cause]) > 0, "the world has this cause"
    without = simulate(counterfactuals(world, result)[cause])
    after = attribute(without).totals()
    assert sum(after[name] for name in CAUSES_OF[cause]) == pytest.approx(0, abs=1e-9)
    if cause != "uneven_batches":  # the slow stage sets the pace, even or not
        assert without.completion_s.max() < result.completion_s.max()
