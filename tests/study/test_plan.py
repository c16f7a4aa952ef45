"""Plans: the cheapest deployment is found, what is pruned would not have won, nothing is lost."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import evenflow as ef
from evenflow.config.build import load_workload
from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.specs.model import model, models
from evenflow.study import plan_prepare, plan_search
from evenflow.study.advice import BOUNDS, Advice, advise, faster_links
from evenflow.study.deployments import launch_lines, layouts, most_tokens, pairs_of, parse_gpus
from evenflow.study.plan import answered, facts
from evenflow.study.plan_prepare import prepare
from evenflow.study.plan_question import Ask, PlanQuestion, name_of, parse_budgets
from evenflow.study.plan_search import ranked, search
from evenflow.study.planned import Planned, launch, rows, sentences
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import Condition, parse_slo
from evenflow.study.trials import How, Trial, run
from tests.amounts import ALL
from tests.command_line import fits_a_screen, write_trace
from tests.sweeps import one_by_one, simulator
from tools.launch_plans import ARCHITECTURES, config_json, plans

RUN: dict[str, Any] = {
    "model": "Llama-3.1-8B",
    "gpu": "L20",
    "stages": 1,
    "link": "pcie-l20",
    "max_model_len": 8192,
    "scheduler": {"name": "sarathi", "token_budget": 512},
    "workload": {
        "trace": "azure-conv-sample",
        "requests": 60,
        "arrivals": {"kind": "poisson", "rate": 6.0},
    },
}
SHORT = {**RUN, "workload": {**RUN["workload"], "requests": 24}}
SLO = tuple(parse_slo(["p90_ttft_ms=1000", "p90_tpot_ms=60"]))


def asked(run: dict[str, Any], slo: tuple[Condition, ...] = SLO, **wish: Any) -> PlanQuestion:
    given = {"gpus": (1, 2, 3, 4), "schedulers": ("sarathi",), "budgets": (256, 1024)} | wish
    return prepare(Document("a.yaml", run, {}), Path(), Ask(slo=slo, **given))


def planned(folder: Path, question: PlanQuestion, workers: int = 1) -> Planned:
    with simulator(folder, workers) as who:
        return answered(question, who)


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try points on a quarter of few requests, and rates in few steps."""
    monkeypatch.setattr(plan_prepare, "LEAST_REQUESTS", 4)
    monkeypatch.setattr(plan_prepare, "SHARES", (1 / 8, 1 / 4))
    monkeypatch.setattr(plan_search, "STEPS", 6)


QUESTIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("azure-conv-sample", {"kind": "poisson", "rate": 2.0}, ["p90_ttft_ms=2000"]),
    ("azure-conv-sample", {"kind": "gamma", "rate": 5.0, "burstiness": 0.2}, ["p90_ttft_ms=2500"]),
    ("azure-code-sample", {"kind": "poisson", "rate": 40.0}, ["p90_ttft_ms=2500"]),
    ("azure-code-sample", {"kind": "replay", "scale": 8}, ["p90_ttft_ms=1500", "p90_tpot_ms=80"]),
    ("sharegpt-sample", {"kind": "poisson", "rate": 5.0}, ["p90_tpot_ms=1"]),  # none can
]
MORE_QUESTIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("azure-conv-sample", {"kind": "poisson", "rate": 6.0}, ["p90_ttft_ms=1000", "p90_tpot_ms=60"]),
    ("azure-conv-sample", {"kind": "poisson", "rate": 12.0}, ["p95_ttft_ms=900"]),
    ("azure-code-sample", {"kind": "poisson", "rate": 8.0}, ["p90_ttft_ms=3000"]),
    (
        "azure-conv-sample",
        {"kind": "replay", "scale": 4},
        ["p90_e2el_ms=20000", "mean_ttft_ms=900"],
    ),
    ("sharegpt-sample", {"kind": "poisson", "rate": 10.0}, ["p90_tpot_ms=45"]),
    ("sharegpt-sample", {"kind": "poisson", "rate": 20.0}, ["p90_queue_ms=200", "p90_tpot_ms=30"]),
    ("sharegpt-sample", {"kind": "offline"}, ["p90_e2el_ms=30000"]),
]
if ALL:
    QUESTIONS += MORE_QUESTIONS


