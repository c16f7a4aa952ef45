"""Measured runs of others: the forms they come in, the catalogue, and what is said of them."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import evenflow as ef
from evenflow.errors import UsageError
from evenflow.experiments.reproduce import (
    FOLDER,
    _drawn,
    cases_of,
    chosen,
    entries,
    load_entry,
    served,
)
from evenflow.experiments.reproduce.aiconfigurator import COLD
from evenflow.experiments.reproduce.forms import read_results
from evenflow.experiments.reproduce.measured import MeasuredRun
from evenflow.experiments.reproduce.scores import Scored
from evenflow.report.shown import Table
from evenflow.traces import Replay
from tests.command_line import evenflow, fits_a_screen, refusal, refused
from tests.places import ROOT
from tools.calibrate import main as calibrate

Rows = list[dict[str, Any]]

ROWS: Rows = [
    {"arrival_s": 0.0, "input": 10, "ttft_s": 0.5, "gaps_s": [0.25, 0.75]},
    {"arrival_s": 1.0, "input": 20, "ttft_s": 0.25, "gaps_s": [0.5]},
    {"arrival_s": 1.5, "input": 30, "ttft_s": 1.0, "gaps_s": []},
]
METRICS = {
    "mean_ttft_ms": 1750 / 3,
    "mean_tpot_ms": 500.0,
    "mean_e2el_ms": 3250 / 3,
    "request_throughput": 3 / 2.5,
    "output_throughput": 6 / 2.5,
}


def e2el_s(row: Any) -> float:
    return float(row["ttft_s"] + sum(row["gaps_s"]))


def table_of(rows: Any) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "arrival_s": [row["arrival_s"] for row in rows],
            "input_tokens": [row["input"] for row in rows],
            "output_tokens": [1 + len(row["gaps_s"]) for row in rows],
            "ttft_ms": [1e3 * row["ttft_s"] for row in rows],
            "e2el_ms": [1e3 * e2el_s(row) for row in rows],
        }
    )


def vllm_json(rows: Any) -> dict[str, Any]:
    table = table_of(rows)
    return {
        "request_rate": "inf",
        "duration": (table["arrival_s"] + table["e2el_ms"] / 1e3).max(),
        "input_lens": table["input_tokens"].to_list(),
        "output_lens": table["output_tokens"].to_list(),
        "ttfts": [row["ttft_s"] for row in rows],
        "itls": [row["gaps_s"] for row in rows],
        "start_times": (1000.0 + table["arrival_s"]).to_list(),
    }


def as_vllm(path: Path, rows: Any) -> Path:
    (path / "run.json").write_text(json.dumps(vllm_json(rows)))
    return path / "run.json"


def as_guidellm(path: Path, rows: Any) -> Path:
    table = table_of(rows)
    columns = {
        "request_start_time": 1e9 + table["arrival_s"],
        "prompt_tokens": table["input_tokens"],
        "output_tokens": table["output_tokens"],
        "time_to_first_token_ms": table["ttft_ms"],
        "request_latency": table["e2el_ms"] / 1e3,
    }
    requests = pd.DataFrame(columns).to_dict("records")
    benchmark = {"requests": {"successful": requests, "errored": [], "incomplete": []}}
    (path / "run.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    return path / "run.json"


def by_engine(rows: Any) -> pd.DataFrame:
    """Return what an engine's own clock, at 7 s when the first request comes, says of requests."""
    table = table_of(rows)
    table["queued_s"] = 7 + table["arrival_s"]
    for name, latency in (("first_token_s", "ttft_ms"), ("last_token_s", "e2el_ms")):
        table[name] = table["queued_s"] + table[latency] / 1e3
    return table.drop(columns=["arrival_s", "ttft_ms", "e2el_ms"])


def as_llmservingsim(path: Path, rows: Any) -> Path:
    names = {"input_tokens": "input_toks", "output_tokens": "output_toks", "queued_s": "queued_ts"}
    names |= {"first_token_s": "first_token_ts", "last_token_s": "last_token_ts"}
    table = by_engine(rows).rename(columns=names)
    table.to_json(path / "requests.jsonl", orient="records", lines=True)
    return path / "requests.jsonl"


def as_engine_csv(path: Path, rows: Any) -> Path:
    by_engine(rows).to_csv(path / "requests.csv", index=False)
    return path / "requests.csv"


