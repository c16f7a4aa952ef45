"""The Batcher's rules as small scenarios, each ending in one literal log."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Decode
from evenflow.core.kv import PagePool, PrefixCache
from evenflow.core.replay import RecordingBatcher, decision_of, replay
from evenflow.core.scheduling import View
from evenflow.engines.handover import Handover, PoolBatcher
from evenflow.engines.radix import RadixCache
from evenflow.engines.rules import EngineRules
from evenflow.engines.upkeep import Upkeep
from evenflow.errors import PolicyError, StallError
from evenflow.types import Action, Plan, Prefill, Prefix, Request, Rules
from tests.worlds import check_integrity, engine_of, send


class Scripted:
    """Returns the plans it was given, one a call."""

    rules = Rules()

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)

    def schedule(self, view: View) -> Plan:
        return self.plans.pop(0)


class Holds:
    """Computes the prompt of request 0; holds and preempts any other in one answer."""

    def schedule(self, view: View) -> Iterator[Plan | Action]:
        prompt = next(view.waiting)
        if prompt.request_id == 0:
            yield Plan([Prefill(0, prompt.remaining)])
        else:
            yield Upkeep(hold=[prompt.request_id])
            yield Plan(preempt=[prompt.request_id])


class Cuts(Scripted):
    rules = EngineRules(cuts=True)


class Radix(Scripted):
    rules = EngineRules(cache="radix")


def batcher(
    *plans: Plan,
    asked: Iterable[tuple[int, int, int]] = (),
    pages: int | PagePool = 10,
    cap: int = 4,
    kind: Callable[..., Batcher] = Batcher,
    policy: type[Scripted] = Scripted,
    **options: Any,
) -> Any:
    """Return a Batcher that is asked (request, prompt tokens, output tokens)."""
    made = engine_of(policy(*plans), pages, kind=kind, depth=4, max_in_flight=cap, **options)
    for request_id, prompt, output in asked:
        made.add(Request(request_id, 0.0, prompt, output))
    return made


def prefill(request_id: int, tokens: int, hold: int = 0) -> Plan:
    return Plan([Prefill(request_id, tokens, hold)])


def test_a_request_from_arrival_to_end() -> None:
    """A prompt of 40 in two chunks, then two decodes; the pages go back at the end."""
    decode = Plan(decodes=1)
    serving = batcher(prefill(7, 30), prefill(7, 10), decode, decode, asked=[(7, 40, 3)])
    log = []
    for now_s in (1.0, 2.0, 3.0, 4.0):
        batch = send(serving, now_s)
        log.append((decision_of(batch), batch.decode_context, batch.sampled_rows, batch.free_pages))
        finished = serving.complete(batch, now_s + 0.5)
    assert log == [
        (((((7, 0, 30)),), ()), 0, 0, 8),
        (((((7, 30, 40)),), ()), 0, 1, 7),
        (((), (7,)), 40, 1, 7),
        (((), (7,)), 41, 1, 7),
    ]
    (seq,) = finished
    assert (seq.first_token_s, seq.completion_s, seq.generated) == (2.5, 4.5, 3)
    assert serving.queues.gap_s == [1.0, 1.0]
    assert serving.pool.free_pages == 10
    assert serving.next(5.0) is None
    assert serving.wait_reason == "work"


def test_preemption_recomputes_prompt_and_output_as_one_prompt() -> None:
    """Two requests of 16 tokens fill two pages; the first decode preempts the later arrival."""
    both, decode = Plan([Prefill(0, 16), Prefill(1, 16)]), Plan(decodes=1)
    plans = both, Plan(decodes=2), decode, prefill(1, 17), decode
    serving = batcher(*plans, asked=[(0, 16, 3), (1, 16, 3)], pages=2)
    log = []
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        batch = send(serving, now_s)
        log.append(decision_of(batch))
        finished = serving.complete(batch, now_s)
    assert log == [
        (((0, 0, 16), (1, 0, 16)), ()),
        ((), (0,)),
        ((), (0,)),
        (((1, 0, 17),), ()),
        ((), (1,)),
    ]
    (seq,) = finished
    assert (seq.first_token_s, seq.epoch, seq.generated) == (1.0, 1, 3)
    assert serving.queues.preemptions == 1
    gaps_s = sorted(serving.queues.gap_s)
    assert gaps_s == [1.0, 1.0, 1.0, 3.0], "the victim's gap spans its recompute"


@pytest.mark.parametrize(
    ("order", "expected"),
    [("arrival", (0, 1)), ("last_returned", (0, 1)), ("first_returned", (1, 2))],
)
def test_decodes_by_arrival_and_by_return(order: Any, expected: tuple[int, int]) -> None:
    """Request 0 returns after 1 and 2: by arrival it goes first, by return last."""
    serving = three_decodes(Plan(decodes=2, order=order))
    assert tuple(sorted(decision_of(send(serving, 1.0)).decodes)) == expected


def three_decodes(*plans: Plan, **options: Any) -> Any:
    """Return a Batcher with request 0 ready from slot 0, and 1 and 2, back before, from slot 1."""
    prompts = prefill(0, 4), Plan([Prefill(1, 4), Prefill(2, 8)])
    serving = batcher(*prompts, *plans, asked=[(0, 4, 9), (1, 4, 9), (2, 8, 9)], **options)
    first, second = send(serving, 0.0), send(serving, 0.0)
    serving.complete(second, 0.5)
    serving.complete(first, 1.0)
    return serving


def test_a_plan_may_name_its_decodes_and_the_view_says_where_and_when_they_were_last() -> None:
    serving = three_decodes(Plan(decodes=[2, 0]), Plan(decodes=(1,)), kind=RecordingBatcher)
    serving.queues.now_s = 1.5
    ready = [Decode(1, 4, 1, None, 9, 1, 1.0), Decode(2, 8, 1, None, 9, 1, 1.0)]
    assert [*serving.view.decodes] == [*ready, Decode(0, 4, 1, None, 9, 0, 0.5)]
    assert serving.view.slot == 2
    batches = [send(serving, 2.0), send(serving, 2.0)]
    assert [decision_of(batch).decodes for batch in batches] == [(2, 0), (1,)]
    assert not [*serving.view.decodes]
    for batch in reversed(batches):
        serving.complete(batch, 2.25)
    back = [(one.request_id, one.slot, one.idle_s) for one in serving.view.decodes]
    assert back == [(1, 3, 0.0), (2, 2, 0.0), (0, 2, 0.0)]
    assert sorted(serving.queues.gap_s) == [1.25, 1.75, 1.75]
    plans = prefill(0, 4), Plan([Prefill(1, 4), Prefill(2, 8)]), Plan(decodes=[2, 0])
    assert replay(serving.journal, batcher(*plans, Plan(decodes=[1]))) is None
    other = replay(serving.journal, batcher(*plans[:2], Plan(decodes=[0, 1])))
    assert other is not None
    assert "decodes=(0, 1)" in other


def test_nobody_takes_the_place_of_a_named_decode_that_was_preempted() -> None:
    """Of pages of 4 tokens one is free, and decodes 1 and 2 need one: the later is preempted."""
    serving = three_decodes(Plan(decodes=[1, 2]), pages=PagePool(5, 4))
    assert decision_of(send(serving, 1.0)).decodes == (1,)
    assert [one.request_id for one in serving.view.decodes] == [0]
    assert [prompt.request_id for prompt in serving.view.waiting] == [2]


def test_the_cap_on_micro_batches_in_flight() -> None:
    serving = batcher(prefill(0, 1), prefill(1, 1), asked=[(0, 1, 1), (1, 1, 1)], cap=1)
    batch = send(serving, 0.0)
    assert serving.next(0.0) is None
    assert serving.wait_reason == "policy"
    serving.complete(batch, 1.0)
    assert serving.next(1.0) is not None


@pytest.mark.parametrize(
    ("prompt", "output", "reason"),
    [
        (100, 62, "11 KV pages exceed the pool's 10"),
        (900, 101, "1001 tokens exceed max_model_len 1000"),
    ],
)
def test_what_can_never_fit_is_refused(prompt: int, output: int, reason: str) -> None:
    serving = batcher()
    assert serving.add(Request(0, 0.0, prompt, output)) == reason
    assert not serving.queues.live


def test_the_same_request_twice_is_refused() -> None:
    serving = batcher(asked=[(3, 1, 1)])
    with pytest.raises(ValueError, match="request 3 is already"):
        serving.add(Request(3, 0.0, 1, 1))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (prefill(9, 1), "request 9, which is not being served"),
        (prefill(0, 41), "request 0: prefills 41 of 40 tokens left"),
        (prefill(0, 0), "request 0: prefills 0 of 40"),
        (prefill(0, 40, hold=200), "request 0: needs 13 pages of 10 free"),
        (Plan(decodes=1), "takes 1 decodes of 0 ready"),
        (Plan([Prefill(0, 1)], decodes=-1), "takes -1 decodes"),
        (Plan(preempt=[0]), "preempts request 0"),
        (Plan(preempt=[[0]]), "preempts request [0], which is not being served"),
        (Plan(preempt=0), "plans 0 as the requests to preempt; a list of their ids is right"),
        (Plan(decodes=[0]), "takes the decode of request 0, which is not ready to decode"),
        (Plan(decodes=[9]), "takes the decode of request 9, which is not ready to decode"),
        (Plan(decodes="0"), "plans '0' as the decodes to take; a list of request ids, or"),
        (Plan(decodes=np.array([0, 1])), "as the decodes to take; a list of request ids, or"),
        (Plan(np.array([0, 1])), "as the prefills; a list of Prefill(request_id, tokens) is right"),
        (Plan([Prefill([0], 1)]), "prefills request [0], which is not being served"),
        (prefill(0, 4, hold=-1), "request 0: holds -1 tokens"),
        (prefill(0, True), "plans True as the tokens to prefill of request 0; a whole number"),
        (Plan([Prefill("0", 1)]), "prefills request '0', which is not being served"),
        (prefill(False, 4), "prefills request False, which is not being served"),
        (Plan(preempt=[True]), "preempts request True, which is not being served"),
        (Plan(decodes=True), "plans True as the decodes to take; a list of request ids, or"),
        (prefill(0, 4, hold="all"), "plans 'all' as the tokens to prefill of request 0"),
        (None, "returned None, not a Plan"),
        (((), 0), "not a Plan"),
    ],
)
def test_an_impossible_plan_names_the_policy_and_the_request(plan: Plan, message: str) -> None:
    serving = batcher(plan, asked=[(0, 40, 2)])
    with pytest.raises(PolicyError, match="Scripted") as error:
        serving.next(0.0)
    assert message in str(error.value)


@pytest.mark.parametrize("order", ["x", None, ["arrival"]])
def test_an_order_that_there_is_not_is_refused_in_a_plan_and_by_the_view(order: Any) -> None:
    right = "one of arrival, first_returned, last_returned, last_row is right"
    serving = three_decodes(Plan(decodes=1, order=order))
    with pytest.raises(PolicyError, match=right):
        serving.next(1.0)
    compiled = "str object expected"  # mypyc's words for what is no text
    for asked in (serving.view.ready, serving.view.decode_pages):
        with pytest.raises((ValueError, TypeError), match=f"is none of arrival, first|{compiled}"):
            asked(1, order)
    with pytest.raises((ValueError, TypeError), match=f"is none of latest_arrived|{compiled}"):
        serving.view.victim(order)


def test_what_a_generator_returns_is_the_last_part_of_its_answer() -> None:
    class Returns(Scripted):
        def schedule(self, view: Any) -> Any:
            yield prefill(0, 4)
            return self.plans.pop(0)

    serving = batcher(prefill(1, 8), 3, policy=Returns, asked=[(0, 8, 1), (1, 8, 1)])
    batch = send(serving, 0.0)
    assert decision_of(batch) == (((0, 0, 4), (1, 0, 8)), ())
    serving.complete(batch, 1.0)
    with pytest.raises(PolicyError, match="returned 3, not a Plan"):
        serving.next(1.0)


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.core.batcher.MOST_PARTS", 100)
    serving = batcher(itertools.repeat(Plan()), asked=[(0, 40, 2)])
    with pytest.raises(PolicyError, match="answers in more than"):
        serving.next(0.0)


@pytest.mark.parametrize("answer", [False, True, 0, 3])
def test_a_policy_refuses_with_a_reason_or_not_at_all(answer: object) -> None:
    class Refuses(Scripted):
        def refuse(self, *_: object) -> Any:
            return answer

    serving = batcher(policy=Refuses)
    with pytest.raises(PolicyError, match=f"refuses with {answer}; a reason, or None, is right"):
        serving.add(Request(0, 0.0, 40, 2))


def test_a_decode_is_named_once_and_not_while_it_is_in_flight() -> None:
    for named, why in (([0, 1, 0], "0, which is there twice"), ([0], "0, which is not ready")):
        serving = three_decodes(Plan(decodes=[0]), Plan(decodes=named))
        if len(named) == 1:
            send(serving, 1.0)
        else:
            serving.scheduler.plans.pop(0)
        with pytest.raises(PolicyError, match=f"takes the decode of request {why}"):
            serving.next(1.0)


def test_a_second_chunk_waits_for_the_first_unless_chunks_are_pipelined() -> None:
    plans = prefill(0, 10), prefill(0, 10)
    serving = batcher(*plans, asked=[(0, 40, 2), (1, 40, 2)])
    serving.next(0.0)
    with pytest.raises(PolicyError, match="earlier chunk is in flight"):
        serving.next(0.0)
    pipelined = batcher(*plans, asked=[(0, 40, 2)], pipelined_chunks=True)
    chunks = [decision_of(send(pipelined, 0.0)).chunks for _ in plans]
    assert chunks == [((0, 0, 10),), ((0, 10, 20),)]


def test_a_decode_in_flight_is_not_preempted_by_a_policy_that_does_not_say_so() -> None:
    two = (0, 4, 3), (1, 4, 3)
    serving = batcher(prefill(0, 4), Plan(decodes=1), Plan(preempt=[0]), asked=two)
    serving.complete(send(serving, 0.0), 0.5)
    send(serving, 1.0)
    with pytest.raises(PolicyError, match="preempts request 0, which is in flight"):
        serving.next(2.0)


@pytest.mark.parametrize(
    ("policy", "pool", "waits"), [(Radix, RadixCache, 42 + 40), (Scripted, PrefixCache, 10 + 8)]
)
def test_of_who_is_preempted_what_is_not_cached_waits(
    policy: type[Scripted], pool: type[PagePool], waits: int
) -> None:
    """Request 1 found 32 of its 40 tokens and made two. A radix tree is looked into when asked."""
    plans = prefill(0, 40), prefill(1, 8), Plan(decodes=1), Plan(preempt=[1]), Plan()
    serving = batcher(*plans, pages=pool(10), policy=policy)
    for number, blocks in enumerate([(1, 2, 3), (1, 2, 4), (1, 2, 4)]):
        prefix = Prefix(blocks, 16, 40)
        serving.add(Request(number, 0.0, 40, 4 if number else 1, prefix=prefix))
        if number < 2:
            assert [prompt.remaining for prompt in serving.view.waiting] == [8 if number else 40]
            serving.complete(send(serving, 1.0), 1.5)
    serving.complete(send(serving, 2.0), 2.5)
    with pytest.raises(StallError):
        serving.next(3.0)
    assert serving.queues.waiting_tokens == waits


def test_tokens_of_one_instant_are_a_gap_of_nothing() -> None:
    serving = batcher(prefill(0, 4), Plan(preempt=[0]), prefill(0, 5), asked=[(0, 4, 3)])
    for _ in range(2):
        serving.complete(send(serving, 1.0), 1.0)
    assert (serving.queues.gap_s, serving.queues.gap_count) == ([0.0], [1])


def test_who_is_preempted_computes_again_what_it_had_left_out() -> None:
    """Six of its ten tokens are enough for request 0 once; after its preemption it needs all."""
    short, whole = Plan([Prefill(0, 6, ends=True)]), Plan([Prefill(0, 11)])
    answers = short, Plan(preempt=[0]), whole
    serving = batcher(*answers, asked=[(0, 10, 4)], policy=Cuts)
    serving.complete(send(serving, 0.0), 0.5)
    (seq,) = serving.queues.live.values()
    assert seq.held_tokens == 6
    serving.complete(send(serving, 1.0), 1.5)
    assert seq.held_tokens == 11


def test_a_policy_that_raises_is_named() -> None:
    serving = batcher(asked=[(0, 4, 2)])  # no plan left: pop from an empty list
    with pytest.raises(PolicyError, match="Scripted raised IndexError: pop from empty list"):
        serving.next(0.0)


def test_sending_nothing_with_nothing_in_flight_is_a_stall() -> None:
    serving = batcher(Plan(), asked=[(5, 4, 2)])
    with pytest.raises(
        StallError, match=r"Scripted stalls at 2 s.*request 5 first\), and it sends nothing; "
    ):
        serving.next(2.0)
    patient = batcher(Plan(wake_at_s=3.0, kv_limited=True), asked=[(5, 4, 2)])
    assert patient.next(2.0) is None
    assert (patient.wake_at_s, patient.wait_reason) == (3.0, "kv")


@pytest.mark.parametrize("at_s", [2.0, -1.0, float("nan"), float("inf"), True, "soon"])
def test_a_policy_is_asked_again_at_a_later_time_or_named(at_s: Any) -> None:
    serving = batcher(Plan(wake_at_s=at_s), asked=[(5, 4, 2)])
    told = f"policy Scripted plans {at_s!r} as the time to be asked again; after 2 s is right"
    with pytest.raises(PolicyError, match=re.escape(told)):
        serving.next(2.0)


@pytest.mark.parametrize("comes", ["as a request", "with its KV"])
def test_a_policy_may_ask_to_be_woken_so_often_and_no_more(
    comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.core.batcher.MOST_WAKES", 3)
    plans, request = [Plan(wake_at_s=9.0)] * 3, Request(0, 0.0, 4, 2)
    serving = batcher(*plans, kind=PoolBatcher)
    if comes == "as a request":
        serving.add(request)
    else:
        serving.reserve(Handover(request, 1, 0.0, 0.0, 0))
        serving.adopt(0)
    assert [serving.next(0.0), serving.next(1.0)] == [None, None]
    with pytest.raises(StallError, match="sends nothing when asked 3 times"):
        serving.next(2.0)


def test_a_policy_that_is_asked_again_and_again_at_one_instant_stalls_while_kv_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evenflow.core.batcher.MOST_WAKES", 3)
    serving = batcher(*[Plan()] * 5, asked=[(0, 4, 2)], kind=PoolBatcher, asks_again=False)
    serving.reserve(Handover(Request(1, 0.0, 4, 2), 1, 0.0, 0.0, 0))
    assert [serving.next(at_s) for at_s in (0.0, 0.0, 1.0, 1.0)] == [None] * 4
    with pytest.raises(StallError, match=r"KV of 1 requests are under way, 1 requests wait"):
        serving.next(1.0)


def test_a_request_that_was_given_its_pages_back_and_not_sent_yet_is_not_preempted() -> None:
    """Else the plan could be made again for ever, and its pages be counted twice."""
    first, again = (Request(n, 0.0, 40, 2, prefix=Prefix((1, 2), 16, 32)) for n in range(2))
    serving = engine_of(Holds(), PrefixCache(10, 16), max_model_len=100)
    serving.add(first)
    serving.complete(send(serving, 0.0), 0.0)
    serving.add(again)
    with pytest.raises(PolicyError, match="preempts request 1, which holds no pages"):
        serving.next(1.0)


def test_why_nothing_was_sent_before_the_last_micro_batch_is_forgotten() -> None:
    plans = Plan(wake_at_s=1.0, kv_limited=True), prefill(0, 4), Plan(preempt=[0])
    serving = batcher(*plans, asked=[(0, 4, 3)], asks_again=False)
    assert (serving.next(0.0), serving.wait_reason) == (None, "kv")
    serving.complete(send(serving, 1.0), 1.5)
    assert (serving.next(2.0), serving.wait_reason) == (None, "policy")


def test_a_micro_batch_completes_once() -> None:
    serving = batcher(prefill(0, 4), asked=[(0, 4, 2)])
    batch = send(serving, 0.0)
    serving.complete(batch, 1.0)
    with pytest.raises(ValueError, match="micro-batch 0 is not in flight"):
        serving.complete(batch, 1.0)


def test_an_early_stop_ends_a_request_and_frees_its_pages() -> None:
    both = Plan([Prefill(0, 4), Prefill(1, 4)])
    serving = batcher(both, Plan(decodes=1), asked=[(0, 4, 50), (1, 4, 2)])
    batch = send(serving, 0.0)
    assert serving.complete(batch, 1.0, stopped=[0])[0].generated == 1
    batch = send(serving, 1.0)
    assert decision_of(batch).decodes == (1,)
    serving.complete(batch, 2.0)
    check_integrity(serving.pool, [])
    assert serving.view.expected_output_tokens == 0


def test_a_view_does_not_show_the_true_output_length() -> None:
    serving = batcher(pages=100)
    serving.add(Request(0, 0.0, 4, 777, predicted_output_tokens=5, max_new_tokens=900))
    prompt = next(iter(serving.view.waiting))
    shown = {name: getattr(prompt, name) for name in dir(prompt) if not name.startswith("_")}
    assert 777 not in shown.values()
    assert shown["predicted_output_tokens"] == 5


def test_replay_finds_a_decision_that_differs() -> None:
    recorded = batcher(prefill(0, 4), asked=[(0, 4, 2)], kind=RecordingBatcher)
    recorded.next(0.0)
    assert replay(recorded.journal, batcher(prefill(0, 4))) is None
    difference = replay(recorded.journal, batcher(prefill(0, 3)))
    assert difference is not None
    assert difference.startswith("entry 1 (Asked)")


# -- a client that leaves: what becomes of its request, by where the request is -------------------


def test_a_request_that_waits_is_aborted_at_once() -> None:
    serving = batcher(prefill(1, 4), asked=[(0, 40, 2), (1, 4, 1)])
    seq = serving.abort(0)
    assert (seq.generated, serving.queues.waiting_tokens, list(serving.queues.live)) == (0, 4, [1])
    with pytest.raises(ValueError, match="request 0 is not being served"):
        serving.abort(0)
    assert serving.next(0.0) is not None


def test_chunks_in_flight_keep_the_pages_of_an_aborted_request_until_the_last_is_back() -> None:
    plans = prefill(0, 16), prefill(0, 16), prefill(1, 4)
    serving = batcher(*plans, asked=[(0, 48, 2)], pipelined_chunks=True)
    batches = send(serving, 0.0), send(serving, 0.0)
    serving.abort(0)
    with pytest.raises(ValueError, match="request 0 is not being served"):
        serving.abort(0)
    queues = serving.queues
    log = [(serving.pool.free_pages, len(queues.admitted), queues.waiting_tokens)]
    for batch in batches:
        assert serving.complete(batch, 1.0) == []
        log.append((serving.pool.free_pages, len(queues.admitted), queues.waiting_tokens))
    assert log == [(8, 1, 0), (8, 1, 0), (10, 0, 0)]
    assert not queues.live
    serving.add(Request(1, 0.0, 4, 1))
    assert serving.next(2.0) is not None


def test_an_aborted_decode_has_counted_the_tokens_it_got() -> None:
    serving = batcher(prefill(0, 4), *[Plan(decodes=1)] * 3, asked=[(0, 4, 9)])
    for now_s in (0.0, 1.0, 2.0):
        serving.complete(send(serving, now_s), now_s)
    batch = send(serving, 3.0)
    seq = serving.abort(0)
    assert seq.generated == 3
    serving.complete(batch, 4.0)
    assert seq.generated == 4, "the token in flight came out and was thrown away"


def test_a_decode_is_aborted_at_once_when_ready_and_on_return_when_in_flight() -> None:
    all_three, decode = Plan([Prefill(i, 4) for i in range(3)]), Plan(decodes=1)
    serving = batcher(all_three, decode, decode, asked=[(0, 4, 2), (1, 4, 3), (2, 4, 3)])
    serving.complete(send(serving, 0.0), 1.0)
    batch = send(serving, 1.0)
    assert [seq.generated for seq in (serving.abort(0), serving.abort(1))] == [1, 1]
    queues = serving.queues
    assert (serving.pool.free_pages, queues.running_decodes) == (8, 2)
    assert serving.complete(batch, 2.0) == [], "request 0 got its last token, and is aborted"
    left = (serving.pool.free_pages, queues.running_decodes, list(queues.live))
    assert left == (9, 1, [2])
    assert decision_of(send(serving, 3.0)).decodes == (2,)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_policy_that_goes_on_with_an_aborted_request_is_told(pipelined: bool) -> None:
    plans = prefill(0, 4), prefill(0, 4)
    serving = batcher(*plans, asked=[(0, 40, 2), (1, 40, 2)], pipelined_chunks=pipelined)
    serving.next(0.0)
    serving.abort(0)
    with pytest.raises(PolicyError, match="prefills request 0, which is not being served"):
        serving.next(0.0)
