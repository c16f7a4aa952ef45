"""The layers of a validation on runs whose times are known: a real driver on a virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.costs import AffineCost, estimates
from evenflow.errors import PolicyError
from evenflow.replay import Asked, RecordingBatcher
from evenflow.result import RunResult
from evenflow.schedulers import create
from evenflow.types import MicroBatch, Request
from experiments.real.run import batcher_of
from experiments.validation.figure import draw_validation
from experiments.validation.layers import (
    METRICS,
    bubble_shares,
    compared,
    cost_errors,
    expected_seconds,
    repeat_errors,
    request_errors,
    same_batches,
    structure_errors,
    structure_of,
    summary_of,
)
from experiments.validation.measured_times import AROUND, Recorded, Times, drawn, measured_times
from runtime.driver import Driver
from runtime.serving import Serving, StepCost
from runtime.wire import Free, Message, Returned, Step
from sim import Link, World, simulate, simulate_timed
from tests.worlds import MAX_MODEL_LEN, POLICIES

WORLD = World(
    [Request(i, 0.013 * i, 30 + 11 * i % 80, 1 + 7 * i % 40) for i in range(60)],
    lambda: create("sarathi", {"token_budget": 64}),
    AffineCost(0.01, 1e-5, 3),
    depth=3,
    total_pages=400,
    max_model_len=500,
    max_in_flight=3,
)
JITTER_S = 0.0004


class NoisyPipeline:
    """A pipeline on a virtual clock: every stage and every message takes a random time more.

    Stages start `late_s` after they could.
    """

    def __init__(self, world: World, seed: int, late_s: float) -> None:
        self._late_s = late_s
        self._rng = np.random.default_rng(seed)
        self._hops = world.hops
        self.now_s = 0.125  # the clock of a machine does not begin with the run
        self.free_s = [0.0] * world.depth
        self.link_free_s = [0.0] * world.depth
        self.heard_s = [0.0, 0.0]
        self.coming: deque[tuple[float, Message]] = deque()

    def clock(self) -> float:
        return self.now_s

    def noise_s(self) -> float:
        return float(self._rng.exponential(JITTER_S))

    def send(self, step: Step) -> None:
        self.now_s += self.noise_s()  # what the driver computes
        at_s, times = self.now_s + self.noise_s(), []
        tokens = [0] * (sum(piece.last for piece in step.pieces) + len(step.decodes))
        for stage, work_s in enumerate(step.work_s):
            start_s = max(at_s, self.free_s[stage]) + self._late_s
            self.free_s[stage] = start_s + work_s + self.noise_s()
            times += [at_s, start_s, self.free_s[stage]]
            if stage < len(self._hops):
                sent_s = max(self.free_s[stage], self.link_free_s[stage]) + step.hops_s[stage]
                self.link_free_s[stage] = sent_s
            at_s = max(self.free_s[stage], self.link_free_s[stage]) + self.noise_s()
        if len(step.work_s) > 1:
            self._tell(0, times[2], Free(step.batch_id))
        self._tell(1, times[-1], Returned(step.batch_id, times, tokens))

    def _tell(self, sender: int, at_s: float, message: Message) -> None:
        self.heard_s[sender] = max(self.heard_s[sender], at_s + self.noise_s())
        self.coming.append((self.heard_s[sender], message))
        self.coming = deque(sorted(self.coming, key=lambda entry: entry[0]))

    def receive(self, timeout_s: float) -> list[Message]:
        until_s = self.now_s + timeout_s
        next_s = min([until_s, *(at_s for at_s, _ in self.coming)])
        self.now_s = max(self.now_s + 1e-7, next_s)  # time passes, whatever is asked
        messages = []
        while self.coming and self.coming[0][0] <= self.now_s:
            messages.append(self.coming.popleft()[1])
        return messages


def serve_noisily(world: World, seed: int = 0, late_s: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a run of the real driver, as `experiments.real.run.serve` does, and its journal."""
    pipeline: Any = NoisyPipeline(world, seed, late_s)
    batcher = batcher_of(world, RecordingBatcher)
    assert isinstance(batcher, RecordingBatcher)

    def cost(batch: MicroBatch) -> StepCost:
        busy_s = [hop.per_token_s * batch.num_tokens for hop in world.hops]
        hops_s = busy_s or [0.0] * (world.depth - 1)
        return StepCost(world.costs.times(batch.charged or batch), hops_s, 0)

    serving = Serving(
        world.requests,
        cost,
        world.depth,
        world.max_in_flight,
        world.dispatch,
        world.concurrency,
    )
    driver = Driver(serving, batcher, pipeline, clock=pipeline.clock)
    driver.run()
    outcome = SimpleNamespace(result=driver.result())
    return SimpleNamespace(outcome=outcome, heard=driver.heard), batcher.journal