def test_a_run_need_not_say_the_stages_that_a_plan_searches() -> None:
    bare = {key: value for key, value in SHORT.items() if key != "stages"}
    assert asked(bare).settings.keys() == asked(SHORT).settings.keys()
    with pytest.raises(UsageError, match='the key "stages" is missing'):
        asked({**bare, "model": None, "gpu": None})


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize(("trace", "arrivals", "limits"), QUESTIONS)
def test_the_answer_is_that_of_all_points_simulated(
    tmp_path: Path, trace: str, arrivals: dict[str, Any], limits: list[str]
) -> None:
    workload = {"requests": 16, "trace": trace, "arrivals": arrivals}
    wish = {"slo": tuple(parse_slo(limits)), "gpus": (1, 2, 3)}
    wish |= {"schedulers": ("sarathi", "vllm_v1"), "budgets": (512,)}
    question = asked({**RUN, "workload": workload}, **wish)
    whole = asked({**RUN, "workload": workload}, exhaustive=True, **wish)
    found, every = planned_if_any(tmp_path / "a", question), planned_if_any(tmp_path / "b", whole)
    if found is None or every is None:
        assert found is every
        return
    name = name_of(fits_a_screen(found).best)
    assert name == name_of(every.best)
    assert found.rates.get(name) == max(every.rates.values(), default=None)
    assert all(each.passes for each in found.probes[name] if each.rate <= found.rates[name])
    kept = {(each.labels["setting"], each.labels["replicas"]) for each in every.kept}
    assert kept.isdisjoint(question.bounds)
    done, most = facts(found)["effort"], facts(every)["effort"]
    assert done["simulated"] + len(question.bounds) <= most["simulated"] == most["points"]


def planned_if_any(folder: Path, question: PlanQuestion) -> Planned | None:
    """Return the plan; None, without looking for what would help, where nothing keeps the SLO."""
    with simulator(folder, 1) as who:
        kept = ranked(question, run(question.study, who, search(question)))
    return planned(folder, question) if kept else None


@pytest.mark.usefixtures("short_stretches")
def test_a_plan_simulates_few_points_and_again_finds_all_of_them(tmp_path: Path) -> None:
    question = asked(SHORT, gpus=tuple(range(1, 7)), budgets=(512,))
    found = planned(tmp_path / "a", question)
    whole = {each.labels["replicas"] for each in found.trials if question.is_whole(each)}
    assert 0 < len(whole) < question.num_points
    assert found.best.labels["gpus"] < 6
    assert planned(tmp_path / "a", question).kept == found.kept
    assert planned(tmp_path / "b", question, 3).kept == found.kept


def test_cpu_time_that_policies_share_is_marked_as_a_default() -> None:
    for runtime, words in ({}, "vllm-0.19 (default),"), ({"runtime": "vllm-0.19"}, "vllm-0.19,"):
        question = asked({**RUN, **runtime}, schedulers=("sarathi", "vllm_v1"))
        best = question.case(next(iter(question.settings.values())), 1)
        assert f"CPU time {words}" in Planned(question, (), [Trial(best.labels, ())]).setup


def test_no_bound_is_of_a_policy_that_computes_prompts_in_part() -> None:
    slo = tuple(parse_slo(["p50_ttft_ms=10"]))
    mixed = {"name": "sglang", "mixed_chunk": True}
    for policy, refuted in ({"name": "sglang"}, True), (mixed, False):
        run = {**RUN, "scheduler": policy, "dispatch": "engine_loop"}
        assert bool(asked(run, slo, gpus=(1,), schedulers=("sglang",)).bounds) == refuted


def test_where_nothing_keeps_the_slo_the_nearest_miss_is_told(tmp_path: Path) -> None:
    found = planned(tmp_path, asked(SHORT, gpus=(1,), slo=tuple(parse_slo(["p99_ttft_ms=1"]))))
    assert not found.kept
    assert found.misses
    first, second, third, _ = sentences(found)
    assert first.startswith("Nothing with up to 1 GPU keeps the SLO. Nearest, by its misses, is 1")
    assert "TTFT P99 (ms) binds" in second
    assert re.match(r"None of \d+ changes keeps it, nor does less traffic; nearest is ", third)
    assert any(" over nvlink-" in each.labels["change"] for each in found.changed)
    slower = asked(SHORT, gpus=(1,), slo=tuple(parse_slo(["p99_tpot_ms=35"])))
    keeps = planned(tmp_path / "b", slower)
    assert not keeps.kept
    assert sentences(keeps)[2].startswith("What would keep it (simulated, one at a time): ")


