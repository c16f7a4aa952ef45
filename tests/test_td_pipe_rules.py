"""TD-Pipe's rules against its equations, apart from any policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.schedulers.td_pipe_rules import (
    FutureUsage,
    saturating_rows,
    spatial_intensity,
    stealing_share,
    temporal_intensity,
)

lengths = st.tuples(st.integers(1, 2000), st.integers(-10, 1500))


@given(st.lists(lengths), st.lists(st.integers(1, 1200), min_size=1, max_size=9, unique=True))
def test_future_usage_is_that_of_algorithm_1(
    rows: list[tuple[int, int]], points: list[int]
) -> None:
    points.sort()
    usage = FutureUsage(points)
    for context, remaining in rows:
        usage.add(context, remaining)
    expected = [sum(c + m for c, remaining in rows if m <= remaining) for m in points]
    assert usage.at_points() == expected
    assert usage.peak() == max(expected)


@given(st.integers(0, 5000), st.integers(1, 16), st.integers(0, 1000))
def test_the_shares_of_a_round_are_even_and_add_up(live: int, depth: int, turn: int) -> None:
    shares = [stealing_share(live, depth, turn + k) for k in range(depth)]
    assert sum(shares) == live
    assert max(shares) - min(shares) <= 1


def test_the_share_is_the_average_over_the_sliding_window() -> None:
    # Figure 9: the window holds what the last four batches submitted, and what was withheld.
    assert stealing_share(sum([128, 128, 128, 128]) - 48, 4, 0) == 116
    assert stealing_share(sum([128, 128, 128, 80]) - 8, 4, 1) == 114
    assert stealing_share(sum([128, 128, 80, 114]) + 6, 4, 2) == 114


def flat_until_256(rows: int, context_tokens: int) -> float:
    return max(rows, 256) * 1e-3 + context_tokens * 1e-6


def test_spatial_intensity_is_achieved_over_peak() -> None:
    assert saturating_rows(flat_until_256) == 256
    assert spatial_intensity(256, 100, 256, flat_until_256) == 1
    # 64 rows: 64 / (0.256 + 0.0064) against 256 / (0.256 + 0.0256).
    value = spatial_intensity(64, 100, 256, flat_until_256)
    assert value == pytest.approx((64 / 0.2624) / (256 / 0.2816))


def test_temporal_intensity_counts_the_bubble_of_the_longest_prefill() -> None:
    # Prefills of 3, 5 and 4 s after steps of 1 s on 4 stages: bubble (5 - 1) * 3, total 12 + 4 +
    # 12.
    assert temporal_intensity([3.0, 5.0, 4.0], 1.0, 4) == pytest.approx(1 - 12 / 28)
    assert temporal_intensity([0.5], 1.0, 4) == 1
    assert temporal_intensity([3.0], 1.0, 1) == 1


def test_work_that_costs_nothing_saturates_at_once() -> None:
    assert spatial_intensity(1, 10, 8, lambda rows, context: 0.0) == 1
    assert temporal_intensity([0.0], 0.0, 4) == 1
