"""Kernels that TensorRT-LLM compiles when a micro-batch first needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.config.build import Workload, build
from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document
from evenflow.core.request import Request
from evenflow.costs import prefill_work
from evenflow.costs.modifiers import _Joined, begun
from evenflow.engines.compiling import GPUS, Product, kernel
from evenflow.errors import UsageError
from evenflow.sim import World, simulate

COMPILE_S = 0.43
DOWN, QUERIES, SHARED = Product(7168, 2112), Product(1536, 3072), Product(7168, 512)


def run(**keys: object) -> RunConfig:
    given = {
        "model": "DeepSeek-V3",
        "gpu": "H200",
        "stages": 1,
        "tensor_parallel": 8,
        "expert_parallel": True,
        "costs": "roofline",
        "runtime": {"compile_s": COMPILE_S},
        "scheduler": {"name": "trtllm", "max_num_tokens": 1152},
        "workload": {"trace": "synthetic", "requests": 1},
    }
    return configured(Document("run.yaml", given | keys, {}))


def world(prompts: list[int], **keys: object) -> World:
    requests = [Request(n, float(20 * n), tokens, 2) for n, tokens in enumerate(prompts)]
    made = build(run(**keys), Path(), Workload(requests, {})).world
    assert isinstance(made, World)
    return made


@pytest.mark.parametrize(
    ("tokens", "columns", "share"),
    [
        (860, [120, 88, 32], False),
        (960, [64, 96, 32], False),
        (1024, [64, 96, 32], True),
        (1100, [80, 112, 40], False),
    ],
)
def test_tiles_are_those_of_the_engine(tokens: int, columns: list[int], share: bool) -> None:
    """By hand from its loop over block_n: 7 rows of tiles of 120 columns are 126 of 132 places."""
    found = [kernel(product, tokens) for product in (DOWN, QUERIES, SHARED)]
    assert [each[1] for each in found] == columns
    assert [each[2] for each in found][1] == share


def test_experts_share_nothing_and_fill_the_fewest_rounds() -> None:
    """9 rows of tiles for each of 32: tiles of 128 columns are 9,216, in 69.8 rounds of 132."""
    experts = Product(7168, 4096, experts=32)
    assert kernel(experts, 1152) == (experts, 128, False)


def test_a_prompt_of_another_size_compiles_its_kernels_once() -> None:
    """Start-up has those of 1,152 tokens and of the first prompt's 991, so of 8 rows of tiles."""
    made = world([991, 866, 850, 1000])
    results = [simulate(made), simulate(made), simulate(made, pipeline="processes")]
    warm = simulate(world([991, 866, 850, 1000], runtime={}))
    for result in results:
        late = result.first_token_s - warm.first_token_s
        assert (late / COMPILE_S).round(6).tolist() == [0, 7, 0, 0]


def test_groups_compile_apart_and_wait_for_the_slowest() -> None:
    """One lacks 2 kernels and one 4, so 4 are waited for; then each has its own."""
    costs = world([991], tensor_parallel=1, data_parallel=8).costs
    cold = begun(costs)

    def compiled(*tokens: int) -> float:
        step = _Joined(prefill_tokens=sum(tokens))
        step.parts = [prefill_work(each) for each in tokens]
        return round((cold.times(step)[0] - costs.times(step)[0]) / COMPILE_S, 6)

    assert compiled(700, 400) == 2
    assert compiled(400, 400) == 0
    assert compiled(400, 700) == 2


@pytest.mark.parametrize(
    "keys",
    [{"gpu": "B200"}, {"model": "Llama-3.1-8B", "expert_parallel": False}, {"dtype": "bfloat16"}],
)
def test_only_products_with_blocks_on_hopper_are_compiled(keys: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=rf"runtime.compile_s: 0.43 .* on {', '.join(GPUS)}; 0 is"):
        world([991], **keys | {"kv": {"pages": 999}})
