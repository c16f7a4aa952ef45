"""Cost models: closed forms computed by hand, and properties that hold for every micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.batch import Span
from evenflow.core.decodes import Sequence
from evenflow.costs import (
    AffineCost,
    Ring,
    RooflineCost,
    StageCost,
    Work,
    decode_work,
    prefill_work,
    token_budget_for,
)
from evenflow.costs.roofline import Rates, linear_s
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GpuSpec, LinkSpec, gpu
from evenflow.types import Chunk, MicroBatch, Request
from tests.command_line import refused
from tests.profiles import PLAIN, TINY, deployed

# Of the tiny model: qkv 64 x 128, o 64 x 64, gate and up 64 x 256, down 128 x 64; 16-bit.
MATRICES = 64 * 128 + 64 * 64 + 64 * 256 + 128 * 64
RING = LinkSpec(10, 5)


def tiny_cost(stages: int = 1, ranks: int = 1, tile_tokens: int = 128) -> RooflineCost:
    deployment = Deployment(TINY, PLAIN, split_layers(4, stages), ranks)
    return RooflineCost(deployment, RING, tile_tokens=tile_tokens)


def l20_cost(stages: int = 4, name: str = "Qwen2.5-32B") -> RooflineCost:
    return RooflineCost(deployed(name, "L20", stages))


# ---- affine


def test_affine_is_the_same_on_every_stage() -> None:
    cost = AffineCost(0.005, 2e-5, 4, bytes_per_token=100)
    work = Work((Span(0, 400),), 400, 100, 9999, 101)
    assert cost.times(work) == [0.005 + 2e-5 * 500] * 4
    assert cost.transfer_bytes(work) == 50_000


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_affine_refuses_what_is_no_duration(wrong: float) -> None:
    for arguments in ((wrong, 1.0, 1), (1.0, wrong, 1), (1.0, 1.0, 1, wrong)):
        with refused("costs: affine"):
            AffineCost(*arguments)
    with refused("depth is 0"):
        AffineCost(1.0, 1.0, 0)


# ---- roofline, by hand


def test_one_decode_moves_every_weight_once() -> None:
    cost = tiny_cost(tile_tokens=1)
    linear = MATRICES + (64 + 128) + (64 + 64) + (64 + 256) + (128 + 64)
    elementwise = 8 * 64 + 2 * (4 + 2) * 16 + 3 * 128 + 4 * 2 * 16
    attention = 101 * 2 * 2 * 16 + 2 * 4 * 16
    embedding = 2 * 64
    head = 64 * 1000 + 64 + 1000
    moved = 2 * (4 * (linear + elementwise + attention) + embedding + head) + 2 * 4 * 1000
    assert cost.times(decode_work(1, 100))[0] == pytest.approx(moved / 1e12, rel=1e-12)


def test_a_full_tile_of_prefill_is_bound_by_compute() -> None:
    slow = GpuSpec("slow", 0.001, 1e6, 80, 1.0, 1.0, 0.0)
    cost = RooflineCost(Deployment(TINY, slow, (4,)))
    pairs = 128 * 129 / 2
    operations = (
        4 * (2 * MATRICES * 128 + 4 * 4 * 16 * pairs) + 2 * 64 * 1000 * 16
    )  # the head: one row
    moved = 2 * 4 * 128 * (8 * 64 + 2 * 6 * 16 + 3 * 128 + 4 * 32) + 2 * 2 * 64 * 128 + 8 * 1000
    expected = operations / 1e9 + moved / 1e15
    assert cost.times(prefill_work(128))[0] == pytest.approx(expected, rel=1e-12)


def test_linear_time_climbs_in_steps_of_a_tile() -> None:
    cost = l20_cost(1)
    seconds = {tokens: cost.times(prefill_work(tokens))[0] for tokens in (513, 640, 641)}
    assert seconds[640] / seconds[513] < 1.02
    assert seconds[641] / seconds[640] > 1.15


def test_few_tokens_are_padded_to_a_small_tile_so_a_gpu_of_little_arithmetic_decodes() -> None:
    h20 = Rates(148e12, 4e12)
    read_s = 2 * 4096 * 4096 / 4e12
    assert linear_s(1, (4096, 4096), 2, 128, h20) == pytest.approx(read_s, rel=1e-3)
    padded = {rows: linear_s(rows, (4096, 4096), 2, 128, h20) for rows in (48, 64, 65, 129)}
    operation_s = 2 * 4096 * 4096 / 148e12
    tokens = {rows: seconds / operation_s for rows, seconds in padded.items()}
    assert tokens == pytest.approx({48: 64, 64: 64, 65: 128, 129: 256})


def test_chunks_of_one_prompt_attend_to_every_pair_once() -> None:
    rates = l20_cost()._layers[0].attention
    long = rates.prefill_s(0, 16384)
    pieces = sum(rates.prefill_s(start, start + 1024) for start in range(0, 16384, 1024))
    assert pieces == pytest.approx(long, rel=1e-9)


def test_only_rows_that_sample_pay_for_the_head() -> None:
    cost = l20_cost()
    silent = cost.times(prefill_work(512, last=False))
    sampled = cost.times(prefill_work(512))
    assert silent[:3] == sampled[:3]
    head_bytes = 2 * (152064 * 5120 + 152064 + 5120) + 8 * 152064
    assert sampled[3] - silent[3] == pytest.approx(head_bytes / gpu("L20").bytes_per_s, rel=1e-9)


def test_overhead_counts_once_a_layer() -> None:
    late = GpuSpec("late", 1000, 1000, 80, 1.0, 1.0, 0.5)
    cost = RooflineCost(Deployment(TINY, late, (1, 3)))
    without = tiny_cost().deployment
    plain = RooflineCost(Deployment(without.model, without.gpu, (1, 3)))
    work = decode_work(3, 30)
    added = [a - b for a, b in zip(cost.times(work), plain.times(work), strict=True)]
    assert added == pytest.approx([0.5, 1.5])


def test_a_ring_takes_bandwidth_and_a_latency_a_step() -> None:
    expected = 2 * (3 / 4) * 1e6 / 10e9 + 2 * 3 * 5e-6
    assert Ring(RING).all_reduce_s(1e6, 4) == pytest.approx(expected, rel=1e-12)
    assert Ring(RING).all_reduce_s(1e6, 1) == 0.0
    twice_s = 2 * (10 * 64 * 2 / 10e9 + 2 * 5e-6)
    assert tiny_cost(ranks=2).all_reduce_s(10) == pytest.approx(twice_s, rel=1e-12)
    assert tiny_cost().all_reduce_s(10) == 0.0


def test_parallel_attention_reduces_once_a_layer() -> None:
    cost = RooflineCost(deployed("Falcon-180B", "A100-80G", 2, 4), RING)
    assert cost.all_reduce_s(8) == pytest.approx(Ring(RING).all_reduce_s(8 * 14848 * 2, 4))


def test_norms_over_all_heads_reduce_two_sums_a_token_besides() -> None:
    """MiniMax-M2 of vLLM (pull request 31493): 8 bytes a token, in each layer."""
    cost = RooflineCost(deployed("MiniMax-M2.5", "H200", 1, 8), RING)
    states = 2 * Ring(RING).all_reduce_s(16 * 3072 * 2, 8)
    assert cost.all_reduce_s(16) == pytest.approx(states + Ring(RING).all_reduce_s(16 * 8, 8))


def test_hidden_states_cross_between_stages() -> None:
    assert l20_cost().transfer_bytes(Work((Span(0, 90),), 90, 10, 0, 10)) == 100 * 5120 * 2


def test_roofline_refuses_ranks_without_a_link_and_empty_tiles() -> None:
    with refused("tensor_parallel: 2 ranks all-reduce over a link"):
        RooflineCost(Deployment(TINY, PLAIN, (4,), 2))
    with refused("tile_tokens is 0"):
        tiny_cost(tile_tokens=0)


# ---- roofline, for every micro-batch


def work(chunks: list[Span], decodes: int = 0, context_tokens: int = 0) -> Work:
    """Return a micro-batch each of whose chunks ends its prompt."""
    prefill_tokens = sum(stop - start for start, stop in chunks)
    rows = len(chunks) + decodes
    return Work(tuple(chunks), prefill_tokens, decodes, context_tokens, rows)


spans = st.builds(
    lambda start, tokens: Span(start, start + tokens), st.integers(0, 9000), st.integers(1, 3000)
)
batches = st.builds(
    lambda chunks, rows, each: work(chunks, rows, rows * each),
    st.lists(spans, max_size=3),
    st.integers(0, 300),
    st.integers(1, 5000),
).filter(lambda batch: batch.sampled_rows > 0)
costs = st.sampled_from(
    [l20_cost(1), l20_cost(4), l20_cost(3, "Llama2-13B"), tiny_cost(2, 2), AffineCost(0.1, 0.01, 3)]
)


@given(costs, batches, spans, st.integers(1, 2000))
def test_more_is_never_cheaper(cost: StageCost, batch: Work, chunk: Span, more: int) -> None:
    chunks, rows, context = list(batch.chunks), batch.decode_tokens, batch.decode_context
    seconds = cost.times(batch)
    alone_s = cost.times(work([chunk]))
    pairs = [
        (seconds, work(chunks, rows + more, context + more)),
        (seconds, work([*chunks, chunk], rows, context)),
        (alone_s, work([Span(chunk.start, chunk.stop + more)])),
        (alone_s, work([Span(chunk.start + more, chunk.stop + more)])),
        (cost.times(work([], rows + 1, context)), work([], rows + 1, context + 500 * more)),
    ]
    for small_s, large in pairs:
        for less, most in zip(small_s, cost.times(large), strict=True):
            assert 0 < less <= most * (1 + 1e-12)


@given(batches, st.integers(2, 8))
def test_the_stages_add_up_to_the_whole_model(batch: Work, stages: int) -> None:
    whole = l20_cost(1).times(batch)[0]
    assert sum(l20_cost(stages).times(batch)) == pytest.approx(whole, rel=1e-12)


def test_a_micro_batch_of_the_simulator_is_accepted() -> None:
    chunk = Chunk(Sequence(Request(0, 0.0, 640, 1), 640), 128, 640, True, 0)
    batch = MicroBatch(0, 0.0, [chunk], None, 512, 7, 700, 8, 10, 8)
    assert l20_cost().times(batch) == l20_cost().times(Work((Span(128, 640),), 512, 7, 700, 8))


# ---- token budget


def test_the_budget_is_the_last_tile_that_meets_the_limit() -> None:
    cost = AffineCost(0.01, 1e-4, 4)
    assert token_budget_for(cost, 4 * (0.01 + 1e-4 * 512) + 1e-12) == 512
    assert token_budget_for(cost, 4 * (0.01 + 1e-4 * 512) - 1e-12) == 384
    assert token_budget_for(cost, 1e9) == 16384


def test_a_tighter_limit_never_gives_a_larger_budget() -> None:
    budgets = [token_budget_for(l20_cost(), slo_s) for slo_s in (0.2, 0.3, 0.5, 1.0, 2.0, 5.0)]
    assert budgets == sorted(budgets)
    assert all(budget % 128 == 0 for budget in budgets)


def test_a_limit_that_no_tile_meets_is_refused() -> None:
    with refused("token_budget: auto: an iteration of 128 tokens already takes 1.280 s, the limit"):
        token_budget_for(AffineCost(0.0, 0.01, 1), 1.0)
    with refused("slo_s is nan"):
        token_budget_for(AffineCost(0.0, 0.01, 1), float("nan"))
