"""Static batching by hand: who waits for whom, and when pages go back."""

from __future__ import annotations

import pytest

from evenflow.costs import AffineCost
from evenflow.errors import UsageError
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from sim import World, simulate


def run(outputs: list[int], depth: int, max_num_seqs: int) -> RunResult:
    """Prompts of 4 tokens, all there at 0; every stage takes 1 s; 16 tokens (a page) reserved."""
    world = World(
        requests=[Request(i, 0.0, 4, output) for i, output in enumerate(outputs)],
        make_scheduler=lambda: create(
            "static", {"max_num_seqs": max_num_seqs, "max_model_len": 16}
        ),
        costs=AffineCost(1.0, 0.0, depth),
        depth=depth,
        total_pages=10,
        max_model_len=16,
        max_in_flight=depth,
    )
    return simulate(world)


def test_the_next_batch_waits_for_the_last_request_of_this_one() -> None:
    """Outputs 2 and 4 decode together; the third request waits, though a seat is free from 2 s."""
    result = run([2, 4, 1], depth=1, max_num_seqs=2)
    assert result.prefill_tokens.tolist() == [8, 0, 0, 0, 4]
    assert result.decode_tokens.tolist() == [0, 2, 1, 1, 0]
    assert result.completion_s.tolist() == [2.0, 4.0, 5.0]
    assert result.free_pages.tolist() == [8, 8, 9, 9, 9], "a page goes back when its request ends"


def test_two_stages_hold_two_batches_that_never_merge() -> None:
    """Two batches of two share the four seats; they alternate on stage 0, each every 2 s."""
    result = run([3, 3, 2, 3, 1], depth=2, max_num_seqs=4)
    assert result.scheduled_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert result.prefill_tokens.tolist() == [8, 8, 0, 0, 0, 0, 4]
    assert result.decode_tokens.tolist() == [0, 0, 2, 2, 2, 1, 0]
    assert result.completion_s.tolist() == [6.0, 6.0, 5.0, 7.0, 8.0]


def test_requests_beyond_the_reservation_are_refused() -> None:
    result = run([12, 13], depth=1, max_num_seqs=2)
    assert result.status == ["completed", "rejected"]
    assert "17 tokens" in result.reason[1]


@pytest.mark.parametrize(
    ("name", "params", "facts", "words"),
    [
        ("static", {"max_model_len": 0}, {}, "max_model_len should be at least 1, not 0"),
        ("orca", {"max_model_len": 0}, {}, "max_model_len should be at least 1, not 0"),
        ("orca", {}, {}, "max_model_len has to be given"),
        (
            "vllm",
            {"max_num_batched_tokens": 0},
            {"max_model_len": 64},
            "should be at least 1, not 0",
        ),
        ("vllm", {}, {}, "max_num_batched_tokens or max_model_len has to be given"),
    ],
)
def test_a_limit_of_zero_or_none_is_refused_not_replaced(
    name: str, params: dict[str, int], facts: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        create(name, params, **facts)
