"""Arrivals against their definitions, what a trace is like, and samples beside real traces."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.config.workload import WorkloadConfig
from evenflow.config.yaml_file import Document, checked
from evenflow.traces import (
    SAMPLE_NAMES,
    Arrivals,
    Closed,
    Gamma,
    Offline,
    Poisson,
    Replay,
    Trace,
    load_trace,
    make_requests,
    sample_trace,
)
from evenflow.traces.describe import FIT_KEYS, convert, fit, fit_values, info, spearman
from evenflow.traces.trace import normal_percent, sample_table
from evenflow.types import Request
from tests.command_line import complaint, refused

THREE = [10, 20, 30], [1, 2, 3]


def a_trace(prompts: list[int], outputs: list[int], arrival_s: list[float] | None = None) -> Trace:
    times = None if arrival_s is None else np.array(arrival_s)
    lengths = np.array(prompts), np.array(outputs)
    return Trace("t", "vidur", times, *lengths, {}, None, None, len(prompts))


def times(arrivals: Arrivals, n: int = 1000) -> Any:
    return arrivals.times(n, 0, None)


def test_replay_keeps_the_times_and_scale_divides_them() -> None:
    requests = make_requests(a_trace(*THREE, [0.0, 1.0, 4.0]), Replay(scale=2))
    assert requests == [Request(0, 0.0, 10, 1), Request(1, 0.5, 20, 2), Request(2, 2.0, 30, 3)]


def test_a_scale_alone_is_that_of_a_replay() -> None:
    given = {"trace": "azure-conv-sample", "arrivals": {"scale": 2}}
    assert checked(WorkloadConfig, Document("w", given, {})).arrivals == Replay(scale=2)


def test_offline_and_closed_are_all_at_zero() -> None:
    for arrivals in (Offline(), Closed(concurrency=4)):
        assert [r.arrival_s for r in make_requests(a_trace(*THREE), arrivals)] == [0.0] * 3


def test_two_poisson_rates_see_one_pattern_which_gamma_has_at_burstiness_one() -> None:
    np.testing.assert_allclose(times(Poisson(rate=2)) * 2, times(Poisson(rate=7)) * 7)
    np.testing.assert_allclose(times(Gamma(rate=3)), times(Poisson(rate=3)))
    constant = times(Gamma(rate=2, burstiness=math.inf), 4)
    assert constant.tolist() == [0.5, 1.0, 1.5, 2.0]


def test_equal_gaps_are_kept_in_json_as_yaml_says_them() -> None:
    equal = Gamma(rate=2, burstiness=math.inf)
    text = '{"kind":"gamma","rate":2.0,"burstiness":".inf","rescale":false}'
    assert equal.model_dump_json() == text
    assert Gamma.model_validate_json(text) == equal


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_the_gaps_of_gamma_vary_by_one_over_root_burstiness(burstiness: float) -> None:
    gaps = np.diff(times(Gamma(rate=3, burstiness=burstiness), 20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize("kind", [Poisson, Gamma])
def test_rescale_puts_the_last_arrival_at_n_over_the_rate(kind: type[Poisson | Gamma]) -> None:
    assert times(kind(rate=4, rescale=True))[-1] == pytest.approx(250)
    assert times(kind(rate=4))[-1] != pytest.approx(250)


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    for arrivals in (Poisson(rate=2), Gamma(rate=2, burstiness=0.3)):
        assert times(arrivals, 50).tolist() == times(arrivals, 100)[:50].tolist()


def test_rate_and_seed_of_the_arrivals_leave_the_lengths_alone() -> None:
    trace = sample_trace("azure-conv-sample", 200, seed=1)
    rates_and_seeds = (1, 0), (9, 0), (1, 5)
    runs = [make_requests(trace, Poisson(rate=rate), seed=seed) for rate, seed in rates_and_seeds]
    lengths = [[(r.prompt_tokens, r.output_tokens) for r in run] for run in runs]
    assert lengths[0] == lengths[1] == lengths[2]
    assert runs[0][7].arrival_s != runs[2][7].arrival_s


def test_a_sample_is_drawn_on() -> None:
    short, long = (sample_trace("azure-conv-sample", n, seed=3) for n in (10, 40))
    assert make_requests(short, Replay(), 40) == make_requests(long, Replay(), 40)


def test_requests_are_plain_numbers() -> None:
    request = make_requests(sample_trace("sharegpt-sample", 3), Poisson(rate=2), 1)[0]
    assert [type(v) for v in (request.arrival_s, request.prompt_tokens)] == [float, int]
    json.dumps([request.request_id, request.arrival_s, request.output_tokens])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "poison"}, 'arrivals.kind: unknown "poison"; did you mean "poisson"'),
        ({}, 'the key "arrivals.kind" is missing'),
        ("poisson", 'the key "arrivals.rate" is missing'),
        ({"kind": "poisson", "rat": 2}, 'unknown key "arrivals.rat"; did you mean "rate"'),
        ({"kind": "offline", "rate": 2}, 'unknown key "arrivals.rate"; known: kind'),
        ({"kind": "poisson", "rate": "2"}, 'arrivals.rate: should be a number, not "2"'),
        ({"kind": "poisson", "rate": 0}, "arrivals.rate: should be greater than 0.0, not 0"),
        ({"kind": "poisson", "rate": math.nan}, "should be a finite number, not nan"),
        ({"kind": "gamma", "rate": 1, "burstiness": 0}, "arrivals.burstiness: should be greater"),
        ({"kind": "replay", "scale": math.inf}, "arrivals.scale: should be a finite number"),
        ({"kind": "closed", "concurrency": 0}, "arrivals.concurrency: should be at least 1, not 0"),
    ],
)
def test_bad_arrivals(keys: Any, says: str) -> None:
    with refused(says):
        checked(WorkloadConfig, Document("RUN.yaml", {"trace": "t", "arrivals": keys}, {}))


def test_requests_that_a_trace_does_not_have() -> None:
    with refused("no arrival times to replay; name their column (columns: {arrival: NAME}), or"):
        make_requests(a_trace(*THREE), Replay())
    with refused("4 requests asked of trace t, which has 3"):
        make_requests(a_trace(*THREE, [0.0, 1.0, 2.0]), Replay(), 4)
    with refused("0 requests asked; expected at least 1"):
        make_requests(a_trace(*THREE), Offline(), 0)
    with refused("5 requests asked of a trace with 2 arrivals to replay"):
        Replay().times(5, 0, np.zeros(2))


# -- summaries, fits, conversion -------------------------------------------------------------------


def lengths(*values: float) -> Any:
    names = ("mean", "min", "p50", "p90", "p99", "max", "total")
    return pytest.approx(dict(zip(names, values, strict=True)))


def test_info_of_a_small_trace() -> None:
    of_file = {"dropped": {"no output tokens": 2}, "sha256": "ab", "path": "p", "rows_read": 6}
    of_file |= {"unread": ["model"]}
    trace = a_trace([10, 30, 20, 40], [1, 2, 3, 2], [0.0, 1.0, 1.0, 4.0])
    summary = info(replace(trace, **of_file))
    assert summary.pop("prompt_tokens") == lengths(25, 10, 25, 37, 39.7, 40, 100)
    assert summary.pop("output_tokens") == lengths(2, 1, 2, 2.7, 2.97, 3, 8)
    assert summary.pop("gap_cv") == pytest.approx((14 / 9) ** 0.5 / (4 / 3))
    assert summary.pop("spearman") == pytest.approx(0.3162277660168379)
    assert summary.pop("neighbours") == {"prompt": pytest.approx(-0.5), "output": pytest.approx(0)}
    assert summary == {
        **of_file,
        "name": "t",
        "format": "vidur",
        "requests": 4,
        "reordered": 0,
        "doubts": [],
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
    result = fit_values(draw(np.random.default_rng(5), 20_000))
    assert {key: result[key] for key in expected} == pytest.approx(expected, rel=0.03)
    assert result["best_aic"] == result["best_ks"] == family


def test_nothing_is_fitted_to_constants_and_zeros() -> None:
    for values in (np.array([3.0, 3.0]), np.array([0.0, 1.0]), np.diff(0.1 * np.arange(50))):
        result = fit_values(values)
        assert result["q50"] == np.median(values)
        assert all(result[key] is None for key in FIT_KEYS)


def test_fit_has_a_row_a_field() -> None:
    result = fit(sample_trace("azure-conv-sample", 300))
    assert list(result) == ["input_tokens", "output_tokens", "interarrival_s"]
    assert list(fit(sample_trace("sharegpt-sample", 300))) == ["input_tokens", "output_tokens"]
    json.dumps(result, allow_nan=False)


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


def test_what_clients_allow_and_ask_first_is_converted_too(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,max_new,priority\n0,1,5,,0\n1,2,5,9,-3\n"
    )
    back = load_trace(convert(load_trace(tmp_path / "log.csv"), tmp_path / "out.csv"))
    assert (back.max_new, back.priority) == ([None, 9], [0, -3])


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trace = sample_trace("arxiv-sample", 5)
    with refused("no/out.csv: cannot be written: No such file"):
        convert(trace, tmp_path / "no" / "out.csv")
    (tmp_path / "folder").mkdir()
    with refused("folder: is there already"):
        convert(trace, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_trace_is_not_converted_over_a_file(tmp_path: Path) -> None:
    """Its own least of all: a log has columns that a converted trace has not."""
    log = tmp_path / "log.csv"
    log.write_text("user,arrival_s,prompt_tokens,output_tokens\nanna,7,10,5\n")
    with refused("log.csv: is there already; name another file"):
        convert(load_trace(log), log)
    assert log.read_text().splitlines()[1] == "anna,7,10,5"


# -- samples ---------------------------------------------------------------------------------------

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
    with refused('sample "azure" is unknown; '):
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
    path = convert(a_trace(*THREE), tmp_path / "t.csv")
    with refused("is no sample; it has the order of its file"):
        load_trace(path, neighbours=0.2)


# -- public traces ---------------------------------------------------------------------------------

CONV = "AzureLLMInferenceTrace_conv.csv"
CODE = "AzureLLMInferenceTrace_code.csv"
VIDUR = "vidur_splitwise_conv_head2000.csv"
SHAREGPT = "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
ARXIV = "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"
DISTSERVE = "distserve_sharegpt_v3_opt_workload_1600.csv"
LLMSERVINGSIM = "llmservingsim_sharegpt-llama-3.1-8b-300-sps10.jsonl"
MOONCAKE = "mooncake_conversation_trace_head4000.jsonl.gz"

# file: format, rows, input mean, output mean, rank correlation, span (s), rate (1/s), CV of gaps
FACTS: dict[str, tuple[Any, ...]] = {
    CONV: ("azure", 14176, 1195.1, 201.5, 0.033, 2400.0, 5.906, 1.078),
    CODE: ("azure", 7491, 2040.1, 27.6, -0.016, 2392.6, 3.131, 12.575),
    VIDUR: ("vidur", 2000, 1104.8, 264.9, 0.192, 424.3, 4.712, 1.138),
    SHAREGPT: ("vidur", 20003, 2344.6, 435.5, 0.049, None, None, None),
    ARXIV: ("vidur", 20000, 2581.7, 295.8, -0.116, None, None, None),
    DISTSERVE: ("distserve", 1600, 758.7, 186.3, -0.121, 100.0, 15.99, 1.024),
    LLMSERVINGSIM: ("llmservingsim", 300, 857.5, 652.5, 0.189, 29.1, 10.26, 0.942),
    MOONCAKE: ("mooncake", 4000, 13312, 347.1, 0.080, 1302, 3.071, 2.866),
}
DATASETS = {
    "azure_conv_2023": CONV,
    "azure_code_2023": CODE,
    "sharegpt4_multiturn_sarathi": SHAREGPT,
    "arxiv_summarization_4k_vidur": ARXIV,
    "sharegptv3_multiturn_distserve": DISTSERVE,
    "mooncake_conversation": MOONCAKE,
}
NAMES = ("best_aic", "best_ks")


def shared_trace(shared: Path, file: str, limit: int | None = None) -> Trace:
    return load_trace(shared / "traces" / file, limit=limit)


@pytest.mark.parametrize("file", FACTS)
def test_counts_and_statistics(shared: Path, file: str) -> None:
    form, rows, prompt_mean, output_mean, correlation, *arrivals = FACTS[file]
    trace = shared_trace(shared, file)
    summary = info(trace)
    assert (trace.format, len(trace), trace.rows_read) == (form, rows, rows)
    assert (trace.dropped, trace.reordered) == ({}, 0)
    assert summary["prompt_tokens"]["mean"] == pytest.approx(prompt_mean, abs=0.5)
    assert summary["output_tokens"]["mean"] == pytest.approx(output_mean, abs=0.06)
    assert summary["spearman"] == pytest.approx(correlation, abs=6e-4)
    found = [summary[key] for key in ("span_s", "rate_per_s", "gap_cv")]
    for value, expected in zip(found, arrivals, strict=True):
        assert value is None if expected is None else value == pytest.approx(expected, rel=2e-3)


def test_azure_and_vidur_give_the_same_requests(shared: Path) -> None:
    azure = shared_trace(shared, CONV, 2000)
    vidur = shared_trace(shared, VIDUR)
    assert azure.rows_read == 2000
    assert azure.prompt_tokens.tolist() == vidur.prompt_tokens.tolist()
    assert azure.output_tokens.tolist() == vidur.output_tokens.tolist()
    np.testing.assert_allclose(azure.arrival_s, vidur.arrival_s, rtol=0, atol=1.1e-6)


def test_fits_are_those_of_the_facts(shared: Path) -> None:
    with (shared / "traces" / "quantiles.csv").open(newline="") as stream:
        facts = [row for row in csv.DictReader(stream) if row["dataset"] in DATASETS]
    whole = ("none", "", "as shipped", "as shipped (p+o<=4096)", "p+o<2048")
    fields = ("input_tokens", "output_tokens", "interarrival_s")
    facts = [row for row in facts if row["filter"] in whole and row["field"] in fields]
    assert len(facts) == 15
    fits = {name: fit(shared_trace(shared, file)) for name, file in DATASETS.items()}
    for row in facts:
        found = fits[row["dataset"]][row["field"]]
        for key, value in list(row.items())[3:]:
            where = (row["dataset"], row["field"], key)
            if value == "":
                assert found.get(key) is None, where
            elif key in NAMES:
                assert found[key] == value, where
            else:
                assert found[key] == pytest.approx(float(value), rel=1e-3, abs=1e-4), where


@pytest.mark.parametrize(
    ("sample", "file"),
    [
        ("azure-conv-sample", CONV),
        ("azure-code-sample", CODE),
        ("sharegpt-multiturn-sample", SHAREGPT),
        ("arxiv-sample", ARXIV),
    ],
)
def test_the_tables_of_the_samples_are_the_quantiles_of_the_files(
    shared: Path, sample: str, file: str
) -> None:
    trace, table = shared_trace(shared, file), sample_table(sample)
    keep = trace.output_tokens <= 1024 if sample == "arxiv-sample" else slice(None)
    columns = {
        "prompt_tokens": trace.prompt_tokens[keep].astype(float),
        "output_tokens": trace.output_tokens[keep].astype(float),
    }
    if trace.arrival_s is not None:
        gaps = np.diff(trace.arrival_s)
        pauses = gaps > 5
        if "pause_s" in table.quantiles:
            bounds = [0, *(np.flatnonzero(pauses) + 1), len(trace)]
            columns |= {"gap_s": gaps[~pauses], "pause_s": gaps[pauses]}
            columns |= {"burst_requests": np.diff(bounds).astype(float)}
        else:
            columns["gap_s"] = gaps
    assert set(columns) == set(table.quantiles)
    assert len(columns["prompt_tokens"]) == int(table.facts["rows"])
    for name, values in columns.items():
        expected = np.percentile(values, table.percent)
        np.testing.assert_allclose(table.quantiles[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["info", "fit"])
def test_times_that_no_float_squares_are_refused_in_a_line(folder: Path, what: str) -> None:
    Path("far.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n1e300,1,1\n"
    )
    assert complaint("traces", what, "far.csv").endswith(
        "the last request would arrive after 1e+300 s; at most 1e+12 s is right"
    )
