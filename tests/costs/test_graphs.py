"""Padding of decode steps to captured sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.batch import Span
from evenflow.costs import AffineCost, GraphCost, Work, decode_work, prefill_work
from tests.command_line import refused

EAGER = AffineCost(0.01, 0.001, 2, bytes_per_token=10)
CAPTURED = AffineCost(0.002, 0.001, 2)
COST = GraphCost(EAGER, [1, 2, 4, 8], CAPTURED)


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_a_decode_step_costs_as_the_next_captured_size(rows: int, padded: int) -> None:
    assert COST.times(decode_work(rows, 99)) == [0.002 + 0.001 * padded] * 2
    assert GraphCost(EAGER, [1, 2, 4, 8]).times(decode_work(rows, 99))[1] == 0.01 + 0.001 * padded


def test_a_larger_step_and_one_with_a_prompt_are_not_replayed() -> None:
    mixed = Work((Span(0, 5),), 5, 3, 30, 4)
    for work in (decode_work(9, 99), prefill_work(3), mixed):
        assert COST.times(work) == EAGER.times(work)


def test_padding_is_not_sent_and_attends_to_nothing() -> None:
    assert COST.transfer_bytes(decode_work(3, 99)) == 30
    seen: list[Work] = []

    class Seeing(AffineCost):
        def times(self, batch: Any) -> list[float]:
            seen.append(batch)
            return super().times(batch)

    GraphCost(Seeing(1.0, 1.0, 1), [4]).times(decode_work(3, 99))[0]
    assert seen == [Work((), 0, 4, 99, 3)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "cuda_graph_sizes: [] must be numbers of tokens that ascend"),
        ([2, 1], "cuda_graph_sizes: [2, 1] must be numbers of tokens that ascend"),
        ([1, 1], "cuda_graph_sizes: [1, 1] must be"),
        ([0, 1], "costs: cuda_graph_sizes: size is 0"),
    ],
)
def test_wrong_sizes_are_refused(sizes: list[int], message: str) -> None:
    with refused(message):
        GraphCost(EAGER, sizes)


@given(
    st.lists(st.integers(1, 300), min_size=1, unique=True).map(sorted),
    st.integers(1, 300),
    st.integers(0, 300),
)
def test_more_rows_are_never_cheaper_and_padding_never_helps(
    sizes: list[int], rows: int, more: int
) -> None:
    cost, step = GraphCost(EAGER, sizes), decode_work(rows, 9)
    assert EAGER.times(step)[0] <= cost.times(step)[0]
    assert cost.times(step)[0] <= cost.times(decode_work(rows + more, 9))[0]
