"""The Batcher's rules as small scenarios, each ending in one literal log."""

from __future__ import annotations

import pytest

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError, StallError
from evenflow.kv import PagePool
from evenflow.replay import RecordingBatcher, decision_of, replay
from evenflow.scheduling import View
from evenflow.types import Plan, Prefill, Request
from tests.worlds import send


class Scripted:
    """Returns the plans it was given, one a call."""

    pipelined_chunks = False

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)
        self.seen: list[tuple[int, int, int]] = []

    def schedule(self, view: View) -> Plan:
        self.seen.append((view.num_waiting, view.ready_decodes, view.free_pages))
        return self.plans.pop(0)


def batcher(*plans: Plan, pages: int = 10, cap: int | None = 4, length: int = 1_000) -> Batcher:
    return Batcher(
        Scripted(*plans), PagePool(pages), depth=4, max_in_flight=cap, max_model_len=length
    )


def prefill(request_id: int, tokens: int, hold: int = 0) -> Plan:
    return Plan([Prefill(request_id, tokens, hold)])


def test_a_request_from_arrival_to_end() -> None:
    """A prompt of 40 in two chunks, then two decodes; the pages go back at the end."""
    serving = batcher(prefill(7, 30), prefill(7, 10), Plan(decodes=1), Plan(decodes=1))
    serving.add(Request(7, 0.0, 40, 3))
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
    both = Plan([Prefill(0, 16), Prefill(1, 16)])
    serving = batcher(
        both, Plan(decodes=2), Plan(decodes=1), prefill(1, 17), Plan(decodes=1), pages=2
    )
    serving.add(Request(0, 0.0, 16, 3))
    serving.add(Request(1, 0.0, 16, 3))
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
    assert sorted(serving.queues.gap_s) == [1.0, 1.0, 1.0, 3.0], (
        "the victim's gap spans its recompute"
    )


def test_decodes_by_arrival_and_by_return() -> None:
    """Request 0 returns after 1 and 2: by arrival it goes first, by return last."""
    plans = [prefill(0, 4), Plan([Prefill(1, 4), Prefill(2, 4)])]
    for order, expected in [
        ("arrival", (0, 1)),
        ("last_returned", (0, 1)),
        ("first_returned", (1, 2)),
    ]:
        serving = batcher(*plans, Plan(decodes=2, order=order))  # type: ignore[arg-type]
        for request_id in range(3):
            serving.add(Request(request_id, 0.0, 4, 9))
        first, second = serving.next(0.0), serving.next(0.0)
        assert first is not None
        assert second is not None
        serving.complete(second, 1.0)
        serving.complete(first, 1.0)
        batch = send(serving, 1.0)
        assert sorted(decision_of(batch).decodes) == sorted(expected)  # type: ignore[union-attr]


def test_the_cap_on_micro_batches_in_flight() -> None:
    serving = batcher(prefill(0, 1), prefill(1, 1), cap=1)
    serving.add(Request(0, 0.0, 1, 1))
    serving.add(Request(1, 0.0, 1, 1))
    batch = send(serving, 0.0)
    assert serving.next(0.0) is None
    assert serving.wait_reason == "policy"
    serving.complete(batch, 1.0)
    assert serving.next(1.0) is not None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(0, 0.0, 100, 61), "161 tokens"),
        (Request(0, 0.0, 900, 101), "1001 tokens exceed max_model_len 1000"),
    ],
)
def test_what_can_never_fit_is_refused(request_: Request, reason: str) -> None:
    serving = batcher()
    refusal = serving.add(request_)
    assert refusal is not None
    assert reason in refusal or "11 KV pages exceed the pool's 10" in refusal
    assert not serving.queues.live


def test_the_same_request_twice_is_refused() -> None:
    serving = batcher()
    serving.add(Request(3, 0.0, 1, 1))
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
        (None, "returned None, not a Plan"),
        (((), 0), "not a Plan"),
    ],
)
def test_an_impossible_plan_names_the_policy_and_the_request(plan: Plan, message: str) -> None:
    serving = batcher(plan)
    serving.add(Request(0, 0.0, 40, 2))
    with pytest.raises(PolicyError, match="Scripted") as error:
        serving.next(0.0)
    assert message in str(error.value)


