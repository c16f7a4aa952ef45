"""Mixtures of experts: which are active, what they cost and hold, by hand and as properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.costs import RooflineCost, decode_work, prefill_work
from evenflow.costs.roofline import Rates, active_experts, all_to_all_bytes, experts_s
from evenflow.costs.silicon.points import Peak, counted, expert_times, experts_of, least_s
from evenflow.costs.silicon.tables import ExpertLayer, ExpertShape, Wanted
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import LinkSpec, gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec, Split
from tests.command_line import refused
from tests.profiles import PLAIN, deployed, measured
from tools.experts_awake import awake
from tools.silicon_errors import expert_ratios

RING = LinkSpec(10, 5)
# 4 experts of 32 columns, 2 a token: gate and up 64 x 64, down 32 x 64, 16-bit.
TINY = ModelSpec(
    "tiny", 2, 64, 4, 2, 16, 1, 1000, 2048, 1e4, num_experts=4, experts_per_token=2,
    expert_intermediate_size=32,
)  # fmt: skip
EXPERT = 64 * 64 + 32 * 64
BOUND_BY_COMPUTE = Rates(1e6, 1e15)
BOUND_BY_MEMORY = Rates(1e18, 1e6)


def cost(
    ranks: int, *, expert_parallel: bool, imbalance: float = 1.0, groups: int = 1
) -> RooflineCost:
    deployment = Deployment(
        TINY, PLAIN, (2,), ranks, expert_parallel=expert_parallel, data_parallel=groups
    )
    return RooflineCost(deployment, RING, expert_imbalance=imbalance)


def seconds(rates: Rates, ranks: int = 1, parallel: bool = False, imbalance: float = 1.0) -> float:
    split = Split(1, ranks) if parallel else Split(ranks, 1)
    return experts_s(3, TINY, split, rates, imbalance=imbalance)


def test_active_experts_are_the_mean_over_all_choices() -> None:
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    counts = [len(set().union(*chosen)) for chosen in product(pairs, repeat=3)]
    assert active_experts(3, 4, 2) == pytest.approx(sum(counts) / len(counts), rel=1e-12)
    assert active_experts(1, 128, 8) == pytest.approx(8)
    assert active_experts(10**6, 128, 8) == 128


def test_experts_bound_by_compute_take_their_operations() -> None:
    operations = 2 * EXPERT * 3 * 2
    moved = 6 * (3 * 32 + 64) * 2 / 1e15
    assert seconds(BOUND_BY_COMPUTE) == pytest.approx(operations / 1e6 + moved, rel=1e-9)
    assert seconds(BOUND_BY_COMPUTE, 2) == pytest.approx(operations / 2 / 1e6, rel=1e-6)
    busiest = seconds(BOUND_BY_COMPUTE, 2, True, 1.5)
    assert busiest == pytest.approx(1.5 * operations / 2 / 1e6, rel=1e-6)


def test_experts_bound_by_memory_read_the_active_ones_once() -> None:
    active = 4 * (1 - 0.5**3)
    values = active * EXPERT + 6 * (64 + 64 + 32 + 64) + 6 * (3 * 32 + 64)
    assert seconds(BOUND_BY_MEMORY) == pytest.approx(2 * values / 1e6, rel=1e-9)
    values = active / 2 * EXPERT + 3 * (64 + 64 + 32 + 64) + 3 * (3 * 32 + 64)
    assert seconds(BOUND_BY_MEMORY, 2, True) == pytest.approx(2 * values / 1e6, rel=1e-9)


def test_experts_compute_after_they_are_read() -> None:
    """Each has too few rows for one to hide the other: both take their time."""
    alone = seconds(BOUND_BY_COMPUTE) + seconds(BOUND_BY_MEMORY)
    assert seconds(Rates(1e6, 1e6)) == pytest.approx(alone, rel=1e-6)


def test_tokens_travel_to_the_experts_that_are_elsewhere() -> None:
    # 100 tokens on 4 ranks, 2 experts each, three quarters elsewhere, 64 values of 2 bytes.
    assert all_to_all_bytes(100, TINY, 4, 1.0) == 25 * 2 * 0.75 * 64 * 2
    assert all_to_all_bytes(100, TINY, 4, 1.2) == pytest.approx(1.2 * 25 * 2 * 0.75 * 64 * 2)
    size_bytes = 50 * 2 * 0.5 * 64 * 2
    there_and_back = 2 * (5e-6 + size_bytes / 10e9)
    groups = cost(1, expert_parallel=True, groups=2)
    assert groups.exchange_s(100) == pytest.approx(there_and_back)


def test_ranks_that_have_all_tokens_send_none_to_experts() -> None:
    """vLLM 0.33's use_all2all_kernels needs data parallelism; without, outputs are added up."""
    for parallel in (False, True):
        assert cost(2, expert_parallel=parallel).exchange_s(100) == 0.0
        # Two all-reduces of 50 rows of 64 values of 2 bytes, two steps of half of it each.
        assert cost(2, expert_parallel=parallel).all_reduce_s(50) == pytest.approx(
            2 * 2 * (5e-6 + 50 * 64 / 10e9)
        )