def as_csv(path: Path, rows: Any) -> Path:
    table_of(rows).to_csv(path / "run.csv", index=False)
    gaps_ms = [[1e3 * gap for gap in row["gaps_s"]] for row in rows]
    with gzip.open(path / "itls.json.gz", "wt") as file:
        json.dump({"run": {"duration_s": 2.5, "itls_ms": gaps_ms}}, file)
    return path / "run.csv"


WRITERS = [as_vllm, as_guidellm, as_llmservingsim, as_engine_csv, as_csv]


@pytest.mark.parametrize("write", WRITERS)
def test_a_run_is_the_same_in_every_form(write: Callable[..., Path], tmp_path: Path) -> None:
    (run,) = read_results(write(tmp_path, ROWS))
    assert {name: run.metrics[name] for name in METRICS} == pytest.approx(METRICS)
    assert run.requests["arrival_s"].to_list() == pytest.approx([0.0, 1.0, 1.5])
    assert run.requests["input_tokens"].to_list() == [10, 20, 30]
    assert run.requests["output_tokens"].to_list() == [3, 2, 1]
    assert not run.doubts
    if write in (as_vllm, as_csv):
        assert run.metrics["mean_itl_ms"] == pytest.approx(500)


@pytest.mark.parametrize("stretched", [False, True])
def test_arrivals_are_drawn_as_the_client_drew_them(tmp_path: Path, stretched: bool) -> None:
    drawn = np.random.RandomState(0).gamma(1.0, 0.5, 50)
    times = np.cumsum(drawn)
    times = times * (25 / times[-1]) if stretched else np.concatenate([[0], times[:-1]])
    rows = [{"arrival_s": at, "input": 5, "ttft_s": 0.1, "gaps_s": [0.1]} for at in times]
    data = vllm_json(rows) | {"request_rate": 2.0, "start_times": None}
    data["duration"] -= times[0]
    (tmp_path / "run.json").write_text(json.dumps(data))
    (run,) = read_results(tmp_path / "run.json")
    assert run.requests["arrival_s"].to_list() == pytest.approx(list(times - times[0]), abs=1e-9)
    assert not run.doubts
    (tmp_path / "run.json").write_text(json.dumps(data | {"duration": 99.0}))
    assert "drawn again" in read_results(tmp_path / "run.json")[0].doubts[0]


AICONFIGURATOR = """\
backend,backend_version,model_path,system,precision,mode,isl,osl,concurrency,tp_size,pp_size,silicon_ttft_ms,silicon_tpot_ms,measured
vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,,agg,1024,128,8,2,1,50,20,2026-01-27
vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,,agg,1024,128,16,2,1,50,20,2026-01-27
trtllm,1.0,meta-llama/Llama-3.1-8B-Instruct,b100_sxm,fp8,disagg,1024,128,8,,,60,9,2025-11-02
trtllm,1.0,meta-llama/Llama-3.1-8B-Instruct,b100_sxm,fp8,agg,1024,128,8,4,2,61,9,2025-11-02
"""


PERF_OVERVIEW = """\
version,model,gpu,dtype,tp,pp,dep,gpus,isl,osl,requests,output_tokens_per_s
1.2,Llama-3.3-70B,RTX-PRO-6000,nvfp4,1,8,1,8,1024,1024,3000,12360
1.0,Qwen3-30B-A3B,RTX-PRO-6000,nvfp4,2,1,1,2,128,2048,3000,22744
1.0,Some-Model,RTX-PRO-6000,nvfp4,1,1,1,1,128,2048,1,9
"""


