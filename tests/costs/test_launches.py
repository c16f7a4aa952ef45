"""Kernels that the host launches one by one: how many, and what a micro-batch waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.config.build import build
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document
from evenflow.core.batch import Work
from evenflow.costs import decode_work, prefill_work
from evenflow.costs.launches import launches
from evenflow.sim import World
from evenflow.specs.model import model
from evenflow.study.deployments import launch_lines


def run(**keys: object) -> RunConfig:
    given = {
        "model": "Llama-3.1-8B",
        "gpu": "H100",
        "stages": 1,
        "scheduler": "vllm_v1",
        "workload": {"trace": "synthetic", "requests": 1},
    }
    return configured(Document("run.yaml", given | keys, {}))


def times_ms(work: Work, **keys: object) -> list[float]:
    world = build(run(**keys), Path()).world
    assert isinstance(world, World)
    return [round(1e3 * seconds, 2) for seconds in world.costs.times(work)]


@pytest.mark.parametrize(
    ("name", "ranks", "narrow", "kernels"),
    [
        ("Llama-3.1-8B", 1, False, 10),
        ("Llama-3.1-70B", 8, False, 12),
        ("Qwen3-8B", 1, False, 12),
        ("Qwen3-30B-A3B", 1, False, 23),
        ("DeepSeek-V3", 8, True, 47),
        ("MiniMax-M2.5", 1, False, 23),
        ("MiniMax-M2.5", 8, False, 26),
    ],
)
def test_the_kernels_of_a_layer_are_counted(
    name: str, ranks: int, narrow: bool, kernels: int
) -> None:
    """Llama's: two norms, four products, rotary embedding, KV write, attention, activation."""
    assert launches(model(name), ranks, narrow=narrow) == kernels


def test_an_eager_step_takes_as_long_as_its_launches() -> None:
    """Of 32 layers of 12 kernels, the embedding and the head: 389, 28 us apart."""
    step, prompt, long = decode_work(4, 4000), prefill_work(300), prefill_work(2048)
    sliced = {"tensor_parallel": 4, "runtime": "vllm-0.19"}
    launches_ms = 10.89
    assert times_ms(step, **sliced) < [launches_ms / 2]
    assert times_ms(step, **sliced, enforce_eager=True) == [launches_ms]
    assert times_ms(prompt, **sliced, enforce_eager=True) == [launches_ms]
    assert times_ms(step, tensor_parallel=4, enforce_eager=True) == [launches_ms]
    assert times_ms(long, **sliced, enforce_eager=True) == times_ms(long, **sliced)
    slower = times_ms(step, **sliced, enforce_eager=True, scale={"host": 2.0})
    assert slower == [pytest.approx(2 * launches_ms, abs=0.01)]


def test_prompts_are_launched_beyond_the_largest_graph() -> None:
    """Up to it three launches a layer, of which two are the attention's."""
    runtime = {"like": "vllm-0.19", "launch_s": 1e-3}
    assert times_ms(prefill_work(512), tensor_parallel=4, runtime=runtime) == [96.0]
    assert times_ms(prefill_work(513), tensor_parallel=4, runtime=runtime) == [389.0]
    none = runtime | {"graph_tokens": 0}
    assert times_ms(prefill_work(16), tensor_parallel=4, runtime=none) == [389.0]
    assert times_ms(decode_work(512, 512), tensor_parallel=4, runtime=none)[0] < 20


def test_each_stage_launches_its_own_layers() -> None:
    stages = {"stages": [20, 12], "runtime": {"launch_s": 1e-3}, "link": "nvlink-h100"}
    assert times_ms(prefill_work(16), **stages) == [201.0, 124.0]


def test_an_eager_deployment_says_so_and_keeps_the_memory_of_graphs() -> None:
    lines = launch_lines(run(enforce_eager=True))
    told = {line.partition(":")[0]: line for line in lines if not line.startswith("  ")}
    assert "--enforce-eager" in told["vLLM"]
    assert "--cuda-graph-backend-decode=disabled" in told["SGLang"]
    assert "cuda_graph_config: null" in told["TensorRT-LLM"]
    assert "  not said: enforce_eager" in lines
    assert not [line for line in launch_lines(run()) if "eager" in line or "graph" in line]
    worlds = [build(run(enforce_eager=eager), Path()).world for eager in (False, True)]
    pages = [world.total_pages for world in worlds]
    assert pages[0] < pages[1]
