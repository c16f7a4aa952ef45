"""The summary of a run against vLLM's definitions, written out over every request and token."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.costs import AffineCost
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from sim import World, simulate
from tests.oracle.plain import Plain, Row, Setting
from tests.oracle.test_plain_oracle import poisson_requests, world_of

SETTING = Setting("sarathi", depth=4, total_pages=120, max_model_len=2_048, per_context_s=1e-7)
LIMITS_MS = {"ttft": 150.0, "tpot": 40.0, "e2el": 1500.0}


def load() -> list[Request]:
    """Requests of which the first fits nowhere, and some have one output token."""
    first, *others = poisson_requests(seed=3, count=120, rate_per_s=9.7)
    return [replace(first, prompt_tokens=10_000), *others]


@pytest.fixture(scope="module")
def summary() -> dict[str, float]:
    found: dict[str, float] = summarize(simulate(world_of(load(), SETTING)), LIMITS_MS)
    return found


@pytest.fixture(scope="module")
def served() -> list[Row]:
    """The served requests with the times of their tokens, as the naive simulator has them."""
    return [row for row in Plain(load(), SETTING).run().rows if row.token_s]


def ttft_ms(row: Row) -> float:
    return (row.token_s[0] - row.arrival_s) * 1e3


def e2el_ms(row: Row) -> float:
    return (row.token_s[-1] - row.arrival_s) * 1e3


def tpot_ms(row: Row) -> float:
    return (e2el_ms(row) - ttft_ms(row)) / (row.output - 1) if row.output > 1 else 0.0


def test_the_load_is_a_test(served: list[Row]) -> None:
    assert len(served) == 119
    assert sum(row.output == 1 for row in served) > 1
    assert sum(row.preemptions for row in served) > 1


def test_latencies(summary: dict[str, float], served: list[Row]) -> None:
    pooled = {
        "ttft": [ttft_ms(row) for row in served],
        "tpot": [tpot_ms(row) for row in served if row.output > 1],
        "itl": [gap_s * 1e3 for row in served for gap_s in np.diff(row.token_s)],
        "e2el": [e2el_ms(row) for row in served],
    }
    for name, values in pooled.items():
        expected = {
            f"mean_{name}_ms": np.mean(values),
            f"median_{name}_ms": np.median(values),
            f"std_{name}_ms": np.sqrt(np.mean(np.square(values - np.mean(values)))),
            **{f"p{p}_{name}_ms": np.percentile(values, p) for p in (50, 90, 95, 99)},
        }
        assert {key: summary[key] for key in expected} == pytest.approx(expected, abs=1e-6)


def test_counts_and_throughput(summary: dict[str, float], served: list[Row]) -> None:
    first_s, *_ = sorted(request.arrival_s for request in load())
    duration = max(row.token_s[-1] for row in served) - first_s
    prompts, outputs = sum(row.prompt for row in served), sum(row.output for row in served)
    good = [
        row
        for row in served
        if ttft_ms(row) <= LIMITS_MS["ttft"]
        and tpot_ms(row) <= LIMITS_MS["tpot"]
        and e2el_ms(row) <= LIMITS_MS["e2el"]
    ]
    assert 0 < len(good) < len(served)
    expected = {
        "duration": duration,
        "completed": len(served),
        "failed": 1,
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(served) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
        "request_goodput": len(good) / duration,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


def test_peaks_are_those_of_whole_seconds_since_the_first_request_that_is_served(
    summary: dict[str, float], served: list[Row]
) -> None:
    start_s = min(row.arrival_s for row in served)
    tokens = Counter(int(token_s - start_s) for row in served for token_s in row.token_s)
    present = Counter(
        second
        for row in served
        for second in range(int(row.arrival_s - start_s), int(row.token_s[-1] - start_s) + 1)
    )
    assert summary["max_output_tokens_per_s"] == max(tokens.values())
    assert summary["max_concurrent_requests"] == max(present.values())


def test_queueing_ends_when_the_first_micro_batch_with_the_prompt_is_scheduled() -> None:
    world = World(
        requests=[Request(0, 0.0, 16, 3), Request(1, 0.25, 16, 1)],
        make_scheduler=lambda: create("static", {"max_num_seqs": 1}, max_model_len=64),
        costs=AffineCost(base_s=0.5, per_token_s=0.0, depth=1),
        depth=1,
        total_pages=100,
        max_model_len=64,
        max_in_flight=1,
    )
    summary = summarize(simulate(world))
    assert summary["mean_queue_ms"] == pytest.approx((0.0 + 1250.0) / 2)
    assert summary["p90_queue_ms"] == pytest.approx(0.9 * 1250.0)


def counted_second_by_second(result: RunResult) -> dict[str, float]:
    """Return the peaks by their definition: every second of the run is looked at."""
    start_s = min(result.arrival_s)
    seconds = range(int(max(result.completion_s) - start_s) + 1)
    tokens = Counter(np.floor(result.returned_s - start_s).tolist())
    for second in tokens:
        at = np.floor(result.returned_s - start_s) == second
        tokens[second] = int(result.sampled_rows[at].sum())
    came, went = np.floor(result.arrival_s - start_s), np.floor(result.completion_s - start_s)
    present = [int(((came <= second) & (second <= went)).sum()) for second in seconds]
    return {
        "max_output_tokens_per_s": max(tokens.values()),
        "max_concurrent_requests": max(present),
    }


@settings(max_examples=25, deadline=None)
@given(
    gaps_s=st.lists(st.floats(0, 30), min_size=1, max_size=12),
    base_s=st.sampled_from([0.01, 0.4, 1.0, 7.0]),
)
def test_peaks_are_those_of_every_second(gaps_s: list[float], base_s: float) -> None:
    requests = [
        Request(index, sum(gaps_s[: index + 1]), 5, 1 + index % 4) for index in range(len(gaps_s))
    ]
    result = simulate(long_world(requests, base_s))
    expected = counted_second_by_second(result)
    assert expected.items() <= summarize(result).items()


def long_world(requests: list[Request], base_s: float = 0.01) -> World:
    return World(requests, lambda: create("sarathi", {}), AffineCost(base_s, 0, 2), 2, 99, 99)


def test_the_length_of_a_run_costs_no_memory() -> None:
    century_s = 3.2e9
    result = simulate(long_world([Request(0, 0.0, 5, 3), Request(1, century_s, 5, 3)]))
    tracemalloc.start()
    peaks = summarize(result)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peaks["max_output_tokens_per_s"], peaks["max_concurrent_requests"]) == (3, 1)
    assert most_bytes < 1e6
