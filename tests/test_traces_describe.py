"""Summaries, fits and conversion of traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenflow.errors import UsageError
from traces import Trace, load_trace, sample_trace
from traces.describe import FIT_KEYS, convert, fit, fit_values, info, spearman


def lengths(*values: float) -> Any:
    names = ("mean", "min", "p50", "p90", "p99", "max", "total")
    return pytest.approx(dict(zip(names, values, strict=True)))


def a_trace(prompts: list[int], outputs: list[int], arrival_s: list[float] | None = None) -> Trace:
    times = None if arrival_s is None else np.array(arrival_s)
    dropped = {"no output tokens": 2}
    return Trace("t", "vidur", times, np.array(prompts), np.array(outputs), dropped, "ab", "p", 6)


def test_info_of_a_small_trace() -> None:
    summary = info(a_trace([10, 30, 20, 40], [1, 2, 3, 2], [0.0, 1.0, 1.0, 4.0]))
    assert summary.pop("prompt_tokens") == lengths(25, 10, 25, 37, 39.7, 40, 100)
    assert summary.pop("output_tokens") == lengths(2, 1, 2, 2.7, 2.97, 3, 8)
    assert summary.pop("gap_cv") == pytest.approx((14 / 9) ** 0.5 / (4 / 3))
    assert summary.pop("spearman") == pytest.approx(0.3162277660168379)
    assert summary.pop("neighbours") == {"prompt": pytest.approx(-0.5), "output": pytest.approx(0)}
    assert summary == {
        "name": "t",
        "format": "vidur",
        "path": "p",
        "sha256": "ab",
        "rows_read": 6,
        "requests": 4,
        "dropped": {"no output tokens": 2},
        "reordered": 0,
        "span_s": 4.0,
        "rate_per_s": 0.75,
    }


@pytest.mark.parametrize("arrival_s", [None, [0.0, 0.0]])
def test_what_has_no_meaning_is_none(arrival_s: list[float] | None) -> None:
    summary = info(a_trace([5, 5], [1, 2], arrival_s))
    assert [summary[k] for k in ("span_s", "rate_per_s", "gap_cv", "spearman")] == [None] * 4
    json.dumps(info(a_trace([5], [1], arrival_s[:1] if arrival_s else None)), allow_nan=False)


def test_spearman_shares_the_ranks_of_ties() -> None:
    assert spearman(np.array([1, 2, 3, 4]), np.array([10, 20, 30, 99])) == pytest.approx(1)
    assert spearman(np.array([1, 1, 2]), np.array([3, 5, 1])) == pytest.approx(-(0.75**0.5))


@pytest.mark.parametrize(
    ("family", "draw", "expected"),
    [
        ("lognormal", lambda rng, n: rng.lognormal(2, 0.5, n), {"ln_mu": 2.0, "ln_sigma": 0.5}),
        ("gamma", lambda rng, n: rng.gamma(0.7, 40, n), {"gamma_k": 0.7, "gamma_theta": 40.0}),
        ("weibull", lambda rng, n: 9 * rng.weibull(1.6, n), {"weib_shape": 1.6, "weib_scale": 9.0}),
    ],
)
def test_a_fit_finds_the_family_it_was_drawn_from(
    family: str, draw: Any, expected: dict[str, float]
) -> None:
    pytest.importorskip("scipy")
    result = fit_values(draw(np.random.default_rng(5), 20_000))
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=0.03)
    assert result["best_aic"] == result["best_ks"] == family


def test_nothing_is_fitted_to_constants_and_zeros() -> None:
    for values in (np.array([3.0, 3.0]), np.array([0.0, 1.0]), np.diff(0.1 * np.arange(50))):
        result = fit_values(values)
        assert result["q50"] == np.median(values)
        assert all(result[key] is None for key in FIT_KEYS)


def test_fit_has_a_row_a_field() -> None:
    pytest.importorskip("scipy")
    result = fit(sample_trace("azure-conv-sample", 300))
    assert list(result) == ["input_tokens", "output_tokens", "interarrival_s"]
    assert list(fit(sample_trace("sharegpt-sample", 300))) == ["input_tokens", "output_tokens"]
    json.dumps(result, allow_nan=False)


def test_without_scipy_a_fit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UsageError, match=r"pip install 'evenflow\[fit\]'"):
        fit(a_trace([1, 2], [3, 4]))


@pytest.mark.parametrize("name", ["azure-conv-sample", "arxiv-sample"])
def test_a_converted_trace_reads_back_the_same(tmp_path: Path, name: str) -> None:
    trace = sample_trace(name, 50)
    back = load_trace(convert(trace, tmp_path / "out.csv"))
    assert back.format == "vidur"
    assert back.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert back.output_tokens.tolist() == trace.output_tokens.tolist()
    assert (back.arrival_s is None) == (trace.arrival_s is None)
    if back.arrival_s is not None and trace.arrival_s is not None:
        assert back.arrival_s.tolist() == trace.arrival_s.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trace = sample_trace("arxiv-sample", 5)
    with pytest.raises(UsageError, match=r'cannot write trace format "azure"; .*known: vidur'):
        convert(trace, tmp_path / "out.csv", "azure")
    with pytest.raises(UsageError, match=r"no/out.csv: cannot be written: No such file"):
        convert(trace, tmp_path / "no" / "out.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        convert(trace, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
