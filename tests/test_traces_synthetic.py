"""The bundled samples: what they are drawn from, and that draws have those distributions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.errors import UsageError
from traces import SAMPLE_NAMES, load_trace, sample_trace
from traces.describe import info
from traces.trace import normal_percent, sample_table

MANY = 40_000
# 1.95 / sqrt(n) is the 0.1 % point of the KS statistic; half a token of rounding adds to it where a
# percent of the requests have the same length.
KS_TOLERANCE = 1.95 / MANY**0.5 + 0.005


def ks_to_table(values: np.ndarray, percent: np.ndarray, quantiles: np.ndarray) -> float:
    """Return the largest distance of a sample's share up to a quantile from its percent.

    A quantile that stands at several percents is a step of the distribution: the share below it
    must not exceed the lowest of them, and the share up to it must reach the highest.
    """
    ordered = np.sort(values)
    upto = np.searchsorted(ordered, quantiles + 0.5, side="left") / len(values)
    below = np.searchsorted(ordered, quantiles - 0.5, side="right") / len(values)
    return float(max((percent / 100 - upto).max(), (below - percent / 100).max()))


ARXIVS = ("arxiv-16k-sample", "arxiv-sample")


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_tables_are_quantile_functions_with_their_source(name: str) -> None:
    table = sample_table(name)
    assert {"rows", "spearman", "source", "licence", "filter"} <= set(table.facts)
    assert (table.percent[0], table.percent[-1]) == (0, 100)
    assert np.all(np.diff(table.percent) > 0)
    for values in table.quantiles.values():
        assert np.all(np.diff(values) >= 0)
        assert values[0] >= 0


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_draws_have_the_quantiles_and_the_correlation(name: str) -> None:
    table, trace = sample_table(name), sample_trace(name, MANY, seed=11)
    columns = {"prompt_tokens": trace.prompt_tokens, "output_tokens": trace.output_tokens}
    for column, values in columns.items():
        distance = ks_to_table(values, table.percent, table.quantiles[column])
        assert distance < KS_TOLERANCE
        assert values.min() >= 1
    assert info(trace)["spearman"] == pytest.approx(float(table.facts["spearman"]), abs=0.03)
    if "max_total_tokens" in table.facts:
        longest = (trace.prompt_tokens + trace.output_tokens).max()
        assert longest <= int(table.facts["max_total_tokens"])


def test_the_gllm_sharegpt_sample_has_the_means_of_the_figure() -> None:
    trace = sample_trace("gllm-sharegpt-sample", MANY)
    assert trace.prompt_tokens.mean() == pytest.approx(221.6, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(127.2, rel=0.02)
    assert (trace.prompt_tokens.min(), trace.prompt_tokens.max()) == (4, 1024)
    assert (trace.output_tokens.min(), trace.output_tokens.max()) == (4, 512)


def test_the_16k_sample_is_the_4k_one_below_4096_and_has_the_published_median() -> None:
    long, short = (sample_trace(name, 40_000).prompt_tokens for name in ARXIVS)
    assert np.median(long) == pytest.approx(7059, rel=0.02)
    assert np.median(long[long < 4096]) == pytest.approx(np.median(short), rel=0.02)


def test_the_arrivals_of_azure_conv() -> None:
    summary = info(sample_trace("azure-conv-sample", MANY))
    assert summary["rate_per_s"] == pytest.approx(5.906, rel=0.03)
    assert summary["gap_cv"] == pytest.approx(1.078, rel=0.05)


def test_the_arrivals_of_azure_code_come_in_bursts() -> None:
    trace = sample_trace("azure-code-sample", MANY)
    gaps = np.diff(trace.arrival_s)
    pauses = gaps > 5
    requests_per_burst = MANY / (pauses.sum() + 1)
    assert requests_per_burst == pytest.approx(163, rel=0.2)
    assert gaps[~pauses].mean() == pytest.approx(0.109, rel=0.05)
    assert gaps[pauses].mean() == pytest.approx(35.2, rel=0.2)
    assert gaps.std() / gaps.mean() == pytest.approx(12.6, rel=0.15)


def test_a_sample_is_decided_by_name_size_and_seed() -> None:
    columns = ("prompt_tokens", "output_tokens", "arrival_s")
    first, again, other, long = (
        [getattr(sample_trace("azure-code-sample", n, seed), name).tolist() for name in columns]
        for n, seed in ((500, 4), (500, 4), (500, 5), (2000, 4))
    )
    assert first == again == [column[:500] for column in long]
    assert first[0] != other[0]


def test_samples_load_by_name() -> None:
    trace = load_trace("sharegpt-sample", limit=7, seed=2)
    assert (len(trace), trace.format, trace.path, trace.seed) == (7, "sample", None, 2)
    assert trace.arrival_s is None
    assert len(load_trace("azure-conv-sample")) == 14_176
    assert len(sample_trace("azure-code-sample", 1)) == 1


def test_an_unknown_sample_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match='sample "azure" is unknown; '):
        sample_table("azure")


def test_the_normal_distribution_function() -> None:
    np.testing.assert_allclose(
        normal_percent(np.array([-1.959964, 0, 1, 9])), [2.5, 50, 84.134475, 100], rtol=1e-6
    )


def test_importing_and_loading_needs_no_heavy_package() -> None:
    script = (
        "import sys, traces; traces.load_trace('azure-conv-sample', limit=10); "
        "print(sorted({'pandas', 'scipy', 'tokenizers', 'torch', 'simpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@given(st.sampled_from(SAMPLE_NAMES), st.floats(-0.8, 0.8).filter(bool), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_neighbours_are_as_alike_as_asked_and_lengths_are_the_same(
    name: str, neighbours: float, seed: int
) -> None:
    plain, chained = (sample_trace(name, 8000, seed, neighbours=r) for r in (0.0, neighbours))
    summary = info(chained)
    table = sample_table(name)
    if "max_total_tokens" not in table.facts:  # else prompts that are too long are cut
        assert summary["spearman"] == pytest.approx(float(table.facts["spearman"]), abs=0.12)
        assert summary["neighbours"]["prompt"] == pytest.approx(neighbours, abs=0.06)
    assert summary["neighbours"]["output"] == pytest.approx(neighbours, abs=0.06)
    for q in (25, 50, 75):
        ours, theirs = (np.percentile(each.output_tokens, q) for each in (chained, plain))
        assert ours == pytest.approx(theirs, rel=0.25, abs=2)


def test_a_file_has_its_own_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n1,2\n3,4\n")
    with pytest.raises(UsageError, match="is no sample; it has the order of its file"):
        load_trace(path, neighbours=0.2)
