"""Replicas with each router, and closed loops, against naive ones on many small random worlds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from evenflow.types import Prefix, Request
from sim import World, simulate_replicas
from sim.arrivals import Router
from tests.oracle.plain import Setting
from tests.oracle.plain_gllm import GllmSetting
from tests.oracle.plain_replicas import PlainReplicas
from tests.oracle.test_plain_oracle import assert_same, close, world_of
from tests.oracle.test_plain_policies import gllm_setting, gllm_world, paged_setting

ROUTERS: list[Router] = ["round_robin", "least_outstanding", "prefix_affinity"]
POLICIES = ["sarathi", "vllm", "chunked_only", "hybrid_only", "throttle", "couple"]
PAGES = [7, 8, 10, 12, 16, 28, 60]


def prefix_of(rng: Random) -> Prefix | None:
    """One of a few conversations, each block of which has two continuations."""
    blocks = [rng.randint(0, 1)]
    while len(blocks) < rng.randint(1, 6):
        blocks.append(10 * blocks[-1] + rng.randint(0, 1))
    return rng.choice([None, Prefix(tuple(blocks), len(blocks) * 8, 8)])


def requests_of(rng: Random) -> list[Request]:
    """No two arrive or end at one instant, but where a closed loop has them arrive together."""
    prompts = rng.sample(range(1, 61), rng.randint(2, 40))
    times_s = sorted(rng.random() * rng.choice([0.1, 0.5]) for _ in prompts)
    return [
        Request(i, times_s[i], prompt, rng.randint(1, 40), prefix=prefix_of(rng))
        for i, prompt in enumerate(prompts)
    ]


def setting_of(rng: Random) -> Setting:
    policy = rng.choice(POLICIES)
    gllm = policy in ("throttle", "couple")
    setting = gllm_setting(rng, policy) if gllm else paged_setting(rng, policy, PAGES)
    costs = {"per_token_s": rng.choice([0.00010137, 0.0010193]), "per_context_s": 1.31e-5}
    return replace(setting, **costs)


def world(requests: list[Request], setting: Setting) -> World:
    if isinstance(setting, GllmSetting):
        return gllm_world(requests, setting)
    return world_of(requests, setting)


def assert_agree(
    requests: list[Request], setting: Setting, count: int, router: Router, concurrency: int | None
) -> PlainReplicas:
    plain = PlainReplicas(requests, setting, count, router, concurrency).run()
    system = replace(
        world(requests, setting), replicas=count, router=router, concurrency=concurrency
    )
    results = simulate_replicas(system)
    for result, pipeline in zip(results, plain.pipelines, strict=True):
        assert result.request_id.tolist() == [row.index for row in pipeline.rows]
        close(result.arrival_s, [row.arrival_s for row in pipeline.rows])
        assert_same(result, pipeline)
    return plain


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("router", ROUTERS)
def test_replicas(router: Router, seed: int) -> None:
    rng = Random(seed)
    requests, setting = requests_of(rng), setting_of(rng)
    assert_agree(requests, setting, rng.randint(2, 4), router, None)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("replicas", [1, 3])
def test_closed_loop(replicas: int, seed: int) -> None:
    rng = Random(seed)
    requests, setting, router = requests_of(rng), setting_of(rng), rng.choice(ROUTERS)
    assert_agree(requests, setting, replicas, router, rng.choice([1, 2, 5, 12]))
