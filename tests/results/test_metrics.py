"""The summary of a run against vLLM's definitions, written out over every request and token."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenflow.costs import AffineCost
from evenflow.engines.pools import PooledWorld
from evenflow.results.load import growth, student_cdf, student_quantile
from evenflow.results.metrics import PERCENTILES, meets, statistics, summarize
from evenflow.results.run import RunResult
from evenflow.sim import World, simulate
from evenflow.types import Request
from tests.oracle.cases import poisson_requests, world_of
from tests.oracle.plain import Plain, Row, Setting
from tests.worlds import small_world

SETTING = Setting("sarathi", depth=4, total_pages=120, max_model_len=2_048, per_context_s=1e-7)
LIMITS_MS = {"ttft": 150.0, "tpot": 40.0, "e2el": 1500.0}


def load() -> list[Request]:
    """Requests of which the first fits nowhere, and some have one output token."""
    first, *others = poisson_requests(seed=3, count=120, rate_per_s=9.7)
    return [replace(first, prompt_tokens=10_000), *others]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 300)), min_size=1, max_size=40),
    st.sampled_from([128, 1 << 20]),
    st.sampled_from([1, 3, 1 << 20]),
)
@example([(0.31, 1), (0.42, 1), (0.83, 1), (0.41, 1)], 128, 3)  # from above, p90 has another digit
def test_gaps_with_counts_have_the_statistics_of_each_gap(
    gaps: list[tuple[float, int]], at_once: int, sampled: int
) -> None:
    values_s, counts = (np.array(column) for column in zip(*gaps, strict=True))
    each_ms = np.repeat(values_s, counts) * 1e3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenflow.results.metrics.AT_ONCE", at_once)
        patch.setattr("evenflow.results.metrics.SAMPLED", sampled)
        found = statistics("itl", values_s, counts)
    if not len(each_ms):
        assert found == {key: None for key in NO_LATENCY if "_itl_" in key}
        return
    points = np.percentile(each_ms, PERCENTILES).tolist()
    assert found == {
        "mean_itl_ms": each_ms.mean(),
        "median_itl_ms": np.median(each_ms),
        "std_itl_ms": each_ms.std(),
        **{f"p{p}_itl_ms": at for p, at in zip(PERCENTILES, points, strict=True)},
    }


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
    requests = [Request(0, 0.0, 16, 3), Request(1, 0.25, 16, 1)]
    sizes = {"times_s": (0.5, 0.0), "max_model_len": 64}
    world = small_world(requests, "static", {"max_num_seqs": 1}, **sizes)
    summary = summarize(simulate(world))
    assert summary["mean_queue_ms"] == pytest.approx((0.0 + 1250.0) / 2)
    assert summary["p90_queue_ms"] == pytest.approx(0.9 * 1250.0)


def on_the_second(outputs: list[int]) -> RunResult:
    """Requests that arrive a second apart, of 16 prompt tokens and so many of output; each
    micro-batch takes a second, so that tokens come on the second."""
    requests = [Request(index, float(index), 16, output) for index, output in enumerate(outputs)]
    return simulate(small_world(requests))


def test_the_steady_window_has_its_first_instant_and_not_its_last() -> None:
    """Of 11 requests the second arrives at 1 s and the tenth at 9 s; tokens come at these too."""
    result = on_the_second([1, 2, 3, 1, 5, 1, 2, 1, 1, 1, 1])
    summary = summarize(result)
    inside = [1 <= at < 9 for at in result.returned_s]
    output = sum(result.sampled_rows[inside])
    prompts = sum(16 for at in result.first_token_s if 1 <= at < 9)
    assert {1.0, 9.0} <= set(result.returned_s) & set(result.first_token_s)
    assert (summary["steady_start_s"], summary["steady_stop_s"]) == (1, 9)
    assert summary["steady_output_throughput"] == output / 8
    assert summary["steady_total_token_throughput"] == (output + prompts) / 8


@pytest.mark.parametrize(("last", "window"), [(70, (1, 9)), (71, (8.1, 72.9))])
def test_where_all_arrive_within_a_tenth_of_the_run_the_window_is_a_part_of_it(
    last: int, window: tuple[float, float]
) -> None:
    """Arrivals fill 8 s, less two tenths of the requests: a tenth of 80 s, but not of 81 s."""
    summary = summarize(on_the_second([*[1] * 10, last]))
    assert (summary["steady_start_s"], summary["steady_stop_s"]) == pytest.approx(window)


def one_a_second(times_s: Iterable[float]) -> dict[str, float]:
    """Return the summary of prompts that arrive at these times, of which one a second is served."""
    requests = [Request(index, at_s, 16, 1) for index, at_s in enumerate(sorted(times_s))]
    found: dict[str, float] = summarize(
        simulate(small_world(requests, "vllm", {"max_num_seqs": 1}))
    )
    return found


@pytest.mark.parametrize(
    ("every_s", "served", "overloaded"),
    [(2.0, 0.5, 0), (1.0, 1.0, 0), (0.95, 1.0, None), (0.5, 1, 1)],
)
def test_what_arrives_faster_than_it_is_served_is_an_overload(
    every_s: float, served: float, overloaded: int | None
) -> None:
    """One a second is served at most; 200 requests are too few to tell 5 % above that."""
    summary = one_a_second(index * every_s for index in range(201))
    assert summary["offered_requests_per_s"] == pytest.approx(1 / every_s)
    assert summary["offered_tokens_per_s"] == pytest.approx(17 / every_s)
    assert summary["served_requests_per_s"] == pytest.approx(served, rel=0.03)
    assert summary["queue_growth_per_s"] == pytest.approx(1 / every_s - served, abs=0.03)
    assert summary["overloaded"] == overloaded


@pytest.mark.parametrize(
    ("times_s", "least_ms"),
    [
        ([*(2.0 * index for index in range(200)), *[250.0] * 40], 30e3),
        ([*np.arange(0, 10, 0.25), *np.arange(10, 110, 1.0)], 0),
        ([0.0, *np.arange(50, 90, 1.25), *np.arange(90, 100, 0.2)], 0),
    ],
    ids=["a burst that is worked off", "early", "at the very end"],
)
def test_a_queue_that_grows_for_a_while_is_no_overload(
    times_s: list[float], least_ms: float
) -> None:
    """Forty at once amid one every two seconds; or no more than one a second come in the second
    and most of the last quarter. So few requests do not tell that it will not grow again."""
    summary = one_a_second(times_s)
    assert summary["p99_ttft_ms"] > least_ms
    assert summary["overloaded"] is None


def queue(seed: int, count: int, load: float, service: str) -> tuple[Any, Any]:
    """Return when Poisson requests of one server arrive and leave, as Lindley's equation says."""
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(1.0, count))
    took = load * (rng.exponential(1.0, count) if service == "M" else np.ones(count))
    done = np.cumsum(took)
    return arrived, done + np.maximum.accumulate(arrived - done + took)


