"""Systems of pools as small scenarios, with times worked out by hand, in milliseconds.

tests/oracle/test_plain_pools.py compares on random worlds that the link is first come first served,
KV holds its pages until it has moved, a pool keeps its watermark, and either side borrows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from evenflow.core.loop import Loop
from evenflow.core.replay import Call, Completed
from evenflow.core.world import Link as WorldLink
from evenflow.engines.handover import Handover, PoolBatcher, RecordingPoolBatcher
from evenflow.engines.loop import EngineLoop
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.engines.swap import SwapCache
from evenflow.errors import UsageError
from evenflow.results.bubbles import attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.sim import simulate
from evenflow.sim.disaggregated import Disaggregated
from evenflow.sim.tandem import Tandem
from evenflow.types import Prefix, Request
from tests.virtual_run import serve_pools_noisily
from tests.worlds import send, small_world
from tools.draw_docs import LINK, pool, pooled_scenario


def prompts(*output_tokens: int) -> list[Request]:
    """Requests of 1600 tokens (100 pages) that arrive at once."""
    return [Request(index, 0.0, 1600, output) for index, output in enumerate(output_tokens)]


def ms(times_s: np.ndarray) -> list[float]:
    return [round(float(time_s) * 1e3, 6) for time_s in times_s.ravel()]


def transfers(result: RunResult) -> list[tuple[int, str, str, float, float, float, float]]:
    """(request, from, to, ready, start, end, blocked) of each, in milliseconds."""
    moved, names = result.transfers, list(result.pools)
    columns = (moved.ready_s, moved.start_s, moved.end_s, moved.blocked_s)
    return [
        (request, names[source], names[to], *times)
        for request, source, to, *times in zip(
            moved.request_id.tolist(),
            moved.source.tolist(),
            moved.destination.tolist(),
            *map(ms, columns),
            strict=True,
        )
    ]


def test_one_pool_of_stages_that_share_a_link_needs_processes() -> None:
    decode = small_world([], depth=2, link=WorldLink(0.0, 0.0, shared=True))
    assert PooledWorld([], small_world([]), decode).shares_link
    assert not PooledWorld([], small_world([]), replace(decode, link=None)).shares_link


def test_224_megabytes_cross_100_gigabytes_a_second_in_2_24_ms() -> None:
    # The blog's example: 4000 tokens of 56,000 bytes. Prefill 10 + 4000 x 0.01 = 50 ms.
    link = TransferLink(56_000 / 100e9, 0.0, 56_000)
    world = PooledWorld([Request(0, 0.0, 4000, 3)], pool(300, 1e-5), pool(300, 1e-5), link=link)
    result = simulate(world)
    assert transfers(result) == [(0, "prefill", "decode", 50.0, 50.0, 52.24, 0.0)]
    assert ms(result.first_token_s) == [50.0]
    assert ms(result.gap_s) == [2.24 + 10.01, 10.01]
    assert ms(result.completion_s) == [50.0 + 2.24 + 2 * 10.01]
    summary = summarize(result)
    assert summary["transferred_bytes"] == 224e6
    assert summary["mean_transfer_ms"] == pytest.approx(2.24)


def test_what_is_ready_at_once_crosses_one_after_the_other() -> None:
    """Three prompts of a step of a second; each takes the link for one, and comes 5 s later."""
    asked = [Request(number, 0.0, 16, 3) for number in range(3)]
    link = TransferLink(1 / 16, 5.0, 1)
    moved = transfers(simulate(PooledWorld(asked, small_world([]), small_world([]), link=link)))
    assert [start for *_, start, _, _ in moved] == [1000.0, 2000.0, 3000.0]
    assert [end for *_, end, _ in moved] == [7000.0, 8000.0, 9000.0]


def test_a_full_decode_pool_keeps_kv_on_the_prefill_side() -> None:
    result = simulate(pooled_scenario())  # what docs/disaggregation.md draws
    # Request 0 arrives at 12.6, holds 101 of 110 pages and ends with its third token at 32.6.
    assert transfers(result) == [
        (0, "prefill", "decode", 10.0, 10.0, 12.6, 0.0),
        (1, "prefill", "decode", 20.0, 32.6, 35.2, 12.6),
    ]
    assert ms(result.first_token_s) == [10.0, 20.0]
    assert ms(result.completion_s) == [32.6, 45.2]
    summary = summarize(result)
    assert summary["backpressure_s"] == pytest.approx(0.0126)
    assert summary["mean_transfer_wait_ms"] == pytest.approx(6.3)
    assert summary["p99_transfer_wait_ms"] == pytest.approx(0.99 * 12.6)
    assert summary["num_transfers"] == 2
    assert summary["transfer_link_busy_share"] == pytest.approx(3.2 / 45.2)
    assert summary["prefill_busy_share"] == pytest.approx(20 / 45.2)
    assert summary["decode_busy_share"] == pytest.approx(30 / 45.2)


def test_an_engine_loop_waits_until_kv_has_moved() -> None:
    """The pool's 101 pages hold one prompt at a time: 10 ms each, and 2.6 ms until it has left."""
    prefill, decode = (replace(pool(101), loop=EngineLoop) for _ in range(2))
    result = simulate(PooledWorld(prompts(2, 2), prefill, decode, link=LINK))
    assert transfers(result) == [
        (0, "prefill", "decode", 10.0, 10.0, 12.6, 0.0),
        (1, "prefill", "decode", 22.6, 22.6, 25.2, 0.0),
    ]
    assert ms(result.completion_s) == [22.6, 35.2]


