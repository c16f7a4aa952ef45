"""What must hold in every run, whatever the trace, the deployment and the policy, pools or none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings

from evenflow.core.decodes import ONE_TOKEN
from evenflow.core.loop import Loop
from evenflow.core.replay import Added, Asked, Completed, RecordingBatcher, replay
from evenflow.core.world import World
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.engines.rules import EngineRules
from evenflow.engines.swap import SwapCache
from evenflow.results.bubbles import attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers.sglang import SGLang
from evenflow.sim import simulate
from evenflow.sim.disaggregated import Disaggregated
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem
from evenflow.types import Request
from tests.amounts import many
from tests.worlds import AuditedBatcher, assert_same, cut_short, pooled_worlds, require_idle, worlds

AnyWorld = World | PooledWorld
Engines = Sequence[tuple[World, RecordingBatcher]]


def run(world: AnyWorld) -> tuple[RunResult, Engines]:
    """Return what happened, and each engine with the world that it is made from."""
    if isinstance(world, PooledWorld):
        system = Disaggregated(world, Tandem, batcher=AuditedBatcher)
        result = system.run()
        return result, [(getattr(world, name), pool.engine) for name, pool in system.pools.items()]
    driver = SimDriver(world, Tandem, batcher=RecordingBatcher)
    return driver.run(), [(world, engine) for engine in driver.engines]


def check_requests_and_tokens(result: RunResult, requests: Sequence[Request]) -> None:
    """Every request is answered once; every token of those that are served came out once."""
    assert result.request_id.tolist() == [request.request_id for request in requests]
    done = np.array([status == "completed" for status in result.status])
    assert [bool(reason) for reason in result.reason] == (~done).tolist()
    served = np.array([status != "rejected" for status in result.status])
    assert result.sampled_rows.sum() == result.output_tokens[served].sum()
    assert result.gap_count.sum() == np.maximum(result.output_tokens[served] - 1, 0).sum()


def check_prompts(result: RunResult, engines: Sequence[RecordingBatcher]) -> None:
    """Who was never preempted has its prompt computed once, from what was cached to the end.

    A policy that leaves out may end it early; SGLang does where a later prompt of the micro-batch
    is cut too, and goes on.
    """
    prompts = dict(zip(result.request_id.tolist(), result.prompt_tokens.tolist(), strict=True))
    cached = np.zeros(len(prompts), int) if result.cached_tokens is None else result.cached_tokens
    calm = np.isfinite(result.completion_s) & (result.preemptions == 0)
    reached = dict(zip(result.request_id[calm].tolist(), cached[calm].tolist(), strict=True))
    for engine in engines:
        leaves_out = EngineRules.of(engine.scheduler).cuts
        behind: dict[int, list[tuple[int, int, int]]] = {}
        for chunks in chunks_of(engine):
            for place, (number, start, stop) in enumerate(chunks):
                if number in reached:
                    assert start == reached[number], "a chunk is computed twice, or never"
                    reached[number] = stop
                    behind[number] = chunks[place + 1 :]
        for number, later in behind.items():
            assert leaves_out or reached[number] == prompts[number]
            if reached[number] < prompts[number] and isinstance(engine.scheduler, SGLang):
                assert any(stop < prompts[other] for other, _, stop in later)
    if calm.all():
        assert result.prefill_tokens.sum() == sum(reached.values()) - cached.sum()


def chunks_of(engine: RecordingBatcher) -> list[list[tuple[int, int, int]]]:
    """Return the chunks of each micro-batch: request, first token, end."""
    asked = (entry for entry in engine.journal if isinstance(entry, Asked))
    return [[*entry.decision.chunks] for entry in asked if entry.decision is not None]


def check_times(result: RunResult) -> None:
    """No request ends before its first token, nor gets that before it arrives."""
    done = np.isfinite(result.completion_s)
    assert (result.first_token_s[done] > result.arrival_s[done]).all()
    assert (result.completion_s[done] >= result.first_token_s[done]).all()
    assert (result.gap_s >= 0).all()


def check_stages(result: RunResult) -> None:
    """Micro-batches take time on a stage, and one follows the other."""
    assert (result.available_s[:, 0] >= result.scheduled_s).all()
    assert (result.start_s >= result.available_s).all()
    assert (result.end_s > result.start_s).all()
    assert (result.available_s[:, 1:] >= result.end_s[:, :-1]).all()
    assert (result.start_s[1:] >= result.end_s[:-1]).all(), "a stage served two at once"


def check_transfers(world: PooledWorld, result: RunResult) -> None:
    """KV crosses one link, in order, after the first token and before the last one."""
    moved, done = result.transfers, np.isfinite(result.completion_s)
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


@settings(max_examples=many(500), deadline=None)
@given(worlds() | pooled_worlds())
@example(cut_short(48))
@example(cut_short(64))
def test_all_is_conserved_in_order_explained_and_the_same_again(world: AnyWorld) -> None:
    result, engines = run(world)
    check_what_is_conserved(result, world, engines)
    check_order(result, world, engines)
    check_idle_time(result)
    check_again(result, world, engines)


def check_what_is_conserved(result: RunResult, world: AnyWorld, engines: Engines) -> None:
    """Requests, tokens and pages."""
    check_requests_and_tokens(result, world.requests)
    for _, engine in engines:
        require_idle(engine)
    if result.pools:
        batches = sum(len(pool.scheduled_s) for pool in result.pools.values())
        assert batches == len(result.scheduled_s)
        return
    check_prompts(result, [engine for _, engine in engines])
    slots = (result.total_pages // result.engines - result.free_pages) * result.page_tokens
    assert (result.kv_tokens > 0).all()
    assert (result.kv_tokens <= slots).all()


def check_order(result: RunResult, world: AnyWorld, engines: Engines) -> None:
    """Nothing happens before its cause."""
    check_times(result)
    for part in result.pools.values() or [result]:
        check_stages(part)
    if isinstance(world, PooledWorld):
        check_transfers(world, result)
        check_journal(engines[0][1])  # elsewhere decodes come with their KV
        return
    crossing_s = (result.end_s[:, -1] - result.start_s[:, 0]).min(initial=np.inf)
    soonest_s = result.gap_s.min(initial=np.inf)
    assert 0 < soonest_s >= crossing_s * (1 - 1e-9) or world.decoding is not ONE_TOKEN
    for _, engine in engines:
        check_journal(engine)


def check_journal(engine: RecordingBatcher) -> None:
    """No decode is in flight twice; chunks are contiguous; a prompt ends before it decodes."""
    in_flight: dict[int, tuple[int, ...]] = {}
    computed: dict[int, int] = defaultdict(int)
    flying: Counter[int] = Counter()
    prompt_tokens = {}
    rules = EngineRules.of(engine.scheduler)
    batches = 0
    for entry in engine.journal:
        if isinstance(entry, Added):
            prompt_tokens[entry.request.request_id] = entry.request.prompt_tokens
        elif isinstance(entry, Asked) and entry.decision is not None:
            for request_id, start, stop in entry.decision.chunks:
                kept = start % engine.pool.page_tokens == 0 or isinstance(engine.kv, SwapCache)
                assert start == computed[request_id] or kept, "chunks leave a gap"
                computed[request_id] = stop
            for request_id in entry.decision.decodes:
                whole = computed[request_id] >= prompt_tokens[request_id]
                assert whole or rules.cuts
                twice = flying[request_id] and not rules.ahead
                assert not twice, "a decode is in flight twice"
            in_flight[batches] = entry.decision.decodes
            flying.update(entry.decision.decodes)
            batches += 1
            assert len(in_flight) <= engine.max_in_flight
        elif isinstance(entry, Completed):
            flying.subtract(in_flight.pop(entry.batch_id))
    assert not in_flight


def check_again(result: RunResult, world: AnyWorld, engines: Engines) -> None:
    """A run again gives the same bytes, and its replay the same decisions."""
    assert_same(result, run(world)[0])
    assert_same(result, simulate(world, pipeline="processes") if result.pools else result)
    for own, engine in engines:
        again = partial(PoolBatcher, keeps_pages=getattr(engine, "keeps_pages", False))
        hides = own.loop_options.get("wait")  # prompts, by what other engines have
        assert hides or replay(engine.journal, own.batcher(again)) is None


def check_idle_time(result: RunResult) -> None:
    """Every idle second has one cause."""
    bubbles = attribute(result)
    busy_s = (result.end_s - result.start_s).sum()
    window_s = bubbles.window[1] - bubbles.window[0]
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, abs=1e-9)
    assert bubbles.idle_s + busy_s == pytest.approx(result.depth * window_s, abs=1e-6)
    assert bubbles.batch.max(initial=-1) < len(result.scheduled_s)
    known = bubbles.batch >= 0
    next_start_s = result.start_s[bubbles.batch[known], bubbles.stage[known]]
    assert (next_start_s >= bubbles.end_s[known] - 1e-9).all()
    assert summarize(result)["completed"] == result.status.count("completed")


@settings(max_examples=many(50), deadline=None)
@given(pooled_worlds())
def test_a_prefill_pool_that_nothing_holds_up_is_a_pipeline_of_one_token_requests(
    world: PooledWorld,
) -> None:
    # An engine loop asks as soon as a prompt is back, before its pages have gone.
    prefill = replace(world.prefill, total_pages=500, dispatch="stage0", loop=Loop)
    decode = replace(world.decode, total_pages=500)
    ample = {"prefill": prefill, "decode": decode, "mixed": None}
    result, _ = run(replace(world, **ample, link=TransferLink(), concurrency=None))
    asked = zip(world.requests, result.reason, strict=True)
    served = [replace(request, output_tokens=1) for request, why in asked if not why]
    assert_same(result.pools["prefill"], simulate(replace(prefill, requests=served)))
