"""Silicon tables: exact where measured, estimated from the rest elsewhere, refusals in a line."""

from __future__ import annotations

import dataclasses
import re

import pytest

from evenflow.costs import decode_work, prefill_work
from evenflow.costs.collectives import Ring
from evenflow.costs.roofline import pairs
from evenflow.costs.silicon.cost import GPUS, SiliconSource, silicon_cost, silicon_source
from evenflow.costs.silicon.points import (
    Peak,
    chunk_times,
    from_memory,
    memory_bytes_per_s,
    product_times,
    prompt_times,
    step_times,
    uncut,
)
from evenflow.costs.silicon.tables import (
    SiliconTables,
    _ordered,
    calm,
    calm_products,
    calm_steps,
    load_tables,
)
from evenflow.costs.tables import Estimate, beside
from evenflow.errors import UsageError
from evenflow.specs.gpu import gpu, link
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec
from tests.profiles import deployed, measured
from tools.silicon_errors import GPUS as NAMES
from tools.silicon_errors import attention_errors, disagreement, peak_of, product_errors

PEAK = Peak(1e15, 1e12)
TINY = ModelSpec("tiny", 4, 256, 4, 2, 64, 512, 1024, 2048, 1e4)
ROWS = (1, 128, 256, 512, 1024)
SIDES = (64, 256, 512, 1024, 2048)
HEADS = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2))


def product_s(m: int, n: int, k: int) -> float:
    """Half of the peak, and a launch of 5 us."""
    return 5e-6 + 2 * PEAK.product_s(m, n, k)


def prompt_s(heads: int, tokens: int) -> float:
    return 1e-5 + heads * tokens * tokens * 1e-12


def step_s(kv_heads: int, rows: int, context: int) -> float:
    return 1e-5 + kv_heads * rows * context * 1e-10


def made_tables() -> SiliconTables:
    gemm = {n: {k: {m: product_s(m, n, k) for m in ROWS} for k in SIDES} for n in SIDES}
    context = {h: {t: prompt_s(h[0], t) for t in (1, 64, 256, 1024, 4096)} for h in HEADS}
    steps = {
        h: {(b, c): step_s(h[1], b, c) for b in (1, 8, 64) for c in (1, 63, 1023)} for h in HEADS
    }
    reduces = {2: {size: 1e-5 + size * 1e-11 for size in (256, 10**8)}}
    return SiliconTables("made", "NVIDIA Made", "vllm", {}, gemm, context, steps, reduces)


def made_cost(spec: ModelSpec = TINY, ranks: int = 1, name: str = "A100-80G"):
    return silicon_cost(deployed(spec, name, 1, ranks), SiliconSource(GPUS[name], made_tables()))


# ---- on tables that are formulas


def test_products_are_exact_where_measured_and_straight_along_k() -> None:
    gemm = made_tables().gemm
    assert product_times(gemm, 512, 1024, PEAK) == gemm[512][1024]
    between = product_times(gemm, 512, 768, PEAK)
    assert between[1024] == pytest.approx((gemm[512][512][1024] + gemm[512][1024][1024]) / 2)
    middle = product_times(gemm, 362, 512, PEAK)[1]  # half way from 256 to 512 in logarithms
    slower = [gemm[n][512][1] / PEAK.product_s(1, n, 512) for n in (256, 512)]
    assert middle / PEAK.product_s(1, 362, 512) == pytest.approx(sum(slower) / 2, rel=1e-3)
    far = product_times(gemm, 8192, 4096, PEAK)
    efficiency = PEAK.product_s(1024, 2048, 2048) / gemm[2048][2048][1024]
    assert PEAK.product_s(1024, 8192, 4096) / far[1024] == pytest.approx(efficiency)