def test_rows_of_the_performance_overview_have_the_settings_of_the_benchmark(
    tmp_path: Path,
) -> None:
    """Rows and tokens as its rule gives them; `tp` of a mixture means replicas of attention."""
    (tmp_path / "rows.csv").write_text(PERF_OVERVIEW)
    dense, mixture, unknown = read_results(tmp_path / "rows.csv")
    assert dense.metrics == {"output_throughput": 12360}
    assert dense.run == {
        "model": "Llama-3.3-70B",
        "gpu": "RTX-PRO-6000",
        "dtype": "nvfp4",
        "stages": 8,
        "tensor_parallel": 1,
        "runtime": {"like": "trtllm-1.2", "tokenize_s": 0.0},
        "workload.arrivals": "offline",
        "scheduler.version": "1.2",
        "scheduler.max_batch_size": 384,
        "scheduler.max_num_tokens": 2048,
    }
    assert (len(dense.requests), dense.requests.input_tokens.unique()) == (3000, 1024)
    assert (mixture.run["tensor_parallel"], mixture.run["data_parallel"]) == (1, 2)
    assert "scheduler.max_batch_size" not in unknown.run
    (tmp_path / "rows.csv").write_text(PERF_OVERVIEW.replace("nvfp4,1,8", "int3,1,8"))
    with refused("dtype int3 of a row; known: bf16, fp16, fp8, mxfp4, nvfp4"):
        read_results(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_text(PERF_OVERVIEW.replace("nvfp4,1,8", "nvfp4,one,8"))
    with refused("rows of TensorRT-LLM's performance overview, with text where a number is"):
        read_results(tmp_path / "rows.csv")


def test_static_batches_have_a_part_of_the_batch_for_each_stage(tmp_path: Path) -> None:
    """Seats are the batch's rows, at least one a stage; ranks of experts are tensor-parallel."""
    head = "model,tp,pp,ep,tokens_in,tokens_out,batch,latency_s\n"
    (tmp_path / "rows.csv").write_text(f"{head}A/b,2,4,2,128,64,1,2.5\nA/b,1,1,1,8,8,16,one\n")
    with refused("rows of static batches, with text where a number is right"):
        read_results(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_text(f"{head}A/b,2,4,2,128,64,1,2.5\n")
    (run,) = read_results(tmp_path / "rows.csv")
    assert run.label == "A/b, TP4 x PP4, 128/64, 1 rows"
    assert run.metrics == {"duration": 2.5}
    assert run.run == {
        "model": "A/b",
        "stages": 4,
        "tensor_parallel": 4,
        "expert_parallel": True,
        "workload.arrivals": "offline",
        "max_model_len": 192,
        "scheduler.max_num_seqs": 4,
    }
    assert len(run.requests) == 1


def test_rows_of_aiconfigurator_are_closed_loops(tmp_path: Path) -> None:
    (tmp_path / "means.csv").write_text(AICONFIGURATOR)
    first, second = read_results(tmp_path / "means.csv")
    assert first.metrics == {"mean_ttft_ms": 50, "mean_tpot_ms": 20}
    assert first.run == {
        "model": "Qwen3-32B",
        "gpu": "H100",
        "stages": 1,
        "tensor_parallel": 2,
        "workload.arrivals": {"kind": "closed", "concurrency": 8},
    }
    assert first.facts["precision"] == "bf16"
    assert (second.facts["engine"], second.run["gpu"]) == ("TensorRT-LLM 1.0", "b100_sxm")
    assert ([*first.doubts], [*second.doubts]) == ([], [COLD])  # before InferenceX warmed up


def test_the_sample_inside_the_package_is_neither_found_nor_read(tmp_path: Path) -> None:
    path = tmp_path / "systems" / "silicon_sample.csv"
    path.parent.mkdir()
    table = pd.read_csv(io.StringIO(AICONFIGURATOR)).rename(columns={"concurrency": "batch_size"})
    table.assign(silicon_data_source="dump; silicon_concurrency=64").to_csv(path)
    assert not [entry.name for entry in entries().values() if entry.files(tmp_path)]
    with pytest.raises(UsageError, match="concurrency"):
        read_results(path)


def test_lengths_of_a_closed_loop_are_drawn_from_the_shortest_on(tmp_path: Path) -> None:
    (tmp_path / "means.csv").write_text(AICONFIGURATOR)
    run = read_results(tmp_path / "means.csv")[0]
    for shortest, prompts, outputs in (
        (1.0, (1024, 1024), (128, 128)),
        (0.8, (819, 1024), (102, 128)),
    ):
        served(run, tmp_path / "trace.csv", 200, shortest)
        drawn = pd.read_csv(tmp_path / "trace.csv")
        assert len(drawn) == 200 * 8
        assert (drawn.num_prefill_tokens.min(), drawn.num_prefill_tokens.max()) == prompts
        assert (drawn.num_decode_tokens.min(), drawn.num_decode_tokens.max()) == outputs


def test_lengths_are_those_of_a_published_run() -> None:
    """The sums that InferenceX's client prints in vLLM's pull request 47631."""
    stated = pd.DataFrame({"input_tokens": [8192], "output_tokens": [1024]})
    drawn = _drawn(stated, 320, shortest=0.8)
    assert drawn.sum().to_dict() == {"input_tokens": 2_352_062, "output_tokens": 296_143}


def test_a_row_with_as_many_expert_ranks_as_ranks_has_whole_experts(tmp_path: Path) -> None:
    head, row, *_ = AICONFIGURATOR.strip().splitlines()
    path = tmp_path / "means.csv"
    for ranks, whole in ((2, True), (1, False)):
        moe = row.replace("Qwen3-32B,h100_sxm,", "Qwen3-235B-A22B-FP8,h100_sxm,fp8") + f",{ranks}"
        path.write_text(f"{head},moe_ep_size\n{moe}\n")
        (run,) = read_results(path)
        assert run.run["model"] == "Qwen3-235B-A22B"
        assert ("expert_parallel" in run.run) is whole
    path.write_text(f"{head},moe_ep_size,attention_dp_size\n{moe[:-1]}16,8\n")
    (run,) = read_results(path)
    assert (run.run["data_parallel"], run.run["expert_parallel"]) == (8, True)


def test_of_rows_that_say_the_same_the_slower_are_told_from_the_fastest(
    folder: Path, tmp_path: Path
) -> None:
    head, row, *_ = AICONFIGURATOR.replace(",,agg", ",fp8,agg").strip().splitlines()
    faster, alike = row.replace(",50,20", ",40,12"), row.replace(",50,20", ",51,12.3")
    (tmp_path / "means.csv").write_text(f"{head}\n{row}\n{faster}\n{alike}\n")
    keys = given(folder) | {"files": ["means.csv"]}
    for where, times in (
        ({"slower": [True]}, [20]),
        ({"slower": [False], "tp_size": [2]}, [12, 12.3]),
        ([{"slower": [True]}, {"silicon_ttft_ms": [40]}], [20, 12]),
    ):
        (folder / "MINE.yaml").write_text(yaml.safe_dump(keys | {"where": where}))
        runs = load_entry(folder / "MINE.yaml").measured(tmp_path)
        assert [run.metrics["mean_tpot_ms"] for run in runs] == times


def test_keys_of_some_rows_and_of_the_clients_go_before_those_of_all(
    folder: Path, tmp_path: Path
) -> None:
    """The row has 8 clients, so one more than 7 seats, and prompts of 1,024 tokens."""
    (tmp_path / "means.csv").write_text(AICONFIGURATOR)
    keys = given(folder) | {"files": ["means.csv"]}
    more: dict[str, Any] = {
        "run": keys["run"] | {"scheduler": {"name": "sarathi"}},
        "by_clients": {"scheduler.max_num_seqs": -1},
        "by_step": {"scheduler.token_budget": 1500, "max_model_len": 9},
        "some": [
            {"where": {"isl": [1024], "tp_size": [2, 4]}, "run": {"scheduler.token_budget": 1152}},
            {"where": {"isl": [1024], "osl": [128]}, "run": {"tensor_parallel": 1}},
            {"where": {"isl": [1]}, "run": {"x": 1}},
        ],
    }
    (folder / "MINE.yaml").write_text(yaml.safe_dump(keys | more))
    case = cases_of(load_entry(folder / "MINE.yaml"), tmp_path, tmp_path)[0]
    assert case.measured.run["tensor_parallel"] == 2
    assert case.config.tensor_parallel == 1
    assert case.config.scheduler.params == {"token_budget": 1152, "max_num_seqs": 7}
    assert case.config.max_model_len == 8 + 1024 + 9


SERVED = {"ttfts": [0.1, 0.2], "itls": [[0.02, 0.02], [0.03]], "input_lens": [10, 20]} | {
    "request_rate": float("inf"),
    "duration": 1.0,
}
MEANS = {"mean_ttft_ms": 110.0, "mean_tpot_ms": 10.0, "completed": 2}
TOTALS = {"total_input_tokens": 200, "total_output_tokens": 40, "max_concurrency": 4}
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 110.0, "p99": 690.0},
    "inter_token_latency": {"unit": "s", "avg": 0.01},
    "input_sequence_length": {"avg": 100},
    "output_sequence_length": {"avg": 20},
}
LLMPERF = {
    "results_ttft_s_mean": 0.11,
    "results_end_to_end_latency_s_mean": 0.3,
    "results_number_input_tokens_mean": 100,
    "results_number_output_tokens_mean": 20,
    "num_concurrent_requests": 4,
}
TRTLLM = {
    "request_info": {"avg_input_length": 100, "avg_output_length": 20},
    "performance": {"total_latency_ms": 1e4},
    "streaming_metrics": {"avg_ttft_ms": 110.0, "avg_tpot_ms": 10.0},
}
PHASES = {"phases": [{"name": "warmup", "concurrency": 2}, {"name": "p", "concurrency": 4}]}
BELOW = {"unit": "ms", "avg": -1.0, "avg_ttft_ms": -1.0, "avg_tpot_ms": 10.0}
EMPTY_GUIDELLM = {"benchmarks": [{"requests": {"successful": []}}]}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.json", "", "not the results"),
        ("a.json", "{}", "known .has nothing"),
        ("a.json", "[1]", "not the results"),
        ("a.json", '{"a":' * 10**5, "nested too deep"),
        ("a.json", json.dumps(EMPTY_GUIDELLM), "no completed request"),
        ("a.json", json.dumps(vllm_json([{**ROWS[0], "ttft_s": 0.0}])), "a.json: "),
        ("a.jsonl", "", "not the results"),
        ("a.jsonl", '{"input_toks": 1}', "has input_toks"),
        ("a.csv", "", "not the results"),
        ("a.csv", "x,y\n1,2\n", "arrival_s"),
        ("a.csv", "arrival_s,input_tokens,output_tokens,ttft_ms,e2el_ms\n0,1,1,x,2\n", "a.csv: "),
        ("a.txt", "", "GuideLLM"),
        ("a.txt", "==== Serving Benchmark Result ====\n", "--output-details"),
        ("a.csv", "Metric,avg,p99\nTTFT,1,2\n", "profile_export.jsonl"),
        ("a.json", json.dumps({"avg_latency": 1, "latencies": []}), "bench serve has"),
        ("a.json", json.dumps({**TRTLLM, "streaming_metrics": None}), "with --streaming"),
        (
            "a.json",
            json.dumps(LLMPERF | {"num_concurrent_requests": None}),
            "num_concurrent_requests is null",
        ),
        ("a.json", json.dumps(LLMPERF | {"results_ttft_s_mean": 0.4}), "is less than results_ttft"),
        ("a.json", json.dumps(AIPERF | {"time_to_first_token": BELOW}), "avg is -1.0; a number, 0"),
        ("a.json", json.dumps(TRTLLM | {"streaming_metrics": BELOW}), "avg_ttft_ms is -1.0; a num"),
        ("a.json", json.dumps(MEANS | {"mean_tpot_ms": 1e40}), "mean_tpot_ms is 1e.40; a number"),
        ("a.json", json.dumps({**MEANS, "completed": 0, "mean_ttft_ms": 0}), "no request was ans"),
        ("a.json", json.dumps(SERVED | {"ttfts": [1e308, 1e308]}), "no request has ttft_ms"),
        ("a.json", json.dumps(SERVED | {"itls": [[0.02, -0.01], [-1]]}), "no request has e2el_ms"),
        ("a.json", json.dumps(SERVED | {"ttfts": [0.1]}), "one for each request"),
        ("a.jsonl", json.dumps(SERVED) + '\n{"ttfts": [0.', "line 2 is not valid, or cut"),
        ("a.csv", "silicon_tpot_ms\nx\n", "without"),
    ],
)
def test_what_is_no_result_is_told_in_one_line(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=told) as error:
        read_results(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["vllm-bench-rate2", "vllm-bench-burst"])
