"""vLLM's V0 policy: what worlds of it (tests/oracle) do not show."""

from __future__ import annotations

import pytest

from evenflow.schedulers import create
from evenflow.types import Request
from tests.worlds import engine_of, send


def test_a_share_of_the_pages_is_left_free_but_not_by_what_runs_alone() -> None:
    policy = create("vllm", {"max_num_batched_tokens": 64, "watermark": 0.25})
    chunks = [
        send(engine_of(policy, 4, asked), 0.0).chunks for asked in ([(62, 2)], [(48, 2), (16, 2)])
    ]
    assert [[chunk.stop for chunk in each] for each in chunks] == [[62], [48]]


def test_the_latest_to_arrive_is_preempted_and_comes_back_before_others() -> None:
    """Two prompts of a page each fill two pages; the first of them to grow takes the other's."""
    policy = create("vllm", {"max_num_batched_tokens": 64, "watermark": 0.0})
    serving = engine_of(policy, 2, [(16, 3)] * 3, max_in_flight=8)
    serving.complete(send(serving, 0.0), 1.0)
    assert serving.next(1.0) is not None
    assert serving.queues.preemptions == 1
    assert [seq.request.request_id for seq in serving.queues.waiting] == [1, 2]
    assert serving.next(1.0) is None, "nothing is free for them yet"
    assert serving.wait_reason == "kv"


@pytest.mark.parametrize(
    ("budget", "refused"),
    [(64, "a prompt of 65 tokens exceeds max_num_batched_tokens 64"), (65, None)],
)
def test_a_prompt_that_never_fits_into_a_micro_batch_is_refused(
    budget: int, refused: str | None
) -> None:
    serving = engine_of(create("vllm", {"max_num_batched_tokens": budget}), 100)
    assert serving.add(Request(0, 0.0, 65, 9)) == refused