def test_heads_between_the_measured_ones_lie_on_a_line() -> None:
    tables = made_tables()
    assert prompt_times(tables.context, (6, 1))[1024] == pytest.approx(prompt_s(6, 1024))
    assert prompt_times(tables.context, (16, 2))[1024] == pytest.approx(2 * prompt_s(8, 1024))
    assert step_times(tables.generation, (6, 2))[8, 63] == pytest.approx(step_s(2, 8, 63))
    assert step_times({(4, 2): {(8, 63): 1.0}, (8, 2): {(8, 63): 3.0}}, (6, 2)) == {(8, 63): 2.0}
    without = {point: s for point, s in tables.generation[4, 2].items() if point != (8, 63)}
    filled = step_times({**tables.generation, (4, 2): without}, (4, 2))
    assert filled[8, 63] == pytest.approx(step_s(2, 8, 63), rel=0.01)


def test_what_a_cache_held_is_read_from_memory() -> None:
    tables = made_tables()
    memory = memory_bytes_per_s(tables.gemm)
    assert memory == 2 * 2048 * 2048 / product_s(1, 2048, 2048)
    cached = {**tables.gemm, 512: {**tables.gemm[512], 1024: {1: 1e-7, 1024: 1.0}}}
    steps = {**tables.generation, (8, 2): {(8, 1023): 1e-7, (64, 1023): 1.0}}
    slow = from_memory(dataclasses.replace(tables, gemm=cached, generation=steps), 4 * 64)
    assert slow.gemm[512][1024] == {1: pytest.approx(2 * 512 * 1024 / memory), 1024: 1.0}
    kept_s = 8 * 1023 * 2 * 64 * 2 * 2 / memory
    assert slow.generation[8, 2] == {(8, 1023): pytest.approx(kept_s), (64, 1023): 1.0}
    assert slow.gemm[2048] == tables.gemm[2048]
    assert slow.context == tables.context


def test_a_chunk_has_its_share_of_the_pairs() -> None:
    times = {tokens: prompt_s(8, tokens) for tokens in (1, 64, 256, 1024, 4096)}
    chunk = chunk_times(times, {1: 1e-6, 4096: 2e-6})
    assert chunk(1024, 0) == times[1024]
    pieces = sum(chunk(1024, start) - 1e-5 for start in range(0, 4096, 1024))
    assert pieces == pytest.approx(times[4096] - 1e-5, rel=0.2)
    alone = chunk_times(times, {1: 1e-6, 4096: 0.5})
    assert alone(64, 4032) == 0.5  # one tile that reads all keys takes as long


def test_attention_goes_on_beyond_the_longest_measured_prompt() -> None:
    """A chunk takes as much longer as it has more pairs; prompts were measured up to 4,096."""
    times = {tokens: prompt_s(8, tokens) for tokens in (1, 64, 256, 1024, 4096)}
    chunk = chunk_times(times, {1: 1e-6, 4096: 2e-6})
    launch_s = times[1]
    each_s = (times[4096] - launch_s) / pairs(0, 4096)
    for context in (0, 4096, 40_960, 409_600):
        expected_s = launch_s + each_s * pairs(context, context + 8192)
        assert chunk(8192, context) == pytest.approx(expected_s, rel=1e-9)
    attention = made_cost().times(prefill_work(1024, 400_000))[0]
    less = made_cost().times(prefill_work(1024, 200_000))[0]
    nothing = made_cost().times(prefill_work(1024))[0]
    assert (attention - nothing) / (less - nothing) == pytest.approx(2, rel=0.02)


def test_a_prompt_that_the_benchmark_cut_is_left_out() -> None:
    measured = {1024: 1.0, 8192: 40.0, 16384: 150.0}
    assert uncut(measured) == measured
    assert uncut(measured | {32768: 151.0}) == measured


def test_more_kv_heads_than_measured_count_as_more_rows() -> None:
    spec = dataclasses.replace(TINY, num_heads=8, num_kv_heads=8)
    cost = made_cost(spec)
    layer = step_s(2, 4 * 8, 500)
    added = cost.times(decode_work(8, 8 * 500))[0] - cost.times(decode_work(8, 8))[0]
    assert added == pytest.approx(4 * (layer - step_s(2, 4 * 8, 1)), rel=1e-6)


