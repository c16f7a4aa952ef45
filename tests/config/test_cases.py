"""The shared cases, small inputs of people who do this job, whose README says what is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import evenflow as ef
from evenflow.config.build import Built, build
from evenflow.config.run import RunConfig, configured, load_config
from evenflow.config.yaml_file import Document
from evenflow.costs.base import decode_work
from evenflow.specs.gpu import GIB
from evenflow.specs.model import model
from evenflow.study.deployments import launch_lines, most_tokens
from tests.command_line import refused

Facts = Callable[..., dict[str, Any]]


@pytest.fixture
def case(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Go to the folder of a case by the beginning of its name; skip where it is not shared."""
    cases = (shared / "cases").resolve()

    def of(name: str) -> Path:
        found = next(cases.glob(f"{name}-*"), None)
        if found is None:
            pytest.skip(f"no case {name} in {cases}")
        monkeypatch.chdir(found)
        return found

    return of


@pytest.fixture
def built(case: Callable[[str], Path]) -> Facts:
    """Return what a case's deployment is, with some keys set."""

    def of(name: str, *settings: str) -> dict[str, Any]:
        folder = case(name)
        return build(load_config(folder / "run.yaml", settings), folder).deployment

    return of


def test_a_checkpoint_s_8_bit_keys_and_values_take_half(built: Facts) -> None:
    found = built("k3a")
    assert (found["kv_bytes_per_token"], found["precision"]["kv"]) == ([65536], "fp8")


def test_the_budget_and_the_sequences_take_pages(built: Facts) -> None:
    for like, pages in (("plain", [30022, 30022 - 451]), ("vllm", [26083, 25589])):
        keys = [f"kv.like={like}", "kv.memory_utilization=0.9"]
        at = [built("k4a", *keys, f"scheduler.max_num_seqs={rows}") for rows in (256, 1024)]
        assert [facts["kv_pages"] for facts in at] == pages
    few = ("scheduler.max_num_batched_tokens=2048", "scheduler.max_num_seqs=256")
    small = built("k4a", "kv.like=plain", *few)
    assert small["kv_pages"] == 30022 + 1776


def test_a_launch_line_allows_no_longer_request_than_the_pool(case: Callable[[str], Path]) -> None:
    folder = case("k5a")
    config = load_config(folder / "run.yaml")
    most = most_tokens(config, folder)
    assert most == 150272
    assert f"--max-model-len {most} " in launch_lines(config, (), most)[1]


def test_two_groups_are_refused_with_what_stands_in(built: Facts) -> None:
    with refused('"group_1" is fp8 beside "group_0" in nvfp4; one format is read; dtype: fp8 in'):
        built("k6a")
    (held,) = built("k6a", "dtype=fp8")["weight_bytes_per_gpu"]
    assert held / GIB == pytest.approx(8.46, abs=0.01)


def test_weights_alone_in_4_bits_are_multiplied_in_16(built: Facts) -> None:
    said = "nvfp4_wo, multiplied in 16-bit, 2250 TFLOP/s"
    assert built("k6c")["precision"] == {"weights": said}


def test_8_bit_integers_of_inputs_are_multiplied_in_int8(built: Facts) -> None:
    assert built("k7a")["precision"] == {"weights": "int8, multiplied in int8, 1979 TOP/s"}
    assert built("k7a", "dtype=int8_wo")["precision"]["weights"].startswith("int8_wo")


def test_the_hub_s_gemma_3_is_the_table_s(case: Callable[[str], Path]) -> None:
    read, known = model(case("k8a")), model("Gemma-3-27B")
    assert read.num_parameters == known.num_parameters
    assert read.max_position_embeddings == 131072


def test_linear_attention_keeps_a_state_and_no_tokens(case: Callable[[str], Path]) -> None:
    kinds = model(case("k9a")).kinds()
    assert [(n, k.kv_token_bytes() > 0, k.state_bytes() > 0) for k, n in kinds.items()] == [
        (48, False, True),
        (16, True, False),
    ]


UNLIKE = {
    "model": "Qwen3-30B-A3B",
    "dtype": "fp8_block",
    "gpu": ["RTX-4090", "L40S"],
    "stages": [16, 32],
    "scheduler": "vllm_v1",
    "workload": {"trace": "azure-conv-sample", "requests": 5},
}
"""The run of case k13."""