def test_results_of_vllms_own_client_have_the_means_that_it_printed(name: str) -> None:
    """Recorded with `vllm serve` 0.32.0 on a CPU, a random Llama of four layers, and `bench serve
    --save-detailed`."""
    path = ROOT / "tests" / "results" / f"{name}.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    (run,) = read_results(path)
    assert len(run.requests) == told["completed"] == 60
    assert not run.doubts
    for key in ("mean_ttft_ms", "mean_tpot_ms", "p99_ttft_ms"):
        assert run.metrics[key] == pytest.approx(told[key], rel=1e-3)


@pytest.mark.parametrize(
    "data",
    [
        MEANS | TOTALS,
        AIPERF | {"input_config": PHASES},
        AIPERF | {"input_config": {"perf_analyzer": {"stimulus": {"concurrency": 4}}}},
        LLMPERF,
        TRTLLM | {"request_info": TRTLLM["request_info"] | {"avg_num_concurrent_requests": 3.9}},
    ],
    ids=["bench serve", "AIPerf", "genai-perf", "LLMPerf", "trtllm-bench"],
)
def test_means_of_a_closed_loop_are_the_same_from_every_client(
    data: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "any.name").write_text(json.dumps(data))
    (run,) = read_results(tmp_path / "any.name")
    found = run.metrics["mean_ttft_ms"], run.metrics["mean_tpot_ms"]
    assert found == pytest.approx((110, 10))
    assert run.run == {"workload.arrivals": {"kind": "closed", "concurrency": 4}}
    assert run.requests.to_dict("records") == [{"input_tokens": 100, "output_tokens": 20}]
    assert len(run.doubts) == 1