def test_derived_gpus_scale_with_their_rooflines() -> None:
    sxm, pcie = made_cost(), made_cost(name="A100-80G-PCIe")
    long, step = prefill_work(1024), decode_work(1, 500)
    assert 1 < pcie.times(long)[0] / sxm.times(long)[0] <= 1 / 0.9 + 1e-9
    assert pcie.times(step)[0] / sxm.times(step)[0] == pytest.approx(2039 / 1935, rel=0.05)


def test_ranks_use_the_measured_all_reduce_or_a_link() -> None:
    cost, work = made_cost(ranks=2), prefill_work(128)
    assert cost.times(work)[0] > 0
    deployment = deployed(TINY, "A100-80G", 1, 4)
    source = SiliconSource(GPUS["A100-80G"], made_tables())
    with pytest.raises(UsageError, match=r"no measured all-reduce of 4 ranks .measured: 2 ove"):
        silicon_cost(deployment, source)
    with pytest.raises(UsageError, match=r"give costs.all_reduce, a link"):
        made_cost(ranks=2, name="A800-80G")
    ring = silicon_cost(deployment, source, Ring(link("allreduce-a100-pcie")))
    assert ring.times(work)[0] > 4 * 2 * Ring(link("allreduce-a100-pcie")).all_reduce_s(65536, 4)


def test_norms_over_all_heads_are_reduced_in_each_layer() -> None:
    apart = dataclasses.replace(TINY, qk_norm=True)
    whole = dataclasses.replace(apart, qk_norm_over_heads=True)
    work = decode_work(64, 6400)
    (more,), (less,) = made_cost(whole, 2).times(work), made_cost(apart, 2).times(work)
    assert more - less == pytest.approx(4 * (1e-5 + 64 * 8 * 1e-11))
    assert made_cost(whole).times(work) == made_cost(apart).times(work)


def test_what_is_not_in_the_tables_counts_as_unmeasured() -> None:
    cost = made_cost()
    cost.times(prefill_work(1024))
    small = cost.extrapolated_share
    assert 0 < small < 0.6
    cost.times(prefill_work(1024, 100_000))
    assert cost.extrapolated_share > small


def test_unknown_gpus_and_types_are_refused() -> None:
    with pytest.raises(UsageError, match=r'no measurements of "L20"; known: A100'):
        silicon_source(deployed(TINY, "L20"))
    floats = deployed(dataclasses.replace(TINY, dtype_bytes=4))
    with pytest.raises(UsageError, match="use a 2-byte dtype"):
        silicon_source(floats)


def test_a_release_is_newer_than_its_candidates() -> None:
    versions = ["0.5.10", "0.5.9", "1.0.0", "1.3.0rc20", "1.3.0rc9", "1.3.0"]
    assert max(versions[:2], key=_ordered) == "0.5.10"
    assert sorted(versions[2:], key=_ordered) == ["1.0.0", "1.3.0rc9", "1.3.0rc20", "1.3.0"]


# ---- on the package


@pytest.fixture(scope="module")
def package() -> None:
    reason = "the tables of real GPUs: pip install -e '.[silicon]'"
    pytest.importorskip("aiconfigurator_core", reason=reason)
    pytest.importorskip("pyarrow", reason=reason)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_gpu_of_the_list_predicts(name: str) -> None:
    deployment = deployed("Llama-3.1-8B", name, 2)
    source = silicon_source(deployment)
    cost = silicon_cost(deployment, source)
    weights_s = deployment.weight_bytes(0) / (gpu(name).memory_bandwidth_gb_s * 1e9)
    assert weights_s < cost.times(decode_work(1, 128))[0] < 3 * weights_s
    flops_s = 2 * 7e9 * 2048 / (gpu(name).fp16_tflops * 1e12)
    assert flops_s < sum(cost.times(prefill_work(2048))) < 3 * flops_s
    facts = source.facts()
    assert facts["device"].startswith("NVIDIA")
    assert set(facts["versions"]) == {"gemm", "context", "generation", "all_reduce"}