@st.composite
def worlds(draw: st.DrawFn) -> World:
    name, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 4))
    costs = AffineCost(0.01, 1e-4, depth)
    lengths = draw(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1))
    arrivals = sorted(draw(st.floats(0, 0.3)) for _ in lengths)
    return World(
        [
            Request(i, at_s, *pair)
            for i, (at_s, pair) in enumerate(zip(arrivals, lengths, strict=True))
        ],
        lambda: create(name, params, max_model_len=MAX_MODEL_LEN, **estimates(costs)),
        costs,
        depth=depth,
        total_pages=draw(st.sampled_from([16, 20, 400])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=draw(st.sampled_from([depth, None])),
        dispatch=draw(st.sampled_from(["stage0", "eager"])),
        concurrency=draw(st.sampled_from([None, None, 3])),
        link=draw(st.sampled_from([None, Link(1e-6, 0.0)])),
    )


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(0, 1000))
def test_a_run_simulated_from_its_own_times_is_itself(world: World, seed: int) -> None:
    served, _ = serve_noisily(world, seed)
    result = served.outcome.result
    structure = structure_of(world, result, measured_times(served, world))
    again = structure.again
    assert structure.parted_at is None
    assert same_batches(result, again) == 1
    for name in ("prefill_tokens", "decode_tokens", "free_pages", "preemptions"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result, name), name)
    for name in ("scheduled_s", "start_s", "end_s", "first_token_s", "completion_s"):
        late_s = result.scheduled_s[0] - again.scheduled_s[0]  # a closed loop begins when it can
        assert abs(late_s) < 1e-9 or world.concurrency is not None
        expected = getattr(result, name) - late_s
        np.testing.assert_allclose(getattr(again, name), expected, atol=3e-9, rtol=0)


def test_a_structure_without_what_stages_take_before_they_start_is_too_fast() -> None:
    served, _ = serve_noisily(WORLD, late_s=0.002)
    result = served.outcome.result
    times = measured_times(served, WORLD)
    assert times.prepare_s == pytest.approx(0.002)
    at_once = replace(times, prepare_s=0 * times.prepare_s)
    found = structure_errors(result, structure_of(WORLD, result, at_once))
    assert found["metrics"]["mean_tpot_ms"] < -0.1
    assert found["requests"]["tpot"]["median"] > 0.1
    found = structure_errors(result, structure_of(WORLD, result, times))
    assert found["requests"]["tpot"]["most"] < 1e-6


@pytest.mark.parametrize(
    "rule",
    [
        {"max_in_flight": 2},
        {"dispatch": "eager", "max_in_flight": None},
        {"pipelined_chunks": True},
        {"total_pages": 40},
    ],
)
def test_a_world_of_other_rules_does_not_give_the_run_back(rule: dict[str, Any]) -> None:
    served, _ = serve_noisily(WORLD)
    result = served.outcome.result
    other = replace(WORLD, **rule)
    found = structure_errors(result, structure_of(other, result, measured_times(served, other)))
    assert found["parted_at"] is not None
    assert found["same_micro_batches"] < 0.9
    assert abs(found["metrics"]["mean_ttft_ms"]) > 0.01


def test_errors_of_structure() -> None:
    served, _ = serve_noisily(WORLD)
    result = served.outcome.result
    found = structure_errors(result, structure_of(WORLD, result, measured_times(served, WORLD)))
    assert (found["parted_at"], found["same_micro_batches"]) == (None, 1)
    assert all(abs(error) < 1e-6 for error in found["metrics"].values())
    assert set(found["metrics"]) == set(METRICS)
    assert all(each["most"] < 1e-6 for each in found["requests"].values())


def test_once_decisions_part_a_micro_batch_takes_what_its_like_took() -> None:
    result = simulate(WORLD)
    times = times_of(result)
    recorded = Recorded(result, times, AffineCost(0.005, 0.5e-5, 3))
    first = batch(0, result, 0)
    assert recorded(first).stages_s == pytest.approx(times.stages_s[0])
    assert recorded.parted_at is None
    size = int(result.prefill_tokens[0])
    other = batch(1, result, 0)  # the first again, where the run had something else
    assert (int(result.prefill_tokens[1]), int(result.decode_tokens[1])) != (size, 0)
    alike = [
        index
        for index in range(len(result.scheduled_s))
        if (result.prefill_tokens[index], result.decode_tokens[index]) == (size, 0)
    ]
    expected = times.stages_s[alike[1 % len(alike)]]
    assert recorded(other).stages_s == pytest.approx(expected)
    assert recorded.parted_at == 1
    unheard_of = replace(batch(2, result, 0), prefill_tokens=5000)
    assert recorded(unheard_of).stages_s == pytest.approx([2 * (0.005 + 0.5e-5 * 5000)] * 3)


def batch(index: int, result: RunResult, like: int) -> Any:
    """Return a micro-batch with the numbers of one of a run's, at another position."""
    return MicroBatch(
        index,
        0.0,
        (),
        None,
        int(result.prefill_tokens[like]),
        int(result.decode_tokens[like]),
        0,
        0,
        int(result.free_pages[like]),
        0,
    )


def times_of(result: RunResult) -> Times:
    count = len(result.scheduled_s)
    return Times(
        schedule_s=np.full(count, 0.001),
        prepare_s=np.full((count, result.depth), 0.0005),
        stages_s=result.end_s - result.start_s,
        hops_s=np.full((count, result.depth - 1), 0.002),
        freed_s=np.linspace(0.003, 0.004, count),
        returned_s=np.linspace(0.005, 0.006, count),
        arrivals_s=result.arrival_s,
    )