def test_a_rate_beside_the_clients_makes_no_closed_loop(tmp_path: Path) -> None:
    config = {"input_config": {"loadgen": {"concurrency": 4, "request_rate": 2.0}}}
    (tmp_path / "a.json").write_text(json.dumps(AIPERF | config))
    (run,) = read_results(tmp_path / "a.json")
    assert (run.run, len(run.requests)) == ({}, 0)


def test_several_runs_lie_one_after_the_other_in_a_file_of_any_name(tmp_path: Path) -> None:
    clients = [SERVED | {"max_concurrency": count} for count in (8, 16)]
    for text in ("\n".join(map(json.dumps, clients)), json.dumps(clients, indent=1)):
        (tmp_path / "result.txt").write_text(text)
        runs = read_results(tmp_path / "result.txt")
        loops = [run.run["workload.arrivals"]["concurrency"] for run in runs]
        assert loops == [8, 16]
        assert [run.label for run in runs] == ["result 1", "result 2"]
        assert runs[1].metrics["mean_ttft_ms"] == pytest.approx(150)


def aiperf_record(start_s: float, phase: str = "profiling", **metrics: float) -> dict[str, Any]:
    metadata = {"request_start_ns": int(start_s * 1e9), "benchmark_phase": phase}
    return {
        "metadata": metadata,
        "metrics": {name: {"value": value} for name, value in metrics.items()},
        "error": None,
    }


