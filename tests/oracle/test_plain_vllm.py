"""vLLM V1 with its engine loop against the naive simulator, on many small random worlds."""

from __future__ import annotations

from random import Random

import pytest

from evenflow.costs import AffineCost
from evenflow.schedulers import create
from evenflow.types import Prefix, Request
from sim import World, simulate
from tests.oracle.plain_vllm import BLOCK_TOKENS, PlainVllm, VllmSetting
from tests.oracle.test_plain_oracle import assert_same


def world_of(requests: list[Request], setting: VllmSetting) -> World:
    params = {
        "max_num_batched_tokens": setting.budget,
        "max_num_seqs": setting.max_num_seqs,
        "watermark": setting.watermark,
        "async_scheduling": setting.runner is not None and f"v{setting.runner}",
    }
    return World(
        requests,
        lambda: create("vllm_v1", params),
        AffineCost(setting.base_s, setting.per_token_s, setting.depth),
        depth=setting.depth,
        total_pages=setting.total_pages,
        max_model_len=4096,
        page_tokens=BLOCK_TOKENS,
        max_in_flight=setting.places,
        dispatch="engine_loop",
        prefix_cache=setting.caching,
    )


def setting_of(rng: Random, mode: str) -> VllmSetting:
    max_num_seqs = rng.choice([2, 4, 16])
    return VllmSetting(
        depth=1 if "v1" in mode else rng.choice([1, 2, 3, 4]),
        total_pages=rng.choice([7, 9, 12, 20, 200]),
        budget=max(max_num_seqs, rng.choice([16, 48, 256])),
        max_num_seqs=max_num_seqs,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        runner={"v1": 1, "v2": 2}.get(mode[:2]),
        caching="caching" in mode,
        base_s=rng.choice([0.0213, 0.00517]),
        per_token_s=rng.choice([0.0, 0.00011]),
    )


def requests_of(rng: Random, *, caching: bool) -> list[Request]:
    """Some come at once, and some begin alike."""
    gap_s, arrival_s, requests = rng.choice([0.0, 0.0137, 0.21]), 0.0, []
    for number in range(rng.choice([4, 12, 25])):
        arrival_s += gap_s * rng.random()
        prompt, output = rng.randint(1, 60), rng.choice([1, 2, rng.randint(1, 40)])
        blocks = tuple(rng.randint(0, 1) for _ in range((prompt + output) // BLOCK_TOKENS + 1))
        prefix = Prefix(blocks, BLOCK_TOKENS, prompt + output) if caching else None
        requests.append(Request(number, arrival_s, prompt, output, prefix=prefix))
    return requests


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("mode", ["sync", "caching", "v1", "v2", "v1 caching", "v2 caching"])
def test_vllm_v1(mode: str, seed: int) -> None:
    rng = Random(f"{mode} {seed}")
    setting = setting_of(rng, mode)
    requests = requests_of(rng, caching=setting.caching)
    assert_same(simulate(world_of(requests, setting)), PlainVllm(requests, setting).run())