@pytest.mark.parametrize("service", ["D", "M"])
def test_of_an_overload_there_are_few_false_alarms_and_few_are_missed(service: str) -> None:
    """At most 1 % of runs at 0.95 of the capacity and less, which gives 4 of 100 once in 50 times;
    95 % of growths by 15 % and, in longer runs, by 5 %. At most 5 % of 1,000 are too short."""

    def verdicts(count: int, load: float) -> Counter[bool | None]:
        runs = (queue(seed, count, load, service) for seed in range(100))
        return Counter(growth(*run).overloaded for run in runs)

    assert verdicts(200, 0.95)[True] <= 3
    for load in (0.5, 0.9, 0.95):
        found = verdicts(1000, load)
        assert found[True] <= 3
        assert found[None] <= 5
    assert verdicts(1000, 1 / 0.85)[True] >= 95
    assert verdicts(10_000, 1 / 0.95)[True] >= 95


def test_a_run_that_is_shorter_than_its_warm_up_does_not_tell_whether_it_keeps_up() -> None:
    """Each gets its first token at once, and its last one 10 s after; all arrive within 4 s."""
    requests = [Request(index, 0.1 * index, 16, 1000) for index in range(41)]
    world = small_world(requests, "vllm", times_s=(0.01, 0.0), total_pages=9999, max_model_len=2000)
    summary = summarize(simulate(world))
    keys = ("served_requests_per_s", "queue_growth_per_s", "overloaded")
    assert [summary[key] for key in keys] == [0, pytest.approx(10), None]


