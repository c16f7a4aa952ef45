"""Swap against the naive simulator, on many small random worlds that preempt."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from evenflow.costs.modifiers import SwapCost
from evenflow.types import Request
from sim import World, simulate
from tests.oracle.plain import Setting
from tests.oracle.plain_gllm import GllmSetting
from tests.oracle.plain_swap import HostLink, PlainSwap, PlainSwapGllm
from tests.oracle.test_plain_oracle import assert_same, world_of
from tests.oracle.test_plain_policies import gllm_setting, gllm_world, paged_setting, requests_of

POLICIES = ["sarathi", "chunked_only", "hybrid_only", "vllm", "throttle", "couple"]
PAGE_BYTES = 1000
HOSTS = [HostLink(), HostLink(0.0, 0.0010193), HostLink(0.00031, 0.00010137)]


def swapping(requests: list[Request], setting: Setting, host: HostLink) -> World:
    gllm = isinstance(setting, GllmSetting)
    world = gllm_world(requests, setting) if gllm else world_of(requests, setting)
    bandwidth = PAGE_BYTES / host.page_s if host.page_s else float("inf")
    page_bytes = (PAGE_BYTES,) * setting.depth
    costs = SwapCost(world.costs, page_bytes, bandwidth, host.row_s)
    return replace(world, swap=True, costs=costs)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", POLICIES)
def test_swap(policy: str, seed: int) -> None:
    rng = Random(seed)
    gllm = policy in ("throttle", "couple")
    pages = [7, 8, 10, 12, 16]
    setting = gllm_setting(rng, policy) if gllm else paged_setting(rng, policy, pages)
    requests, host = requests_of(rng, most=25, output=40), rng.choice(HOSTS)
    plain = (PlainSwapGllm if gllm else PlainSwap)(requests, setting, host)
    result = simulate(swapping(requests, setting, host))
    assert_same(result, plain.run())
