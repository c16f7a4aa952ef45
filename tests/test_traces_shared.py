"""The readers, the fits and the tables of the samples against real public traces."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces import Trace, load_trace
from traces.describe import fit, info
from traces.trace import sample_table

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
    pytest.importorskip("scipy")
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