def test_drawn_times_are_those_of_one_micro_batch_and_the_costs() -> None:
    result = simulate(WORLD)
    times = times_of(result)
    timings = [drawn(times, WORLD.costs, seed)(batch(0, result, 0)) for seed in range(20)]
    assert len({timing.freed_s for timing in timings}) > 10
    for timing in timings:
        assert timing.returned_s - timing.freed_s == pytest.approx(0.002, abs=1e-5)
        assert timing.stages_s == WORLD.costs.times(batch(0, result, 0))
    again = [simulate_timed(WORLD, drawn(times, WORLD.costs, seed)) for seed in (0, 0, 1)]
    assert summary_of(again[0]) == summary_of(again[1]) != summary_of(again[2])
    assert summary_of(again[0])["mean_e2el_ms"] > summary_of(result)["mean_e2el_ms"]


def test_a_stall_of_the_machine_is_not_drawn_for_one_message() -> None:
    times = times_of(simulate(WORLD))
    count = len(times.schedule_s)
    stalled = replace(times, freed_s=np.where(np.arange(count) == 7, 3.0, times.freed_s))
    timing = drawn(stalled, WORLD.costs, seed=0)
    first = batch(0, simulate(WORLD), 0)
    assert max(timing(first).freed_s for _ in range(20 * count)) < 0.0041


def test_with_no_times_around_the_stages_a_timed_world_is_the_world() -> None:
    result = simulate(WORLD)
    nothing = replace(
        times_of(result), **{name: 0 * getattr(times_of(result), name) for name in AROUND}
    )
    again = simulate_timed(WORLD, drawn(nothing, WORLD.costs, seed=0))
    assert again.completion_s == pytest.approx(result.completion_s, abs=1e-8)
    assert same_batches(again, result) == 1


def test_costs_are_compared_with_what_a_replayed_journal_held() -> None:
    served, journal = serve_noisily(WORLD)
    result = served.outcome.result
    expected_s = expected_seconds(WORLD, journal)
    tokens = result.prefill_tokens + result.decode_tokens
    assert expected_s == pytest.approx(np.repeat(0.01 + 1e-5 * tokens[:, None], 3, axis=1))
    lines = cost_errors([result], [expected_s])
    late = np.abs(expected_s / (result.end_s - result.start_s) - 1)
    for stage, line in enumerate(lines):
        assert line["median"] == pytest.approx(np.median(late[:, stage]))
        assert line["p95"] == pytest.approx(np.percentile(late[:, stage], 95))
        assert line["bias"] < 0
        assert 0 < line["median_repeat"] < line["p95_repeat"]
    asked = next(index for index, entry in enumerate(journal) if isinstance(entry, Asked))
    changed = [*journal[:asked], journal[asked]._replace(decision=None), *journal[asked + 1 :]]
    with pytest.raises(PolicyError, match="a recorded run does not replay"):
        expected_seconds(WORLD, changed)


def test_only_what_has_its_like_repeats() -> None:
    shapes = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    errors = repeat_errors(shapes, np.array([1.0, 9.0, 2.0, 8.0, 3.0]))
    assert sorted(errors) == pytest.approx([0.0, 0.5, 0.5])
    assert len(repeat_errors(shapes[:2], np.array([1.0, 9.0]))) == 0


def test_one_metric_of_several_runs() -> None:
    runs = [{"duration": 9.0}, {"duration": 11.0}]
    line = compared("duration", runs, {"duration": 9.5}, [{"duration": 10.0}, {"duration": 10.2}])
    assert line == {
        "measured": 10.0,
        "least": 9.0,
        "most": 11.0,
        "spread": 0.2,
        "simulated": 9.5,
        "error": pytest.approx(-0.05),
        "calibrated": pytest.approx(10.1),
        "calibrated_error": pytest.approx(0.01),
        "calibrated_spread": pytest.approx(0.02),
    }
    nothing = compared("mean_tpot_ms", [{"mean_tpot_ms": 0.0}], {"mean_tpot_ms": 0.0})
    assert (nothing["error"], nothing["spread"]) == (None, None)
    assert "calibrated" not in nothing


def test_bubbles_add_up_to_what_is_not_busy() -> None:
    result = simulate(WORLD)
    shares = bubble_shares([result, result])
    assert sum(shares.values()) == pytest.approx(summary_of(result)["bubble_share"])


def test_errors_of_requests() -> None:
    result = simulate(WORLD)
    later = replace(
        result, completion_s=result.completion_s + 0.1 * (result.completion_s - result.arrival_s)
    )
    found = request_errors(result, later)
    assert found["e2el"] == pytest.approx({"median": 0.1, "p95": 0.1, "most": 0.1})
    assert found["ttft"] == {"median": 0, "p95": 0, "most": 0}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    result = simulate(WORLD)
    draw_validation(result, result, simulate(replace(WORLD, link=Link(0, 0.001))), "t", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"validation.png", "validation.svg"}
