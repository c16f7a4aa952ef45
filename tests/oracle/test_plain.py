"""Evenflow against the naive simulators: every request, every micro-batch of many small worlds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.routing import Router
from evenflow.costs.modifiers import SwapCost
from evenflow.engines.swap import SwapCache
from evenflow.sim import simulate, simulate_replicas
from evenflow.types import Prefix, Request
from tests.amounts import ALL, many
from tests.oracle import cases
from tests.oracle.plain import Setting
from tests.oracle.plain_gllm import GllmSetting
from tests.oracle.plain_replicas import PlainEngines, PlainReplicas
from tests.oracle.plain_swap import HostLink, PlainSwap, PlainSwapGllm
from tests.oracle.plain_vllm import BLOCK_TOKENS, PlainVllm

DISPATCHES = ["stage0", "eager"]
SEEDS = range(60 if ALL else 25)
FEWER = range(40 if ALL else 16)
FEW_PAGES = [7, 8, 10, 12, 16]
PREEMPTING = ["sarathi", "chunked_only", "hybrid_only", "vllm", "throttle", "couple"]


# -- the same seconds, in long runs ---------------------------------------------------------------

POLICIES = ["sarathi", "chunked_only", "vllm", "orca"]


def drawn_requests(seed: int, rate_per_s: float = 12.0) -> list[Request]:
    return cases.poisson_requests(seed, 200 if ALL else 70, rate_per_s)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
class TestPoissonRequests:
    def setting(self, policy: str, depth: int, dispatch: str, **changes: Any) -> Setting:
        return replace(Setting(policy, depth, 20_000, 2_048, dispatch), **changes)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_ample_pages(self, policy: str, depth: int, dispatch: str, seed: int) -> None:
        setting = self.setting(policy, depth, dispatch)
        result = cases.assert_agree(drawn_requests(seed), setting)
        assert result.preemptions.sum() == 0

    def test_few_pages(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, total_pages=64, max_model_len=1_000)
        result = cases.assert_agree(drawn_requests(2, rate_per_s=40.0), setting)
        assert (result.preemptions.sum() >= 4) == (policy != "orca")

    @pytest.mark.parametrize(
        ("seed", "cap"), [(3, {"max_batch_rows": 3}), (4, {"max_num_seqs": 5})]
    )
    def test_a_cap_binds(
        self, policy: str, depth: int, dispatch: str, seed: int, cap: dict[str, int]
    ) -> None:
        setting = self.setting(policy, depth, dispatch)
        requests = drawn_requests(seed, rate_per_s=40.0)
        capped = cases.assert_agree(requests, replace(setting, **cap))
        free = simulate(cases.world_of(requests, setting))
        assert capped.completion_s.max() > free.completion_s.max()

    def test_context_counts(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, total_pages=120, max_model_len=1_000)
        cases.assert_agree(drawn_requests(5), replace(setting, per_context_s=3e-7))


@pytest.mark.parametrize("depth", [1, 4])
def test_whole_prompts_are_chunks_under_a_budget_that_never_binds(depth: int) -> None:
    setting = Setting("hybrid_only", depth, 80, 1_000, token_budget=10**6)
    result = cases.assert_agree(drawn_requests(6, rate_per_s=40.0), setting)
    assert result.preemptions.sum() >= 5


# -- a few short requests, many at one instant, in pools that hold a few of them ------------------


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[Request], Setting]:
    setting = Setting(
        policy=draw(st.sampled_from(POLICIES)),
        depth=draw(st.integers(1, 4)),
        total_pages=draw(st.sampled_from([4, 6, 8, 12, 24, 1_000])),
        max_model_len=draw(st.sampled_from([40, 64, 100])),
        dispatch=draw(st.sampled_from(DISPATCHES)),
        per_token_s=draw(st.sampled_from([0.0, 0.0001, 0.001])),
        per_context_s=draw(st.sampled_from([0.0, 0.00001])),
        token_budget=draw(st.integers(1, 64)),
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 5, 256])),
        max_batch_rows=draw(st.sampled_from([None, 1, 2, 3, 4])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1, 0.3])),
    )
    instants = st.sampled_from([0.0, 0.005, 0.01, 0.015, 0.0173, 0.05, 0.1])
    lengths = st.tuples(instants, st.integers(1, 60), st.integers(1, 20))
    count = draw(st.integers(1, 12))
    drawn = sorted(draw(st.lists(lengths, min_size=count, max_size=count)))
    return [Request(i, *entry) for i, entry in enumerate(drawn)], setting


@settings(max_examples=many(200), derandomize=True)
@given(small_cases())
def test_small_cases(case: tuple[list[Request], Setting]) -> None:
    cases.assert_agree(*case)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["throttle", "couple", "hybrid_only"])
def test_policies(policy: str, seed: int) -> None:
    rng = Random(seed)
    setting = cases.setting_of(rng, policy, [*FEW_PAGES, 28, 60])
    cases.assert_agree(cases.requests_of(rng, most=25, output=40), setting)


@pytest.mark.parametrize("seed", [24, 149, 371, 455, 487, 678, 687, 803, 868, 955, 1006, 2468])
@pytest.mark.parametrize("policy", ["sarathi", "chunked_only"])
def test_chunks_while_pages_are_short(policy: str, seed: int) -> None:
    """Seeds of worlds where a prompt is partly computed when decodes run out of pages."""
    rng = Random(seed)
    setting = cases.setting_of(rng, policy, FEW_PAGES)
    cases.assert_agree(cases.requests_of(rng, most=14, output=40), setting)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", ["paper", "reading", "code"])
def test_td_pipe(variant: str, seed: int) -> None:
    rng = Random(seed)
    setting = cases.td_pipe_setting(rng, variant)
    requests = cases.requests_of(rng, most=60, output=40, times_s=[0.0] * 4 + cases.ANY_TIME_S)
    cases.assert_agree(cases.guessed(rng, requests), setting, max_in_flight=None)


@pytest.mark.parametrize("seed", SEEDS)
def test_static(seed: int) -> None:
    rng = Random(seed)
    setting = Setting(
        "static",
        total_pages=rng.choice([6, 20, 27, 40, 200]),
        max_num_seqs=rng.choice([1, 2, 5, 8, 16, 128]),
        max_batch_rows=rng.choice([None, None, 2, 3]),
        **cases.common(rng),
    )
    cases.assert_agree(cases.requests_of(rng, most=30), setting)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["vllm", "sarathi", "chunked_only"])
def test_virtual_engines(policy: str, seed: int) -> None:
    rng = Random(seed)
    setting = cases.setting_of(rng, policy, [28, 29, 40, 60, 200])
    requests = cases.requests_of(rng, most=30, times_s=cases.ANY_TIME_S)
    result = simulate(cases.world_of(requests, setting, virtual_engines=setting.depth))
    cases.assert_same(result, PlainEngines(requests, setting).run())


# -- swap -----------------------------------------------------------------------------------------

PAGE_BYTES = 1000
HOSTS = [HostLink(), HostLink(0.0, 0.0010193), HostLink(0.00031, 0.00010137)]


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("policy", PREEMPTING)
def test_swap(policy: str, seed: int) -> None:
    rng = Random(seed)
    setting = cases.setting_of(rng, policy, FEW_PAGES)
    requests, host = cases.requests_of(rng, most=25, output=40), rng.choice(HOSTS)
    world = cases.world_of(requests, setting, kv=SwapCache)
    bandwidth = PAGE_BYTES / host.page_s if host.page_s else float("inf")
    costs = SwapCost(world.costs, (PAGE_BYTES,) * setting.depth, bandwidth, host.row_s)
    plain = PlainSwapGllm if isinstance(setting, GllmSetting) else PlainSwap
    cases.assert_same(simulate(replace(world, costs=costs)), plain(requests, setting, host).run())


# -- vLLM V1 --------------------------------------------------------------------------------------


def requests_alike(rng: Random, *, caching: bool) -> list[Request]:
    """Some come at once, and some begin alike."""
    gap_s, arrival_s, requests = rng.choice([0.0, 0.0137, 0.21]), 0.0, []
    for number in range(rng.choice([4, 12, 25])):
        arrival_s += gap_s * rng.random()
        prompt, output = rng.randint(1, 60), rng.choice([1, 2, rng.randint(1, 40)])
        blocks = tuple(rng.randint(0, 1) for _ in range((prompt + output) // BLOCK_TOKENS + 1))
        prefix = Prefix(blocks, BLOCK_TOKENS, prompt + output) if caching else None
        requests.append(Request(number, arrival_s, prompt, output, prefix=prefix))
    return requests


VLLM_MODES = [
    *("sync", "caching", "v1", "v2", "v1 caching", "v2 caching"),
    *("seats", "decodes", "tokens"),
]


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("mode", VLLM_MODES)
def test_vllm_v1(mode: str, seed: int) -> None:
    rng = Random(f"{mode} {seed}")
    setting = cases.vllm_setting(rng, mode)
    requests = requests_alike(rng, caching=setting.caching)
    changes = {"max_in_flight": setting.places, "prefix_cache": setting.caching}
    result = simulate(cases.world_of(requests, setting, **changes))
    cases.assert_same(result, PlainVllm(requests, setting).run())


# -- replicas with each router, and closed loops --------------------------------------------------

ROUTERS: list[Router] = ["round_robin", "least_outstanding", "prefix_affinity"]


def prefix_of(rng: Random) -> Prefix | None:
    """One of a few conversations, each block of which has two continuations."""
    blocks = [rng.randint(0, 1)]
    while len(blocks) < rng.randint(1, 6):
        blocks.append(10 * blocks[-1] + rng.randint(0, 1))
    return rng.choice([None, Prefix(tuple(blocks), len(blocks) * 8, 8)])


def requests_apart(rng: Random) -> list[Request]:
    """No two arrive or end at one instant, but where a closed loop has them arrive together."""
    prompts = rng.sample(range(1, 61), rng.randint(2, 40))
    times_s = sorted(rng.random() * rng.choice([0.1, 0.5]) for _ in prompts)
    return [
        Request(i, times_s[i], prompt, rng.randint(1, 40), prefix=prefix_of(rng))
        for i, prompt in enumerate(prompts)
    ]


def assert_replicas_agree(
    rng: Random, requests: list[Request], count: int, router: Router, concurrency: int | None
) -> None:
    setting = cases.setting_of(rng, rng.choice(PREEMPTING), [*FEW_PAGES, 28, 60])
    costs = {"per_token_s": rng.choice([0.00010137, 0.0010193]), "per_context_s": 1.31e-5}
    setting = replace(setting, **costs)
    pipelines = [cases.plain_of([], setting) for _ in range(count)]
    PlainReplicas(requests, pipelines, router, concurrency).run()
    changes = {"replicas": count, "router": router, "concurrency": concurrency}
    results = simulate_replicas(cases.world_of(requests, setting, **changes))
    for result, pipeline in zip(results, pipelines, strict=True):
        assert result.request_id.tolist() == [row.index for row in pipeline.rows]
        cases.close(result.arrival_s, [row.arrival_s for row in pipeline.rows])
        cases.assert_same(result, pipeline)


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("router", ROUTERS)
def test_replicas(router: Router, seed: int) -> None:
    rng = Random(seed)
    assert_replicas_agree(rng, requests_apart(rng), rng.randint(2, 4), router, None)


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("replicas", [1, 3])
def test_closed_loop(replicas: int, seed: int) -> None:
    rng = Random(seed)
    requests, router, concurrency = requests_apart(rng), rng.choice(ROUTERS), [1, 2, 5, 12]
    assert_replicas_agree(rng, requests, replicas, router, rng.choice(concurrency))