def test_a_request_is_refused_only_where_no_pool_can_serve_it() -> None:
    requests = [
        Request(0, 0.0, 1700, 5),  # its prompt fits no prefill pool
        Request(1, 0.0, 320, 33),  # 23 pages where it decodes
        Request(2, 0.0, 353, 1),  # never decodes
        Request(3, 0.0, 320, 32),
    ]
    result = simulate(PooledWorld(requests, pool(100), pool(22)))
    assert list(zip(result.status, result.reason, strict=True)) == [
        ("rejected", "prefill pool: 107 KV pages exceed the pool's 100"),
        ("rejected", "decode pool: 23 KV pages exceed the pool's 22"),
        ("completed", ""),
        ("completed", ""),
    ]
    with_mixed = PooledWorld(requests, pool(100), pool(22), mixed=pool(107))
    assert simulate(with_mixed).status == ["completed"] * 4


def test_the_whole_has_the_stages_of_both_pools() -> None:
    result = simulate(PooledWorld(prompts(2), pool(400), pool(400), link=LINK))
    assert (result.depth, result.total_pages) == (2, 800)
    assert ms(result.start_s) == [0.0, 10.0, 12.6, 12.6]
    assert ms(result.end_s) == [10.0, 10.0, 12.6, 22.6]
    bubbles = attribute(result)
    # Each stage's idle time: the prefill stage's after its prompt, the decode stage's before.
    assert ms(bubbles.stage_totals().sum(axis=1)) == [12.6, 12.6]
    assert bubbles.batch.tolist() == [-1, 1]


def test_a_pool_without_work_starves() -> None:
    bubbles = attribute(simulate(PooledWorld(prompts(1), pool(400), pool(400))))
    idle_s = {cause: idle_s for cause, idle_s in bubbles.totals().items() if idle_s}
    assert idle_s == {"starvation": pytest.approx(0.010)}


def test_a_pool_is_one_engine() -> None:
    with pytest.raises(ValueError, match="one engine, not 2"):
        PooledWorld((), pool(10), replace(pool(10), virtual_engines=2))


def test_a_prompt_swapped_with_its_first_token_in_flight_computes_its_last_token_again() -> None:
    """Chunks of 16 and three pages: the third of 47 tokens takes the page of the other prompt.

    All 16 tokens of that one are on the host, but the token that they gave is lost.
    """
    params = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "long_prefill_token_threshold": 16}
    params |= {"scheduler_reserve_full_isl": False, "async_scheduling": False}
    prefill = small_world([], "vllm_v1", params, depth=4, total_pages=3, kv=SwapCache)
    requests = [Request(0, 0.0, 47, 1), Request(1, 0.0, 16, 1)]
    result = simulate(PooledWorld(requests, prefill, small_world([])))
    assert result.pools["prefill"].prefill_tokens.tolist() == [32, 16, 15, 1]
    assert result.preemptions.tolist() == [0, 1]


@pytest.mark.parametrize("policy", ["sglang", "vllm_v1"])
def test_a_policy_that_counts_questions_is_no_pool_s(policy: str) -> None:
    decode = small_world([], policy, loop=EngineLoop, max_in_flight=2)
    with pytest.raises(UsageError, match=r"decode pool: policy \w+ counts the questions"):
        simulate(PooledWorld((), pool(10), decode))


