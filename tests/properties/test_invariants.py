"""What must hold in every run, whatever the trace, the deployment and the policy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from evenflow.replay import Added, Asked, Completed, RecordingBatcher, replay
from evenflow.results.bubbles import attribute
from evenflow.results.run import RunResult
from evenflow.types import Request
from evenflow.world import World
from sim.driver import Driver
from sim.tandem import Tandem
from tests.worlds import assert_same, require_idle, worlds


def run(world: World) -> tuple[RunResult, list[RecordingBatcher]]:
    driver = Driver(world, Tandem, batcher=RecordingBatcher)
    result = driver.run()
    return result, list(driver.engines)


def check_requests_and_tokens(result: RunResult, requests: Sequence[Request]) -> None:
    """Every request is answered once; every token of those that are served came out once."""
    assert result.request_id.tolist() == [request.request_id for request in requests]
    done = np.array([status == "completed" for status in result.status])
    assert [bool(reason) for reason in result.reason] == (~done).tolist()
    served = np.array([status != "rejected" for status in result.status])
    assert result.sampled_rows.sum() == result.output_tokens[served].sum()
    assert result.gap_count.sum() == (result.output_tokens[served] - 1).sum()


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


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_requests_tokens_and_pages_are_conserved(world: World) -> None:
    result, engines = run(world)
    check_requests_and_tokens(result, world.requests)
    done = np.isfinite(result.completion_s)
    cached_tokens = 0 if result.cached_tokens is None else result.cached_tokens[done].sum()
    prompts_whole = not getattr(world.make_scheduler(), "leaves_out", False)
    least_tokens = (result.prompt_tokens[done].sum() - cached_tokens) * prompts_whole
    assert result.prefill_tokens.sum() >= least_tokens
    slots = (result.total_pages // result.engines - result.free_pages) * result.page_tokens
    assert (result.kv_tokens > 0).all()
    assert (result.kv_tokens <= slots).all()
    for engine in engines:
        require_idle(engine)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_nothing_happens_before_its_cause(world: World) -> None:
    result, engines = run(world)
    check_times(result)
    check_stages(result)
    assert (result.gap_s > 0).all() or world.speculation is not None
    for engine in engines:
        check_journal(engine)


def check_journal(engine: RecordingBatcher) -> None:
    """No decode is in flight twice; chunks are contiguous; a prompt ends before it decodes."""
    in_flight: dict[int, tuple[int, ...]] = {}
    computed: dict[int, int] = defaultdict(int)
    flying: Counter[int] = Counter()
    prompt_tokens = {}
    batches = 0
    for entry in engine.journal:
        if isinstance(entry, Added):
            prompt_tokens[entry.request.request_id] = entry.request.prompt_tokens
        elif isinstance(entry, Asked) and entry.decision is not None:
            for request_id, start, stop in entry.decision.chunks:
                kept = start % engine.pool.page_tokens == 0 or engine.kv.swap
                assert start == computed[request_id] or kept, "chunks leave a gap"
                computed[request_id] = stop
            for request_id in entry.decision.decodes:
                whole = computed[request_id] >= prompt_tokens[request_id]
                assert whole or getattr(engine.scheduler, "leaves_out", False)
                twice = flying[request_id] and not engine.queues.ahead
                assert not twice, "a decode is in flight twice"
            in_flight[batches] = entry.decision.decodes
            flying.update(entry.decision.decodes)
            batches += 1
            assert len(in_flight) <= engine.max_in_flight
        elif isinstance(entry, Completed):
            flying.subtract(in_flight.pop(entry.batch_id))
    assert not in_flight


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_a_run_again_gives_the_same_bytes_and_its_replay_the_same_decisions(world: World) -> None:
    result, engines = run(world)
    assert_same(result, run(world)[0])
    for engine in engines:
        assert replay(engine.journal, world.batcher()) is None


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_every_idle_second_has_one_cause(world: World) -> None:
    result, _ = run(world)
    bubbles = attribute(result)
    busy_s = (result.end_s - result.start_s).sum()
    window_s = bubbles.window[1] - bubbles.window[0]
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, abs=1e-9)
    assert bubbles.idle_s + busy_s == pytest.approx(world.depth * window_s, abs=1e-6)