def test_a_shared_expert_leaves_no_gaps_up_to_256_tokens() -> None:
    """vLLM's VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD, the least of three engines'. GLM-4.5-Air:
    8 kernels of attention and router, 8 of experts, 3 of the shared one; a dense first layer."""
    spec = model("GLM-4.5-Air")

    def step_s(tokens: int, overhead_s: float) -> float:
        card = replace(gpu("H100"), per_layer_overhead_s=overhead_s)
        costs = RooflineCost(Deployment(spec, card, (46,)))
        return costs.times(decode_work(tokens, 10 * tokens))[0]

    for tokens, kernels in ((256, 16), (257, 19)):
        gaps_s = step_s(tokens, 1e-3) - step_s(tokens, 0.0)
        assert gaps_s == pytest.approx((45 * kernels + 10) * 1e-4, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        ("Llama-3.1-8B", None, 10),
        ("Llama-3.1-8B", "fp8", 14),  # the inputs of four products are quantised
        ("Qwen3-8B", None, 10),  # norms of queries and keys are in the rotary embedding's
        # Two norms, qkv, o, router, rotary embedding, KV write, attention; choice, sorting in two,
        # two products, activation, sum.
        ("Qwen3-30B-A3B", None, 15),
        ("MiniMax-M2.5", None, 17),  # norms of all queries and of all keys
    ],
)
def test_each_kernel_of_a_layer_has_its_gap(name: str, dtype: str | None, kernels: int) -> None:
    spec = replace(model(name), quantization=dtype)

    def step_s(overhead_s: float) -> float:
        card = replace(gpu("H100"), per_layer_overhead_s=overhead_s)
        return RooflineCost(Deployment(spec, card, (spec.num_layers,))).times(decode_work(8, 80))[0]

    gaps_s = step_s(1e-3) - step_s(0.0)
    assert gaps_s == pytest.approx(spec.num_layers * kernels * 1e-4, rel=1e-9)


def test_experts_of_eight_bits_multiply_no_faster_than_of_sixteen() -> None:
    """SGLang's measured layer of DeepSeek-V3 on 8 H200, of a long prompt."""
    pytest.importorskip("aiconfigurator_core")
    ratios = expert_ratios("H200", "sglang", "DeepSeek-V3", 8)
    assert ratios[8192] == pytest.approx(1.0, abs=0.1)


def test_a_rank_holds_its_columns_of_all_experts_or_its_share_of_whole_ones() -> None:
    def weights(ranks: int, *, parallel: bool) -> int:
        return Deployment(TINY, PLAIN, (2,), ranks, expert_parallel=parallel).weight_bytes(0)

    assert weights(2, parallel=False) == weights(2, parallel=True)
    assert weights(1, parallel=True) - weights(2, parallel=True) > 2 * 2 * 2 * EXPERT
    with refused("expert_parallel: 2 ranks cannot share the 5 experts of tiny evenly; use a"):
        Deployment(replace(TINY, num_experts=5), PLAIN, (2,), 2, expert_parallel=True)


def test_activations_of_a_mixture_are_those_of_the_experts_a_token_is_sent_to() -> None:
    deployment = Deployment(TINY, PLAIN, (2,), activation_tokens=10, logits_rows=1)
    width = 2 * 64 + 3 * 2 * 32
    assert deployment.activation_bytes(0) == 10 * width * 2 + 1000 * 6


def test_few_decodes_of_a_mixture_cost_like_its_active_parameters() -> None:
    spec = model("Qwen3-30B-A3B")
    quick = replace(gpu("H100"), per_layer_overhead_s=0.0)
    step_s = RooflineCost(Deployment(spec, quick, (48,))).times(decode_work(1, 1))[0]
    read_s = 2 * (spec.active_parameters - spec.embedding_parameters) / quick.bytes_per_s
    assert step_s == pytest.approx(read_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parallel", "imbalance", "message"),
    [
        ("Llama2-13B", True, 1.0, "expert_parallel: Llama2-13B has no experts; leave it out"),
        ("Mixtral-8x7B", True, 0.9, "expert_imbalance is 0.9; the busiest rank has at least"),
        ("Mixtral-8x7B", True, float("nan"), "expert_imbalance is nan"),
        ("Mixtral-8x7B", False, 1.1, "expert_imbalance needs expert_parallel: true"),
    ],
)
def test_wrong_experts_are_refused(
    name: str, parallel: bool, imbalance: float, message: str
) -> None:
    with refused(message):
        on = deployed(name, ranks=2, expert_parallel=parallel)
        RooflineCost(on, RING, expert_imbalance=imbalance)