def test_rows_that_keep_the_slo_beyond_the_table_are_counted(tmp_path: Path) -> None:
    wish = {"budgets": (64, 128, 256, 512, 1024), "gpus": (1, 2), "exhaustive": True}
    found = planned(tmp_path, asked(SHORT, tuple(parse_slo(["p90_ttft_ms=90000"])), **wish))
    told = [line for line in found.told() if isinstance(line, str)]
    assert len(rows(found)[1]) == 8
    assert f"{len(found.kept) - 8} more keep the SLO; plan.csv has them." in told
    assert len(found.table) == len(found.kept) > 8
    all_of_them = "on all 24 requests or until they missed the SLO"
    assert any(all_of_them in line for line in told)


def test_the_nearest_holds_the_highest_rate(tmp_path: Path) -> None:
    """TP2 misses by most at 20 requests/s, and is alone in holding a lower rate."""
    arrivals = {"kind": "poisson", "rate": 20.0}
    run = {**RUN, "workload": {**RUN["workload"], "arrivals": arrivals}}
    slo = tuple(parse_slo(["p90_ttft_ms=500", "p90_tpot_ms=35"]))
    found = planned(tmp_path, asked(run, slo, gpus=(2,), budgets=(512,)))
    assert found.rates.keys() == {"1 x TP2, sarathi 512"}
    excess = [found.question.excess(each) for each in found.misses]
    assert excess[0] == max(excess)
    first = "Nearest, by the rate that it holds, is 1 x TP2, sarathi 512: 2 GPUs."
    assert sentences(found)[0].endswith(first)


def test_another_scheduler_than_the_run_s_own_says_so_and_the_best_of_that(tmp_path: Path) -> None:
    """SGLang's prompts hold decodes up: one GPU is too few for it, and gets no command."""
    run = {**SHORT, "scheduler": "sglang"}
    words = "which misses the SLO on up to 1 GPU; --schedulers sglang plans with it alone."
    for most in (2, 1):
        wish = {"gpus": (1, 2)[:most], "schedulers": ("sglang", "vllm_v1")}
        found = planned(tmp_path, asked(run, tuple(parse_slo(["p90_tpot_ms=60"])), **wish))
        assert name_of(found.best) == "1 x PP1, vllm_v1 256"
        assert f"vllm_v1 beats the run's own sglang, {words}" in sentences(found)[1]
        assert "SGLang: no command, as sglang misses the SLO here" in launch(found)
    own = planned(tmp_path, asked({**SHORT, "scheduler": "vllm_v1"}, found.question.slo, **wish))
    assert "beats" not in " ".join(sentences(own))


