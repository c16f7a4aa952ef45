"""SGLang's rules: recorded journals, the times of its loops, and what holds whatever it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.decodes import ONE_TOKEN, Sequence
from evenflow.core.kv import PagePool
from evenflow.core.replay import replay
from evenflow.core.scheduling import Action
from evenflow.engines.consensus import DecodeLoop, PrefillLoop
from evenflow.engines.loop import EngineLoop
from evenflow.engines.receiving import Agreed
from evenflow.engines.speculation import ReservingGroup, Speculation
from evenflow.engines.swap import SwapCache
from evenflow.engines.upkeep import Upkeep
from evenflow.engines.view import DecodeRow, EnginePrompt, EngineView
from evenflow.errors import UsageError
from evenflow.experiments.recordings import sglang
from evenflow.experiments.recordings.journal import first_line, lines
from evenflow.experiments.recordings.journal import replay as replay_journal
from evenflow.results.bubbles import attribute
from evenflow.schedulers import create
from evenflow.schedulers.sglang import PrefillAdder, SGLang
from evenflow.sim import World, simulate
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem
from evenflow.types import Plan, Request
from tests.amounts import many
from tests.experiments.test_engine_journals import stem
from tests.places import SHARED
from tests.worlds import (
    AuditedBatcher,
    assert_same,
    cut_short,
    engine_of,
    require_idle,
    send,
    sglang_worlds,
    small_world,
)

RECORDED = SHARED / "engines" / "sglang-0.5.23"
JOURNALS = [
    path for path in sorted(RECORDED.glob("*.jsonl.gz")) if sglang.FACTS.mark in first_line(path)
]


@pytest.mark.parametrize("path", JOURNALS, ids=stem)
def test_sglang_decides_as_recorded(path: Path) -> None:
    """Step for step and, from arrivals alone, each end in a simulation to 1 ns."""
    outcome = replay_journal(path, sglang, "0.5.23")
    assert outcome.difference is None
    assert outcome.equal == outcome.steps > 40
    assert outcome.timed == sum(len(event.get("finished", ())) for event in lines(path))


@settings(max_examples=many(150), deadline=None)
@given(sglang_worlds(st.just(1), overlap=True))
def test_nothing_is_lost_but_what_is_chosen_too_early(world: World) -> None:
    """Who ends by itself decodes once more; what is in flight of who is retracted is dropped."""
    driver = SimDriver(world, Tandem, batcher=AuditedBatcher)
    result = driver.run()
    wanted = {request.request_id: request.output_tokens for request in world.requests}
    got = zip(result.request_id.tolist(), result.output_tokens.tolist(), result.status, strict=True)
    assert all(tokens == wanted[number] for number, tokens, status in got if status == "completed")
    served = np.array([status != "rejected" for status in result.status], dtype=bool)
    assert result.sampled_rows.sum() >= result.output_tokens[served].sum()
    assert result.gap_count.sum() == (result.output_tokens[served] - 1).clip(0).sum()
    (engine,) = driver.engines
    require_idle(engine)
    assert replay(engine.journal, world.batcher()) is None
    assert_same(result, SimDriver(world, Tandem).run())
    bubbles = attribute(result)
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, abs=1e-9)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("speculates", [False, True])
def test_of_a_pipelines_speculative_decodes_one_fewer_than_stages_are_in_flight(
    stages: int, *, speculates: bool
) -> None:
    """A request a slot, a second a stage: SGLang verifies once an older slot is back."""
    requests = [Request(number, 0.0, 8, 40) for number in range(stages)]
    params = {"pp_max_micro_batch_size": 1, "chunked_prefill_size": 16}
    world = small_world(
        requests,
        "sglang",
        params,
        depth=stages,
        max_in_flight=stages,
        loop=EngineLoop,
        page_tokens=16,
        decoding=Speculation((0.0,)) if speculates else ONE_TOKEN,
    )
    result = simulate(world)
    sent_s = result.scheduled_s[result.prefill_tokens == 0][stages : stages * 20]
    in_flight = stages - speculates
    assert (sent_s[in_flight:] - sent_s[:-in_flight]).tolist() == [stages] * (
        19 * stages - in_flight
    )


def test_a_speculative_decode_holds_pages_for_two_steps_and_gains_its_own_tokens() -> None:
    """k = 3 on pages of 16: a decode that attends to 25 tokens holds pages for 33."""
    gains = {(0, 2): 4, (0, 6): 3, (1, 2): 4, (1, 6): 4}
    policy, decoding = Noted(depth=2, page_tokens=16), sglang.Accepted((0.5,) * 3, gains)
    asked = [(32, 9), (20, 10)]
    engine = engine_of(policy, PagePool(100, 16), asked, decoding=decoding, asks_again=False)
    held, due, tokens = [], [], []
    for turn in range(8):  # every other slot is empty
        if batch := engine.next(float(turn)):
            held.append(100 - engine.pool.free_pages)
            tokens.append(batch.output_tokens)
            engine.complete(batch, turn + 0.5)
            due.append(sum(group.due_tokens() for group in engine.queues.slots[0].groups))
    assert held == [4, 5, 5, 6]
    assert tokens == [2, 2, 8, 7]  # prompts, a token each, then what was accepted
    assert due == [16 + 12, 0, 16, 0]  # a page, and after a prompt what its last page has left
    assert policy.emptied == [4 + 2, 2 + 2, 0, 2 + 1]  # one more for each, where any is due
    assert not engine.queues.live


def test_a_speculative_decode_gains_the_average_from_its_second_step_on() -> None:
    """1 + 0.5 + 0.25 + 0.125 tokens a step, rounded: 2, 4, 6, 8, 9, 11, 13 and 15 by the eighth."""
    policy, decoding = SGLang(depth=2, page_tokens=16), Speculation((0.5,) * 3)
    engine = engine_of(policy, 100, [(32, 17)], decoding=decoding, asks_again=False)
    tokens = []
    for turn in range(20):
        if batch := engine.next(float(turn)):
            tokens.append(batch.output_tokens)
            engine.complete(batch, turn + 0.5)
    assert tokens == [1, 1, 2, 2, 2, 2, 1, 2, 2, 2]
    assert ReservingGroup(decoding, relayed=True).due_tokens() == 0


@pytest.mark.parametrize(
    ("pages", "longest", "params", "most"),
    [
        (20_000, 131_072, {}, 2048),
        (50_000, 131_072, {}, 3125),
        (50_000, 4096, {}, 4096),
        (20_000, 64, {"max_running_requests": 100_000}, 100_000),
        (20, 4096, {"max_running_requests": 256}, 160),
        (20, 4096, {}, 160),
    ],
)
def test_as_many_requests_run_as_sglang_resolves(
    pages: int, longest: int, params: dict[str, Any], most: int
) -> None:
    """Pages of 16; the numbers are of its `resolve_max_num_reqs`, and 48 of its EAGLE."""
    policy = SGLang(max_model_len=longest, page_tokens=16, depth=2, **params)
    for decoding, right in ((ONE_TOKEN, most), (Speculation((0.5,)), min(most, 48))):
        pool = PagePool(pages, 16)
        engine = engine_of(policy, pool, decoding=decoding, asks_again=False)
        assert policy.most_running(engine.view) == (
            most if "max_running_requests" in params else right
        )


def test_groups_of_data_parallel_attention_divide_chunks_and_requests() -> None:
    """Its ServerArgs make 2,048 and 0.3 of 8,192 and 1.0 for four ranks; 48 are 12 of each."""
    policy = SGLang(data_parallel=4, max_running_requests=48, max_model_len=4096)
    engine = engine_of(policy, PagePool(50_000), [(3000, 5)], max_model_len=4096, asks_again=False)
    assert policy.new_token_ratio == 0.7 * 0.3
    assert policy.most_running(engine.view) == 12
    assert SGLang(data_parallel=4, max_running_requests=3).most_running(engine.view) == 1
    assert send(engine, 0.0).prefill_tokens == 2048


@pytest.mark.parametrize(("version", "two_s"), [("0.5.23", [8.0, 8.0]), ("0.5.17", [4.0, 8.0])])
def test_the_stages_of_a_prefill_server_agree_before_a_prompt_ends(
    version: str, two_s: list[float]
) -> None:
    """Four stages of a second: turns take no time, but for the micro-batches they wait for.

    The second prompt is seen when the first is back, after 4 s. In 0.5.23 it is sent at once, and
    the round on the first waits for it; in 0.5.17 both rounds are over before it is sent.
    """
    params = {"disaggregation_mode": "prefill", "version": version, "chunked_prefill_size": 16}

    def ends(*arrivals_s: float) -> list[float]:
        asked = [Request(number, at_s, 16, 9) for number, at_s in enumerate(arrivals_s)]
        world = small_world(
            asked, "sglang", params, depth=4, max_in_flight=4, loop=PrefillLoop, page_tokens=16
        )
        result = simulate(world)
        assert result.first_token_s.tolist() == result.completion_s.tolist()
        assert result.output_tokens.tolist() == [1] * len(asked)
        return sorted(result.completion_s.tolist())

    assert ends(0.0) == [4.0]
    assert ends(0.0, 1.0) == two_s


@pytest.mark.parametrize(("reserved", "first_s"), [(900, [0.5, 16.5]), (1584, [0.5, 21.0])])
def test_a_decode_server_gives_pages_where_what_is_reserved_fits(
    reserved: int, first_s: list[float]
) -> None:
    """Four stages of a second, KV in half a second, 1,600 tokens; two rounds a request.

    The first is alone, so its rounds take no time. It decodes to 20.5 s. The second is seen at 4.5
    and gets pages with the round that is back at 8.5; its KV is there at 9, and in the round that
    is back at 16.5. What is reserved for decodes of other slots does not count, their pages do: 32
    tokens and 1,584 do not fit before the first ends.
    """
    params = {"disaggregation_mode": "decode", "num_reserved_decode_tokens": reserved}
    asked = [Request(0, 0.0, 16, 6), Request(1, 1.0, 16, 1)]
    world = small_world(
        asked,
        "sglang",
        params,
        depth=4,
        max_in_flight=4,
        loop=DecodeLoop,
        loop_options={"transfer_s": 0.5},
        max_model_len=100,
    )
    result = simulate(world)
    assert sorted(result.first_token_s.tolist()) == first_s
    assert result.prefill_tokens.sum() == 0


@pytest.mark.parametrize(("most", "admitted"), [(17, [1]), (18, [1, 2])])
def test_decodes_that_ride_with_prompts_count_as_their_tokens(
    most: int, admitted: list[int]
) -> None:
    """A decode rides: of 17 tokens 16 are left, which the first prompt takes."""
    params = {"mixed_chunk": True, "overlap": False, "chunked_prefill_size": 64}
    policy = create("sglang", {**params, "max_prefill_tokens": most}, depth=1, page_tokens=16)
    batcher = engine_of(policy, 99, [(16, 9)], depth=1, max_in_flight=1, asks_again=False)
    batcher.complete(send(batcher, 0.0), 1.0)
    for number in (1, 2):
        batcher.add(Request(number, 1.0, 16, 9))
    batch = send(batcher, 1.0)
    assert [chunk.sequence.request.request_id for chunk in batch.chunks] == admitted


@pytest.mark.parametrize(("chunk", "computed"), [(48, 51), (64, 67)])
def test_of_two_prompts_cut_at_once_the_first_decodes_after_what_it_has(
    chunk: int, computed: int
) -> None:
    """Of 115 tokens; each chunk counts whole pages of 16, and only the last prompt goes on."""
    result = SimDriver(cut_short(chunk), Tandem).run()
    assert result.prefill_tokens.sum() == computed
    assert result.status == ["completed"] * 5


def test_chunks_of_a_time_that_bends_down_at_first_are_those_of_its_square() -> None:
    """A fitted linear part below zero counts as none."""

    asked = []

    def sizes(linear: float) -> list[int]:
        def time_s(tokens: int) -> float:
            asked.append(tokens)
            return 1e-8 * tokens * tokens + linear * tokens

        limits = {"chunked_prefill_size": 2048, "max_prefill_tokens": 4096, "max_model_len": 16_384}
        policy = SGLang(dynamic_chunking=True, page_tokens=16, prefill_s=time_s, **limits)
        return [*map(policy.chunk_after, (0, 2048, 6000))]

    assert sizes(0.0) == sizes(-1e-5) == [2048, 1088, 704]
    assert asked == 2 * [*range(2540, 0, -20)], "as it profiles: up to 1.25 of a first chunk"


def test_prompts_of_one_pass_count_against_the_pool_one_after_the_other() -> None:
    """Each takes two pages of 16 and 40 more tokens: of 208, two prompts, not three."""
    room = room_of(13)
    prompts = [EnginePrompt(Sequence(Request(number, 0.0, 16, 40), 16)) for number in range(3)]
    taken = []
    for prompt in prompts:
        taken.append(room.fits(prompt))
        room.take(prompt, 16)
    assert taken == [True, True, False]


def room_of(pages: int, *decodes: DecodeRow) -> PrefillAdder:
    view = small_world([], "sglang", {}, total_pages=pages, loop=EngineLoop).batcher().view
    return PrefillAdder(view, 64, 64, 0, 0.5, decodes)


@pytest.mark.parametrize(("pages", "fits"), [(9, False), (10, True)])
def test_the_end_of_a_prompt_under_way_is_awaited_too(pages: int, fits: bool) -> None:
    """Both hold two pages and write 40 tokens each: 64 + 80 of the pool, and two to spare."""
    room = room_of(pages)
    first, second = (
        EnginePrompt(Sequence(Request(number, 0.0, 16, 40), 16)) for number in range(2)
    )
    room.take(first, 16)
    assert room.fits(second) == fits


@pytest.mark.parametrize(("generated", "fits"), [(9, False), (8, True)])
def test_what_has_ended_leaves_nothing_behind_to_wait_for(generated: int, fits: bool) -> None:
    """Beside 32 + 40 tokens of a prompt; a decode frees 100 with its ninth, if that is to come."""
    room = room_of(4, DecodeRow(Request(1, 0.0, 91, 9), generated))
    assert room.fits(EnginePrompt(Sequence(Request(0, 0.0, 16, 40), 16))) == fits


def test_what_comes_back_from_the_host_needs_pages_for_what_was_kept() -> None:
    """Found by the pages' properties: a swapped request was admitted by what it has yet to do."""
    first = [Request(0, 0.0, 1, 1), Request(1, 0.0, 69, 1)]
    first += [Request(2, 0.003, 108, 54, max_new_tokens=54)]
    others = [(64, 34), (3, 1), (1, 1), (49, 1), (81, 1)]
    requests = [*first, *(Request(n, 0.503, *tokens) for n, tokens in enumerate(others, 3))]
    params = {"chunked_prefill_size": 208, "schedule_conservativeness": 0.1}
    fields: dict[str, Any] = {"max_in_flight": 4, "total_pages": 16, "loop": EngineLoop}
    fields |= {"depth": 4, "times_s": (0.005, 1e-4), "kv": SwapCache}
    result = simulate(small_world(requests, "sglang", params, **fields))
    assert result.preemptions.sum() == 1