def test_records_of_aiperf_are_read_without_those_of_the_warm_up(tmp_path: Path) -> None:
    latencies = {"time_to_first_token": 100.0, "request_latency": 300.0}
    request = latencies | {"input_sequence_length": 10, "output_sequence_length": 21}
    records = [
        aiperf_record(5.0, "warmup", **request),
        aiperf_record(7.5, **request),
        aiperf_record(7.0, **request),
        aiperf_record(8.0, input_sequence_length=10),
    ]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(map(json.dumps, records)))
    (run,) = read_results(tmp_path / "profile_export.jsonl")
    assert run.requests["arrival_s"].to_list() == pytest.approx([0.0, 0.5])
    assert run.metrics["mean_tpot_ms"] == pytest.approx(10.0)
    assert run.doubts == ["1 requests failed or lack a number, and are left out"]


@pytest.mark.parametrize(
    "gap", [{"input_lens": [10, None]}, {"ttfts": [0.1, None]}, {"itls": [[0.02, 0.02], [None]]}]
)
def test_a_request_with_a_gap_is_left_out_and_told(gap: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SERVED | gap))
    (run,) = read_results(tmp_path / "a.json")
    assert run.requests["input_tokens"].to_list() == [10]
    assert run.doubts == ["1 requests failed or lack a number, and are left out"]


def test_a_pipe_holds_no_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UsageError, match="is a pipe or a device"):
        read_results(tmp_path / "a.json")


def test_each_entry_is_short_and_says_where_its_data_is() -> None:
    assert len(entries()) >= 8
    for name, entry in entries().items():
        lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 36, name
        assert entry.keys.source.commit in entry.where_from()


def test_the_data_given_is_what_the_catalogue_was_made_with(shared: Path) -> None:
    for entry in entries().values():
        assert entry.files(shared), entry.name
        assert not entry.others(shared), entry.name


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("vllm083-a100-tp8", {"qps_01": [], "qps_inf": [1.0, 4.0, 16.0]}),
        ("vllm083-a100-pp2-ib", {"qps_01": [], "qps_04": [1.0], "qps_inf": [1.0, 1.0, 16.0]}),
    ],
)
def test_runs_of_one_server_are_simulated_one_after_the_other(
    name: str, scales: dict[str, list[float]], shared: Path, tmp_path: Path
) -> None:
    """A rate that was not given is the first one's arrivals, so many times as fast."""
    cases = cases_of(entries()[name], shared, tmp_path)
    assert len(cases) == len(scales)
    for case in cases:
        (found,) = [scales[end] for end in scales if case.measured.label.endswith(end)]
        arrivals = [part.arrivals for part in case.config.workload.after]
        assert [each.scale for each in arrivals if isinstance(each, Replay)] == found


def seen_of(requests: pd.DataFrame) -> Rows:
    """Return what a client sees of simulated requests, their tokens at even distances."""
    return [
        {
            "arrival_s": row["arrival_s"],
            "input": row["prompt_tokens"],
            "ttft_s": row["first_token_s"] - row["arrival_s"],
            "gaps_s": gaps * [(row["completion_s"] - row["first_token_s"]) / max(gaps, 1)],
        }
        for row in requests.to_dict("records")
        for gaps in [row["output_tokens"] - 1]
    ]


