"""Speculative decoding: tokens a step, pages, times and costs, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.decodes import ONE_TOKEN, Decoding
from evenflow.costs import AffineCost, DraftedCost, RooflineCost, Work, decode_work, prefill_work
from evenflow.costs.modifiers import prompts_of, share_of, step_of
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.engines.speculation import Speculation, SpeculativeGroup
from evenflow.results.run import RunResult
from evenflow.sim import World, simulate
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import gpu, link
from evenflow.specs.model import model
from evenflow.types import Request
from tests.command_line import refused
from tests.worlds import send, small_world


def world(output_tokens: int, decoding: Decoding, **more: Any) -> World:
    plain = {"costs": AffineCost(1.0, 0.01, 1), "decoding": decoding}
    return small_world([Request(0, 0.0, 10, output_tokens)], **(plain | more))


def tokens_each_step(result: RunResult) -> list[int]:
    return result.sampled_rows.tolist()


@pytest.mark.parametrize(
    ("acceptance", "tokens"),
    [
        *(((0.0,) * 3, 1.0), ((1.0,) * 3, 4.0), ((0.5,), 1.5)),
        *(((0.8,) * 4, 1 + 0.8 + 0.64 + 0.512 + 0.4096), ((0.5, 0.2), 1 + 0.5 + 0.1)),
    ],
)
def test_tokens_per_step_are_all_that_were_accepted_in_a_row(
    acceptance: tuple[float, ...], tokens: float
) -> None:
    assert Speculation(acceptance).tokens_per_step == pytest.approx(tokens, rel=1e-12)
    assert Speculation(acceptance).row_tokens == len(acceptance) + 1


def test_steps_verify_k_plus_one_tokens_and_yield_the_average() -> None:
    result = simulate(world(10, Speculation((0.5,) * 2)))  # 1.75 tokens a step
    # Prompt, then 1.75 n + 0.5 rounded down: 2, 4, 5, 7, 9.
    assert tokens_each_step(result) == [1, 2, 2, 1, 2, 2]
    assert result.decode_tokens.tolist() == [0, 3, 3, 3, 3, 3]
    assert np.diff(result.returned_s) == pytest.approx([1.03] * 5)
    assert result.gap_s.tolist() == pytest.approx([1.03, 0, 1.03, 0, 1.03, 1.03, 0, 1.03, 0])


def test_no_acceptance_is_plain_decoding_that_verifies_more() -> None:
    plain = simulate(world(9, ONE_TOKEN))
    wasted = simulate(world(9, Speculation((0.0,) * 2), costs=AffineCost(1.0, 0.0, 1)))
    assert tokens_each_step(wasted) == tokens_each_step(plain)
    assert len(plain.scheduled_s) == len(wasted.scheduled_s) == 9


def test_rows_that_come_later_go_on_at_the_pace_of_their_group() -> None:
    requests = [Request(0, 0.0, 10, 12), Request(1, 2.5, 10, 5)]
    result = simulate(replace(world(1, Speculation((0.5,) * 1)), requests=requests))
    assert result.sampled_rows.sum() == 17
    # Both rows step together from the third decode step on: 1, 2, 1, 2 tokens each.
    assert tokens_each_step(result)[:6] == [1, 2, 1, 2 + 1, 2, 4]


def test_pages_are_held_for_the_tokens_of_a_step() -> None:
    batcher = world(30, Speculation((1.0,) * 3), total_pages=10, page_tokens=4).batcher()
    batcher.add(Request(0, 0.0, 6, 30))
    held = []
    for now_s in range(5):
        batch = send(batcher, float(now_s))
        held.append(10 - batch.free_pages)
        batcher.complete(batch, now_s + 0.5)
    # Context 6, then 4 more a step: the pages of 6, 10, 14, 18, 22 tokens.
    assert held == [2, 3, 4, 5, 6]


def test_a_step_must_fit_into_a_page() -> None:
    with refused("a step of k + 1 = 5 tokens needs pages of at least as many, not 4"):
        simulate(world(5, Speculation((0.5,) * 4), page_tokens=4))


@given(st.integers(1, 8), st.floats(0, 1), st.integers(1, 200))
def test_steps_yield_the_average_rounded(k: int, acceptance: float, steps: int) -> None:
    mean = Speculation((acceptance,) * k).tokens_per_step
    group = SpeculativeGroup(mean)
    strides = []
    for step in range(steps):
        strides.append(group.stride)
        group.step(float(step), [], [])
    assert abs(sum(strides) - mean * steps) <= 0.5 + 1e-6
    assert set(strides) <= {int(mean), int(mean) + 1}
    assert max(strides) <= k + 1


@given(st.integers(1, 6), st.floats(0, 0.9), st.floats(0, 0.1))
def test_more_acceptance_never_takes_more_steps(k: int, acceptance: float, more: float) -> None:
    less = simulate(world(60, Speculation((acceptance,) * k)))
    most = simulate(world(60, Speculation((acceptance + more,) * k)))
    assert len(most.scheduled_s) <= len(less.scheduled_s)


# ---- what a draft costs


def test_a_draft_is_paid_on_the_last_stage_of_what_decodes() -> None:
    target = AffineCost(1.0, 0.1, 2, bytes_per_token=8)
    cost = DraftedCost(target, 3, share_of(target, 0.05))
    verified = Work((), 0, 4 * 2, 100, 8)  # 2 rows
    step_s = 2 * (1.0 + 0.1 * 2)
    assert cost.times(verified) == pytest.approx([1.8, 1.8 + 3 * 0.05 * step_s])
    assert cost.times(prefill_work(8)) == target.times(prefill_work(8))
    assert (cost.depth, cost.transfer_bytes(verified)) == (2, 64)


def test_a_draft_model_costs_k_steps_of_its_own() -> None:
    target, draft = AffineCost(1.0, 0.0, 1), AffineCost(0.01, 0.001, 1)
    cost = DraftedCost(target, 4, step_of(draft))
    rows = 3
    assert cost.times(decode_work(5 * rows, 9))[0] == pytest.approx(1.0 + 4 * (0.01 + 0.003))


def test_groups_that_step_together_propose_for_the_rows_of_each() -> None:
    target, draft = AffineCost(1.0, 0.0, 1), AffineCost(0.01, 0.001, 1)
    cost = DraftedCost(target, 1, step_of(draft), groups=4)
    assert cost.times(decode_work(2 * 10, 40))[0] == pytest.approx(1.0 + 0.01 + 0.003)


def test_a_draft_model_computes_the_prompts_too() -> None:
    target, draft = AffineCost(1.0, 0.0, 2), AffineCost(0.01, 0.001, 1)
    cost = DraftedCost(target, 4, step_of(draft), draft_prompts_s=prompts_of(draft))
    assert cost.times(prefill_work(100)) == pytest.approx([1.0, 1.0 + 0.01 + 0.1])
    assert cost.times(decode_work(5, 9))[1] == pytest.approx(1.0 + 4 * 0.011)


@pytest.mark.parametrize("kind", ["roofline", "silicon"])
def test_several_tokens_of_a_request_read_its_keys_once_and_compute_for_each(kind: str) -> None:
    """Latents of 128 heads are bound by arithmetic, of 16 by reading the keys."""
    if kind == "silicon":
        pytest.importorskip("aiconfigurator_core")

    def grows(ranks: int) -> float:
        def step_s(tokens: int, context: int) -> float:
            alone = Deployment(model("DeepSeek-V3"), gpu("H200"), (61,), ranks)
            alone = replace(alone, verified_tokens=tokens)
            if kind == "silicon":
                cost = silicon_cost(alone, silicon_source(alone, "trtllm"))
            else:
                cost = RooflineCost(alone, link("nvlink-h100"))
            return cost.times(decode_work(64 * tokens, 64 * context))[0]

        one, two = (step_s(tokens, 16_000) - step_s(tokens, 8000) for tokens in (1, 2))
        return two / one

    assert 1.5 < grows(1) < 2.2
    assert 0.95 < grows(8) < 1.3


def test_a_draft_model_takes_memory_of_the_last_stage() -> None:
    spec, draft = model("Qwen2.5-32B"), model("Qwen2.5-0.5B")
    alone = Deployment(spec, gpu("L20"), (32, 32))
    drafted = Deployment(spec, gpu("L20"), (32, 32), draft=draft)
    assert drafted.weight_bytes(0) == alone.weight_bytes(0)
    assert drafted.weight_bytes(1) - alone.weight_bytes(1) == 2 * draft.num_parameters
    assert drafted.kv_bytes_per_token(1) - alone.kv_bytes_per_token(1) == 2 * 24 * 2 * 64 * 2
    assert drafted.kv_pages() < alone.kv_pages()
    with refused("tensor_parallel: 4 ranks cannot share the 14 heads and 2 KV heads of Qwen2.5-0"):
        Deployment(spec, gpu("L20"), (32, 32), 4, draft=draft)


def test_a_model_predicts_further_tokens_by_a_module_of_its_own() -> None:
    """DeepSeek-V3's README_WEIGHTS.md: 11.5B parameters of its own, without embedding and head."""
    spec = model("DeepSeek-V3")
    module = spec.mtp()
    own = module.num_parameters - 2 * spec.embedding_parameters
    assert own == pytest.approx(11.5e9, rel=0.01)
    for depth, copies in ((1, 0), (2, 1)):  # the embedding is on stage 0
        alone = Deployment(spec, gpu("H200"), split_layers(61, depth), 8, expert_parallel=True)
        both = replace(alone, draft=module)
        more = both.weight_bytes(depth - 1) - alone.weight_bytes(depth - 1)
        copied = copies * spec.embedding_parameters // 8 * 2
        final_norm = spec.hidden_size * 2
        split = alone.expert_split
        assert more == module.layer_bytes(8, split) + final_norm + copied
    three = replace(spec, mtp_layers=3).mtp()
    assert three.num_parameters - module.num_parameters == 2 * module.layer_parameters()
    with refused("Qwen2.5-32B has no layer that predicts further tokens"):
        model("Qwen2.5-32B").mtp()