def unlike(*settings: str) -> tuple[RunConfig, Built]:
    config = configured(Document("the run", dict(UNLIKE), {}), settings)
    return config, build(config, Path())


def test_each_stage_has_the_time_and_the_memory_of_its_gpu() -> None:
    """16 layers on a card of 24 GB and 32 on one of 48, as in case k13."""
    link = "link=pcie-gen4"
    config, both = unlike(link)
    (_, small), (_, large) = (unlike(link, f"gpu={name}") for name in ("RTX-4090", "L40S"))
    work = decode_work(16, 16 * 1024)
    seconds = [each.world.costs.times(work) for each in (both, small, large)]
    assert seconds[0] == [seconds[1][0], seconds[2][1]]
    assert small.world.total_pages < both.world.total_pages  # stage 1 is the fullest of both
    halves = [unlike(link, "stages=[24, 24]", *gpu)[1].world for gpu in ([], ["gpu=L40S"])]
    assert halves[0].total_pages < halves[1].total_pages
    assert config.setup().startswith("simulated: Qwen3-30B-A3B on 1 x RTX-4090 + 1 x L40S, PP2,")
    lines = launch_lines(config)
    assert lines[1].startswith("vLLM: VLLM_PP_LAYER_PARTITION=16,32 vllm serve")
    assert "  not said: the GPU of each stage: RTX-4090, L40S" in lines
    assert unlike(link, "gpu=[L40S, L40S]")[1].world.total_pages == large.world.total_pages


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["gpu=[RTX-4090, RTX-PRO-6000]"],
            "gpu: RTX-4090 and RTX-PRO-6000 are sold in machines of their own; give the link",
        ),
        (["gpu=[L40S]"], 'a pipeline of 2 stages needs the key "gpu" with one GPU, or with a list'),
        (["gpu=[]"], 'a pipeline of 2 stages needs the key "gpu" with one GPU, or with a list'),
        (["gpu=[L40S, 7]"], "gpu.1: should be a text, not 7"),
        (["gpu=[L40S, {name: X}]"], "gpu: needs fp16_tflops, memory_bandwidth_gb_s, memory_gb, or"),
        (["link=pcie-gen4", "costs=silicon"], "costs: silicon are of one GPU; costs: roofline is"),
        (["link=pcie-gen4", "stages=2", "split=balanced"], "split: balanced: is of one GPU, not"),
    ],
)
def test_unlike_gpus_that_cannot_be_have_a_line(settings: list[str], told: str) -> None:
    with refused(told):
        unlike(*settings)


def test_an_unknown_gpu_has_a_line_that_says_what_to_do(built: Facts) -> None:
    with refused('unknown gpu "MI325X"; any other is a mapping, gpu: {name: MI325X, fp16_tflops:'):
        built("k15a", "gpu=MI325X")


@pytest.fixture
def summary(case: Callable[[str], Path]) -> Callable[..., dict[str, float]]:
    """Return the summary of a case's run, with some keys set."""
    return lambda name, file, **keys: ef.simulate(case(name) / file, set=keys).summary


def test_four_a100_of_one_machine_are_best_as_tp4_and_worst_as_pp4(summary: Facts) -> None:
    """TensorRT-LLM #1144: TP4 has P90 6.4 s, PP2 x TP2 10.2 s, PP4 does not keep up."""
    fewer = {"workload.requests": 80}
    tp4, pp2 = (summary("k2a", file, **fewer) for file in ("tp4.yaml", "pp2tp2.yaml"))
    pp4 = summary("k2a", "tp4.yaml", stages=4, tensor_parallel=1, **fewer)
    latencies = [one["mean_e2el_ms"] for one in (tp4, pp2, pp4)]
    assert latencies == sorted(latencies)


def test_more_gpus_behind_nvswitch_make_one_request_faster(summary: Facts) -> None:
    """vLLM #16300, QwQ-32B on A100: TP2 5.50, TP4 3.91, TP8 3.15 s."""
    runs = [summary("k2b", "tp4.yaml", tensor_parallel=ranks) for ranks in (2, 4, 8)]
    seconds = [one["duration"] for one in runs]
    assert seconds == sorted(seconds, reverse=True)


def test_nodes_without_a_link_have_that_of_the_gpus_machine(summary: Facts) -> None:
    assert summary("k11", "run.yaml")["completed"] == 5


def test_mi300x_is_known(summary: Facts) -> None:
    assert summary("k15a", "run.yaml")["completed"] == 5