def given(folder: Path, cpu: Any = None, own: Any = None, **more: Any) -> dict[str, Any]:
    """Write MINE.yaml, whose run is what evenflow itself simulates, and that result.

    `own` are keys of the run, `more` of the entry.
    """
    run = {
        "stages": 2,
        "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5},
        "kv": {"pages": 200},
        "runtime": cpu or {"schedule_s": 0.002},
        "scheduler": {"name": "sarathi", "token_budget": 64},
        **(own or {}),
    }
    table = ef.simulate(run | {"workload": {"trace": "trace.csv", "arrivals": "replay"}}).requests
    (folder / "data").mkdir()
    as_vllm(folder / "data", seen_of(table))
    keys = {
        "title": "Ours",
        "source": {"repository": "example.org/ours", "commit": "abc", "path": "run.json"},
        "engine": "evenflow",
        "files": ["run.json"],
        "metrics": {"mean_tpot_ms": 0.01, "mean_ttft_ms": 0.01, "mean_e2el_ms": None},
        "assumed": ["nothing"],
        "run": run,
    }
    (folder / "MINE.yaml").write_text(yaml.safe_dump(keys | more))
    return keys


def test_a_run_of_our_own_is_reproduced_without_error(folder: Path) -> None:
    given(folder)
    status, output, errors = evenflow("reproduce", "MINE.yaml", "--data", "data", "--out", "out")
    assert status == 0
    assert "is not what the catalogue was made with" in errors
    assert "NOT FAIR: " in errors
    assert "requests are few" in errors
    assert "no CPU time" in output
    table = pd.read_csv("out/reality.csv").set_index("metric")
    assert table["error"].abs().max() < 1e-6
    assert table["ideal_error"].max() < -0.1  # the CPU's 2 ms are missing there
    text = Path("out/reality.md").read_text()
    assert "| hit |" in text
    assert "https://example.org/ours, commit abc, run.json" in text
    assert {path.suffix for path in Path("out").glob("reality.*")} == {
        ".csv",
        ".md",
        ".png",
        ".svg",
    }
    found = ef.reproduce(["MINE.yaml"], data="data", set={"runtime": "ideal"})
    assert fits_a_screen(found).table["error"].to_list() == pytest.approx(
        table["ideal_error"].to_list()
    )


def test_kinds_of_costs_are_compared_on_the_same_runs(folder: Path) -> None:
    """What silicon itself made is nearest with silicon; a run that one kind refuses is named."""
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    silicon = {"kind": "silicon", "framework": "vllm"}
    given(folder, own={"costs": silicon, "model": "Qwen2.5-7B", "gpu": "H100"})
    kinds = "silicon,aiconfigurator"
    status, output, _ = evenflow(
        "reproduce", "MINE.yaml", "--data", "data", "--costs", kinds, "--out", "out"
    )
    assert status == 0
    assert "silicon, median" in output
    table = pd.read_csv("out/scores.csv").set_index("metric")
    assert table["silicon"].abs().max() < 1e-6
    assert 0.001 < abs(table["aiconfigurator"]["mean_tpot_ms"]) < 0.2
    assert table[["family", "precision", "odd"]].iloc[0].to_list() == ["qwen2", "16 bits", False]


