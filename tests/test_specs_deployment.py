"""Deployments: splits, bytes and KV pages against numbers counted by hand, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GIB, gpu
from evenflow.specs.model import in_precision, model, models
from tests.command_line import refused


def deployed(name: str, gpu_name: str, stages: int = 1, ranks: int = 1, **more: Any) -> Deployment:
    spec = model(name)
    return Deployment(spec, gpu(gpu_name), split_layers(spec.num_layers, stages), ranks, **more)


def test_left_over_layers_go_to_the_stages_before_the_last() -> None:
    assert split_layers(64, 4) == (16, 16, 16, 16)
    assert split_layers(64, 5) == (13, 13, 13, 13, 12)
    assert split_layers(64, 6) == (10, 11, 11, 11, 11, 10)
    assert split_layers(64, 7) == (9, 9, 9, 9, 9, 10, 9)
    assert split_layers(64, [20, 22, 22]) == (20, 22, 22)


@given(st.integers(1, 200), st.integers(1, 200))
def test_an_even_split_is_even_and_complete(layers: int, stages: int) -> None:
    if stages > layers:
        with refused("use fewer stages"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (0, "stages is 0; it must be a whole number, 1 or above"),
        (True, "stages is True; it must be a whole number"),
        ([], "stages: [] must list whole numbers"),
        ([32, 0, 32], "stages: [32, 0, 32] must list whole numbers of layers, 1 or above"),
        ([32, 31], "stages: [32, 31] add up to 63 layers; the model has 64"),
    ],
)
def test_a_wrong_split_is_refused(stages: Any, message: str) -> None:
    with refused(message):
        split_layers(64, stages)


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_hold_the_whole_model(name: str, stages: int) -> None:
    """A tied embedding is shared by the ends of one stage, and on both ends of several."""
    deployment = deployed(name, "H200", stages)
    spec = in_precision(deployment.model, "bfloat16", None)
    deployment = replace(deployment, model=spec)
    copies = spec.embedding_parameters if spec.tie_word_embeddings and stages > 1 else 0
    held = sum(deployment.weight_bytes(stage) for stage in range(stages))
    assert held == (spec.num_parameters + copies) * spec.dtype_bytes


def test_kv_pages_follow_from_the_bytes_of_the_fullest_stage() -> None:
    deployment = deployed("Qwen2.5-32B", "L20", 4)
    layer = 5120 * (5120 + 2 * 1024) + 5120 + 2 * 1024 + 5120 * 5120 + 3 * 5120 * 27648 + 2 * 5120
    weights = 2 * (16 * layer + 152064 * 5120 + 5120)
    assert deployment.weight_bytes(3) == weights
    activations = 2048 * (2 * 5120 + 3 * 27648) * 2 + 256 * 152064 * 6
    assert deployment.activation_bytes(3) == activations
    assert deployment.kv_bytes_per_token(3) == 2 * 16 * 8 * 128 * 2
    free = 0.9 * 48 * GIB - weights - activations
    assert deployment.kv_pages() == int(free // (16 * 65536)) == 27284


@pytest.mark.parametrize(
    ("name", "gpu_name", "fits"),
    [
        ("Qwen2.5-32B", "L20", [False, True, True]),
        ("Llama2-70B", "A100-80G-PCIe", [False, True, True]),
        ("Llama2-13B", "L20", [True, True, True]),
    ],
)
def test_what_td_pipe_found_out_of_memory_does_not_fit(
    name: str, gpu_name: str, fits: list[bool]
) -> None:
    for stages, expected in zip((1, 2, 4), fits, strict=True):
        if expected:
            assert deployed(name, gpu_name, stages).kv_pages() > 0
        else:
            with refused("does not fit: each GPU of stage 0 needs"):
                deployed(name, gpu_name, stages).kv_pages()


def test_the_refusal_has_the_numbers() -> None:
    with refused(
        "Qwen2.5-32B does not fit: each GPU of stage 0 needs 61.0 GiB for weights and 0.6 for "
        "activations and has 43.2 (0.9 of an L20's 48); use more stages or tensor_parallel"
    ):
        deployed("Qwen2.5-32B", "L20").kv_pages()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "tensor_parallel: 3 ranks cannot share the 40 heads and 8 KV heads"),
        ({"ranks": 0}, "tensor_parallel is 0"),
        ({"memory_utilization": 1.2}, "memory_utilization is 1.2; at most 1 is right"),
        ({"memory_utilization": float("nan")}, "memory_utilization is nan"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"activation_tokens": -5}, "activation_tokens is -5"),
    ],
)
def test_a_wrong_deployment_is_refused(changes: Any, message: str) -> None:
    with refused(message):
        deployed("Qwen2.5-32B", "L20", 2, **changes)