def test_the_next_chunk_may_take_the_last_free_page() -> None:
    policy = SGLang(chunked_prefill_size=16, page_tokens=16, overlap=False)
    engine = engine_of(policy, 9, [(32, 3)], depth=1, max_in_flight=1, asks_again=False)
    engine.complete(send(engine, 0.0), 1.0)
    engine.pool.allocate(7)
    assert send(engine, 1.0).prefill_tokens == 16


def test_dynamic_chunks_need_a_cost_model() -> None:
    with pytest.raises(ValueError, match="dynamic_chunking needs max_model_len and a cost model"):
        SGLang(dynamic_chunking=True)


def test_a_retracted_request_may_take_all_that_is_free() -> None:
    """Of five pages, with the KV of 64 and 14 more tokens."""
    policy = SGLang(depth=4, disaggregation_mode="decode", num_reserved_decode_tokens=0)
    engine = engine_of(policy, 5, [(64, 16)], depth=4, max_in_flight=4, asks_again=False)
    (retracted,) = engine.queues.waiting
    retracted.epoch, retracted.prompt_tokens = 1, 79
    assert [each.request_id for each in policy.take_in(engine.view, Agreed([0], [], []))] == [0]


class Noted(SGLang):
    """Notes how many pages it asks to have emptied."""

    emptied: ClassVar[list[int]] = []

    def schedule(self, view: EngineView) -> Iterator[Plan | Action]:
        for part in super().schedule(view):
            if isinstance(part, Upkeep):
                self.emptied.append(part.empty_pages)
            yield part


def test_slots_take_their_turn_in_the_loop_of_an_engine_only() -> None:
    told = "policy SGLang gives slots their turn, which goes with dispatch: engine_loop"
    with pytest.raises(UsageError, match=told):
        engine_of(SGLang(overlap=False), 9, asks_again=True)


@pytest.mark.parametrize(
    ("interval", "first_tokens_s"), [(1, [1.0, 3.0, 7.0, 101.5]), (4, [1.0, 6.0, 7.0, 101.5])]
)
def test_who_comes_is_seen_after_some_steps_of_decodes_or_one_of_prompts(
    interval: int, first_tokens_s: list[float]
) -> None:
    """Steps of a second: decodes from 1 to 5, the second prompt then; the third comes meanwhile.

    The last comes when nobody runs, and is seen at once.
    """
    requests = [Request(n, s, 16, 20) for n, s in enumerate((0.0, 1.5, 5.5, 100.5))]
    params = {"scheduler_recv_interval": interval, "overlap": False}
    result = simulate(small_world(requests, "sglang", params, loop=EngineLoop))
    assert result.first_token_s.tolist() == first_tokens_s
