"""vLLM V1's rules as small scenarios; that they are vLLM's is for tests/test_engine_journals.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenflow.decodes import Speculation
from evenflow.errors import PolicyError, UsageError
from evenflow.kv import KvCache, PagePool
from evenflow.replay import RecordingBatcher, decision_of, replay
from evenflow.schedulers import create
from evenflow.scheduling import View
from evenflow.types import Plan, Prefill, Request
from experiments.run_file.build import build
from experiments.run_file.run import load_config
from tests.worlds import engine_of, require_idle, send


def serving(pages: int, *asked: tuple[int, int], budget: int = 64, **more: str) -> Any:
    params = {"max_num_batched_tokens": budget, "max_num_seqs": 8, **more}
    return engine_of(create("vllm_v1", params), pages, asked, asks_again=False)


def test_chunks_of_a_prompt_follow_one_another_and_pages_come_with_them() -> None:
    batcher = serving(8, (100, 2), (20, 2))
    log = [(decision_of(batch), batch.free_pages) for batch in map(send, [batcher] * 2, (1.0, 2.0))]
    assert log == [((((0, 0, 64),), ()), 4), ((((0, 64, 100),), ()), 1)]
    assert batcher.next(3.0) is None, "request 1 needs two pages"


def test_decodes_and_chunks_share_the_budget() -> None:
    batcher = serving(40, (16, 5), budget=32)
    batcher.complete(send(batcher, 0.0), 0.5)
    batcher.add(Request(1, 0.0, 50, 5))
    assert decision_of(send(batcher, 1.0)) == (((1, 0, 31),), (0,))


def test_what_is_in_flight_is_preempted_and_its_output_still_counts() -> None:
    """Request 1 is on its way when request 0 needs its page; both of its tokens arrive."""
    batcher = serving(2, (16, 3))
    first = send(batcher, 0.0)
    batcher.add(Request(1, 0.1, 16, 3))
    second = send(batcher, 0.1)
    batcher.complete(first, 1.0)
    third = send(batcher, 1.0)
    assert decision_of(third) == ((), (0,))
    (waiting,) = batcher.queues.waiting
    assert (waiting.request.request_id, waiting.owed, batcher.pool.free_pages) == (1, 1, 0)
    assert list(batcher.view.waiting) == [], "not before its output is back"
    assert batcher.complete(second, 2.0) == []
    assert (waiting.generated, waiting.first_token_s, waiting.prompt_tokens) == (1, 2.0, 17)
    assert [prompt.request_id for prompt in batcher.view.waiting] == [1]


def test_a_request_may_end_while_it_waits() -> None:
    batcher = serving(2, (16, 3))
    first = send(batcher, 0.0)
    batcher.add(Request(1, 0.1, 16, 1))
    second = send(batcher, 0.1)
    batcher.complete(first, 1.0)
    send(batcher, 1.0)
    (ended,) = batcher.complete(second, 2.0)
    assert (ended.request.request_id, ended.completion_s, ended.generated) == (1, 2.0, 1)
    assert list(batcher.queues.live) == [0]
    assert batcher.queues.waiting_tokens == 0


def test_others_overtake_what_is_not_back_yet() -> None:
    """Request 1 is on its way when 0 takes its page; 2 is admitted before it, and runs before."""
    batcher = serving(3, (16, 10))
    first = send(batcher, 0.0)
    batcher.add(Request(1, 0.1, 32, 4))
    send(batcher, 0.1)
    batcher.complete(first, 1.0)
    batcher.complete(sent_decode := send(batcher, 1.0), 2.0)
    assert sent_decode.sequences()[0].request.request_id == 0
    batcher.add(Request(2, 2.0, 8, 4))
    assert decision_of(send(batcher, 2.0)) == (((2, 0, 8),), (0,))
    assert [seq.request.request_id for seq in batcher.queues.waiting] == [1]


def test_the_least_urgent_is_preempted_and_decodes_after_one_that_lacks_a_page_wait() -> None:
    """Both need a page: one is free, or none, and request 1 could have what 0 gives up."""
    for pages, priorities, decodes, waiting in [(3, (0, 1), [(0,)], [1]), (2, (1, 0), [], [0])]:
        batcher, batches = serving(pages, scheduling_policy="priority"), []
        for number, priority in enumerate(priorities):
            batcher.add(Request(number, 0.1 * number, 16, 10, priority=priority))
            batches.append(send(batcher, 0.1 * number))
        for batch in batches:
            batcher.complete(batch, 1.0)
        sent = filter(None, [batcher.next(1.0)])
        assert [decision_of(batch) for batch in sent] == [((), each) for each in decodes]
        assert [each.request_id for each in batcher.view.waiting] == waiting


def test_a_step_that_preempts_admits_nobody() -> None:
    batcher = serving(3, (16, 20), (30, 10))
    batcher.complete(send(batcher, 0.0), 1.0)
    batcher.add(Request(2, 1.0, 4, 2))
    assert decision_of(send(batcher, 1.0)) == ((), (0,))
    assert (batcher.view.preemptions, batcher.pool.free_pages) == (1, 1)


def test_a_prompt_under_way_preempts_itself_and_nothing_is_sent() -> None:
    """A step that is empty for want of pages is an answer: the next one admits again."""
    batcher = serving(3, (16, 2), budget=16)
    batcher.complete(send(batcher, 0.0), 1.0)
    decode = send(batcher, 1.0)
    batcher.add(Request(1, 1.0, 20, 2))
    batcher.pool.allocate(1)
    assert batcher.next(1.5) is None, "not all of it fits"
    batcher.complete(decode, 2.0)
    chunk = send(batcher, 2.0)
    assert decision_of(chunk) == (((1, 0, 16),), ())
    batcher.pool.allocate(1)
    assert batcher.next(3.0) is None
    assert (batcher.view.preemptions, batcher.queues.owed) == (1, 1)
    assert batcher.complete(chunk, 4.0) == []
    assert [prompt.request_id for prompt in batcher.view.waiting] == [1]


def test_a_decode_goes_again_while_its_last_token_is_computed() -> None:
    policy = create("vllm_v1", {"async_scheduling": "v1"})
    batcher = engine_of(policy, 8, [(16, 3)], depth=1, asks_again=False)
    first, second = send(batcher, 0.0), send(batcher, 0.1)
    assert [decision_of(batch) for batch in (first, second)] == [
        ((((0, 0, 16)),), ()),
        ((), (0,)),
    ]
    batcher.complete(first, 1.0)
    third = send(batcher, 1.0)
    assert batcher.next(1.1) is None, "the third token is its last"
    assert batcher.complete(second, 2.0) == []
    (ended,) = batcher.complete(third, 3.0)
    assert (ended.first_token_s, ended.completion_s, ended.generated) == (1.0, 3.0, 3)
    assert batcher.queues.gap_s == [1.0, 1.0]
    require_idle(batcher)


@pytest.mark.parametrize(
    ("mode", "stages", "places"),
    [("off", 4, 4), ("v2", 4, 5), ("v2", 1, 2), ("v1", 1, 2)],
)
def test_as_many_are_in_flight_as_in_vllm(mode: str, stages: int, places: int) -> None:
    system = Path(__file__).parent.parent / "examples" / "systems" / "vllm_v1.yaml"
    changes = [f"stages={stages}", f"scheduler.async_scheduling={mode}", "gpu=H100"]
    world = build(load_config(system, changes), [], system.parent).world
    assert world.max_in_flight == places


def test_what_decodes_that_run_ahead_do_not_go_with() -> None:
    policy = create("vllm_v1", {"async_scheduling": "v2"})
    for kv, asks_again in ((KvCache(PagePool(8)), True), (KvCache(PagePool(8), swap=True), False)):
        with pytest.raises(UsageError, match="run ahead, which goes with dispatch: engine_loop"):
            engine_of(policy, kv, depth=1, asks_again=asks_again)


def test_runner_v1_runs_ahead_on_one_stage_only() -> None:
    with pytest.raises(UsageError, match="async_scheduling v1 is for one stage, not 2"):
        create("vllm_v1", {"async_scheduling": "v1"}, depth=2)


class InParts:
    """Yields the plans it was given, each in answer to one question."""

    preempts_in_flight = True

    def __init__(self, *answers: list[Plan]) -> None:
        self.answers = list(answers)

    def schedule(self, view: View) -> object:
        yield from self.answers.pop(0)


def in_parts(*answers: list[Plan], asked: int = 2, **options: Any) -> Any:
    """Return an engine that is asked that many times for 16 tokens and three of output."""
    plans = InParts(*answers)
    return engine_of(plans, 4, [(16, 3)] * asked, RecordingBatcher, max_in_flight=4, **options)


def test_parts_of_an_answer_are_one_micro_batch() -> None:
    answers = [[Plan([Prefill(0, 16)]), Plan([Prefill(1, 16)])], [Plan(decodes=1)]]
    batcher = in_parts(*answers)
    batch = send(batcher, 0.0)
    assert decision_of(batch) == (((0, 0, 16), (1, 0, 16)), ())
    batcher.complete(batch, 1.0)
    assert decision_of(send(batcher, 1.0)) == ((), (0,))
    assert replay(batcher.journal, in_parts(*answers, asked=0)) is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Plan(decodes=1), Plan(decodes=1)], "takes decodes in two parts"),
        ([Plan([Prefill(2, 8)]), Plan(preempt=[2])], "after it was aborted or planned"),
        ([Plan(decodes=2), Plan(preempt=[1])], "after it was aborted or planned"),
        ([Plan(decodes=1), "more"], "returned 'more', not a Plan"),
    ],
)
def test_parts_that_cannot_be_carried_out(parts: list[Plan], message: str) -> None:
    batcher = in_parts([Plan([Prefill(0, 16), Prefill(1, 16)])], parts, asked=3)
    batcher.complete(send(batcher, 0.0), 1.0)
    with pytest.raises(PolicyError, match=message):
        batcher.next(1.0)


def test_who_waits_for_an_output_cannot_be_planned() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(preempt=[0]), Plan([Prefill(0, 16)])])
    send(batcher, 0.0)
    with pytest.raises(PolicyError, match="while an output of it is in flight"):
        batcher.next(1.0)


def test_a_decode_in_flight_is_preempted_and_waits_for_its_token() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(decodes=1)], [Plan(preempt=[0])], [Plan()])
    batcher.complete(send(batcher, 0.0), 0.5)
    decode = send(batcher, 1.0)
    assert batcher.next(1.5) is None
    assert [seq.owed for seq in batcher.queues.waiting] == [1, 0]
    batcher.complete(decode, 2.0)
    assert [seq.generated for seq in batcher.queues.waiting] == [2, 0]


def test_a_speculative_decode_in_flight_yields_no_more_than_its_rest() -> None:
    """A step yields four tokens; the request wants three, and one came with its prompt."""
    answers = [Plan([Prefill(0, 16)])], [Plan(decodes=1)], [Plan(preempt=[0])], [Plan()]
    batcher = in_parts(*answers, speculation=Speculation((1.0,) * 3))
    batcher.complete(send(batcher, 0.0), 0.5)
    decode = send(batcher, 1.0)
    assert batcher.next(1.5) is None
    (ended,) = batcher.complete(decode, 2.0)
    assert (ended.generated, batcher.queues.gap_s) == (3, [1.5, 0.0])


def test_a_decode_taken_while_another_is_in_flight_is_not_preempted() -> None:
    one = Plan(decodes=1)
    batcher = in_parts([Plan([Prefill(0, 16), Prefill(1, 16)])], [one], [one, Plan(preempt=[1])])
    batcher.complete(send(batcher, 0.0), 0.5)
    assert decision_of(send(batcher, 1.0)) == ((), (0,))
    with pytest.raises(PolicyError, match="request 1: preempts it after it was aborted or planned"):
        batcher.next(1.5)


def test_a_client_leaves_while_its_preempted_request_is_in_flight() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(preempt=[0])], [Plan()])
    batch = send(batcher, 0.0)
    assert batcher.next(0.5) is None
    assert batcher.abort(0).aborted
    batcher.abort(1)
    assert (len(batcher.queues.live), batcher.queues.waiting_tokens, batcher.kv.tokens) == (0, 0, 0)
    assert batcher.complete(batch, 1.0) == []
    assert batcher.queues.owed == 0


def test_only_policies_that_say_so_preempt_in_flight() -> None:
    class Quiet(InParts):
        preempts_in_flight = False

    policy = Quiet([Plan([Prefill(0, 16)])], [Plan(decodes=1, victims="latest_admitted")])
    batcher = engine_of(policy, 2, [(16, 3)])
    batcher.complete(send(batcher, 0.0), 1.0)
    batcher.pool.allocate(1)
    with pytest.raises(PolicyError, match="does not say preempts_in_flight"):
        batcher.next(1.0)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("seats", [3, 3, 2]),  # 9 seats on 3 stages
        ("decodes", [3, 3, 2]),  # 8 decodes run
    ],
)
def test_a_micro_batch_takes_its_share_of_what_decodes(share: str, expected: list[int]) -> None:
    """Eight prompts of one burst come back at once; `vllm_v1` would send all of them again."""
    params = {"share": share, "max_num_batched_tokens": 64, "max_num_seqs": 9}
    policy = create("vllm_balanced", params, depth=3)
    batcher = engine_of(policy, 40, [(8, 5)] * 8, depth=3, max_in_flight=3)
    while batcher.view.num_waiting:
        batcher.complete(send(batcher, 0.0), 1.0)
    sent = [len(decision_of(send(batcher, 2.0))[1]) for _ in range(3)]
    assert sent == expected


def test_tokens_are_shared_by_prompts_too() -> None:
    params = {"share": "tokens", "max_num_batched_tokens": 64, "max_num_seqs": 9}
    policy = create("vllm_balanced", params, depth=3)
    batcher = engine_of(policy, 40, [(90, 5)], depth=3, max_in_flight=3)
    sent = [decision_of(send(batcher, 0.0))[0] for _ in range(3)]
    assert sent == [((0, 0, 30),), ((0, 30, 50),), ((0, 50, 64),)]