def test_the_verbs_of_a_move() -> None:
    engine = pool(10).batcher(partial(PoolBatcher, keeps_pages=True))
    handover = Handover(Request(7, 0.0, 32, 3), 1, 0.5, 0.5, 0)
    assert handover.context_tokens == 32
    assert engine.has_room(160, spare_pages=9)  # nothing runs: no page need stay free
    engine.reserve(handover)
    assert engine.pool.free_pages == 8
    assert not engine.has_room(32, spare_pages=7)
    assert engine.next(1.0) is None  # not a decode yet
    engine.adopt(7)
    for now_s in (1.0, 2.0):
        batch = send(engine, now_s)
        finished = engine.complete(batch, now_s + 1)
    assert [row.request.request_id for row in finished] == [7]
    assert engine.queues.gap_s == [1.5, 1.0]
    assert engine.pool.free_pages == 7  # kept, for whoever fetches them
    engine.release(7)
    assert engine.pool.free_pages == 10


def test_a_last_token_without_pages_to_fetch_is_lost() -> None:
    world = small_world([], "vllm_v1", {"async_scheduling": False})
    engine = world.batcher(partial(PoolBatcher, keeps_pages=True))
    for number, output in enumerate((1, 2)):
        engine.add(Request(number, 0.0, 16, output))
    assert [engine.is_lost(number) for number in range(3)] == [True, False, False]


def test_a_request_that_stays_in_its_pool_keeps_pages_that_it_shares() -> None:
    """Two prompts of 4 pages have 2 in common; of 6 pages none is free while the second stays."""
    engine = replace(pool(6), prefix_cache=True).batcher(partial(PoolBatcher, keeps_pages=True))
    first, second = (Request(n, 0.0, 64, 1, prefix=Prefix((1, 2), 16, 32)) for n in range(2))
    for request in (first, second):
        engine.add(request)
        batch = send(engine, float(request.request_id))
        engine.complete(batch, request.request_id + 1.0)
    assert engine.pool.free_pages == 0
    engine.reserve(Handover(replace(second, output_tokens=3), 1, 2.0, 2.0, 0))
    assert engine.pool.free_pages == 0
    assert len(engine.moving[1].pages) == 4
    engine.release(0)
    assert engine.pool.free_pages == 2
    engine.adopt(1)
    for now_s in (3.0, 4.0):
        engine.complete(send(engine, now_s), now_s + 1)
    engine.release(1)
    assert engine.pool.free_pages == 6


def test_kv_that_comes_as_a_micro_batch_returns_is_there_after_it() -> None:
    """As in a real run, where all messages of an instant are heard before KV is looked at."""
    made: list[RecordingPoolBatcher] = []

    def batcher(*given: Any, **facts: Any) -> RecordingPoolBatcher:
        made.append(RecordingPoolBatcher(*given, **facts))
        return made[-1]

    requests = [Request(0, 0.0, 8, 5), Request(1, 1.0, 8, 5)]  # KV takes a second, as all does
    pools = PooledWorld(requests, small_world([]), small_world([]), link=TransferLink(0, 1.0, 1))
    Disaggregated(pools, Tandem, batcher=batcher).run()
    prefill, decode = made[0], made[-1]
    calls = [entry for entry in prefill.journal if isinstance(entry, Call)]
    assert calls == [Call("release", 0), Call("release", 1)]
    happened = [entry for entry in decode.journal if isinstance(entry, Call | Completed)]
    adopted = [index for index, entry in enumerate(happened) if entry == Call("adopt", 1)]
    assert isinstance(happened[adopted[0] - 1], Completed)


@pytest.mark.parametrize("loop", [Loop, EngineLoop])
def test_in_a_closed_loop_of_pools_a_request_comes_when_one_ends(loop: Any) -> None:
    requests = [Request(number, 0.0, 8, 1 + number % 3) for number in range(6)]
    both = [small_world([], depth=2, loop=loop, times_s=(0.01, 0.0)) for _ in range(2)]
    world = PooledWorld(requests, *both, concurrency=1)
    for result in (simulate(world), serve_pools_noisily(world)[0].result):
        assert result.arrival_s[1:].tolist() == result.completion_s[:-1].tolist()
