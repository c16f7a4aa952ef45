"""Files that people bring: the shared cases, each with the value that its README says is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evenflow as ef
from evenflow.config.run import configured
from evenflow.config.yaml_file import read
from evenflow.experiments.reproduce.forms import read_results
from evenflow.traces import load_trace


@pytest.fixture
def cases(shared: Path) -> Path:
    if not (shared / "cases").is_dir():
        pytest.skip("the shared folder has no cases")
    return shared / "cases"


def test_the_lines_of_sglang_are_runs_with_their_clients(cases: Path) -> None:
    runs = read_results(cases / "k10a-sglang-jsonl" / "result.jsonl")
    assert [run.run["workload.arrivals"]["concurrency"] for run in runs] == [8, 16]
    for run in runs:
        found = run.metrics["mean_ttft_ms"], run.metrics["mean_tpot_ms"]
        assert found == pytest.approx((110.0, 10.0))


def test_the_totals_of_aiperf_are_a_closed_loop(cases: Path) -> None:
    (run,) = read_results(cases / "k10b-aiperf" / "profile_export_aiperf.json")
    assert run.metrics["mean_ttft_ms"] == 230.0
    assert run.metrics["mean_tpot_ms"] == 11.8
    assert run.run["workload.arrivals"] == {"kind": "closed", "concurrency": 16}
    assert "profile_export.jsonl" in run.doubts[0]


def test_a_request_of_guidellm_without_its_prompt_is_left_out(cases: Path) -> None:
    (run,) = read_results(cases / "k10d-guidellm-null" / "result.json")
    assert run.requests["input_tokens"].to_list() == [100]
    assert run.doubts == ["1 requests failed or lack a number, and are left out"]


def test_the_table_of_nccl_tests_is_read(cases: Path) -> None:
    costs = f"costs={{kind: roofline, all_reduce: {cases / 'k12-nccl-text' / 'nccl.txt'}}}"
    config = configured(read(cases / "k14-means-only" / "run.yaml"), [costs])
    points = config.costs.all_reduce.points
    assert points == [[32768, 18.6], [1048576, 62.1], [16777216, 790.2]]


def test_means_make_no_workload_of_their_own(cases: Path) -> None:
    (run,) = read_results(cases / "k14-means-only" / "result.json")
    assert (run.metrics["mean_ttft_ms"], len(run.requests), dict(run.run)) == (110.0, 0, {})
    assert "--save-detailed" in run.doubts[0]


def test_a_trace_of_bailian_is_in_seconds_and_blocks_of_16(cases: Path) -> None:
    path = cases / "k1a-bailian-seconds" / "trace.jsonl"
    trace = load_trace(path)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 20.5, 41.0]
    run = {
        "stages": 1,
        "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5},
        "kv": {"pages": 400, "page_tokens": 16, "prefix_cache": True},
        "scheduler": {"name": "vllm_v1", "max_num_batched_tokens": 2048},
        "workload": {"trace": str(path), "arrivals": "replay"},
    }
    assert ef.simulate(run).requests["cached_tokens"].to_list() == [0, 32, 528]


@pytest.mark.parametrize(
    ("block", "doubts"), [(16, []), (512, ["hash_ids: a block is taken as 512 tokens"])]
)
def test_the_size_of_blocks_is_told_from_how_many_there_are(
    block: int, doubts: list[str], tmp_path: Path
) -> None:
    lengths = [528, 1000, 700]
    rows = [
        {"chat_id": 1, "timestamp": i, "input_length": n, "output_length": 5}
        | {"hash_ids": list(range(-(-n // block)))}
        for i, n in enumerate(lengths)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = load_trace(tmp_path / "t.jsonl")
    assert trace.prefixes is not None
    assert {prefix.block_tokens for prefix in trace.prefixes} == {block}
    assert [doubt.partition(",")[0] for doubt in trace.doubts] == doubts