@pytest.mark.usefixtures("package")
def test_frameworks_and_versions_are_chosen_or_refused() -> None:
    assert load_tables("h100_sxm", "sglang", "0.5.14").versions["gemm"] == "0.5.14"
    with pytest.raises(UsageError, match=r'no framework "vlm" for h100_sxm; did you mean "vllm"'):
        load_tables("h100_sxm", "vlm")
    with pytest.raises(UsageError, match=r"no gemm of vllm 0.1 for h100_sxm; versions: 0.24.0"):
        load_tables("h100_sxm", "vllm", "0.1")
    with pytest.raises(UsageError, match=r'no GPU "h300"; .*h100_sxm'):
        load_tables("h300", "vllm")
    with pytest.raises(UsageError, match="heads of 96 with bfloat16 KV; measured: 128"):
        load_tables("a100_sxm", "vllm", head_dim=96)


@pytest.mark.long
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("system", ["l40s", "h100_sxm", "a100_sxm", "h200_sxm"])
def test_points_left_out_are_estimated_within_the_bound(system: str) -> None:
    tables = from_memory(load_tables(system, "vllm"), 4 * 128)
    products = product_errors(tables, peak_of(NAMES[system]), shapes=40)
    prompts = attention_errors(tables.context, prompt_times)
    steps = attention_errors(tables.generation, step_times)
    assert max(off.median for off in (products, prompts, steps)) <= 0.05
    assert max(prompts.p95, steps.p95) <= 0.15
    if system != "l40s":
        assert products.p95 <= 0.15
        return
    # Two collections of one product on L40S differ by more than our estimate is off.
    floor = disagreement(tables, from_memory(load_tables(system, "sglang"), 4 * 128))
    assert products.p95 <= 0.21 < floor.p95


@pytest.mark.parametrize("name", ["A100-80G", "L40S", "H100", "H200"])
def test_keys_and_values_come_from_memory(name: str) -> None:
    deployment = deployed("Llama-3.1-8B", name)
    cost = measured(deployment)
    for rows, context in ((4, 4096), (16, 1024), (64, 1024)):
        full, empty = decode_work(rows, rows * context), decode_work(rows, rows)
        step_s = cost.times(full)[0] - cost.times(empty)[0]
        kept_bytes = rows * context * deployment.kv_bytes_per_token(0)
        launch_s = 1e-5  # a kernel's, in each of 32 layers, is in both
        assert step_s > kept_bytes / (gpu(name).memory_bandwidth_gb_s * 1e9) - 32 * launch_s


def test_a_hiccup_of_the_benchmark_is_no_time_of_an_operator() -> None:
    assert calm({1: 9.0, 2: 3.0, 4: 99.0, 8: 4.0, 16: 7.0}) == {1: 3, 2: 3, 4: 4, 8: 4, 16: 7}
    assert calm({5: 1.0}) == {5: 1.0}
    assert calm_steps({(1, 1): 1.0, (1, 9): 5.0, (2, 1): 9.0, (2, 9): 2.0})[2, 1] == 2.0


def test_a_product_takes_no_longer_than_larger_ones_but_for_a_kernel_of_its_own() -> None:
    table = {
        16: {8: {1: 9.0, 2: 3.0, 4: 9.0}, 16: {1: 4.0, 2: 9.5, 4: 5.0}},
        32: {8: {1: 5.0, 2: 5.0, 4: 4.0}, 16: {1: 6.0, 2: 6.0, 4: 6.0}},
    }
    calm_products(table)
    assert table[16][8] == {1: 4.0, 2: 3.0, 4: 9.0}  # nothing has more rows than the last
    assert table[16][16] == {1: 4.0, 2: 6.0, 4: 5.0}
    assert table[32] == {8: {1: 5.0, 2: 5.0, 4: 4.0}, 16: {1: 6.0, 2: 6.0, 4: 6.0}}


