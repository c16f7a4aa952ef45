"""vLLM's V0 policy, decision by decision; that worlds of it come out is tests/oracle's to say."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.batcher import Batcher
from evenflow.kv import PagePool
from evenflow.replay import decision_of
from evenflow.schedulers import create
from evenflow.types import Request
from tests.worlds import send

Asked = tuple[int, int]
"""Prompt and output tokens."""


def engine(asked: list[Asked], *, pages: int = 100, **params: Any) -> Batcher:
    """Return one that is asked these requests, 0 first; a page has 16 tokens."""
    policy = create("vllm", {"max_num_batched_tokens": 64, **params})
    made = Batcher(policy, PagePool(pages), depth=2, max_in_flight=8, max_model_len=1000)
    for number, (prompt, output) in enumerate(asked):
        made.add(Request(number, 0.0, prompt, output))
    return made


def prompts(serving: Batcher) -> list[int]:
    """Send a micro-batch, in which there are only prompts, whole ones; return whose."""
    chunks, decodes = decision_of(send(serving, 0.0))
    assert not decodes
    assert all(start == 0 for _, start, _ in chunks)
    return [number for number, *_ in chunks]


def test_prompts_go_first_and_whole_and_never_with_decodes() -> None:
    serving = engine([(32, 3), (32, 3), (16, 3), (48, 3)])
    first, second = send(serving, 0.0), send(serving, 0.0)
    assert decision_of(first) == (((0, 0, 32), (1, 0, 32)), ())
    assert decision_of(second) == (((2, 0, 16), (3, 0, 48)), ())
    serving.complete(first, 1.0)
    serving.add(Request(4, 1.0, 8, 3))
    assert prompts(serving) == [4], "though two decodes are ready"
    assert decision_of(send(serving, 1.0)) == ((), (0, 1)), "all that are ready"
    assert serving.next(1.0) is None


@pytest.mark.parametrize(
    ("asked", "params", "expected"),
    [
        ([(64, 2), (1, 2)], {}, [[0], [1]]),  # max_num_batched_tokens is reached
        ([(63, 2), (2, 2)], {}, [[0], [1]]),  # and would be exceeded
        ([(1, 2)] * 5, {"max_batch_rows": 3}, [[0, 1, 2], [3, 4]]),
        ([(1, 2)] * 5, {"max_num_seqs": 4}, [[0, 1, 2, 3]]),
        ([(1, 2)] * 3, {"max_num_seqs": 1}, [[0]]),
        ([(16, 2)] * 3, {"pages": 2}, [[0, 1]]),
        ([(48, 2), (16, 2)], {"pages": 4, "watermark": 0.25}, [[0]]),  # a page is left free
        ([(62, 2)], {"pages": 4, "watermark": 0.25}, [[0]]),  # but not by what runs alone
        ([(48, 2), (16, 2)], {"pages": 4, "watermark": 0.2}, [[0, 1]]),  # 0.8 of a page is none
    ],
)
def test_the_limits_of_admission(
    asked: list[Asked], params: dict[str, Any], expected: list[list[int]]
) -> None:
    serving = engine(asked, **params)
    assert [prompts(serving) for _ in expected] == expected
    assert serving.next(0.0) is None


def test_at_most_max_num_seqs_run_at_once_256_unless_said() -> None:
    serving = engine([(1, 9)] * 300, pages=400, max_num_batched_tokens=1000)
    assert len(prompts(serving)) == 256
    assert serving.next(0.0) is None


def test_a_cap_on_rows_splits_decodes() -> None:
    serving = engine([(1, 9)] * 5, max_batch_rows=3)
    for batch in (send(serving, 0.0), send(serving, 0.0)):
        serving.complete(batch, 1.0)
    assert [decision_of(send(serving, 1.0)).decodes for _ in range(2)] == [(0, 1, 2), (3, 4)]


def test_the_latest_to_arrive_is_preempted_and_comes_back_before_others() -> None:
    """Two prompts of a page each fill two pages; the first of them to grow takes the other's."""
    serving = engine([(16, 3), (16, 3), (16, 3)], pages=2, watermark=0.0)
    serving.complete(send(serving, 0.0), 1.0)
    assert serving.next(1.0) is not None
    assert serving.queues.preemptions == 1
    assert [seq.request.request_id for seq in serving.queues.waiting] == [1, 2]
    assert serving.next(1.0) is None, "nothing is free for them yet"
    assert serving.wait_reason == "kv"


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        ({"max_num_batched_tokens": 64}, "a prompt of 65 tokens exceeds max_num_batched_tokens 64"),
        ({"max_num_batched_tokens": 65}, None),
    ],
)
def test_a_prompt_that_never_fits_into_a_micro_batch_is_refused(
    params: dict[str, Any], refused: str | None
) -> None:
    assert engine([], **params).add(Request(0, 0.0, 65, 9)) == refused


def test_without_max_num_batched_tokens_a_prompt_may_be_as_long_as_the_model_allows() -> None:
    policy = create("vllm", {}, max_model_len=300)
    serving = Batcher(policy, PagePool(100), depth=1, max_in_flight=1, max_model_len=300)
    for number in range(2):
        serving.add(Request(number, 0.0, 290, 10))
    assert prompts(serving) == [0]
