"""Removing a cause removes its bubbles, and nothing it did not cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow.costs import AffineCost
from evenflow.costs.base import BatchShape
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.results.bubbles import attribute
from evenflow.results.run import RunResult
from evenflow.sim import Link, World, runtimes, simulate
from evenflow.sim.counterfactual import counterfactuals
from evenflow.types import Request
from tests.worlds import small_world


class SlowLast(AffineCost):
    """The last stage takes three times as long."""

    def times(self, batch: BatchShape) -> list[float]:
        times = super().times(batch)
        return [*times[:-1], 3 * times[-1]]


def troubled() -> World:
    """A world in which every cause acts: slow link, coupled runtime, few pages, slow stage."""
    return small_world(
        [Request(i, 0.01 * i, 40 + 37 * i % 300, 20 + 11 * i % 50) for i in range(60)],
        "sarathi",
        {"token_budget": 256},
        costs=SlowLast(0.01, 0.0001, 4),
        depth=4,
        total_pages=60,
        max_model_len=900,
        overheads=runtimes()["vllm-share"].stages,
        link=Link(per_token_s=2e-5, latency_s=0.002),
    )


CAUSES_OF = {
    "link": ["link"],
    "cpu": ["cpu"],
    "kv_limited": ["kv_limited"],
    "uneven_stages": ["uneven_stages"],
    "uneven_batches": ["uneven_prefill", "prefill_decode", "uneven_decode"],
}


def of(cause: str, result: RunResult) -> float:
    totals = attribute(result).totals()
    return sum(totals[name] for name in CAUSES_OF[cause])


@pytest.mark.parametrize("cause", CAUSES_OF)
def test_without_a_cause_there_is_no_idle_time_due_to_it(cause: str) -> None:
    world = troubled()
    result = simulate(world)
    assert of(cause, result) > 0, "the world has this cause"
    without = simulate(counterfactuals(world, result)[cause])
    assert of(cause, without) == pytest.approx(0, abs=1e-9)
    if cause != "uneven_batches":  # the slow stage sets the pace, even or not
        assert without.completion_s.max() < result.completion_s.max()


def troubled_pools(**changes: object) -> PooledWorld:
    """Two pools with every trouble, and a link between them that takes longest of all."""
    world = replace(troubled(), requests=())
    link = TransferLink(per_token_s=1e-3, latency_s=0.05)
    pools = PooledWorld(troubled().requests, prefill=world, decode=world, link=link)
    return replace(pools, **changes)


@pytest.mark.parametrize("cause", CAUSES_OF)
def test_pools_are_all_without_the_cause(cause: str) -> None:
    world = troubled_pools()
    result = simulate(world)
    without = simulate(counterfactuals(world, result)[cause])
    assert of(cause, without) == pytest.approx(0, abs=1e-9)
    moved, as_it_was = without.transfers, result.transfers
    assert (moved.start_s == moved.end_s).all() == (cause == "link")
    assert as_it_was.blocked_s.sum() > 0
    assert (moved.blocked_s.sum() == 0) == (cause == "kv_limited")


def test_a_pool_that_never_ran_has_nothing_to_even_out() -> None:
    world = troubled_pools(requests=[Request(0, 0.0, 10, 1)])
    result = simulate(world)
    for changed in counterfactuals(world, result).values():
        assert simulate(changed).status == ["completed"]
