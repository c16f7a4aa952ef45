"""Groups of GPUs with requests of their own that step together and share experts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.config.run import with_
from evenflow.costs import AffineCost, RanksCost, RooflineCost, Work, decode_work
from evenflow.costs.collectives import Ring
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.engines.lock_step import LockStep, PromptWait
from evenflow.engines.loop import EngineLoop
from evenflow.experiments.figures.schema import load_plan
from evenflow.runtimes import RuntimeOverheads
from evenflow.sim import Link, Pipeline, simulate
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu, link
from evenflow.specs.model import model
from evenflow.types import Prefix, Request
from tests.command_line import refused
from tests.places import ROOT
from tests.worlds import POLICIES, small_world

TOGETHER: dict[str, Any] = {"virtual_engines": 2, "loop": LockStep}


def deployed(**changes: Any) -> Deployment:
    spec = model("DeepSeek-V3")
    return Deployment(spec, gpu("H200"), (spec.num_layers,), **changes)


def test_a_step_is_as_slow_as_its_slowest_group_and_experts_serve_the_tokens_of_all() -> None:
    own, experts = AffineCost(1.0, 0.1, 1), AffineCost(0.0, 0.01, 1)
    long, short = Request(0, 0.0, 30, 2), Request(1, 0.0, 10, 2)
    costs = RanksCost(own, 2, experts)
    result = simulate(small_world([long, short], total_pages=100, costs=costs, **TOGETHER))
    # Both prompts at once, each in a group: 1 + 30 x 0.1, and 40 tokens; then a token each.
    assert result.end_s[:, 0] == pytest.approx([4.4, 4.4 + 1.1 + 0.02])
    assert list(result.prefill_tokens) == [40, 0]
    assert list(result.decode_tokens) == [0, 2]
    assert costs.times(Work((), 5)) == pytest.approx([1.5 + 10 * 0.01])  # the like in each group


@pytest.mark.parametrize("pipeline", ["recurrence", "processes"])
@pytest.mark.parametrize(("shared", "tokens"), [(False, 30), (True, 40)])
def test_groups_pass_their_tokens_on_over_links_of_their_own(
    pipeline: Pipeline, shared: bool, tokens: int
) -> None:
    """Prompts of 30 and 10 tokens, each in a group: the longer one is all that a link carries."""
    asked = [Request(0, 0.0, 30, 1), Request(1, 0.0, 10, 1)]
    hop = Link(0.5, 0.0, shared=shared)
    world = small_world(asked, depth=2, total_pages=100, link=hop, **TOGETHER)
    result = simulate(world, pipeline="processes" if shared else pipeline)
    assert result.available_s[0, 1] == pytest.approx(1 + 0.5 * tokens)


def test_a_group_without_requests_takes_part() -> None:
    requests = [Request(0, 0.0, 10, 3), Request(1, 2.5, 10, 1)]
    overheads = RuntimeOverheads(per_row_s=0.25, holds="stage0")
    world = small_world(requests, total_pages=100, **TOGETHER)
    result = simulate(replace(world, overheads=overheads))
    # A step takes 1 s and 0.25 s of the busiest host, and the late prompt waits for its end.
    assert list(result.start_s[:, 0]) == [0.25, 1.5, 2.75]
    assert list(result.completion_s) == [3.75, 3.75]
    assert result.free_pages[0] == 99  # a page of the busy group; the other's are free


def first_scheduled(arrivals: list[float], **wait: int) -> list[float]:
    """Return when requests begin that come to two busy groups, whose steps take a second."""
    busy = [Request(0, 0.0, 1, 40), Request(1, 0.0, 1, 40)]
    late = [Request(2 + n, at_s, 1, 1) for n, at_s in enumerate(arrivals)]
    world = small_world([*busy, *late], total_pages=100, **TOGETHER)
    world = replace(world, loop_options={"wait": PromptWait(**wait) if wait else None})
    return list(simulate(world).first_scheduled_s[2:])


def test_a_group_that_sends_nothing_holds_what_its_requests_share_once() -> None:
    """Two of 40 tokens in each group begin with the same 32: 48 held, and 48, and a prompt of 8."""
    alike = [Request(i, i // 2 / 2, 40, 3, prefix=Prefix((1, 2), 16, 32)) for i in range(4)]
    world = small_world([*alike, Request(4, 1.5, 8, 2)], depth=3, prefix_cache=True, **TOGETHER)
    result = simulate(world)
    assert result.prefill_tokens.tolist()[:3] == [80, 16, 8]
    assert result.kv_tokens.tolist()[:3] == [80, 96, 104]


def test_prompts_wait_until_all_groups_have_one_or_long_enough() -> None:
    """The rule of TensorRT-LLM 1.1's `attention_dp_config`, by hand."""
    assert first_scheduled([4.5]) == [5.0]
    # Steps without a prompt in each group are counted from 1 s on: the fourth is that of 4 s.
    assert first_scheduled([4.5], timeout_iters=4, batching_iters=0) == [8.0]
    # At 3 s each has one, and from 4 s on they are counted anew: the fourth is that of 7 s.
    assert first_scheduled([2.5, 2.5, 4.5], timeout_iters=4, batching_iters=0) == [3.0, 3.0, 7.0]
    assert first_scheduled([4.5, 5.5], timeout_iters=9, batching_iters=0) == [6.0, 6.0]
    assert first_scheduled([4.5, 5.5], timeout_iters=9, batching_iters=2) == [8.0, 8.0]


