"""Worlds of Evenflow and of the naive simulators: drawn, said to both, and compared.

Few pages and short prompts, so that caps, reserves, last chunks and evictions all matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from evenflow.costs import estimates
from evenflow.engines.loop import EngineLoop
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.sim import World, simulate
from evenflow.types import Request
from tests.oracle.plain import ContextCost, Plain, Setting
from tests.oracle.plain_gllm import GllmSetting, PlainGllm, PlainStatic
from tests.oracle.plain_replicas import PlainEngines
from tests.oracle.plain_td_pipe import CODE_POINTS, POINTS, PlainTDPipe, TDPipeSetting
from tests.oracle.plain_vllm import PlainVllm, VllmSetting

TOLERANCE_S = 1e-9
INSTANTS_S = [0.0, 0.0, 0.005, 0.01, 0.015, 0.0173, 0.05, 0.1]
ANY_TIME_S = [0.00371, 0.0173, 0.0613, 0.1217, 0.2931]

CAPS = ("max_num_seqs", "max_batch_rows")
PAGED = (*CAPS, "watermark")
GLLM = (
    *("iterations", "max_prefill", "min_prefill", "kv_thresh", "use_wt", "use_ut", "victim"),
    "max_batch_rows",
)
TD_PIPE = (
    *("kv_occupancy_ratio", "request_finish_ratio", "work_stealing", "variant", "future_points"),
    "max_num_batched_tokens",
)
SCHEDULERS: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, Any]]] = {
    "static": ("static", CAPS, {}),
    "orca": ("orca", CAPS, {}),
    "vllm": ("vllm", PAGED, {}),
    "sarathi": ("sarathi", (*PAGED, "token_budget"), {"mode": "hybrid"}),
    "chunked_only": ("sarathi", (*PAGED, "token_budget"), {"mode": "chunked_only"}),
    "hybrid_only": ("sarathi", (*PAGED, "token_budget"), {"mode": "hybrid_only"}),
    "throttle": ("token_throttling", GLLM, {}),
    "couple": ("token_throttling", GLLM, {"coupled": True}),
    "td_pipe": ("td_pipe", TD_PIPE, {}),
    "vllm_v1": (
        "vllm_v1",
        ("max_num_batched_tokens", "max_num_seqs", "watermark", "async_scheduling"),
        {},
    ),
    "vllm_balanced": (
        "vllm_balanced",
        ("max_num_batched_tokens", "max_num_seqs", "watermark", "async_scheduling", "share"),
        {},
    ),
}
"""Evenflow's name of a policy, its parameters that a setting has, and further ones."""


def world_of(requests: list[Request], setting: Setting, **changes: Any) -> World:
    """Return what Evenflow serves as the naive simulators serve a setting."""
    name, keys, more = SCHEDULERS[setting.policy]
    params = {key: getattr(setting, key) for key in keys} | more
    bases_s = (setting.base_s,) * setting.depth
    costs = ContextCost(bases_s, setting.per_token_s, setting.per_context_s)
    facts = {"max_model_len": setting.max_model_len, "depth": setting.depth, **estimates(costs)}
    asking: dict[str, Any] = {"dispatch": setting.dispatch}
    if setting.dispatch == "engine_loop":
        asking = {"loop": EngineLoop}
    return World(
        requests=requests,
        make_scheduler=lambda: create(name, params, **facts),
        costs=costs,
        depth=setting.depth,
        total_pages=setting.total_pages,
        max_model_len=setting.max_model_len,
        **{"max_in_flight": setting.depth, **asking, **changes},
    )


def plain_of(requests: list[Request], setting: Setting) -> Plain:
    """Return the naive simulator of a setting."""
    if isinstance(setting, TDPipeSetting):
        return PlainTDPipe(requests, setting)
    if isinstance(setting, GllmSetting):
        return PlainGllm(requests, setting)
    return (PlainStatic if setting.policy == "static" else Plain)(requests, setting)


# -- comparisons ----------------------------------------------------------------------------------


def assert_agree(requests: list[Request], setting: Setting, **changes: Any) -> RunResult:
    """Run both and compare all that happened; return Evenflow's result."""
    result = simulate(world_of(requests, setting, **changes))
    assert_same(result, plain_of(requests, setting).run())
    return result


def assert_same(result: RunResult, plain: Plain | PlainEngines | PlainVllm) -> None:
    """Compare all that happened in two runs of the same requests."""
    assert_same_batches(result, plain.sent)
    assert_same_requests(result, [row.token_s for row in plain.rows])
    assert result.preemptions.tolist() == [row.preemptions for row in plain.rows]


def assert_same_batches(result: RunResult, sent: list[tuple[float, int, int, int]]) -> None:
    table = np.array(sent, dtype=float).reshape(-1, 4)
    assert np.array_equal(result.prefill_tokens, table[:, 1])
    assert np.array_equal(result.decode_tokens, table[:, 2])
    assert np.array_equal(result.free_pages, table[:, 3])
    close(result.scheduled_s, table[:, 0])