def test_a_short_run_whose_requests_mostly_wait_for_their_first_token_is_an_overload() -> None:
    """All 20 arrive within 1.9 s, and one a second is served: the last one waits for 18 s."""
    summary = one_a_second(0.1 * index for index in range(20))
    keys = ("offered_requests_per_s", "served_requests_per_s", "overloaded")
    assert [summary[key] for key in keys] == [pytest.approx(10), pytest.approx(1, abs=0.5), 1]
    assert one_a_second([0.0, 0.5, 2.0])["overloaded"] is None


def test_what_is_served_and_how_much_the_queue_grows_add_up_to_what_arrives() -> None:
    """Most arrive within 40 of 100 s, five a second; at the end 136 of 220 are not done."""
    summary = one_a_second([*np.arange(0, 100, 5.0), *np.arange(30, 70, 0.2)])
    served, grows = summary["served_requests_per_s"], summary["queue_growth_per_s"]
    assert served + grows == pytest.approx(summary["offered_requests_per_s"])
    assert 0.3 < served < 1.0


def test_the_share_of_busy_time_and_offline_throughput_begin_with_the_first_prefill() -> None:
    """Two requests, of 2 and 3 output tokens, and a stage that is idle from 2 s to 10 s."""
    requests = [Request(0, 0.0, 16, 2), Request(1, 10.0, 16, 3)]
    summary = summarize(simulate(small_world(requests)))
    assert summary["busy_share"] == 5 / 13
    assert summary["offline_duration"] == summary["duration"] == 13
    assert summary["offline_output_throughput"] == 5 / 13
    assert summary["offline_total_throughput"] == 37 / 13
    late = simulate(small_world([Request(0, 3.0, 16, 2)]))
    assert summarize(late)["busy_share"] == 1.0, "from the first arrival on"


NO_LATENCY = {
    f"{part}_{name}_ms": None
    for name in ("ttft", "tpot", "itl", "e2el", "queue")
    for part in ("mean", "median", "std", "p50", "p90", "p95", "p99")
}
NO_RATE = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")


def test_a_run_in_which_nothing_is_completed() -> None:
    """The only request does not fit: its counts are zero, of the others there is no number."""
    world = small_world([Request(0, 0.0, 10_000, 2)], prefix_cache=True)
    summary = summarize(simulate(world), {"ttft": 1.0})
    assert summary == {
        **dict.fromkeys(("duration", "prefix_hit_rate", *NO_RATE), None),
        **dict.fromkeys(("completed", "total_input_tokens", "total_output_tokens"), 0),
        **dict.fromkeys(("max_output_tokens_per_s", "max_concurrent_requests"), 0),
        **NO_LATENCY,
        **dict.fromkeys(("preemptions", "num_micro_batches", "busy_share"), 0),
        "failed": 1,
    }


def test_what_is_refused_is_offered_too() -> None:
    """Of ten requests, one every two seconds, four are too long; the others are served at once."""
    prompts = 2 * [16, 10_000, 16, 10_000, 16]
    requests = [Request(n, 2.0 * n, prompt, 2) for n, prompt in enumerate(prompts)]
    summary = summarize(simulate(small_world(requests)))
    assert (summary["completed"], summary["failed"]) == (6, 4)
    assert summary["offered_requests_per_s"] == 0.5
    assert summary["offered_tokens_per_s"] == 0.5 * (sum(prompts) + 20) / 10
    assert summary["served_requests_per_s"] == pytest.approx(0.3)
    alone = summarize(simulate(small_world([*requests[1:3], requests[3]])))
    assert "overloaded" not in alone
    assert alone["offered_requests_per_s"] == 0.5