def test_a_wait_that_cannot_be_is_refused() -> None:
    plan = load_plan(ROOT / "examples/figures/deepseek_layouts.yaml")
    run = {"model": "DeepSeek-V3", "gpu": "H200", "workload.trace": "azure-conv-sample"}
    key = "attention_dp_config"
    with refused('attention_dp_config needs the key "data_parallel" of 2 or more'):
        with_(plan.run, run | {key: {"enable_balance": True}})
    with refused("attention_dp_config.timeout_iters: should be"):
        with_(plan.run, run | {"data_parallel": 8, key: {"timeout_iters": 0}})


@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(0, 9)), min_size=1),
    st.builds(PromptWait, st.integers(1, 9), st.integers(0, 3)),
)
def test_whoever_waits_is_served(
    policy: tuple[str, dict[str, object]],
    depth: int,
    asked: list[tuple[int, int, int]],
    wait: PromptWait,
) -> None:
    """Whatever the policy; pages run out, so that some are preempted while prompts wait."""
    at_s = itertools.accumulate(pause for _, _, pause in asked)
    requests = [
        Request(n, t, *lengths[:2]) for (n, lengths), t in zip(enumerate(asked), at_s, strict=True)
    ]
    pages = {"total_pages": 18, "max_model_len": 130, "loop_options": {"wait": wait}}
    result = simulate(small_world(requests, *policy, depth=depth, **pages, **TOGETHER))
    assert list(result.status) == ["completed"] * len(asked)
    assert result.output_tokens.sum() == sum(output for _, output, _ in asked)


@given(st.sampled_from(POLICIES[5:20]), st.integers(1, 3), st.integers(1, 9))
def test_equal_groups_step_as_one_of_them(
    policy: tuple[str, dict[str, object]], depth: int, each: int
) -> None:
    requests = [Request(index, 0.0, 20 + index // 2, 5) for index in range(2 * each)]
    alone = [Request(index, 0.0, 20 + index, 5) for index in range(each)]
    own = AffineCost(1.0, 0.01, depth)
    one = simulate(small_world(alone, *policy, depth=depth, total_pages=60, costs=own))
    both: dict[str, Any] = {"costs": RanksCost(own, 2), "total_pages": 120, **TOGETHER}
    two = simulate(small_world(requests, *policy, depth=depth, **both))
    assert (two.end_s == one.end_s).all()
    assert list(two.completion_s[::2]) == list(two.completion_s[1::2]) == list(one.completion_s)


def test_all_but_the_experts_is_on_every_group() -> None:
    groups, ranks = deployed(data_parallel=8, expert_parallel=True), deployed(tensor_parallel=8)
    experts = 58 * 256 * 3 * 7168 * 2048
    alone = deployed().weight_bytes(0)
    assert alone - groups.weight_bytes(0) == pytest.approx(experts * 7 / 8, rel=1e-3)
    assert groups.weight_bytes(0) > ranks.weight_bytes(0)
    # Latents are whole on every GPU: groups keep eight requests' in the room of one.
    assert 8 * groups.kv_pages() > 4 * ranks.kv_pages()


@pytest.mark.parametrize("kind", ["roofline", "silicon"])
@pytest.mark.parametrize("whole_experts", [True, False])
def test_the_parts_add_up(kind: str, whole_experts: bool) -> None:
    deployment = deployed(tensor_parallel=2, data_parallel=4, expert_parallel=whole_experts)

    def cost(part: Any) -> Any:
        if kind == "roofline":
            return RooflineCost(deployment, Ring(link("nvlink-h100")), part=part)
        return silicon_cost(deployment, silicon_source(deployment, "sglang"), part=part)

    # With fewer rows, `silicon` has the shared expert beside the others, where both are its own.
    for rows in (1, 8, 256) if kind == "roofline" else (1025, 2048):
        work = decode_work(rows, 1000 * rows)
        parts = cost("own").times(work)[0] + cost("experts").times(Work((), rows))[0]
        assert parts == pytest.approx(cost("all").times(work)[0])
    assert cost("experts").times(Work((), 64))[0] < cost("experts").times(Work((), 4096))[0]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama-3.1-8B", {"data_parallel": 2}, "data_parallel: Llama-3.1-8B has no experts to sha"),
        (
            "Mixtral-8x7B",
            {"data_parallel": 3, "expert_parallel": True},
            "expert_parallel: 3 ranks cannot share the 8 experts",
        ),
        ("Mixtral-8x7B", {"data_parallel": 0}, "data_parallel is 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: Any, message: str) -> None:
    spec = model(name)
    with refused(message):
        Deployment(spec, gpu("H200"), (spec.num_layers,), **changes)
    with refused("dispatch: engine_loop is the loop of one engine; virtual_engines: 1"):
        simulate(small_world([], loop=EngineLoop, virtual_engines=2))


def test_the_example_lays_a_model_on_as_many_gpus_in_each_way() -> None:
    plan = load_plan(ROOT / "examples/figures/deepseek_layouts.yaml")
    gpus = {"model": "DeepSeek-V3", "gpu": "H200", "workload.trace": "azure-conv-sample"}
    runs = [with_(plan.run, gpus | keys) for keys in map(dict, plan.keys.systems.values())]
    copies = [1 if run.replicas is None else run.replicas.count for run in runs]
    assert [run.pipeline_gpus * count for run, count in zip(runs, copies, strict=True)] == [16] * 3