@given(
    st.sampled_from(["Mixtral-8x7B", "Qwen3-30B-A3B"]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.integers(1, 3000),
    st.integers(1, 3000),
)
def test_more_tokens_are_never_cheaper(
    name: str, ranks: int, parallel: bool, tokens: int, more: int
) -> None:
    times = RooflineCost(deployed(name, ranks=ranks, expert_parallel=parallel), RING).times
    few_s, more_s = times(prefill_work(tokens))[0], times(prefill_work(tokens + more))[0]
    assert few_s <= more_s * (1 + 1e-12)


@given(st.integers(1, 500), st.floats(1, 4), st.floats(0, 3))
def test_more_imbalance_is_never_cheaper(tokens: int, imbalance: float, more: float) -> None:
    less, most = (
        cost(2, expert_parallel=True, imbalance=share).times(prefill_work(tokens))[0]
        for share in (imbalance, imbalance + more)
    )
    assert less <= most * (1 + 1e-12)


def test_experts_of_another_shape_keep_their_launches_and_their_rows_an_expert() -> None:
    """Measured: a launch of 30 us and twice the roofline. A shape with half the rows an expert."""
    measured, other, whole = ExpertShape(64, 32, 8, 2), ExpertShape(96, 16, 16, 2), Split(1, 1)
    peak = Peak(1e9, 1e9)

    def taken_s(shape: ExpertShape, tokens: int) -> float:
        return 30e-6 + 2 * (least_s(shape, tokens, whole, 16, peak) - bare_s)

    bare_s = least_s(measured, 1, whole, 16, peak)
    times = {whole: {tokens: taken_s(measured, tokens) + bare_s for tokens in (1, 4, 64)}}
    found, exact = expert_times(ExpertLayer(measured, "", times), other, whole, peak, peak)
    assert not exact
    assert list(found) == [2, 8, 128]
    for tokens, seconds in found.items():
        ratio = least_s(other, tokens, whole, 16, peak)
        ratio /= least_s(measured, tokens // 2, whole, 16, peak)
        expected = 30e-6 + (taken_s(measured, tokens // 2) + bare_s - 30e-6) * ratio
        assert seconds == pytest.approx(expected, rel=1e-12)


def test_counted_experts_take_no_less_than_to_read_those_awake() -> None:
    """A launch of 30 us and 10 an expert: 16 tokens wake 19.2, by the power law 15."""
    even = {1: 40e-6, 8: 110e-6, 16: 190e-6, 32: 350e-6, 192: 360e-6}
    law = {1: 30e-6, 8: 170e-6, 16: 180e-6, 32: 200e-6, 192: 400e-6}
    shape = ExpertShape(7168, 2048, 256, 8)
    kept = {(8, 1): law}
    power, evenly = (ExpertLayer(shape, "", kept | {(1, 8): each}) for each in (law, even))
    found = {cut: dict(times) for cut, times in counted(power, evenly).times.items()}
    expected = {1: 62e-6, 8: 170e-6, 16: 222e-6, 32: 284e-6, 192: 400e-6}
    assert found == kept | {(1, 8): pytest.approx(expected)}


def test_tokens_wake_experts_of_their_four_best_groups() -> None:
    """Where two experts of each of 4 groups have all tokens, each rank of these wakes both."""
    counts = np.zeros(256)
    counts[[0, 1, 32, 33, 64, 65, 96, 97]] = 5
    assert [awake(counts, tokens, np.random.default_rng(0)) for tokens in (1, 7)] == [2, 2]
    even = awake(np.ones(256), 1, np.random.default_rng(0))
    assert 2 <= even <= 4


def test_only_deepseeks_experts_were_counted() -> None:
    with refused("costs.expert_load: counted is of 256 experts, 8 a token"):
        wanted = Wanted("", "counted")
        experts_of(Path(), "trtllm", None, ExpertShape(2048, 768, 128, 8), wanted)


@pytest.mark.long
def test_a_named_kernel_is_the_one_that_counts() -> None:
    """Marlin widens four bits to sixteen: as fast as Triton's for few rows, half as for many."""
    placed = deployed("gpt-oss-120b")
    triton, marlin = (measured(placed, kernel=kernel).times for kernel in (None, "marlin"))
    assert marlin(decode_work(4, 4096))[0] < 1.1 * triton(decode_work(4, 4096))[0]
    assert marlin(prefill_work(8192))[0] > 1.4 * triton(prefill_work(8192))[0]
    with refused('costs: silicon has no experts of a kernel "martin" of vllm for h200_sxm'):
        measured(placed, kernel="martin")
