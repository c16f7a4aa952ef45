"""TD-Pipe's single decisions: when a phase ends, and on what it looks to say so."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.batcher import Batcher
from evenflow.kv import PagePool
from evenflow.schedulers.td_pipe import TDPipe
from evenflow.types import Request
from tests.td_pipe_parts import NO_SWITCH, batcher_of, offline, td_pipe
from tests.worlds import send


def deciding(policy: Any, outputs: list[int], *, predicted: int = 90, pages: int = 1000) -> Batcher:
    """Two stages; prompts of 16 tokens have decoded one round, and the first batch has returned."""
    batcher = Batcher(policy, PagePool(pages), depth=2, max_in_flight=None, max_model_len=4096)
    for number, output in enumerate(outputs):
        batcher.add(Request(number, 0.0, 16, output, predicted))
    prefills = []
    while (batch := batcher.next(0.0)) is not None and batch.chunks:
        prefills.append(batch)
    assert batch is None
    for prefill in prefills:
        batcher.complete(prefill, 1.0)
    first, _ = send(batcher, 1.0), send(batcher, 1.0)
    batcher.complete(first, 2.0)
    return batcher


def arrive(batcher: Batcher, count: int, prompt: int = 16, predicted: int = 90) -> None:
    for number in range(count):
        batcher.add(Request(1000 + number, 2.0, prompt, 90, predicted))


def letters(batcher: Batcher, count: int) -> str:
    return "".join("P" if send(batcher, 3.0).chunks else "D" for _ in range(count))


def flat(rows: int, context_tokens: int) -> float:
    return 1.0


def linear(rows: int, context_tokens: int) -> float:
    return float(rows)


def odd_peak(rows: int, context_tokens: int) -> float:
    """Saturates at 64 rows, and is 100 times slower at the public code's 256."""
    return 100.0 if rows == 256 else max(1.0, rows / 64)


@pytest.mark.parametrize(
    ("variant", "decode_s", "prefill_s", "answer"),
    [
        ("paper", flat, 1.0, "P"),  # far from saturated, and no bubble
        ("paper", linear, 1.0, "D"),  # every batch is saturated
        ("paper", odd_peak, 10.0, "P"),  # 2 / 64 < 1 - 9 / 21
        ("code", odd_peak, 10.0, "D"),  # 2 * 100 / 256 > 1 - 9 / 21
    ],
)
def test_decode_ends_when_spatial_is_below_temporal_intensity(
    variant: str, decode_s: Any, prefill_s: float, answer: str
) -> None:
    policy = TDPipe(variant=variant, decode_s=decode_s, prefill_s=lambda tokens: prefill_s)
    batcher = deciding(policy, [90] * 4)
    arrive(batcher, 1)
    assert letters(batcher, 1) == answer


def test_a_phase_of_decode_lasts_a_round() -> None:
    batcher = batcher_of(TDPipe(decode_s=flat, prefill_s=lambda tokens: 1.0))
    for request in offline(8, 16, 90):
        batcher.add(request)
    batcher.complete(send(batcher, 0.0), 1.0)
    assert letters(batcher, 1) == "D"
    arrive(batcher, 1)
    assert letters(batcher, 3) == "DDD"


def test_the_public_code_looks_for_the_end_of_decode_once_a_round() -> None:
    for variant, answer in (("paper", "P"), ("code", "D")):
        batcher = deciding(
            TDPipe(variant=variant, decode_s=flat, prefill_s=lambda tokens: 1.0), [90] * 4
        )
        assert letters(batcher, 1) == "D"
        batcher.complete(next(iter(batcher.queues.in_flight.values())), 3.0)
        arrive(batcher, 1)
        assert letters(batcher, 1) == answer


def saturates_at_4(rows: int, context_tokens: int) -> float:
    return max(1.0, 0.35 * rows)


@pytest.mark.parametrize(
    ("pages", "decode_s", "answer"),
    [
        (20, flat, "D"),  # none fits
        (40, flat, "P"),  # one fits, which is better than a nearly empty pipeline
        (
            40,
            saturates_at_4,
            "D",
        ),  # 2 * 1.4 / 4 > 1 - 9 / 21; with the second it would be < 22 / 31
        (1000, saturates_at_4, "P"),  # all fit: 0.7 < 1 - 9 / 36
    ],
)
def test_pending_prefills_are_those_that_the_predictions_leave_room_for(
    pages: int, decode_s: Any, answer: str
) -> None:
    # Four that live to point 64 with 18 or 19 + 64 tokens, and 80 more for each that arrives: 640
    # tokens hold three of those, and micro-batches of two prompts only one; 320 hold none.
    policy = TDPipe(
        future_points=[32, 64],
        max_num_batched_tokens=32,
        decode_s=decode_s,
        prefill_s=lambda tokens: 10.0 if tokens == 32 else 5.0,
    )
    batcher = deciding(policy, [90] * 4, pages=pages)
    arrive(batcher, 5)
    assert letters(batcher, 1) == answer


@pytest.mark.parametrize(("predicted", "prefills"), [(96, 4), (110, 2)])
def test_the_use_of_running_decodes_counts_in_the_next_prefill_phase(
    predicted: int, prefills: int
) -> None:
    # Of 96 tokens one or two are there: point 96 is out of reach, and at 64 there is room for 3.
    policy = TDPipe(future_points=[32, 64, 96], max_num_batched_tokens=16, request_finish_ratio=0.2)
    batcher = deciding(policy, [2, 98, 98, 98, 98], predicted=predicted, pages=40)
    arrive(batcher, 6, predicted=98)
    assert letters(batcher, prefills) == "P" * prefills
    following = batcher.next(3.0)
    assert following is None or following.decodes is not None


