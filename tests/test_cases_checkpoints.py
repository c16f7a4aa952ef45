"""The shared cases of checkpoints, memory and GPUs, whose README says what is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.build import build
from evenflow.config.run import load_config
from evenflow.specs.gpu import GIB
from evenflow.specs.model import model
from evenflow.study.deployments import launch_lines, most_tokens
from tests.command_line import refused

Built = Callable[..., dict[str, Any]]


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
def built(case: Callable[[str], Path]) -> Built:
    """Return what a case's deployment is, with some keys set."""

    def of(name: str, *settings: str) -> dict[str, Any]:
        folder = case(name)
        return build(load_config(folder / "run.yaml", settings), [], folder).deployment

    return of


def test_a_checkpoint_s_8_bit_keys_and_values_take_half(built: Built) -> None:
    found = built("k3a")
    assert (found["kv_bytes_per_token"], found["precision"]["kv"]) == ([65536], "fp8")


def test_the_budget_and_the_sequences_take_pages(built: Built) -> None:
    for like, pages in (("plain", [30022, 30022 - 451]), ("vllm", [25916, 25589])):
        keys = [f"kv.like={like}"]
        at = [built("k4a", *keys, f"scheduler.max_num_seqs={rows}") for rows in (256, 1024)]
        assert [facts["kv_pages"] for facts in at] == pages
    small = built("k4a", "kv.like=plain", "scheduler.max_num_batched_tokens=2048")
    assert small["kv_pages"] == 30022 + 1776


def test_a_launch_line_allows_no_longer_request_than_the_pool(case: Callable[[str], Path]) -> None:
    folder = case("k5a")
    config = load_config(folder / "run.yaml")
    most = most_tokens(config, folder)
    assert most == 148944
    assert f"--max-model-len {most} " in launch_lines(config, (), most)[0]


def test_two_groups_are_refused_with_what_stands_in(built: Built) -> None:
    with refused('"group_1" is fp8 beside "group_0" in nvfp4; one format is read; dtype: fp8 in'):
        built("k6a")
    (held,) = built("k6a", "dtype=fp8")["weight_bytes_per_gpu"]
    assert held / GIB == pytest.approx(8.46, abs=0.01)


def test_weights_alone_in_4_bits_are_multiplied_in_16(built: Built) -> None:
    said = "nvfp4_wo, multiplied in 16-bit, 2250 TFLOP/s"
    assert built("k6c")["precision"] == {"weights": said}


def test_8_bit_integers_of_inputs_are_multiplied_in_int8(built: Built) -> None:
    assert built("k7a")["precision"] == {"weights": "int8, multiplied in int8, 1979 TOP/s"}
    assert built("k7a", "dtype=int8_wo")["precision"]["weights"].startswith("int8_wo")


def test_the_hub_s_gemma_3_is_the_table_s(case: Callable[[str], Path]) -> None:
    read, known = model(case("k8a")), model("Gemma-3-27B")
    assert read.num_parameters == known.num_parameters
    assert read.max_position_embeddings == 131072


def test_linear_attention_is_named_and_no_other_model_is(case: Callable[[str], Path]) -> None:
    with refused("48 of 64 layers are linear_attention, which is not modelled") as raised:
        model(case("k9a"))
    assert "did you mean" not in str(raised.value)


def test_unlike_gpus_and_unknown_ones_have_a_line_that_says_what_to_do(built: Built) -> None:
    with refused("gpu: should be one GPU: those of a pipeline are of one kind; for unlike"):
        built("k13")
    with refused('unknown gpu "MI325X"; any other is a mapping, gpu: {name: MI325X, fp16_tflops:'):
        built("k15a", "gpu=MI325X")
