"""Intervals of predictions: what is put in as an error comes out as one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import evenflow as ef
from evenflow.config.run import RunConfig
from evenflow.study.uncertainty import COSTS, HOST, MetricInterval, Z, range_of, stated

shares = st.floats(0.001, 0.4)


def test_the_two_errors_are_normal_and_go_with_nothing_of_each_other() -> None:
    costs, host = np.array(COSTS), np.array(HOST)
    for each in (costs, host):
        assert each.sum() == pytest.approx(0, abs=1e-9)
        assert each @ each / 9 == pytest.approx(1, abs=2e-3)
    for a, b in ((costs, host), (costs**2, host), (costs, host**2)):
        assert abs(a @ b / 9) < 0.05


@given(shares, shares, st.floats(0.01, 1e5))
def test_the_interval_of_known_errors_is_theirs(costs: float, host: float, middle: float) -> None:
    values = [middle * math.exp(costs * a + host * b) for a, b in zip(COSTS, HOST, strict=True)]
    found = range_of(values)
    assert found is not None
    half = Z * math.hypot(costs, host)
    assert math.log(found.high / middle) == pytest.approx(half, rel=0.01)
    assert math.log(found.low / middle) == pytest.approx(-half, rel=0.01)
    assert found.costs == pytest.approx(costs**2 / (costs**2 + host**2), abs=0.01)


def test_nine_seeds_cover_a_tenth_run_nine_times_of_ten() -> None:
    draws = np.random.default_rng(0).lognormal(3.0, 0.2, (1000, 10))
    inside = [
        found.low <= tenth <= found.high
        for *nine, tenth in draws.tolist()
        if (found := range_of(nine)) is not None
    ]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)


def test_half_the_width_of_an_interval_below_one_is_a_share_too() -> None:
    """0.25 to 1 is twice or half of 0.5, as a rate of requests may be."""
    assert MetricInterval(0.25, 1.0, 0.0, 0.0, 1.0).half_width == 1.0
    assert math.isnan(MetricInterval(0.0, 1.0, 0.0, 0.0, 1.0).half_width), (
        "what exp has rounded to 0"
    )


@pytest.mark.parametrize("value", [0.0, math.nan, -1.0])
def test_of_what_is_not_above_zero_there_is_no_interval(value: float) -> None:
    assert range_of([1.0] * 8 + [value]) is None


@pytest.mark.parametrize(
    ("model", "speculative", "share"),
    [
        ("Llama-3.1-8B", None, 0.055),
        ("Qwen3-32B-FP8", None, 0.081),
        ("gpt-oss-120b", None, 0.131),
        ("DeepSeek-V3", None, 0.069),
        ("DeepSeek-V3", {"k": 1, "acceptance": 0.8, "draft_model": "mtp"}, 0.188),
    ],
)
def test_the_stated_error_is_that_of_like_models(
    model: str, speculative: dict[str, object] | None, share: float
) -> None:
    keys = {"model": model, "gpu": "H200", "stages": 1, "costs": "silicon"}
    scheduler, workload = {"name": "orca"}, {"trace": "given.csv"}
    config = RunConfig.model_validate(
        keys | {"speculative": speculative, "scheduler": scheduler, "workload": workload}
    )
    assert stated(config, Path()).share == share


def test_a_roofline_is_farther_off_than_the_measured_runs_and_says_so() -> None:
    workload = {"trace": "azure-conv-sample", "requests": 3, "arrivals": "offline"}
    run = {"model": "Qwen2.5-32B", "gpu": "L20", "stages": 4, "scheduler": "vllm_v1"}
    words = ef.intervals(run | {"workload": workload}).measured
    assert words.endswith("are off, with measured costs; a roofline is farther off")