@pytest.mark.parametrize(
    ("change", "wish", "words"),
    [
        ({}, {"rate": "fast"}, "--rate fast: should be requests/s, above 0"),
        ({}, {"rate": "-2x"}, "--rate -2x: should be"),
        ({}, {"price": 0.0}, "--price 0: should be dollars of a GPU an hour"),
        ({}, {"schedulers": ("sarathy",)}, "unknown scheduler 'sarathy'"),
        ({}, {"schedulers": ("distserve",)}, "is a system of pools"),
        ({}, {"budgets": (0,)}, "--budgets 0: should be at least 1"),
        ({"model": "Falcon-180B"}, {"gpus": (2,)}, "--gpus: no layout fits"),
        ({}, {"slo": tuple(parse_slo(["p99_tttf_ms=1"]))}, "--slo p99_tttf_ms: a run has no such"),
        ({"workload": {**RUN["workload"], "arrivals": "offline"}}, {"rate": "2x"}, "no rate"),
    ],
)
def test_a_mistake_is_told_before_anything_is_simulated(
    change: dict[str, Any], wish: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        asked({**RUN, **change}, **wish)


def test_budgets_are_numbers() -> None:
    assert parse_budgets("512, 1024,512") == (512, 1024)
    for wrong in ("", "1e3", "many", "9" * 20):
        with pytest.raises(UsageError, match="should be numbers of tokens"):
            parse_budgets(wrong)


def launched(**keys: Any) -> str:
    run = {**RUN, "replicas": {"count": 3}, **keys}
    return "\n".join(launch_lines(configured(Document("a.yaml", run, {})), keys.get("stages", ())))


def test_layouts_of_some_gpus_with_what_does_not_fit() -> None:
    document = Document("a.yaml", {**RUN, "model": "Qwen2.5-32B", "stages": 4}, {})
    workload = load_workload(configured(document), Path())
    found = layouts(document, workload, Path(), pairs_of([8]))
    assert {each.parallel for each in found} == {"PP8", "PP4 x TP2", "PP2 x TP4", "TP8"}
    assert all(each.reason or sum(each.layers) == 64 for each in found)
    (one,) = layouts(document, workload, Path(), pairs_of([1]))
    assert one.label == "PP1, even"
    assert "does not fit" in one.reason
    own = layouts(document, workload, Path(), shifts=(1, 2))
    assert own[0].label == "PP4, as given"
    divisions = {each.layers for each in own}
    assert len(divisions) == len(own) > 2
    assert (17, 17, 16, 14) in divisions


def test_numbers_of_gpus_are_said_in_one_way() -> None:
    for text, numbers in (("4", (4,)), ("8, 4", (4, 8)), ("2..4,8", (2, 3, 4, 8))):
        assert parse_gpus(text) == numbers
    for wrong in ("", "0", "4..2", "many", "4...8", "-1", "1..9999999999", "9" * 5000):
        with pytest.raises(UsageError, match=r"should be a number of GPUs, several \(4,8\)"):
            parse_gpus(wrong)


def test_launch_lines_say_what_an_engine_can_express() -> None:
    lines = launched().splitlines()
    _, vllm, sglang, gllm, trtllm = (line for line in lines if not line.startswith(" "))
    for name in ("Qwen3-32B", "Qwen/Qwen3-32B"):  # the repository once
        assert "vllm serve Qwen/Qwen3-32B --tensor" in launched(model=name)
    assert vllm == (
        "vLLM x 3: vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 1 "
        "--pipeline-parallel-size 1 --gpu-memory-utilization 0.9 "
        "--max-model-len 8192 --no-enable-prefix-caching --max-num-batched-tokens 512 "
        "--max-num-seqs 256 --no-async-scheduling"
    )
    assert "--chunked-prefill-size 512 --max-running-requests 256 --enable-mixed-chunk" in sglang
    assert "--maxp 512 --maxd 256 --schedule-method chunked_prefill" in gllm
    assert "prefix" not in gllm
    mixture = {"model": "Qwen3-30B-A3B", "gpu": "H200", "tensor_parallel": 2}
    for given, said in ((True, False), (False, True)):  # on by default there
        line = next(
            each
            for each in launched(expert_parallel=given, **mixture).splitlines()
            if "gllm" in each
        )
        assert ("--disable-ep" in line) is said
    cached = launched(kv={"prefix_cache": True})
    assert cached.count("prefix") == 1
    assert "--block-size 32 " in launched(kv={"page_tokens": 32})
    assert "--enable-prefix-caching" in cached
    assert trtllm == (
        "TensorRT-LLM x 3: trtllm-serve meta-llama/Llama-3.1-8B --tp_size 1 --pp_size 1 "
        "--max_seq_len 8192 --max_batch_size 256 --max_num_tokens 512 --extra_llm_api_options "
        "<(echo '{kv_cache_config: {tokens_per_block: 16, enable_block_reuse: false}}')"
    )
    assert "a router in front of the 3 of them: round_robin" in lines[-1]


def test_launch_lines_say_first_which_defaults_they_turn_off() -> None:
    words = "These commands turn off engines' defaults, as simulated: "
    first = launched(scheduler="vllm_v1").splitlines()[0]
    assert first == f"{words}the prefix cache (kv.prefix_cache)."
    eager = launched(scheduler="vllm_v1", enforce_eager=True, dispatch="stage0").splitlines()[0]
    assert eager == (
        f"{words}the prefix cache (kv.prefix_cache), asynchronous scheduling and CUDA graphs "
        "(enforce_eager)."
    )
    kept = launched(scheduler="vllm_v1", kv={"prefix_cache": True})
    assert kept.startswith("vLLM x 3: ")


def test_another_engine_gets_the_same_limits() -> None:
    scheduler = {"name": "vllm_v1", "max_num_batched_tokens": 1024, "max_num_seqs": 300}
    lines = launched(scheduler=scheduler)
    for flags in (
        "--max-num-batched-tokens 1024 --max-num-seqs 300",
        "--chunked-prefill-size 1024 --max-prefill-tokens 16384 --max-running-requests 300",
        "--maxp 1024 --maxd 300",
        "--max_batch_size 300 --max_num_tokens 1024",
    ):
        assert flags in lines
    scheduler = {"name": "sglang", "chunked_prefill_size": 64, "max_running_requests": 300}
    assert "--max-num-batched-tokens 64 --max-num-seqs 64" in launched(scheduler=scheduler)


def test_launch_lines_say_what_they_leave_out() -> None:
    throttled = launched(
        scheduler={"name": "token_throttling", "max_prefill": 700}, stages=[17, 15]
    )
    assert "VLLM_PP_LAYER_PARTITION=17,15 vllm serve" in throttled
    assert "--maxp 700 --minp 32 --iterp 8 --kvthresh 0.05 --schedule-method" in throttled
    assert throttled.count("not said: the policy token_throttling; this is") == 3
    assert "--assigned-layers 17,15" in throttled
    own = launched(scheduler={"name": "sglang", "chunked_prefill_size": None, "overlap": False})
    assert "--chunked-prefill-size -1 --disable-overlap-schedule\n" in own
    assert "async" not in own
    assert "--no-async-scheduling" in launched(
        scheduler={"name": "vllm_v1", "async_scheduling": False}
    )
    assert "--no-async-scheduling" in launched(scheduler="vllm_v1", dispatch="stage0")
    own = launched(scheduler={"name": "vllm_v1", "watermark": 0.5}, kv_dtype="fp8", dtype="fp8")
    assert "not said: watermark 0.5" in own
    assert "--kv-cache-dtype fp8 " in own
    assert "--kv-cache-dtype fp8_e4m3 " in own
    assert own.count("not said: kv_dtype fp8") == 1
    assert own.count("not said: dtype fp8; name a checkpoint whose weights are in it") == 4


def test_launch_lines_of_tensorrt_llm_have_a_file_and_its_benchmark() -> None:
    policy = {"name": "trtllm", "enable_chunked_prefill": True, "version": "1.0"}
    lines = launched(scheduler=policy, stages=[17, 15], kv_dtype="fp8")
    file = (
        "--extra_llm_api_options <(echo '{enable_chunked_prefill: true, pp_partition: [17, 15], "
        "kv_cache_config: {free_gpu_memory_fraction: 0.9, tokens_per_block: 16, "
        "enable_block_reuse: false, dtype: fp8}}')"
    )
    assert lines.count(f" --max_batch_size 2048 --max_num_tokens 8192 {file}") == 2
    bench = (
        "trtllm-bench --model meta-llama/Llama-3.1-8B throughput --dataset DATASET --tp 1 --pp 2"
    )
    assert f"TensorRT-LLM's benchmark x 3: {bench} --max_seq_len 8192" in lines
    assert lines.count("not said: version 1.0\n") == 2
    assert lines.count("not said: free_gpu_memory_fraction 0.9") == 3  # the others' is of the GPU
    assert "not said: memory" not in lines


def test_launch_lines_say_machines_and_groups_and_what_nobody_says_for_them() -> None:
    nodes = {"gpus": 2, "link": "ethernet-100g"}
    lines = launched(stages=[8] * 4, link="pcie-l20", nodes=nodes, kv_dtype="bfloat16")
    assert lines.count("--nnodes 2") == 2
    assert "not said: what differs from node to node: --node-rank and --master-addr" in lines
    assert lines.count("not said: nodes 2") == 2  # gLLM, TensorRT-LLM
    assert lines.count("not said: kv_dtype bfloat16") == 3
    default = launched(
        gpu="H100", tensor_parallel=8, stages=[16, 16], link=None, costs={"kind": "roofline"}
    )
    assert default.count("--nnodes 2") == 2  # a machine has eight
    odd = launched(stages=[11, 11, 10], link="pcie-l20", nodes=nodes)
    assert odd.count("--nnodes") == 0
    assert odd.count("--distributed-executor-backend ray") == 1
    assert odd.count("not said: nodes 2, with 3 GPUs not as many on each") == 4
    grouped = launched(model="Qwen3-30B-A3B", data_parallel=2, expert_parallel=True)
    assert "--data-parallel-size 2" in grouped
    assert grouped.count("not said: data_parallel 2") == 3
    assert grouped.count("not said: expert_parallel") == 2  # SGLang, TensorRT-LLM


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 8192),  # RUN's max_model_len, which the pool holds
        ({"kv": {"pages": 100}}, 1584),
        ({"kv": {"pages": 100}, "stages": 2, "virtual_engines": True}, 784),
        ({"max_model_len": None}, None),
    ],
)
def test_no_longer_request_is_allowed_than_the_pool_holds(keys: Any, length: int | None) -> None:
    config = configured(Document("a.yaml", {**RUN, **keys}, {}))
    assert most_tokens(config, Path()) == length
    flag = "--max-model-len" if length is None else f"--max-model-len {length} "
    assert (flag in launch_lines(config, (), length)[1]) == (length is not None)


