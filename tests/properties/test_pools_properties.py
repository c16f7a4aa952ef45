"""What must hold in every system of pools: as in every run, and for what moves between pools."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given, settings

from evenflow.batcher import Batcher
from evenflow.replay import replay
from evenflow.results.bubbles import attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from sim import PooledWorld, TransferLink, simulate
from sim.disaggregated import Disaggregated
from sim.stages import StageProcesses
from sim.tandem import Tandem
from tests.properties.test_invariants import (
    check_journal,
    check_requests_and_tokens,
    check_stages,
    check_times,
)
from tests.worlds import AuditedBatcher, assert_same, pooled_worlds, require_idle


def run(world: PooledWorld) -> tuple[RunResult, Disaggregated]:
    system = Disaggregated(world, Tandem, batcher=AuditedBatcher)
    return system.run(), system


@settings(max_examples=80, deadline=None)
@given(pooled_worlds())
def test_requests_tokens_and_pages_are_conserved(world: PooledWorld) -> None:
    result, system = run(world)
    check_requests_and_tokens(result, world.requests)
    assert sum(len(pool.scheduled_s) for pool in result.pools.values()) == len(result.scheduled_s)
    for pool in system.pools.values():
        require_idle(pool.engine)


@settings(max_examples=80, deadline=None)
@given(pooled_worlds())
def test_nothing_happens_before_its_cause(world: PooledWorld) -> None:
    result, system = run(world)
    check_times(result)
    done = np.isfinite(result.completion_s)
    for part in result.pools.values():
        check_stages(part)
    for pool in system.pools.values():
        if pool is system.pools["prefill"]:
            check_journal(pool.engine)
    moved = result.transfers
    row = np.searchsorted(result.request_id, moved.request_id)
    assert (moved.ready_s == result.first_token_s[row]).all()
    assert (moved.start_s >= moved.ready_s).all()
    assert (moved.end_s >= moved.start_s + moved.link_busy_s).all()
    assert (moved.start_s[1:] >= (moved.start_s + moved.link_busy_s)[:-1]).all(), "link shared"
    assert (np.diff(moved.ready_s) >= 0).all(), "a transfer was overtaken"
    assert (moved.blocked_s <= moved.start_s - moved.ready_s).all()
    assert (moved.end_s < result.completion_s[row]).all()
    assert (moved.source != moved.destination).all()
    decoded = set(moved.request_id.tolist())
    assert len(decoded) == len(moved.request_id)
    if world.mixed is None:
        several = done & (result.output_tokens > 1)
        assert decoded == set(result.request_id[several].tolist())


@settings(max_examples=80, deadline=None)
@given(pooled_worlds())
def test_replaying_each_pool_gives_the_same_decisions(world: PooledWorld) -> None:
    _, system = run(world)
    for name, pool in system.pools.items():
        engine = pool.engine
        again = partial(Batcher, keeps_pages=engine.keeps_pages)
        assert replay(engine.journal, getattr(world, name).batcher(again)) is None


@settings(max_examples=80, deadline=None)
@given(pooled_worlds())
def test_the_same_world_gives_the_same_bytes_and_so_do_stages_as_processes(
    world: PooledWorld,
) -> None:
    one, _ = run(world)
    for other in (run(world)[0], Disaggregated(world, StageProcesses).run()):
        assert_same(one, other)


@settings(max_examples=50, deadline=None)
@given(pooled_worlds())
def test_a_prefill_pool_that_nothing_holds_up_is_a_pipeline_of_one_token_requests(
    world: PooledWorld,
) -> None:
    prefill = replace(world.prefill, total_pages=500)
    decode = replace(world.decode, total_pages=500)
    ample = {"prefill": prefill, "decode": decode, "mixed": None}
    result, _ = run(replace(world, **ample, link=TransferLink(), concurrency=None))
    asked = zip(world.requests, result.reason, strict=True)
    served = [replace(request, output_tokens=1) for request, why in asked if not why]
    assert_same(result.pools["prefill"], simulate(replace(prefill, requests=served)))


@settings(max_examples=80, deadline=None)
@given(pooled_worlds())
def test_idle_and_busy_time_of_all_pools_fill_the_window(world: PooledWorld) -> None:
    result, _ = run(world)
    bubbles = attribute(result)
    start_s, end_s = bubbles.window
    busy_s = float((result.end_s - result.start_s).sum())
    whole_s = result.depth * (end_s - start_s)
    assert np.isclose(bubbles.idle_s + busy_s, whole_s, atol=1e-6 * max(whole_s, 1e-3))
    assert np.isclose(sum(bubbles.totals().values()), bubbles.idle_s)
    assert bubbles.batch.max(initial=-1) < len(result.scheduled_s)
    known = bubbles.batch >= 0
    next_start_s = result.start_s[bubbles.batch[known], bubbles.stage[known]]
    assert (next_start_s >= bubbles.end_s[known] - 1e-9).all()
    assert summarize(result)["completed"] == result.status.count("completed")
