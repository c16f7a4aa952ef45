"""A client that leaves: what becomes of its request, by where the request is."""

from __future__ import annotations

import pytest

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError
from evenflow.kv import PagePool
from evenflow.replay import decision_of
from evenflow.types import Plan, Prefill, Request
from tests.test_batcher import Scripted, batcher, prefill
from tests.worlds import send


def test_a_request_that_waits_is_aborted_at_once() -> None:
    serving = batcher(prefill(1, 4))
    serving.add(Request(0, 0.0, 40, 2))
    serving.add(Request(1, 0.0, 4, 1))
    seq = serving.abort(0)
    assert (seq.generated, serving.queues.waiting_tokens, list(serving.queues.live)) == (0, 4, [1])
    with pytest.raises(ValueError, match="request 0 is not being served"):
        serving.abort(0)
    assert serving.next(0.0) is not None


def test_chunks_in_flight_keep_the_pages_of_an_aborted_request_until_the_last_is_back() -> None:
    serving = Batcher(
        Scripted(prefill(0, 16), prefill(0, 16), prefill(1, 4)),
        PagePool(10),
        depth=4,
        max_in_flight=4,
        max_model_len=100,
        pipelined_chunks=True,
    )
    serving.add(Request(0, 0.0, 48, 2))
    first, second = serving.next(0.0), serving.next(0.0)
    assert first is not None
    assert second is not None
    serving.abort(0)
    with pytest.raises(ValueError, match="request 0 is not being served"):
        serving.abort(0)
    queues = serving.queues
    log = [(serving.pool.free_pages, len(queues.admitted), queues.waiting_tokens)]
    for batch in (first, second):
        assert serving.complete(batch, 1.0) == []
        log.append((serving.pool.free_pages, len(queues.admitted), queues.waiting_tokens))
    assert log == [(8, 1, 0), (8, 1, 0), (10, 0, 0)]
    assert not queues.live
    serving.add(Request(1, 0.0, 4, 1))
    assert serving.next(2.0) is not None


def test_an_aborted_decode_has_counted_the_tokens_it_got() -> None:
    serving = batcher(prefill(0, 4), *[Plan(decodes=1)] * 3)
    serving.add(Request(0, 0.0, 4, 9))
    for now_s in (0.0, 1.0, 2.0):
        batch = send(serving, now_s)
        serving.complete(batch, now_s)
    batch = send(serving, 3.0)
    seq = serving.abort(0)
    assert seq.generated == 3
    serving.complete(batch, 4.0)
    assert seq.generated == 4, "the token in flight came out and was thrown away"


def test_a_decode_is_aborted_at_once_when_ready_and_on_return_when_in_flight() -> None:
    serving = batcher(Plan([Prefill(i, 4) for i in range(3)]), Plan(decodes=1), Plan(decodes=1))
    for request_id in range(3):
        serving.add(Request(request_id, 0.0, 4, 3 if request_id else 2))
    batch = send(serving, 0.0)
    serving.complete(batch, 1.0)
    batch = send(serving, 1.0)
    assert [seq.generated for seq in (serving.abort(0), serving.abort(1))] == [1, 1]
    queues = serving.queues
    assert (serving.pool.free_pages, queues.running_decodes) == (8, 2)
    assert serving.complete(batch, 2.0) == [], "request 0 got its last token, and is aborted"
    assert (serving.pool.free_pages, serving.queues.running_decodes, list(serving.queues.live)) == (
        9,
        1,
        [2],
    )
    batch = send(serving, 3.0)
    assert decision_of(batch).decodes == (2,)  # type: ignore[union-attr]


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_policy_that_goes_on_with_an_aborted_request_is_told(pipelined: bool) -> None:
    serving = batcher(prefill(0, 4), prefill(0, 4))
    serving.queues.pipelined_chunks = pipelined
    serving.add(Request(0, 0.0, 40, 2))
    serving.add(Request(1, 0.0, 40, 2))
    serving.next(0.0)
    serving.abort(0)
    with pytest.raises(PolicyError, match="prefills request 0, which is not being served"):
        serving.next(0.0)