def test_advice_is_the_best_change_of_each_kind_simulated(tmp_path: Path) -> None:
    run = {**RUN, "stages": 2, "runtime": "vllm"}
    config = configured(Document("a.yaml", run, {}))
    job = Job(config, load_workload(config, Path()), Path())
    given = advise(job, run_job(job), How(workers=1))
    assert given.metric == "mean_e2el_ms"
    gains = [given.gain(summary) for summary in given.changed.values()]
    assert gains == sorted(gains, reverse=True)
    assert "layers: TP2, even" in given.changed
    first, *best = given.rows.items()
    assert first == ("as it is", given.base)
    shown = [words for words, _ in best if words in given.changed]
    assert len({words.partition(":")[0] for words in shown}) == len(shown) == 3
    assert all(given.gain(given.changed[words]) > 0 for words in shown)
    assert [words for words, _ in best[3:]] == [f"bound: {words}" for words in BOUNDS.values()]
    assert given.bounds["bound: no CPU time"]["duration"] < given.base["duration"]


def lost(**keys: Any) -> dict[str, Any]:
    """Return the run with a model too short for 5 of the 60 requests of seed 0, and 3 of seed 1."""
    return {**RUN, "max_model_len": 4180, **keys}


def test_a_plan_says_first_what_every_deployment_refuses(tmp_path: Path) -> None:
    question = asked(lost(), gpus=(2,), budgets=(512,), replications=2)
    assert question.served.asked == 120
    failed = question.served.failed
    found = planned(tmp_path, question)
    assert found.kept, "layouts refuse no more than the model does, of all seeds together"
    assert sentences(found)[0].startswith(f"NOT FAIR: {failed} of 120 requests (")
    assert re.search(r"; it .* [\d.]+ requests/s, [\d.]+ of them served\.", sentences(found)[2])
    assert found.table[["completed", "failed"]].loc[0].tolist() == [120 - failed, failed]
    assert facts(found)["failed"] == facts(found)["best"]["failed"] == failed
    heads, (first, *_) = rows(found)
    assert first[heads.index("requests\ncompleted")] == f"{120 - failed} of 120"
    with pytest.raises(UsageError, match=r"of 60 requests .* max_model_len 700: .*--allow-refused"):
        asked(lost(max_model_len=700))
    assert asked(lost(max_model_len=700), allow_refused=True).served.is_no_answer