def assert_same_requests(result: RunResult, token_s: list[list[float]]) -> None:
    """Compare the times of each request's tokens; one without any was rejected."""
    assert result.status == ["completed" if times_s else "rejected" for times_s in token_s]
    done = np.array([bool(times_s) for times_s in token_s], dtype=bool)
    served = [times_s for times_s in token_s if times_s]
    assert list(map(len, served)) == result.output_tokens[done].tolist()
    close(result.first_token_s[done], [times_s[0] for times_s in served])
    close(result.completion_s[done], [times_s[-1] for times_s in served])
    gaps_s = np.concatenate([np.zeros(0), *map(np.diff, served)])
    close(np.sort(np.repeat(result.gap_s, result.gap_count)), np.sort(gaps_s))


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE_S)


# -- draws ----------------------------------------------------------------------------------------


def requests_of(
    rng: Random, most: int, prompt: int = 60, output: int = 30, times_s: list[float] = INSTANTS_S
) -> list[Request]:
    drawn = [
        (rng.choice(times_s), rng.randint(1, prompt), rng.randint(1, output))
        for _ in range(rng.randint(2, most))
    ]
    return [Request(number, *each) for number, each in enumerate(sorted(drawn))]


def poisson_requests(seed: int, count: int, rate_per_s: float) -> list[Request]:
    """Poisson arrivals, prompts of 1 to 900 tokens (median about 200), outputs of 1 to 60."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts = np.clip(rng.lognormal(5.3, 0.9, count), 1, 900).astype(int)
    outputs = rng.integers(1, 61, count)
    return [
        Request(i, float(arrivals_s[i]), int(prompts[i]), int(outputs[i])) for i in range(count)
    ]


def guessed(rng: Random, requests: list[Request]) -> list[Request]:
    """Return the requests with the lengths that a predictor says, or does not."""
    outputs = [request.output_tokens for request in requests]
    guesses = [rng.choice([None, output, rng.randint(1, 40)]) for output in outputs]
    pairs = zip(requests, guesses, strict=True)
    return [replace(request, predicted_output_tokens=guess) for request, guess in pairs]


def common(rng: Random) -> dict[str, Any]:
    return {
        "depth": rng.randint(1, 4),
        "max_model_len": 100,
        "dispatch": rng.choice(["stage0", "eager"]),
        "per_token_s": rng.choice([0.0, 0.0001, 0.001]),
        "per_context_s": rng.choice([0.0, 0.00001]),
    }


def setting_of(rng: Random, policy: str, pages: list[int]) -> Setting:
    """Draw a setting of one of gLLM's policies, or of one that admits whole prompts by pages."""
    if policy not in ("throttle", "couple"):
        return Setting(
            policy,
            total_pages=rng.choice(pages),
            token_budget=rng.choice([3, 5, 8, 16, 32, 64]),
            max_num_seqs=rng.choice([3, 5, 256, 256]),
            max_batch_rows=rng.choice([None, None, 2, 3]),
            watermark=rng.choice([0.0, 0.01, 0.1, 0.3]),
            **common(rng),
        )
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


def td_pipe_setting(rng: Random, variant: str) -> TDPipeSetting:
    points = CODE_POINTS if variant == "code" else POINTS
    return TDPipeSetting(
        "td_pipe",
        variant=variant,
        total_pages=rng.choice([7, 8, 12, 20, 40, 60, 100]),
        max_num_batched_tokens=rng.choice([16, 32, 64, 2048]),
        kv_occupancy_ratio=rng.choice([None, None, 0.3, 0.8]),
        request_finish_ratio=rng.choice([None, None, None, 0.05, 0.3, 1.0]),
        work_stealing=rng.random() < 0.8,
        future_points=rng.choice([points, [1, 2, 4, 8, 16, 32, 64], [8, 16, 24, 32]]),
        **common(rng),
    )


def vllm_setting(rng: Random, mode: str) -> VllmSetting:
    max_num_seqs = rng.choice([2, 4, 16])
    share = mode if mode in ("seats", "decodes", "tokens") else None
    return VllmSetting(
        "vllm_balanced" if share else "vllm_v1",
        share=share,
        depth=1 if "v1" in mode else rng.choice([1, 2, 3, 4]),
        total_pages=rng.choice([7, 9, 12, 20, 200]),
        max_model_len=4096,
        dispatch="engine_loop",
        max_num_batched_tokens=max(max_num_seqs, rng.choice([16, 48, 256])),
        max_num_seqs=max_num_seqs,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        async_scheduling=mode[:2] if mode[:2] in ("v1", "v2") else False,
        caching="caching" in mode,
        base_s=rng.choice([0.0213, 0.00517]),
        per_token_s=rng.choice([0.0, 0.00011]),
    )
