"""The policies with much state of their own against naive ones, on many small random worlds.

Few pages and short prompts, so that caps, reserves, last chunks and evictions all matter.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from evenflow.costs import estimates
from evenflow.schedulers import create
from evenflow.types import Request
from sim import World, simulate
from tests.oracle.plain import ContextCost, Setting
from tests.oracle.plain_engines import PlainEngines
from tests.oracle.plain_gllm import GllmSetting, PlainGllm
from tests.oracle.plain_static import PlainStatic
from tests.oracle.plain_td_pipe import CODE_POINTS, POINTS, PlainTDPipe, TDPipeSetting
from tests.oracle.test_plain_oracle import assert_agree, assert_same, world_of

INSTANTS_S = [0.0, 0.0, 0.005, 0.01, 0.015, 0.0173, 0.05, 0.1]
ANY_TIME_S = [0.00371, 0.0173, 0.0613, 0.1217, 0.2931]
SEEDS = range(60)


def requests_of(
    rng: Random, most: int, prompt: int = 60, output: int = 30, times_s: list[float] = INSTANTS_S
) -> list[Request]:
    drawn = [
        (rng.choice(times_s), rng.randint(1, prompt), rng.randint(1, output))
        for _ in range(rng.randint(2, most))
    ]
    return [Request(number, *each) for number, each in enumerate(sorted(drawn))]


def common(rng: Random) -> dict[str, Any]:
    return {
        "depth": rng.randint(1, 4),
        "max_model_len": 100,
        "dispatch": rng.choice(["stage0", "eager"]),
        "per_token_s": rng.choice([0.0, 0.0001, 0.001]),
        "per_context_s": rng.choice([0.0, 0.00001]),
    }


def world(requests: list[Request], setting: Setting, name: str, params: dict[str, Any]) -> World:
    bases_s = (setting.base_s,) * setting.depth
    costs = ContextCost(bases_s, setting.per_token_s, setting.per_context_s)
    facts: dict[str, Any] = {"max_model_len": setting.max_model_len, **estimates(costs)}
    return World(
        requests=requests,
        make_scheduler=lambda: create(name, params, **facts),
        costs=costs,
        depth=setting.depth,
        total_pages=setting.total_pages,
        max_model_len=setting.max_model_len,
        max_in_flight=None if name == "td_pipe" else setting.depth,
        dispatch="eager" if setting.dispatch == "eager" else "stage0",
    )


# -- gLLM -----------------------------------------------------------------------------------------


def gllm_setting(rng: Random, policy: str) -> GllmSetting:
    return GllmSetting(
        policy,
        total_pages=rng.choice([7, 8, 10, 12, 16, 30, 60]),
        max_batch_rows=rng.choice([None, None, None, 2, 4]),
        iterations=rng.choice([1, 2, 3, 8, 16]),
        max_prefill=rng.choice([1, 7, 16, 32, 64, 256, 2048]),
        min_prefill=rng.choice([0, 1, 4, 32]),
        kv_thresh=rng.choice([0.0, 0.05, 0.1, 0.3, 0.5, 0.9]),
        use_wt=rng.random() < 0.8,
        use_ut=rng.random() < 0.8,
        victim=rng.choice(["latest", "most_pages"]),
        **common(rng),
    )


def gllm_world(requests: list[Request], setting: GllmSetting) -> World:
    keys = ("iterations", "max_prefill", "min_prefill", "kv_thresh", "use_wt", "use_ut", "victim")
    params = {key: getattr(setting, key) for key in (*keys, "max_batch_rows")}
    params["coupled"] = setting.policy == "couple"
    return world(requests, setting, "token_throttling", params)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["throttle", "couple"])
def test_token_throttling(policy: str, seed: int) -> None:
    rng = Random(seed)
    setting = gllm_setting(rng, policy)
    requests = requests_of(rng, most=25, output=40)
    result = simulate(gllm_world(requests, setting))
    assert_same(result, PlainGllm(requests, setting).run())


# -- TD-Pipe --------------------------------------------------------------------------------------


def td_pipe_setting(rng: Random, variant: str) -> TDPipeSetting:
    points = CODE_POINTS if variant == "code" else POINTS
    return TDPipeSetting(
        "td_pipe",
        code=variant == "code",
        total_pages=rng.choice([7, 8, 12, 20, 40, 60, 100]),
        max_prefill=rng.choice([16, 32, 64, 2048]),
        kv_occupancy_ratio=rng.choice([None, None, 0.3, 0.8]),
        request_finish_ratio=rng.choice([None, None, None, 0.05, 0.3, 1.0]),
        work_stealing=rng.random() < 0.8,
        points=rng.choice([points, (1, 2, 4, 8, 16, 32, 64), (8, 16, 24, 32)]),
        **common(rng),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", ["paper", "code"])
def test_td_pipe(variant: str, seed: int) -> None:
    rng = Random(seed)
    setting = td_pipe_setting(rng, variant)
    requests = []
    for request in requests_of(rng, most=60, output=40, times_s=[0.0] * 4 + ANY_TIME_S):
        guess = rng.choice([None, request.output_tokens, rng.randint(1, 40)])
        requests.append(replace(request, predicted_output_tokens=guess))
    keys = ("kv_occupancy_ratio", "request_finish_ratio", "work_stealing")
    params = {key: getattr(setting, key) for key in keys}
    params |= {
        "variant": variant,
        "future_points": list(setting.points),
        "max_num_batched_tokens": setting.max_prefill,
    }
    result = simulate(world(requests, setting, "td_pipe", params))
    assert_same(result, PlainTDPipe(requests, setting).run())


# -- static batching, virtual engines, Sarathi-Serve ----------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_static(seed: int) -> None:
    rng = Random(seed)
    setting = Setting(
        "static",
        total_pages=rng.choice([6, 20, 27, 40, 200]),
        max_num_seqs=rng.choice([1, 2, 5, 8, 16, 128]),
        max_batch_rows=rng.choice([None, None, 2, 3]),
        **common(rng),
    )
    requests = requests_of(rng, most=30)
    params = {"max_num_seqs": setting.max_num_seqs, "max_batch_rows": setting.max_batch_rows}
    result = simulate(world(requests, setting, "static", params))
    assert_same(result, PlainStatic(requests, setting).run())


def paged_setting(rng: Random, policy: str, pages: list[int]) -> Setting:
    return Setting(
        policy,
        total_pages=rng.choice(pages),
        token_budget=rng.choice([3, 5, 8, 16, 32, 64]),
        max_num_seqs=rng.choice([3, 5, 256, 256]),
        max_batch_rows=rng.choice([None, None, 2, 3]),
        watermark=rng.choice([0.0, 0.01, 0.1, 0.3]),
        **common(rng),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["vllm", "sarathi", "chunked_only"])
def test_virtual_engines(policy: str, seed: int) -> None:
    rng = Random(seed)
    setting = paged_setting(rng, policy, [28, 29, 40, 60, 200])
    requests = requests_of(rng, most=30, times_s=ANY_TIME_S)
    split = replace(world_of(requests, setting), virtual_engines=setting.depth)
    assert_same(simulate(split), PlainEngines(requests, setting).run())


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_prompts_under_a_budget(seed: int) -> None:
    rng = Random(seed)
    setting = paged_setting(rng, "hybrid_only", [7, 8, 10, 12, 16, 28, 60])
    assert_agree(requests_of(rng, most=25, output=40), setting)


@pytest.mark.parametrize("seed", [24, 149, 371, 455, 487, 678, 687, 803, 868, 955, 1006, 2468])
@pytest.mark.parametrize("policy", ["sarathi", "chunked_only"])
def test_chunks_while_pages_are_short(policy: str, seed: int) -> None:
    """Seeds of worlds where a prompt is partly computed when decodes run out of pages."""
    rng = Random(seed)
    setting = paged_setting(rng, policy, [7, 8, 10, 12, 16])
    assert_agree(requests_of(rng, most=14, output=40), setting)