def test_a_run_that_is_left_to_the_defaults_has_them_but_for_what_is_set(folder: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    keys = {"model": "Qwen2.5-7B", "gpu": "H100", "costs": {"kind": "silicon"}}
    given(folder, own={**keys, "scheduler": "vllm_v1", "link": "ethernet-100g"})
    plain = {"costs": "roofline", "link": None}
    for more, kept in (("vllm-0.19", {}), ("ideal", {"runtime": "ideal"})):
        found = ef.reproduce("MINE.yaml", data="data", costs="default,silicon", set=kept)
        same = ef.reproduce("MINE.yaml", data="data", set=plain | {"runtime": more})
        errors = same.table.set_index("metric")["error"]
        assert found.table.set_index("metric")["default"].to_list() == errors.to_list()
        (shown,) = found.told()
        assert isinstance(shown, Table)
        assert [row[:2] for row in shown.rows] == [["MINE", "1"], ["1 sets, median off", "1"]]


def test_every_nth_run_of_an_entry_counts(folder: Path) -> None:
    keys = given(folder) | {"files": ["means.csv"]}
    (folder / "MINE.yaml").write_text(yaml.safe_dump(keys))
    (folder / "means.csv").write_text(AICONFIGURATOR.replace(",50,20", ",51,20", 1))
    for every, clients in ((1, [8, 16, 8]), (2, [8, 8]), (3, [8])):
        (entry,) = chosen(["MINE.yaml"], every)
        found = [each.facts["concurrency"] for each in entry.measured(folder)]
        assert found == clients
    assert "every is 0" in refusal("reproduce", "MINE.yaml", "--data", "data", "--every", "0")


def test_the_nearest_of_kinds_is_counted_by_sets_of_odd_rows() -> None:
    set_of = dict.fromkeys(["entry", "engine", "gpu", "layout", "family", "precision"], "a")
    rows = [(True, "mean_tpot_ms", 0.1, -0.2), (True, "mean_tpot_ms", -0.3, 0.1)]
    rows += [(True, "mean_ttft_ms", 0.0, 0.9), (False, "mean_tpot_ms", 0.0, 0.9)]
    names = ["odd", "metric", "one", "other"]
    table = pd.DataFrame([set_of | dict(zip(names, row, strict=True)) for row in rows])
    found = Scored(["one", "other"], table, {"b": "no such GPU"})
    first, shown, lost = found.told()
    assert first == "other is nearest in 1 of 1 sets (odd rows)"
    assert isinstance(shown, Table)
    assert shown.rows[:2] == [
        ["odd", "all", "2", "20.0% / 28.0%", "15.0% / 19.0%"],
        ["even", "all", "1", "0.0% / 0.0%", "90.0% / 90.0%"],
    ]
    assert lost == "not compared: b: no such GPU"


@pytest.mark.parametrize(("schedule_s", "holds"), [(0.002, "engine"), (0.009, "nothing")])
def test_a_fit_finds_the_cpu_time_that_a_run_was_made_with(
    schedule_s: float, holds: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time that is hidden shows where it is longer than a stage's: around 0 nothing tells it."""
    goals = {"mean_tpot_ms": 0.05, "mean_ttft_ms": 0.1, "mean_e2el_ms": 0.05, "p99_itl_ms": 0.1}
    given(folder, {"schedule_s": schedule_s, "holds": holds}, metrics=goals)
    part = ["host", "MINE.yaml", "--data", "data", "--part", "run"]
    calibrate([*part, "--find", "schedule_s", "--holds", holds])
    constants, *_ = capsys.readouterr().out.splitlines()
    found = yaml.safe_load(constants)["runtime"]
    assert found["schedule_s"] == pytest.approx(schedule_s, rel=0.02)
    assert found["holds"] == holds


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["MINE.yaml", "--data", "nowhere"], "--data: no folder nowhere"),
        (["MINE.yaml", "--data", "empty"], "it is at https://example.org/ours, commit abc"),
        (["vlm"], "known: closed-vllm, "),
        (["MINE.yaml", "--data", "data", "--set", "stages=0"], "stages"),
        (["MINE.yaml", "--data", "data", "--set", "model=no-such"], "no run can be simulated"),
        (["MINE.yaml", "--data", "data", "--costs", "silicn"], 'did you mean "silicon"'),
        (["MINE.yaml", "--data", "data", "--costs", "silicon"], "no runs of entries with costs"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line(
    arguments: list[str], told: str, folder: Path
) -> None:
    given(folder)
    (folder / "empty").mkdir()
    assert told in refusal("reproduce", *arguments)


def test_a_key_of_an_entry_that_is_wrong_is_named(folder: Path) -> None:
    given(folder, metrics={"mean_tpot_ms": -1})
    assert "metrics.mean_tpot_ms" in refusal("reproduce", "MINE.yaml", "--data", "data")


def test_a_name_is_an_entry_or_how_entries_begin() -> None:
    assert [entry.name for entry in chosen(["closed-trtllm"])] == ["closed-trtllm"]
    both = [entry.name for entry in chosen(["static-trtllm", "static", "static-trtllm"])]
    assert both == [entry.name for entry in chosen(["static"])]
    begin = sorted(entry.name for entry in chosen(["closed-trtllm-latent-m"]))
    assert begin == ["closed-trtllm-latent-mtp", "closed-trtllm-latent-mtp-dp"]


@pytest.mark.parametrize("arrivals", ["all_at_once", {"kind": "poisson", "rate": 2}, None])
def test_every_entry_takes_runs_without_clients(arrivals: object) -> None:
    run = {} if arrivals is None else {"workload.arrivals": arrivals}
    measured = MeasuredRun("offline", {}, pd.DataFrame(), run=run)
    for entry in entries().values():
        assert entry.own_keys(measured).keys() >= entry.keys.by_clients.keys()
