"""The simulated world against arithmetic by hand, queueing theory and its own specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evenflow.costs import AffineCost
from evenflow.results.bubbles import attribute
from evenflow.results.run import RunResult
from evenflow.runtimes import Holds
from evenflow.sim import Link, RuntimeOverheads, World, runtimes, simulate
from evenflow.types import Request
from tests.amounts import ALL, many
from tests.oracle.cases import close
from tests.oracle.plain import ContextCost
from tests.worlds import assert_same, small_world

BASE_S, PER_TOKEN_S = 0.005, 0.00002
DISPATCHES = ["stage0", "eager"]


def world_of(
    policy: str, params: dict[str, Any], requests: Sequence[Request], depth: int, **changes: Any
) -> World:
    """A world with affine costs, ample pages and one micro-batch in flight for each stage."""
    sizes = {"depth": depth, "total_pages": 10_000, "max_model_len": 4_096}
    times_s = BASE_S, PER_TOKEN_S
    return small_world(requests, policy, params, times_s=times_s, **(sizes | changes))


def one_by_one(tokens: int, count: int, depth: int, **changes: Any) -> RunResult:
    """Send `count` equal micro-batches of one prompt, which ends with its first token."""
    requests = [Request(i, 0.0, tokens, 1) for i in range(count)]
    return simulate(world_of("vllm", {"max_batch_rows": 1}, requests, depth, **changes))


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_pipeline_fill(count: int, depth: int, dispatch: str) -> None:
    """m equal micro-batches through p stages take (m + p - 1) t."""
    stage_s = BASE_S + 250 * PER_TOKEN_S
    result = one_by_one(250, count, depth, dispatch=dispatch)
    close(result.completion_s.max(), (count + depth - 1) * stage_s)
    starts = (np.arange(count)[:, None] + np.arange(depth)[None, :]) * stage_s
    close(result.start_s, starts)
    close(result.end_s, starts + stage_s)


class TestThousandTokenPrompt:
    """Chunks of 512 and 488 tokens: 5 + 10.24 = 15.24 ms and 5 + 9.76 = 14.76 ms a stage.

    Two decodes of 5 + 0.02 = 5.02 ms a stage bring the second and the third token.
    """

    def run(self, depth: int, **changes: Any) -> RunResult:
        requests = [Request(0, 0.0, 1_000, 3)]
        world = world_of("sarathi", {"token_budget": 512}, requests, depth, **changes)
        return simulate(world)

    @pytest.mark.parametrize("dispatch", DISPATCHES)
    def test_one_stage(self, dispatch: str) -> None:
        result = self.run(1, dispatch=dispatch)
        assert result.prefill_tokens.tolist() == [512, 488, 0, 0]
        close(result.first_token_s, [0.01524 + 0.01476])
        close(result.completion_s, [0.030 + 2 * 0.00502])

    @pytest.mark.parametrize("dispatch", DISPATCHES)
    def test_four_stages(self, dispatch: str) -> None:
        """The second chunk waits until the first has left the last stage."""
        result = self.run(4, dispatch=dispatch)
        assert result.prefill_tokens.tolist() == [512, 488, 0, 0]
        close(result.scheduled_s, [0.0, 0.06096, 0.120, 0.14008])
        close(result.first_token_s, [4 * 0.01524 + 4 * 0.01476])
        close(result.completion_s, [0.120 + 2 * 4 * 0.00502])

    def test_four_stages_with_pipelined_chunks(self) -> None:
        """The second chunk follows the first, which is slower, from stage to stage."""
        result = self.run(4, pipelined_chunks=True)
        close(result.scheduled_s[:2], [0.0, 0.01524])
        close(result.first_token_s, [4 * 0.01524 + 0.01476])
        close(result.completion_s, [0.07572 + 2 * 4 * 0.00502])


class TestQueue:
    """Requests of one token, one a micro-batch, one stage: a queue with a constant service."""

    def waits_s(self, rho: float, count: int) -> tuple[np.ndarray, np.ndarray, float]:
        service_s = BASE_S + 250 * PER_TOKEN_S
        gaps_s = np.random.default_rng(7).exponential(service_s / rho, count)
        arrivals_s = np.cumsum(gaps_s)
        requests = [Request(i, at_s, 250, 1) for i, at_s in enumerate(arrivals_s.tolist())]
        result = simulate(world_of("vllm", {"max_batch_rows": 1}, requests, 1))
        return result.first_token_s - result.arrival_s - service_s, gaps_s, service_s

    def test_lindley_recursion(self) -> None:
        """wait[i] = max(0, wait[i - 1] + service - gap[i]), for each request."""
        waits_s, gaps_s, service_s = self.waits_s(rho=0.8, count=2_000)
        expected_s = [0.0]
        for gap_s in gaps_s[1:]:
            expected_s.append(max(0.0, expected_s[-1] + service_s - gap_s))
        close(waits_s, expected_s)

    def test_mean_wait_of_m_d_1(self) -> None:
        """rho / (2 (1 - rho)) of a service (Pollaczek-Khinchine) lies in the 99 % interval that 20
        batches of 1,000 waits give, and half of the interval is less than 10 % of it."""
        waits_s, _, service_s = self.waits_s(rho=0.5, count=20_000)
        means_s = waits_s.reshape(20, 1_000).mean(axis=1)
        half_s = stats.t.ppf(0.995, 19) * means_s.std(ddof=1) / np.sqrt(20)
        expected_s = 0.5 / (2 * (1 - 0.5)) * service_s
        assert abs(means_s.mean() - expected_s) < half_s < 0.1 * expected_s


class TestLinks:
    """Micro-batches of 100 tokens: 5 + 2 = 7 ms a stage."""

    def test_latency_and_bandwidth(self) -> None:
        """7 ms, then 100 tokens at 10 us and 2 ms of latency, then 7 ms."""
        result = one_by_one(100, 1, 2, link=Link(per_token_s=1e-5, latency_s=0.002))
        close(result.available_s, [[0.0, 0.010]])
        close(result.end_s, [[0.007, 0.017]])

    def test_slow_link_queues_and_latency_does_not_occupy_it(self) -> None:
        """In ms: the first goes at 7 + 10, the second at 17 + 10; each lands 2 later."""
        result = one_by_one(100, 2, 2, link=Link(per_token_s=1e-4, latency_s=0.002))
        close(result.available_s, [[0.0, 0.019], [0.007, 0.029]])
        close(result.end_s, [[0.007, 0.026], [0.014, 0.036]])

    def test_each_hop_has_its_own_link(self) -> None:
        """The first crosses hop 1 from 26 to 36 while the second crosses hop 0 until 27."""
        result = one_by_one(100, 2, 3, link=Link(per_token_s=1e-4, latency_s=0.002))
        close(result.available_s[:, 1], [0.019, 0.029])
        close(result.available_s[:, 2], [0.038, 0.048])

    def test_two_hops_queue_for_a_shared_link(self) -> None:
        """In ms. Hop 0: first 7-17, second 17-27. The first leaves stage 1 at 26 and waits: hop 1
        from 27 to 37. The second leaves stage 1 at 36 and waits: 37-47. Each lands 2 later."""
        link = Link(per_token_s=1e-4, latency_s=0.002, shared=True)
        result = one_by_one(100, 2, 3, link=link)
        close(result.available_s, [[0.0, 0.019, 0.039], [0.007, 0.029, 0.049]])
        close(result.start_s, [[0.0, 0.019, 0.039], [0.007, 0.029, 0.049]])
        close(result.end_s[:, -1], [0.046, 0.056])


class TestRuntimes:
    """Micro-batches of 250 tokens: 5 + 5 = 10 ms a stage."""

    def test_a_share_of_the_execution_is_prepared_before_it(self) -> None:
        """Each stage prepares for 1.7 ms, then computes for 10 ms: 17 % more a stage."""
        result = one_by_one(250, 2, 2, overheads=runtimes()["vllm-share"].stages)
        close(result.start_s, [[0.0017, 0.0134], [0.0134, 0.0251]])
        close(result.end_s, [[0.0117, 0.0234], [0.0234, 0.0351]])
        ideal = one_by_one(250, 2, 2)
        close(result.completion_s.max() / ideal.completion_s.max(), 1.17)

    def test_each_row_of_a_micro_batch_has_inputs(self) -> None:
        """A stage prepares 2 ms and 3 for the only row, then computes for 10 ms."""
        overheads = RuntimeOverheads(prepare_s=0.002, prepare_row_s=0.003)
        result = one_by_one(250, 2, 2, overheads=overheads)
        close(result.end_s, [[0.015, 0.030], [0.030, 0.045]])

    def test_gllm_hides_the_preparation(self) -> None:
        """1.7 ms from when a micro-batch is scheduled, while stage 0 computes it for 10 ms."""
        result = one_by_one(250, 2, 2, overheads=runtimes()["gllm"].stages)
        close(result.end_s, [[0.010, 0.020], [0.020, 0.030]])

    def test_overlapped_preparation_that_is_too_long_shows(self) -> None:
        """In ms, 12 to prepare: stage 1 is ready for the first at 12, for the second (scheduled at
        10) at 12 + 12 = 24. Stage 0 needs none."""
        overheads = RuntimeOverheads(prepare_s=0.012, overlapped=True)
        result = one_by_one(250, 2, 2, overheads=overheads)
        close(result.start_s, [[0.0, 0.012], [0.010, 0.024]])

    def test_the_driver_schedules_one_after_the_other(self) -> None:
        """In ms, 4 to schedule, eager: ready at 4 and 8; stage 0 computes 4-14 and 14-24."""
        overheads = RuntimeOverheads(schedule_s=0.004)
        result = one_by_one(250, 2, 2, overheads=overheads, dispatch="eager")
        close(result.available_s, [[0.004, 0.014], [0.008, 0.024]])
        close(result.end_s, [[0.014, 0.024], [0.024, 0.034]])

    @pytest.mark.parametrize(
        ("holds", "ends_ms"),
        [
            # The host takes 2 ms, 1 a row, 1 a prompt that ends, 0.01 a token and 2.5 for having
            # any, so 9. Stage 0 is asked when it is free: it computes 9-19, then 28-38.
            ("engine", [[19, 29], [38, 48]]),
            ("stage0", [[19, 29], [38, 48]]),
            # The first has no predecessor: 9-19. For the second the host begins at 9, done at 18.
            ("nothing", [[19, 29], [29, 39]]),
        ],
    )
    def test_the_hosts_time(self, holds: Holds, ends_ms: list[list[float]]) -> None:
        overheads = RuntimeOverheads(
            0.002,
            per_row_s=0.001,
            per_new_request_s=0.001,
            per_prompt_token_s=0.00001,
            per_prefill_s=0.0025,
            holds=holds,
        )
        result = one_by_one(250, 2, 2, overheads=overheads)
        close(result.end_s, np.array(ends_ms) / 1000)
        idle = attribute(result).totals()
        assert idle["cpu"] > 0

    @pytest.mark.parametrize(
        ("holds", "starts_ms"),
        [
            # Eager: the host is done at 9 and 18, and stage 0 computes the second when it is free.
            ("engine", [9, 19]),
            ("stage0", [9, 28]),
        ],
    )
    def test_what_the_hosts_time_holds_up(self, holds: Holds, starts_ms: list[float]) -> None:
        overheads = RuntimeOverheads(0.009, holds=holds)
        result = one_by_one(250, 2, 2, overheads=overheads, dispatch="eager")
        close(result.start_s[:, 0], np.array(starts_ms) / 1000)

    @pytest.mark.parametrize("concurrency", [None, 3])
    def test_the_front_end_serves_all_in_turns(self, concurrency: int | None) -> None:
        """In ms, 2 in turns and 2 in order: of three at once all are read at 6, and admitted at 8,
        10 and 12. The engine sees them 1 later, and takes 10 for each."""
        overheads = RuntimeOverheads(front_end_s=0.004, front_end_latency_s=0.001)
        result = one_by_one(250, 3, 1, overheads=overheads, concurrency=concurrency)
        close(result.arrival_s, [0, 0, 0])
        close(result.scheduled_s, [0.009, 0.019, 0.029])

    def test_who_comes_while_the_front_end_is_busy_shares_it(self) -> None:
        """In ms, 4 in turns, at 0, 2 and 20. The first has got 2 alone, and is read when both got 2
        more, at 6; the second is then alone with 2 to go. Then 4 in order: at 10, 14 and 28."""
        requests = [Request(i, at, 250, 1) for i, at in enumerate((0.0, 0.002, 0.020))]
        overheads = RuntimeOverheads(front_end_s=0.008)
        world = world_of("vllm", {"max_batch_rows": 1}, requests, 1, overheads=overheads)
        free = replace(world, costs=AffineCost(0.0001, 0.0, 1))
        close(simulate(free).scheduled_s, [0.010, 0.014, 0.028])

    def test_one_thread_makes_the_tokens_of_prompts_in_order(self) -> None:
        """In ms, 0.01 a token: prompts of 100 and 200 that come at 0 are there at 1 and 3."""
        requests = [Request(0, 0.0, 100, 1), Request(1, 0.0, 200, 1), Request(2, 0.010, 300, 1)]
        overheads = RuntimeOverheads(tokenize_s=1e-5)
        world = world_of("vllm", {"max_batch_rows": 1}, requests, 1, overheads=overheads)
        free = replace(world, costs=AffineCost(0.0001, 0.0, 1))
        close(simulate(free).scheduled_s, [0.001, 0.003, 0.013])


class TestArrangements:
    """Micro-batches of one prompt of 100 tokens take 7 ms a stage, of one decode 5.02 ms."""

    requests = (Request(0, 0.0, 100, 2), Request(1, 0.0, 100, 2))

    def engines(self, depth: int, **changes: Any) -> RunResult:
        return simulate(world_of("orca", {}, self.requests, depth, virtual_engines=2, **changes))

    def test_virtual_engines_on_two_stages(self) -> None:
        """In ms. Each request has an engine, and an engine one micro-batch in flight. Prefills: 0-7
        and 7-14, then 7-14 and 14-21. Decodes: 14-19.02 and 21-26.02, then 21-26.02 and on."""
        result = self.engines(2)
        close(result.scheduled_s, [0.0, 0.007, 0.014, 0.021])
        close(result.first_token_s, [0.014, 0.021])
        close(result.completion_s, [0.02602, 0.03104])

    def test_virtual_engines_take_turns_on_one_stage(self) -> None:
        """In ms. Prefills 0-7 and 7-14, though the first could go on at 7; then decodes."""
        result = self.engines(1)
        close(result.first_token_s, [0.007, 0.014])
        close(result.completion_s, [0.01902, 0.02404])

    def test_virtual_engines_split_the_pages(self) -> None:
        """The longest request takes 4096 / 16 = 256 pages: two engines with 255 each refuse all."""
        assert self.engines(2, total_pages=511).status == ["rejected"] * 2
        assert self.engines(2, total_pages=512).status == ["completed"] * 2

    def test_closed_loop(self) -> None:
        """Two at a time, one a micro-batch: each completion lets one arrive."""
        result = one_by_one(100, 4, 1, concurrency=2)
        close(result.arrival_s, [0.0, 0.0, 0.007, 0.014])
        close(result.completion_s, [0.007, 0.014, 0.021, 0.028])


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("static", {"max_num_seqs": 4}),
    ("orca", {}),
    ("vllm", {}),
    ("sarathi", {"token_budget": 32}),
    ("sarathi", {"token_budget": 16, "max_batch_rows": 3, "mode": "chunked_only"}),
    ("token_throttling", {"iterations": 2, "max_prefill": 48, "min_prefill": 4}),
    ("token_throttling", {"iterations": 3, "max_prefill": 32, "coupled": True}),
]


@st.composite
def worlds(draw: st.DrawFn, plain: bool = False) -> World:
    """Uneven stages; unless `plain`, also costs of context, links, CPUs, engines, closed loops."""
    policy, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 4))
    bases_s = draw(st.lists(st.floats(0.001, 0.01), min_size=depth, max_size=depth))
    arrivals_s = st.sampled_from([0.0, 0.004, 0.011]) | st.floats(0, 0.1)
    lengths = st.tuples(arrivals_s, st.integers(1, 60), st.integers(1, 12))
    entries = sorted(draw(st.lists(lengths, min_size=1, max_size=12)))
    per_context_s = 0.0 if plain else draw(seconds(0.00002))
    changes: dict[str, Any] = {
        "costs": ContextCost(tuple(bases_s), draw(seconds(0.0003)), per_context_s),
        "total_pages": draw(st.sampled_from([24, 40, 1_000])),
        "max_model_len": 80,
        "max_in_flight": draw(st.sampled_from([depth, 1, 2, None])),
        "dispatch": draw(st.sampled_from(DISPATCHES)),
        "pipelined_chunks": draw(st.sampled_from([None, True, False])),
    }
    if not plain:
        changes |= {
            "link": draw(st.none() | st.builds(Link, seconds(0.0003), seconds(0.003))),
            "overheads": draw(st.sampled_from(OVERHEADS)),
            "virtual_engines": draw(st.sampled_from([1, 1, depth])),
            "concurrency": draw(st.sampled_from([None, None, 1, 3])),
        }
    requests = [Request(i, *entry) for i, entry in enumerate(entries)]
    return world_of(policy, params, requests, depth, **changes)


def seconds(maximum: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(0, maximum)


OVERHEADS = [
    *(runtime.stages for runtime in runtimes().values()),
    RuntimeOverheads(schedule_s=0.001, prepare_s=0.002, prepare_row_s=0.001, prepare_share=0.1),
    RuntimeOverheads(schedule_s=0.003, prepare_s=0.008, overlapped=True),
    *(
        RuntimeOverheads(0.001, per_row_s=2e-3, holds=holds, front_end_s=0.001, prepare_s=prepare_s)
        for holds in get_args(Holds)
        for prepare_s in (0.0, 0.001)
    ),
]


@settings(max_examples=many(150), derandomize=True)
@given(worlds(plain=True))
def test_tandem_recurrence(world: World) -> None:
    """start[k][i] = max(end[k][i-1], end[k-1][i]), and end - start is the cost."""
    result = simulate(world)
    predecessor_s = np.vstack([np.zeros(world.depth), result.end_s[:-1]])
    input_s = np.column_stack([result.scheduled_s, result.end_s[:, :-1]])
    assert np.array_equal(result.available_s, input_s)
    assert np.array_equal(result.start_s, np.maximum(predecessor_s, input_s))
    tokens = result.prefill_tokens + result.decode_tokens
    takes_s = world.costs.per_token_s * tokens[:, None] + np.array(world.costs.bases_s)
    close(result.end_s - result.start_s, takes_s)


@settings(max_examples=500 if ALL else 25, derandomize=True)
@given(worlds())
def test_recurrence_and_processes_give_the_same_bits(world: World) -> None:
    assert_same(simulate(world), simulate(world, pipeline="processes"))
