"""Bounds are never above what is simulated, and a run ends only once it cannot keep its SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.config.build import load_workload
from evenflow.config.run import RunConfig
from evenflow.costs import AffineCost
from evenflow.costs.launches import LaunchedCost
from evenflow.results.metrics import request_metrics
from evenflow.study.bounds import Least, late_by_work, least, refuted
from evenflow.study.deployments import dispatch_of
from evenflow.study.early import EarlyEnd, MissedError, most_beyond
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import Condition, allowed, parse_slo
from evenflow.types import Request
from tests.amounts import many
from tests.sweeps import one_by_one

MODELS: list[dict[str, Any]] = [
    {"model": "Llama-3.1-8B", "gpu": "L20"},
    {"model": "Llama-3.1-8B", "gpu": "H100", "stages": 2, "link": "nvlink-h100"},
    {"model": "Qwen3-30B-A3B", "gpu": "H100", "tensor_parallel": 2, "link": "nvlink-h100"},
    {"costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 1e-4}, "kv": {"pages": 4000}},
    {
        "costs": {"kind": "affine", "base_s": 0, "per_token_s": 2e-4},
        "kv": {"pages": 400},
        "stages": 3,
    },
]
jobs = st.builds(
    lambda model, policy, count, router, trace, rate, seed: RunConfig.model_validate(
        {
            "stages": 1,
            **model,
            "max_model_len": 6400,
            "scheduler": policy,
            "dispatch": dispatch_of(policy),
            "replicas": {"count": count, "router": router},
            "workload": {
                "trace": trace,
                "requests": 30,
                "seed": seed,
                "arrivals": {"kind": "gamma", "rate": rate, "burstiness": 0.3},
            },
        }
    ),
    st.sampled_from(MODELS),
    st.sampled_from(["sarathi", "vllm_v1", "vllm", "sglang", "token_throttling", "orca"]),
    st.integers(1, 3),
    st.sampled_from(["round_robin", "least_outstanding"]),
    st.sampled_from(["azure-conv-sample", "azure-code-sample", "sharegpt-sample"]),
    st.sampled_from([1.0, 10.0, 100.0]),
    st.integers(0, 9),
)


@given(jobs, st.sampled_from([0.02, 0.3, 1.0, 5.0]))
@settings(max_examples=many(60))
def test_no_bound_is_above_what_is_simulated(config: RunConfig, limit_s: float) -> None:
    job = Job(config, load_workload(config, Path()), Path())
    built = job.built()
    assert config.replicas is not None
    found, count = run_job(job, built=built), config.replicas.count
    of = least(built.world.costs)
    latency = request_metrics(found.result)
    status = dict(zip(found.result.request_id, found.result.status, strict=True))
    requests = [each for each in job.workload.requests if status[each.request_id] == "completed"]
    rates = np.array([count / max(of.token_s, 1e-12)])
    (late,) = late_by_work(requests, rates, limit_s)
    assert late <= np.sum(latency.ttft_s > limit_s) <= np.sum(latency.e2el_s > limit_s)
    assert of.step_s <= np.nanmin(latency.tpot_s, initial=np.inf) * (1 + 1e-9)


def test_the_least_step_is_of_decodes_that_a_graph_replays() -> None:
    """Eager it would take 300 launches of 28 us, 8.4 ms."""
    cost = LaunchedCost(AffineCost(0.001, 1e-5, 1), [300 * 28e-6], [90 * 28e-6])
    assert least(cost).step_s == pytest.approx(0.00101)


def test_work_that_does_not_fit_before_the_limits_is_of_the_longest_prompts() -> None:
    """100 tokens/s: of 6 prompts of 100 tokens at once, 3 are done within 3 s."""
    requests = [Request(number, 0.0, 100, 1) for number in range(6)]
    assert late_by_work(requests, np.array([100.0, 50.0, 600.0]), 3.0).tolist() == [3, 5, 0]
    requests[0] = Request(0, 0.0, 300, 1)
    assert late_by_work(requests, np.array([100.0]), 3.0).tolist() == [3]  # 300 + 100 + 100


def test_a_limit_that_too_many_are_beyond_is_refuted_with_its_bound() -> None:
    requests = [Request(number, 0.0, 100, 2) for number in range(10)]
    slow, fast = Least(0.05, 0.01), Least(0.05, 0.0001)
    ttft, tpot = parse_slo(["p50_ttft_ms=3000", "p90_tpot_ms=40"])
    found = refuted(allowed([ttft], 10), requests, [(slow, 1), (slow, 2), (fast, 1)])
    assert [each and (each.beyond, each.most) for each in found] == [(7, 5), None, None]
    (step,) = refuted(allowed([tpot], 10), requests, [(fast, 9)])
    assert step is not None
    assert (step.bound, step.beyond, step.most) == ("one decode step", 10, 1)
    assert allowed(parse_slo(["mean_ttft_ms=1", "p99_itl_ms=1", "attainment=0.9"]), 10) == ()


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9])
def test_with_more_beyond_a_limit_its_percentile_is_beyond(percent: float) -> None:
    for count in (1, 2, 10, 99, 100, 101, 7491):
        most = most_beyond(percent, count)
        for beyond in (most, most + 1):
            values = np.arange(count) >= count - beyond
            assert (np.percentile(values * 1.0, percent) == 1) >= (beyond > most)
            assert (np.percentile(values * 1.0, percent) == 0) <= (beyond <= most)
        assert most_beyond(percent, count + 1) >= most


@given(jobs, st.sampled_from(["ttft", "tpot", "e2el", "queue"]), st.floats(0.001, 10))
@settings(max_examples=many(60))
def test_a_run_ends_early_if_and_only_if_too_many_are_beyond(
    config: RunConfig, name: str, limit_s: float
) -> None:
    job = Job(config, load_workload(config, Path()), Path())
    outcome = run_job(job)
    beyond = int(
        np.sum(getattr(request_metrics(outcome.result), f"{name}_s") * 1e3 > limit_s * 1e3)
    )
    watch = EarlyEnd(allowed([Condition(f"p90_{name}_ms", limit_s * 1e3)], 30))
    if beyond <= most_beyond(90, 30):
        assert run_job(job, watch=watch).summary == outcome.summary
    else:
        with pytest.raises(MissedError, match=f"p90_{name}_ms is beyond its limit"):
            run_job(job, watch=watch)


def test_requests_that_wait_still_count_once_they_are_late(tmp_path: Path) -> None:
    """40 requests at once, 1 s each in turn: after 8 s, 32 wait that had to begin within 5 s."""
    config = RunConfig.model_validate(one_by_one(tmp_path, *["0,1,1"] * 40))
    job = Job(config, load_workload(config, Path()), Path())
    with pytest.raises(MissedError) as missed:
        run_job(job, watch=EarlyEnd(allowed(parse_slo(["p50_ttft_ms=5500"]), 40)))
    assert missed.value.done == 8