def test_pools_in_which_nothing_is_completed_were_not_busy() -> None:
    part = small_world(())
    summary = summarize(simulate(PooledWorld([Request(0, 0.0, 10_000, 2)], part, part)))
    assert [summary[key] for key in summary if key.endswith("busy_share")] == [0, 0, 0, 0]


def test_where_nothing_is_completed_the_time_begins_at_zero() -> None:
    result = simulate(small_world([Request(0, 3.0, 16, 3)]))
    aborted = replace(result, completion_s=np.array([np.nan]), status=("aborted",))
    share = (result.end_s - result.start_s).sum() / result.returned_s[-1]
    assert summarize(aborted)["busy_share"] == pytest.approx(share)


def test_a_run_that_takes_no_time() -> None:
    """What costs nothing has no throughput: zero, not infinite, and no steady window."""
    costs = AffineCost(0.0, 0.0, 1)
    summary = summarize(simulate(small_world([Request(0, 5.0, 16, 3)], costs=costs)), {"ttft": 1})
    assert (
        summary.items()
        >= {
            **dict.fromkeys(("duration", "busy_share", *NO_RATE, *NO_LATENCY), 0),
            "completed": 1,
            "failed": 0,
            "total_output_tokens": 3,
            "max_output_tokens_per_s": 3,
            "max_concurrent_requests": 1,
            **dict.fromkeys(("offline_duration", "offline_output_throughput"), 0),
            "offline_total_throughput": 0,
        }.items()
    )
    assert not [key for key in summary if key.startswith("steady")]


def test_a_preempted_request_that_costs_no_time_keeps_each_gap_between_its_tokens() -> None:
    requests = [Request(number, 0.0, 16, 20) for number in range(2)]
    result = simulate(small_world(requests, costs=AffineCost(0.0, 0.0, 1), total_pages=4))
    assert result.preemptions.sum() > 0
    assert result.gap_count.sum() == 2 * 19


@pytest.mark.parametrize(("limit", "good"), [(1000.0, 2), (999.0, 0), (1500.0, 2), (2000.0, 3)])
def test_a_limit_is_met_by_what_takes_exactly_so_long(limit: float, good: int) -> None:
    """The first tokens of three requests come after 1, 1 and 2 s."""
    requests = [Request(0, 0.0, 16, 2), Request(1, 0.0, 16, 1), Request(2, 1.0, 600, 1)]
    world = small_world(requests, "sarathi", {"token_budget": 512})
    assert int(meets(simulate(world), {"ttft": limit}).sum()) == good


def test_a_limit_on_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="goodput limits are ttft, tpot, e2el, queue, not 'itl'"):
        meets(on_the_second([1]), {"itl": 3.0})


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
    return small_world(requests, depth=2, times_s=(base_s, 0), max_in_flight=None)


def test_the_length_of_a_run_costs_no_memory() -> None:
    century_s = 3.2e9
    result = simulate(long_world([Request(0, 0.0, 5, 3), Request(1, century_s, 5, 3)]))
    tracemalloc.start()
    peaks = summarize(result)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peaks["max_output_tokens_per_s"], peaks["max_concurrent_requests"]) == (3, 1)
    assert most_bytes < 1e6


@given(st.integers(1, 400), st.floats(-9, 9), st.floats(0.5, 0.999))
def test_students_distribution_is_that_of_scipy(
    degrees: int, value: float, probability: float
) -> None:
    special = pytest.importorskip("scipy.special")
    assert student_cdf(value, degrees) == pytest.approx(special.stdtr(degrees, value), abs=1e-12)
    known = special.stdtrit(degrees, probability)
    assert student_quantile(probability, degrees) == pytest.approx(known, rel=1e-9, abs=1e-12)