def test_a_step_of_deepseek_is_not_slowed_by_one_hiccup() -> None:
    """A step of 32 rows with 3 tokens each is 190 times too long in TensorRT-LLM's table."""
    cost = measured(deployed("DeepSeek-V3", ranks=8), "trtllm")
    assert cost.times(decode_work(32, 32 * 1536))[0] < 0.03


@pytest.mark.usefixtures("package")
def test_many_runs_on_the_same_gpus_read_the_tables_once() -> None:
    twice, further = (deployed("Llama-3.1-70B", ranks=ranks) for ranks in (2, 4))
    two, four = map(silicon_source, (twice, further))
    assert two.tables is four.tables
    assert silicon_source(further, "sglang").tables is not two.tables


@pytest.mark.usefixtures("package")
def test_attention_of_latents_takes_what_its_module_was_measured_to_take() -> None:
    """TensorRT-LLM's table has 64 rows with 1,024 tokens of context at 72.4 us, FP8 all of it."""
    spec = model("DeepSeek-V3", kv_dtype="fp8")
    tables = silicon_source(deployed(spec, ranks=8), "trtllm").tables
    peak = Peak(1979e12, 4.8e12, 8)
    shapes = ((7168, 2112), (1536, 3072), (2048, 7168))
    around_s = sum(product_times(tables.quantized, n, k, peak)[64] for k, n in shapes)
    assert tables.rotates
    assert tables.generation[16, 1][64, 1024] + around_s == pytest.approx(72.4e-6, abs=1e-6)


@pytest.mark.usefixtures("package")
def test_what_attention_was_measured_with_is_not_launched_again() -> None:
    placed = deployed("Llama-3.1-70B", "H100", 1, 4)
    source = silicon_source(placed, "trtllm")
    apart = dataclasses.replace(source.tables, rotates=False)
    step = decode_work(8, 8 * 1024)
    together_s, apart_s = (
        silicon_cost(placed, dataclasses.replace(source, tables=tables, others={})).times(step)[0]
        for tables in (source.tables, apart)
    )
    by_k = source.tables.gemm[min(source.tables.gemm)]
    launch_s = by_k[min(by_k)][1]  # the smallest product
    assert apart_s - together_s == pytest.approx(80 * 2 * launch_s, rel=1e-6)


def test_a_shared_expert_is_computed_beside_the_others_up_to_a_size() -> None:
    def experts(size: int) -> Estimate:
        return Estimate(3.0 * size, 0.0)

    def shared(size: int) -> Estimate:
        return Estimate(4.0, 1.0)

    seconds = beside(experts, shared, most=8)
    assert [seconds(size) for size in (1, 8, 9)] == [(4.0, 1.0), (24.0, 0.0), (31.0, 1.0)]


def test_published_decode_steps_without_tuning() -> None:
    """Sarathi-Serve, strict SLO / 5: batch 32, 4096 tokens of context, in ms."""
    for name, ranks, published_ms, off in (("Mistral-7B", 1, 20, 0.21), ("Yi-34B", 2, 40, -0.01)):
        cost = measured(deployed(name, "A100-80G", 1, ranks))
        predicted_ms = 1000 * cost.times(decode_work(32, 32 * 4096))[0]
        assert predicted_ms / published_ms - 1 == pytest.approx(off, abs=0.02)


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_the_bundled_efficiencies_are_the_fits() -> None:
    from tools.calibrate import CHECKED_ON, FITTED_ON, bundled, operators, soft_fit

    for name in ("A100-80G", "H200"):
        spec = gpu(name)
        found = soft_fit([operators(spec, FITTED_ON)], spec)
        assert found == pytest.approx(bundled(spec), rel=5e-3)
        off = operators(spec, CHECKED_ON).errors(spec, bundled(spec))
        stated = [float(number) / 100 for number in re.findall(r"([0-9.]+) %", spec.source)]
        assert stated == pytest.approx([off.mean, off.p95], abs=0.002)