def test_a_second_chunk_waits_for_the_first_unless_chunks_are_pipelined() -> None:
    plans = [prefill(0, 10), prefill(0, 10)]
    serving = batcher(*plans)
    serving.add(Request(0, 0.0, 40, 2))
    serving.add(Request(1, 0.0, 40, 2))
    serving.next(0.0)
    with pytest.raises(PolicyError, match="earlier chunk is in flight"):
        serving.next(0.0)
    pipelined = Batcher(
        Scripted(*plans),
        PagePool(10),
        depth=4,
        max_in_flight=4,
        max_model_len=100,
        pipelined_chunks=True,
    )
    pipelined.add(Request(0, 0.0, 40, 2))
    batches = [pipelined.next(0.0), pipelined.next(0.0)]
    assert [decision_of(batch).chunks for batch in batches] == [  # type: ignore[union-attr]
        ((0, 0, 10),),
        ((0, 10, 20),),
    ]


def test_a_policy_that_raises_is_named() -> None:
    serving = batcher()  # no plan left: pop from an empty list
    serving.add(Request(0, 0.0, 4, 2))
    with pytest.raises(PolicyError, match="Scripted raised IndexError: pop from empty list"):
        serving.next(0.0)


def test_sending_nothing_with_nothing_in_flight_is_a_stall() -> None:
    serving = batcher(Plan())
    serving.add(Request(5, 0.0, 4, 2))
    with pytest.raises(StallError, match=r"Scripted stalls at 2 s.*request 5 first"):
        serving.next(2.0)
    patient = batcher(Plan(wake_at_s=3.0, kv_limited=True))
    patient.add(Request(5, 0.0, 4, 2))
    assert patient.next(2.0) is None
    assert (patient.wake_at_s, patient.wait_reason) == (3.0, "kv")


def test_a_micro_batch_completes_once() -> None:
    serving = batcher(prefill(0, 4))
    serving.add(Request(0, 0.0, 4, 2))
    batch = send(serving, 0.0)
    serving.complete(batch, 1.0)
    with pytest.raises(ValueError, match="micro-batch 0 is not in flight"):
        serving.complete(batch, 1.0)


def test_an_early_stop_ends_a_request_and_frees_its_pages() -> None:
    serving = batcher(Plan([Prefill(0, 4), Prefill(1, 4)]), Plan(decodes=1))
    serving.add(Request(0, 0.0, 4, 50))
    serving.add(Request(1, 0.0, 4, 2))
    batch = send(serving, 0.0)
    assert serving.complete(batch, 1.0, stopped=[0])[0].generated == 1
    batch = send(serving, 1.0)
    assert decision_of(batch).decodes == (1,)  # type: ignore[union-attr]
    serving.complete(batch, 2.0)
    serving.pool.check_integrity([])
    assert serving.view.expected_output_tokens == 0


def test_a_view_does_not_show_the_true_output_length() -> None:
    serving = batcher(pages=100)
    serving.add(Request(0, 0.0, 4, 777, predicted_output_tokens=5))
    prompt = next(iter(serving.view.waiting))
    shown = {name: getattr(prompt, name) for name in dir(prompt) if not name.startswith("_")}
    assert 777 not in shown.values()
    assert shown["predicted_output_tokens"] == 5


def test_replay_finds_a_decision_that_differs() -> None:
    def recording(*plans: Plan) -> RecordingBatcher:
        return RecordingBatcher(
            Scripted(*plans), PagePool(10), depth=4, max_in_flight=4, max_model_len=100
        )

    recorded = recording(prefill(0, 4))
    recorded.add(Request(0, 0.0, 4, 2))
    recorded.next(0.0)
    assert replay(recorded.journal, recording(prefill(0, 4))) is None
    difference = replay(recorded.journal, recording(prefill(0, 3)))
    assert difference is not None
    assert difference.startswith("entry 1 (Asked)")