def test_a_finish_ratio_waits_for_pages_without_a_new_split() -> None:
    # Of the first batch three of four end: enough to switch, but the long prompt does not fit.
    policy = TDPipe(work_stealing=False, request_finish_ratio=0.3)
    batcher = deciding(policy, [2, 2, 2, 90, 90, 90, 90, 90], pages=30)
    arrive(batcher, 1, prompt=380)
    batches = [send(batcher, 2.0)]
    batcher.complete(next(iter(batcher.queues.in_flight.values())), 3.0)
    batches.append(send(batcher, 3.0))
    assert [batch.decode_tokens for batch in batches] == [1, 4]


def test_the_public_code_leaves_prefill_at_90_percent() -> None:
    """Each is predicted to need 16 + 16 tokens: six exceed the 160 there are, five are 90 %."""
    for variant, prefills in (("paper", 6), ("code", 5)):
        policy = td_pipe(max_num_batched_tokens=16, variant=variant, future_points=[16])
        batcher = batcher_of(policy, pages=10)
        for request in offline(20, 16, 16):
            batcher.add(request)
        sent = [send(batcher, 0.0) for _ in range(prefills)]
        assert batcher.next(0.0) is None
        for batch in sent:
            batcher.complete(batch, 1.0)
        assert send(batcher, 1.0).decode_tokens == 2, "of 5 or 6 in four batches"


def test_the_public_code_looks_at_what_is_predicted_not_at_what_is_held() -> None:
    """Predicted lengths below the first point: nothing fills up but the pages themselves."""
    batcher = batcher_of(td_pipe(max_num_batched_tokens=16, variant="code"), pages=10)
    for request in offline(20, 16, 3):
        batcher.add(request)
    assert [send(batcher, 0.0).prefill_tokens for _ in range(10)] == [16] * 10


def test_an_occupancy_is_reached_at_exactly_its_share_of_the_pages() -> None:
    for pages, ratio, prefills in ((20, 0.2, 4), (10, 0.7, 7), (20, 0.95, 19)):
        batcher = batcher_of(td_pipe(max_num_batched_tokens=16, kv_occupancy_ratio=ratio), pages)
        for request in offline(pages, 16, 3):
            batcher.add(request)
        for _ in range(prefills):
            assert send(batcher, 0.0).chunks
        assert batcher.next(0.0) is None


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6, 0.8])
def test_a_finish_ratio_is_reached_at_exactly_its_share_of_the_requests(ratio: float) -> None:
    ends = round(10 * ratio)
    for early, answer in ((ends, "P"), (ends - 1, "D")):
        outputs = [2] * early + [90] * (10 - early)
        batcher = deciding(TDPipe(request_finish_ratio=ratio), outputs)
        batcher.complete(next(iter(batcher.queues.in_flight.values())), 2.0)
        arrive(batcher, 1)
        assert letters(batcher, 1) == answer


def test_an_evicted_request_has_not_finished() -> None:
    """Three want a second page of the two that are left: one is evicted, and then one ends."""
    policy = TDPipe(request_finish_ratio=0.5)
    batcher = Batcher(policy, PagePool(5), depth=1, max_in_flight=None, max_model_len=80)
    for number, output in enumerate((2, 30, 30)):
        batcher.add(Request(number, 0.0, 16, output, output))
    batcher.complete(send(batcher, 0.0), 1.0)
    batcher.complete(send(batcher, 1.0), 2.0)
    assert (batcher.queues.preemptions, batcher.queues.completed, batcher.pool.free_pages) == (
        1,
        1,
        3,
    )
    assert letters(batcher, 1) == "D"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_public_code_takes_the_first_that_arrived(order: tuple[int, int]) -> None:
    """Of 5 rows in 2 batches 3 go next, whichever batch returned first."""
    policy = td_pipe(max_num_batched_tokens=10**4, variant="code", **NO_SWITCH)
    batcher = Batcher(policy, PagePool(99), depth=2, max_in_flight=None, max_model_len=4096)
    for request in offline(5, 16, 90):
        batcher.add(request)
    batcher.complete(send(batcher, 0.0), 1.0)
    batches = send(batcher, 1.0), send(batcher, 1.0)
    assert [len(batch.sequences()) for batch in batches] == [3, 2]
    for number in order:
        batcher.complete(batches[number], 2.0)
    assert [row.order for row in send(batcher, 3.0).sequences()] == [0, 1, 2]


@pytest.mark.parametrize(("live", "answer"), [(380, "P"), (384, "D")])
def test_from_192_rows_a_batch_the_public_code_counts_as_saturated(live: int, answer: str) -> None:
    """Its peak is that of 256 rows: 190 / 256 < 1 by the intensities, and 192 are enough."""
    policy = TDPipe(
        variant="code",
        max_num_batched_tokens=10**4,
        decode_s=flat,
        prefill_s=lambda tokens: 1.0,
    )
    batcher = Batcher(policy, PagePool(10**6), depth=2, max_in_flight=None, max_model_len=4096)
    for request in offline(live, 16, 90):
        batcher.add(request)
    batcher.complete(send(batcher, 0.0), 1.0)
    first, _ = send(batcher, 1.0), send(batcher, 1.0)
    batcher.complete(first, 2.0)
    arrive(batcher, 1)
    assert letters(batcher, 1) == answer


def test_the_lengths_of_running_decodes() -> None:
    batcher = deciding(TDPipe(request_finish_ratio=1.0), [90, 90, 90, 90], predicted=70)
    # The first two have returned with their second token; the others are in flight for theirs.
    view = batcher.view
    assert list(view.decode_lengths) == [(17, 2, 70)] * 2 + [(16, 1, 70)] * 2
    assert view.decode_context_tokens == 2 * 17 + 2 * 16
