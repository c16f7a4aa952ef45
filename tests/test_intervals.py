"""Confidence intervals agree with SciPy's, and pairing removes what both sides share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.study.intervals import (
    interval,
    paired_difference,
    student_quantile,
    unpaired_difference,
)

stats = pytest.importorskip("scipy.stats")


@given(st.integers(1, 400), st.sampled_from([0.8, 0.95, 0.975, 0.995]))
def test_the_quantile_is_that_of_scipy(degrees: int, probability: float) -> None:
    expected = stats.t.ppf(probability, degrees)
    assert student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8).filter(lambda v: max(v) > min(v) + 1))
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    found = interval(values)
    scale = stats.sem(values)
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=math.fsum(values) / len(values), scale=scale
    )
    assert found.mean - found.half_width == pytest.approx(low, rel=1e-9, abs=1e-6)
    assert found.mean + found.half_width == pytest.approx(high, rel=1e-9, abs=1e-6)
    assert found.n == len(values)


def test_one_replication_says_nothing_of_the_spread() -> None:
    found = interval([3.0])
    assert (found.mean, found.n, math.isnan(found.half_width)) == (3.0, 1, True)
    assert not found.is_above_zero


def test_pairs_that_share_their_noise_are_told_apart() -> None:
    noise = [100.0, 250.0, 70.0]
    slower = [value + 2 + 0.1 * index for index, value in enumerate(noise)]
    assert interval(slower).half_width > 200
    difference = paired_difference(slower, noise)
    assert difference.mean == pytest.approx(2.1)
    assert difference.is_above_zero
    assert paired_difference(noise, slower).is_below_zero


def test_independent_draws_are_compared_as_welch_does() -> None:
    values, others = [3.0, 5.5, 4.1, 7.0], [1.0, 1.2, 0.9, 1.3, 1.1, 0.8]
    found = unpaired_difference(values, others)
    right = stats.ttest_ind(values, others, equal_var=False)
    narrower = right.confidence_interval(0.95)
    assert found.mean == pytest.approx(right.statistic * right._standard_error)
    assert found.half_width >= (narrower.high - narrower.low) / 2  # of 3.02 degrees, not of 3
    assert found.half_width == pytest.approx((narrower.high - narrower.low) / 2, rel=0.01)
    assert math.isnan(unpaired_difference([1.0], others).half_width)
    assert unpaired_difference([2.0, 2.0], [1.0, 1.0]).ends == (1.0, 1.0)