def test_a_plan_says_which_rows_and_requests_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path / "trace.csv", *(f"{index},9,{index % 5 and 3}" for index in range(20)))
    monkeypatch.setattr(plan_prepare, "MOST_REQUESTS", 10)
    workload = {"trace": str(tmp_path / "trace.csv")}
    found = planned(tmp_path, asked({**RUN, "workload": workload}, gpus=(1,), budgets=(256,)))
    *_, dropped, tried = sentences(found)
    assert dropped == "dropped 3 rows of the trace: no output tokens."
    assert "on the first 10 requests of the trace (workload.requests says how many) or" in tried


def test_a_plan_says_how_many_gpus_are_spare_for_failures(tmp_path: Path) -> None:
    """Work of 1 s that starts anew takes 3.24 s (docs/processes-checked.md); 2.2 s apart."""
    times_s = np.cumsum(np.random.default_rng(0).exponential(1 / 0.45, 60))
    run = one_by_one(tmp_path, *(f"{at_s},1,1" for at_s in times_s))
    limit = {"mean_ttft_ms": 15_000}
    wish: dict[str, Any] = {"schedulers": "vllm", "budgets": "512"}

    def planned_with(gpus: str) -> Planned:
        return ef.plan(run, limit, gpus, with_=["outage={mtbf_s: 2, restart_s: 3}"], **wish)

    found = planned_with("1,2")
    assert (found.best.labels["gpus"], found.spare) == (2, 1)
    deaths = int(found.best.mean("marks"))
    told = (
        f"Spare for outage ({deaths} marks here): 1; without, 1 GPU does: 1 x as given, vllm 512."
    )
    assert told in sentences(found)
    assert facts(found)["without"]["gpus"] == facts(found)["spare_gpus"] == 1
    assert found.winner.data["processes"] == [{"name": "outage", "mtbf_s": 2, "restart_s": 3}]
    too_few = planned_with("1")
    assert (too_few.spare, bool(too_few.kept)) == (None, False)
    assert "Without outage 1 GPU does: 1 x as given, vllm 512." in sentences(too_few)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("outage", "process outage needs a value of 'mtbf_s'"),
        ("outage=86400", "--with outage=86400: should be PROCESS=KEYS, like outage={mtbf_s: 86400"),
        ("={mtbf_s: 1}", "--with ={mtbf_s: 1}: should be PROCESS=KEYS"),
        ("outage={mtbf_s: 0, restart_s: 1}", "process outage: mtbf_s should be greater than 0"),
        ("outrage={}", "unknown process 'outrage'; did you mean \"outage\"?"),
    ],
)
def test_what_is_no_process_joins_no_plan(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        ef.plan(RUN, {"mean_ttft_ms": 1000}, 1, with_=[given])


def test_a_change_with_which_fewer_requests_are_completed_helps_nothing() -> None:
    def tried(completed: int, latency_ms: float | None) -> dict[str, float | None]:
        return {"completed": completed, "failed": 9 - completed, "mean_e2el_ms": latency_ms}

    advice = Advice("mean_e2el_ms", tried(9, 10.0), {}, {})
    assert advice.gain(tried(9, 5.0)) == 0.5
    assert advice.gain(tried(8, 5.0)) == advice.gain(tried(0, None)) == -math.inf
    nothing = replace(advice, base=tried(0, None))
    assert nothing.gain(tried(9, 5.0)) == math.inf


@pytest.mark.long
def test_a_queue_that_grows_keeps_no_slo(tmp_path: Path) -> None:
    """One GPU keeps its limit on TPOT at any rate, for its requests wait; it does not keep up."""
    arrivals = {"kind": "poisson", "rate": 40.0}
    run = {**RUN, "workload": {**RUN["workload"], "requests": 600, "arrivals": arrivals}}
    slo = tuple(parse_slo(["p99_tpot_ms=2000"]))
    found = planned(tmp_path, asked(run, slo, gpus=(1,), budgets=(1024,)))
    assert not found.kept


def test_random_plans_are_checked_with_the_shapes_of_their_models(tmp_path: Path) -> None:
    """What engines read of the config.json that `make test-vllm` gives them, for all families."""
    known = [spec for spec in models().values() if spec.family in ARCHITECTURES]
    assert {spec.family for spec in known} == set(ARCHITECTURES)
    for spec in known:
        (tmp_path / "config.json").write_text(json.dumps(config_json(spec)))
        read = model(tmp_path)
        for what in ("num_layers", "vocab_size", "max_position_embeddings", "num_experts"):
            assert getattr(read, what) == getattr(spec, what)
        assert read.kv_bytes_per_token() == spec.kv_bytes_per_token()
    seeds = [2958, *range(99)]  # the first draws two layers off a stage that has no more
    found = list(plans(((number, Random(number)) for number in seeds), 4))
    assert len(found) == 4
    assert all(sum(each["layers"]) == each["config"]["num_hidden_layers"] for each in found)


def test_a_faster_link_between_stages_is_no_row_of_all_reduces() -> None:
    """28.3 GB/s is what all-reduces over PCIe 5 reach; the next faster wire has 50."""
    config = configured(Document("run", {**RUN, "link": {"bandwidth_gb_s": 22}}, {}))
    assert next(faster_links(config))[0] == "link: ib-ndr (50 GB/s)"
