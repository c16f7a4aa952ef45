"""Weights and KV in fewer bits: their bytes, and what their products take."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.config.build import build
from evenflow.config.run import load_config
from evenflow.costs.base import decode_work, prefill_work
from evenflow.costs.roofline import RooflineCost
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment
from evenflow.specs.model import model
from evenflow.specs.modelspec import Split, in_precision
from evenflow.specs.precision import FORMATS
from tests.command_line import RUN, refused, write_inputs
from tests.profiles import deployed, measured


def on(gpu_name: str, dtype: str | None, kv_dtype: str | None = None) -> Deployment:
    return deployed(in_precision(model("Llama-3.1-8B"), dtype, kv_dtype), gpu_name)


@pytest.mark.parametrize(
    ("dtype", "by_hand"),
    [
        ("fp8", 1024 * 4096 + 4),
        ("fp8_block", 1024 * 4096 + 4 * 8 * 32),
        ("int8", 1024 * 4096 + 4 * 4096),
        ("int8_wo", 1024 * 4096 + 2 * 4096),
        ("int4_wo", 1024 * 4096 // 2 + 2.5 * 8 * 4096),
        ("nvfp4", 1024 * 4096 // 2 + 64 * 4096),
        ("mxfp4", 1024 * 4096 // 2 + 32 * 4096),
    ],
)
def test_a_matrix_has_its_bits_and_its_scales(dtype: str, by_hand: float) -> None:
    assert FORMATS[dtype].matrix_bytes((1024, 4096)) == by_hand


@pytest.mark.parametrize(
    ("dtype", "bytes_each"),
    [("bfloat16", 2), ("fp8", 1), ("fp8_block", 1 + 4 / 128**2), ("nvfp4", 0.5 + 1 / 16)],
)
def test_embedding_and_head_stay_as_they_are(dtype: str, bytes_each: float) -> None:
    deployment = on("H200", dtype)
    ends = 2 * deployment.model.embedding_parameters
    layers = deployment.model.num_parameters - ends
    by_hand = 2 * ends + bytes_each * layers
    assert deployment.weight_bytes(0) == pytest.approx(by_hand, rel=1e-4)


def test_ranks_share_quantised_layers_and_experts_alike() -> None:
    spec = in_precision(model("Qwen3-30B-A3B"), "fp8", None)
    whole, half = spec.layer_bytes(), spec.layer_bytes(2, Split(1, 2))
    assert 0.5 < half / whole < 0.51  # the router and the norms are on both
    assert spec.layer_bytes(2) == pytest.approx(half, rel=1e-3)


def test_keys_and_values_of_8_bits_take_half() -> None:
    narrow, wide = (on("H200", None, kv) for kv in ("fp8", None))
    assert 2 * narrow.kv_bytes_per_token(0) == wide.kv_bytes_per_token(0)
    step = decode_work(64, 64 * 4096)
    assert RooflineCost(narrow).times(step)[0] < 0.75 * RooflineCost(wide).times(step)[0]


@pytest.mark.parametrize(
    ("gpu_name", "dtype", "said"),
    [
        ("H100", "fp8", "fp8, multiplied in fp8, 1979 TFLOP/s"),
        ("A100-80G", "int8", "int8, multiplied in int8, 624 TOP/s"),
        ("H100", "int4_wo", "int4_wo, multiplied in 16-bit, 989 TFLOP/s"),
        ("B200", "nvfp4_wo", "nvfp4_wo, multiplied in 16-bit, 2250 TFLOP/s"),
        ("H100", "fp8_wo", "fp8_wo, multiplied in 16-bit, 989 TFLOP/s"),
        (
            "A100-80G",
            "fp8",
            "fp8, multiplied in 16-bit, 312 TFLOP/s, weight-only: A100-80G has no fp8 arithmetic",
        ),
    ],
)
def test_what_products_are_computed_in_is_said_and_decides_prompts(
    gpu_name: str, dtype: str, said: str
) -> None:
    quantised, plain = (on(gpu_name, each) for each in (dtype, None))
    assert quantised.precision() == {"weights": said}
    assert plain.precision() == {}
    prompt, step = prefill_work(4096), decode_work(1, 1024)
    faster = [
        RooflineCost(plain).times(work)[0] / RooflineCost(quantised).times(work)[0]
        for work in (prompt, step)
    ]
    assert faster[1] > 1.3
    assert (faster[0] > 1.3) == ("multiplied in 16-bit" not in said)


def test_what_is_not_known_is_refused() -> None:
    with refused('Llama-3.1-8B: quantization is "fp6"; did you mean "fp8"'):
        in_precision(model("Llama-3.1-8B"), "fp6", None)
    with refused('Llama-3.1-8B: kv_dtype is "int8"; known: '):
        in_precision(model("Llama-3.1-8B"), None, "int8")


def test_measured_products_are_used_by_format() -> None:
    steps = {}
    for dtype in (None, "fp8", "int4_wo"):
        cost = measured(on("H200", dtype))
        steps[dtype] = cost.times(decode_work(1, 1024))[0], cost.extrapolated_share
    assert steps["int4_wo"][0] < steps["fp8"][0] < steps[None][0]
    assert steps["fp8"][1] < 0.2 < steps["int4_wo"][1]  # no engine of the tables has int4 there
    with pytest.raises(UsageError, match="heads of 128 with fp8 KV; measured: 128 with bfloat16"):
        measured(on("A100-80G", "fp8", "fp8"))


@pytest.mark.parametrize(("gpu_name", "dtype"), [("H200", "fp8"), ("B200", "nvfp4")])
def test_narrow_prompts_take_about_what_their_operators_were_measured_to(
    gpu_name: str, dtype: str
) -> None:
    """They reach less of their peak than 16 bits do; this model took no part in how much."""
    pytest.importorskip("aiconfigurator_core")
    deployment = deployed(in_precision(model("Mistral-7B"), dtype, None), gpu_name)
    prompts = prefill_work(4096)
    predicted_s = RooflineCost(deployment).times(prompts)[0]
    operators = silicon_cost(deployment, silicon_source(deployment, "sglang"))
    assert predicted_s == pytest.approx(operators.times(prompts)[0], rel=0.1)


def test_products_of_a_slower_kernel_reach_no_more_than_it_does() -> None:
    pytest.importorskip("aiconfigurator_core")
    deployment = on("B200", "fp8_block")
    source = silicon_source(deployment, "sglang")
    fast, slow = (silicon_cost(deployment, source, product_tflops=most) for most in (None, 440))
    tokens = 8192
    flops = 2 * tokens * sum(k * n for k, n in deployment.model.linear_shapes(1)) * 32
    prompts_s = [cost.times(prefill_work(tokens))[0] for cost in (fast, slow)]
    assert prompts_s[0] < flops / 440e12 < prompts_s[1] < prompts_s[0] + flops / 440e12
    steps_s = [cost.times(decode_work(4, 4096))[0] for cost in (fast, slow)]
    assert steps_s[0] == steps_s[1]  # bound by memory


def test_the_configuration_says_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    keys = ["model=Qwen/Qwen3-8B", "gpu=H100", "kv.pages=auto", "costs.kind=roofline"]
    Path("RUN.yaml").write_text(RUN.replace("affine, base_s: 0.005, per_token_s: 2e-5", "roofline"))
    settings = [*keys, "dtype=fp8", "kv_dtype=fp8", "link=nvlink-h100"]
    built = build(load_config("RUN.yaml", settings), tmp_path)
    assert built.deployment["precision"] == {
        "weights": "fp8, multiplied in fp8, 1979 TFLOP/s",
        "kv": "fp8",
    }
    assert "precision" not in build(load_config("RUN.yaml", keys), tmp_path).deployment
