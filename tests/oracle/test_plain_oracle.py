"""Evenflow against the naive simulator of `plain`: every request, every micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from sim import World, simulate
from tests.oracle.plain import ContextCost, Plain, Setting
from tests.oracle.plain_engines import PlainEngines

PLENTY_OF_PAGES = 20_000
MODEL_LEN = 2_048
TOLERANCE_S = 1e-9
POLICIES = ["sarathi", "chunked_only", "vllm", "orca"]
SARATHI_MODES = {
    "sarathi": "hybrid",
    "chunked_only": "chunked_only",
    "hybrid_only": "hybrid_only",
}
DISPATCHES = ["stage0", "eager"]


def world_of(requests: list[Request], setting: Setting) -> World:
    name = "sarathi" if setting.policy in SARATHI_MODES else setting.policy
    params: dict[str, Any] = {
        "max_num_seqs": setting.max_num_seqs,
        "max_batch_rows": setting.max_batch_rows,
    }
    if name != "orca":
        params["watermark"] = setting.watermark
    if name == "sarathi":
        mode = SARATHI_MODES[setting.policy]
        params |= {"token_budget": setting.token_budget, "mode": mode}
    bases_s = (setting.base_s,) * setting.depth
    return World(
        requests=requests,
        make_scheduler=lambda: create(name, params, max_model_len=setting.max_model_len),
        costs=ContextCost(bases_s, setting.per_token_s, setting.per_context_s),
        depth=setting.depth,
        total_pages=setting.total_pages,
        max_model_len=setting.max_model_len,
        max_in_flight=setting.depth,
        dispatch="eager" if setting.dispatch == "eager" else "stage0",
    )


def poisson_requests(seed: int, count: int = 200, rate_per_s: float = 12.0) -> list[Request]:
    """Poisson arrivals, prompts of 1 to 900 tokens (median about 200), outputs of 1 to 60."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts = np.clip(rng.lognormal(5.3, 0.9, count), 1, 900).astype(int)
    outputs = rng.integers(1, 61, count)
    return [
        Request(i, float(arrivals_s[i]), int(prompts[i]), int(outputs[i])) for i in range(count)
    ]


def assert_agree(requests: list[Request], setting: Setting) -> RunResult:
    """Run both and compare all that happened; return Evenflow's result."""
    result = simulate(world_of(requests, setting))
    assert_same(result, Plain(requests, setting).run())
    return result


def assert_same(result: RunResult, plain: Plain | PlainEngines) -> None:
    """Compare all that happened in two runs of the same requests."""
    rows = plain.rows
    sent = np.array(plain.sent, dtype=float).reshape(-1, 4)
    assert np.array_equal(result.prefill_tokens, sent[:, 1])
    assert np.array_equal(result.decode_tokens, sent[:, 2])
    assert np.array_equal(result.free_pages, sent[:, 3])
    close(result.scheduled_s, sent[:, 0])
    served = [row for row in rows if row.token_s]
    assert result.status == ["completed" if row.token_s else "rejected" for row in rows]
    assert result.preemptions.tolist() == [row.preemptions for row in rows]
    done = np.array([bool(row.token_s) for row in rows], dtype=bool)
    close(result.first_token_s[done], [row.token_s[0] for row in served])
    close(result.completion_s[done], [row.token_s[-1] for row in served])
    gaps_s = np.concatenate([np.zeros(0), *(np.diff(row.token_s) for row in served)])
    close(np.sort(np.repeat(result.gap_s, result.gap_count)), np.sort(gaps_s))


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE_S)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
class TestTwoHundredPoissonRequests:
    def setting(self, policy: str, depth: int, dispatch: str, **changes: Any) -> Setting:
        setting = Setting(policy, depth, PLENTY_OF_PAGES, MODEL_LEN, dispatch)
        return replace(setting, **changes)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_ample_pages(self, policy: str, depth: int, dispatch: str, seed: int) -> None:
        setting = self.setting(policy, depth, dispatch)
        result = assert_agree(poisson_requests(seed), setting)
        assert result.preemptions.sum() == 0

    def test_few_pages(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, total_pages=80, max_model_len=1_000)
        result = assert_agree(poisson_requests(2, rate_per_s=40.0), setting)
        assert (result.preemptions.sum() >= 20) == (policy != "orca")

    def test_rows_of_a_micro_batch_bind(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, max_batch_rows=3)
        requests = poisson_requests(3, rate_per_s=40.0)
        capped = assert_agree(requests, setting)
        free = simulate(world_of(requests, replace(setting, max_batch_rows=None)))
        assert capped.completion_s.max() > free.completion_s.max()

    def test_running_requests_bind(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, max_num_seqs=5)
        requests = poisson_requests(4, rate_per_s=40.0)
        capped = assert_agree(requests, setting)
        free = simulate(world_of(requests, replace(setting, max_num_seqs=256)))
        assert capped.completion_s.max() > free.completion_s.max()

    def test_context_counts(self, policy: str, depth: int, dispatch: str) -> None:
        setting = self.setting(policy, depth, dispatch, total_pages=120, max_model_len=1_000)
        assert_agree(poisson_requests(5), replace(setting, per_context_s=3e-7))


@pytest.mark.parametrize("depth", [1, 4])
def test_whole_prompts_are_chunks_under_a_budget_that_never_binds(depth: int) -> None:
    setting = Setting("hybrid_only", depth, 80, 1_000, token_budget=10**6)
    result = assert_agree(poisson_requests(6, rate_per_s=40.0), setting)
    assert result.preemptions.sum() >= 20


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[Request], Setting]:
    """A few short requests, many at one instant, in pools that hold a few of them."""
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
    requests = [Request(i, *entry) for i, entry in enumerate(drawn)]
    return requests, setting


@settings(max_examples=200, derandomize=True)
@given(small_cases())
def test_small_cases(case: tuple[list[Request], Setting]) -> None:
    assert_agree(*case)
