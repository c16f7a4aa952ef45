"""Validation against runs that are known, of a real driver on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.decodes import ONE_TOKEN
from evenflow.core.replay import Asked
from evenflow.costs import AffineCost
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.errors import PolicyError
from evenflow.experiments.validation import AROUND_MS, Validation, layers
from evenflow.experiments.validation.write import (
    OVERVIEW,
    draw_validation,
    off_by_a_factor,
    verdict,
    worse_when_calibrated,
)
from evenflow.report.plots import save
from evenflow.results.run import RunResult
from evenflow.sim import Link, RuntimeOverheads, World, simulate
from evenflow.sim.timed import simulate_timed
from evenflow.types import MicroBatch, Request
from tests.amounts import many
from tests.virtual_run import WORLD, serve_noisily, serve_pools_noisily
from tests.worlds import MAX_MODEL_LEN, pooled_worlds, served_worlds, small_world


def measured(world: World, seed: int = 0, late_s: float = 0.0) -> tuple[RunResult, layers.Times]:
    """Return a noisy run of a world and its times."""
    served, journals = serve_noisily(world, seed, late_s)
    times = layers.measured_times(served, world, layers.priced(world, journals)[1])
    return served.result, times


@settings(max_examples=many(100), deadline=None)
@given(
    served_worlds(st.floats(0, 0.3), 0.01, 1e-4, links=(None, Link(1e-6, 0.0))),
    st.integers(0, 1000),
)
def test_a_run_simulated_from_its_own_times_is_itself(world: World, seed: int) -> None:
    result, times = measured(world, seed)
    structure = layers.structure_of(world, result, times)
    again = structure.again
    assert structure.parted_at is None
    assert layers.same_batches(result, again) == 1
    for name in ("prefill_tokens", "decode_tokens", "free_pages", "preemptions"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result, name), name)
    for name in ("scheduled_s", "start_s", "end_s", "first_token_s", "completion_s"):
        late_s = result.scheduled_s[0] - again.scheduled_s[0]  # a closed loop begins when it can
        assert abs(late_s) < 1e-9 or world.concurrency is not None
        expected = getattr(result, name) - late_s
        np.testing.assert_allclose(getattr(again, name), expected, atol=3e-9, rtol=0)


@pytest.mark.long
@settings(max_examples=many(60), deadline=None)
@given(pooled_worlds(), st.integers(0, 1000))
def test_so_is_one_of_pools(world: PooledWorld, seed: int) -> None:
    world = replace(world, **{name: real_pool(getattr(world, name)) for name in POOLS})
    served, journals = serve_pools_noisily(world, seed)
    times = []
    for (name, journal), each in zip(journals.items(), served.pipelines, strict=True):
        pool = getattr(world, name)
        num_tokens = layers.priced(pool, [journal], keeps_pages=name != "decode")[1]
        times.append(layers.measured_times(each, pool, num_tokens))
    result = served.result
    structure = layers.structure_of(world, result, *times)
    assert structure.parted_at is None
    again = structure.again
    for name in ("prefill_tokens", "decode_tokens", "free_pages"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result, name), name)
    if world.concurrency is None:
        for name in ("scheduled_s", "end_s", "first_token_s", "completion_s"):
            close = {"atol": 3e-9, "rtol": 0}
            np.testing.assert_allclose(getattr(again, name), getattr(result, name), **close)


def test_a_prompt_that_is_preempted_as_it_ends_is_computed_again() -> None:
    """Its first token is on its way when its pages go, which the other pool is to fetch."""
    prompts = (150, 13, 79, 65, 74, 65, 24, 36, 96)
    outputs = (47, 6, 2, 24, 32, 24, 57, 48, 35)
    arrivals_s = (0.0, 0.003, 0.023, 0.023, 0.026, 0.026, 0.046, 0.049, 0.049)
    columns = zip(arrivals_s, prompts, outputs, strict=True)
    requests = [Request(index, *each) for index, each in enumerate(columns)]
    few = {"times_s": (0.005, 1e-4), "total_pages": 9, "max_model_len": 256}
    vllm = {"max_num_batched_tokens": 150, "max_num_seqs": 256, "max_batch_rows": 3}
    chunks = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "watermark": 0.05}
    chunks["async_scheduling"] = False
    world = PooledWorld(
        requests,
        small_world([], "vllm", vllm, depth=2, max_in_flight=None, **few),
        small_world([], "vllm", vllm, depth=3, dispatch="eager", **few),
        small_world([], "vllm_v1", chunks, depth=3, **few),
        link=TransferLink(1e-6, 1e-5, 8.0),
        watermark=0.3,
        borrow_tokens=60,
    )
    served, _ = serve_pools_noisily(world, 1)
    result = served.result
    assert result.pools["mixed"].preemptions.any()
    assert result.status[-1] == "completed"


POOLS = ("prefill", "mixed", "decode")


def real_pool(pool: World | None) -> World | None:
    """Return a pool with what a real run has, if there is one."""
    return pool and replace(pool, overheads=RuntimeOverheads(), decoding=ONE_TOKEN)


def test_padding_keeps_links_busy() -> None:
    params = {"max_num_seqs": 4, "padded": True}
    requests = [Request(0, 0.0, 1, 1), Request(1, 0.0, 1, 2)]
    sizes = {"depth": 2, "total_pages": 400, "max_model_len": MAX_MODEL_LEN}
    slow = {"times_s": (0.01, 1e-5), "link": Link(1e-3, 0.0)}
    world = small_world(requests, "static", params, **sizes, **slow)
    result, times = measured(world)
    assert result.decode_tokens.tolist() == [0, 1]  # of two rows, one is padding
    again = layers.structure_of(world, result, times).again
    np.testing.assert_allclose(again.end_s, result.end_s, atol=3e-9, rtol=0)


def test_a_structure_without_what_stages_take_before_they_start_is_too_fast() -> None:
    result, times = measured(WORLD, late_s=0.002)
    assert times.prepare_s == pytest.approx(0.002)
    at_once = replace(times, prepare_s=0 * times.prepare_s)
    found = layers.structure_errors(layers.structure_of(WORLD, result, at_once))
    assert found["metrics"]["mean_tpot_ms"] < -0.1
    assert found["requests"]["tpot"]["median"] > 0.1
    found = layers.structure_errors(layers.structure_of(WORLD, result, times))
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
    result, times = measured(WORLD)
    found = layers.structure_errors(layers.structure_of(replace(WORLD, **rule), result, times))
    assert found["parted_at"] is not None
    assert found["same_micro_batches"] < 0.9
    assert abs(found["metrics"]["mean_ttft_ms"]) > 0.01


def test_once_decisions_part_a_micro_batch_takes_what_its_like_took() -> None:
    result = simulate(WORLD)
    times = times_of(result)
    recorded = layers.Recorded(result, times, AffineCost(0.005, 0.5e-5, 3))
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
    unheard_of = batch(2, result, 0)
    unheard_of.prefill_tokens = 5000
    assert recorded(unheard_of).stages_s == pytest.approx([2 * (0.005 + 0.5e-5 * 5000)] * 3)


def batch(index: int, result: RunResult, like: int) -> Any:
    """Return a micro-batch with the numbers of one of a run's, at another position."""
    columns = result.prefill_tokens, result.decode_tokens, result.free_pages
    prefill, decode, free = (int(column[like]) for column in columns)
    return MicroBatch(index, 0.0, (), None, prefill, decode, 0, 0, free, 0)


def times_of(result: RunResult) -> layers.Times:
    count = len(result.scheduled_s)
    return layers.Times(
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
    timings = [layers.drawn(times, WORLD.costs, seed)(batch(0, result, 0)) for seed in range(20)]
    assert len({timing.freed_s for timing in timings}) > 10
    for timing in timings:
        assert timing.returned_s - timing.freed_s == pytest.approx(0.002, abs=1e-5)
        assert timing.stages_s == WORLD.costs.times(batch(0, result, 0))
    again = [simulate_timed(WORLD, layers.drawn(times, WORLD.costs, seed)) for seed in (0, 0, 1)]
    assert layers.summary_of(again[0]) == layers.summary_of(again[1]) != layers.summary_of(again[2])
    assert layers.summary_of(again[0])["mean_e2el_ms"] > layers.summary_of(result)["mean_e2el_ms"]


def test_a_stall_of_the_machine_is_not_drawn_for_one_message() -> None:
    times = times_of(simulate(WORLD))
    count = len(times.schedule_s)
    stalled = replace(times, freed_s=np.where(np.arange(count) == 7, 3.0, times.freed_s))
    timing = layers.drawn(stalled, WORLD.costs, seed=0)
    first = batch(0, simulate(WORLD), 0)
    assert max(timing(first).freed_s for _ in range(20 * count)) < 0.0041


def test_costs_are_compared_with_what_a_replayed_journal_held() -> None:
    served, (journal,) = serve_noisily(WORLD)
    result = served.result
    expected_s, _ = layers.priced(WORLD, [journal])
    tokens = result.prefill_tokens + result.decode_tokens
    assert expected_s == pytest.approx(np.repeat(0.01 + 1e-5 * tokens[:, None], 3, axis=1))
    lines = layers.cost_errors([result], [expected_s])
    late = np.abs(expected_s / (result.end_s - result.start_s) - 1)
    for stage, line in enumerate(lines):
        assert line["median"] == pytest.approx(np.median(late[:, stage]))
        assert line["p95"] == pytest.approx(np.percentile(late[:, stage], 95))
        assert line["bias"] < 0
        assert 0 < line["median_repeat"] < line["p95_repeat"]
    asked = next(index for index, entry in enumerate(journal) if isinstance(entry, Asked))
    changed = [*journal[:asked], journal[asked]._replace(decision=None), *journal[asked + 1 :]]
    with pytest.raises(PolicyError, match="a recorded run does not replay"):
        layers.priced(WORLD, [changed])


def test_only_what_has_its_like_repeats() -> None:
    shapes = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    errors = layers.repeat_errors(shapes, np.array([1.0, 9.0, 2.0, 8.0, 3.0]))
    assert sorted(errors) == pytest.approx([0.0, 0.5, 0.5])
    assert len(layers.repeat_errors(shapes[:2], np.array([1.0, 9.0]))) == 0


def test_one_metric_of_several_runs() -> None:
    runs = [{"duration": 9.0}, {"duration": 11.0}]
    line = layers.compared(
        "duration", runs, {"duration": 9.5}, [{"duration": 10.0}, {"duration": 10.2}]
    )
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
    nothing = layers.compared("mean_tpot_ms", [{"mean_tpot_ms": 0.0}], {"mean_tpot_ms": 0.0})
    assert (nothing["error"], nothing["spread"]) == (None, None)
    assert "calibrated" not in nothing


@pytest.mark.parametrize(
    ("runs", "predicted", "told"),
    [
        (
            [9.0, 11.0],
            10.5,
            "is WITHIN the spread of the 2 runs: 8 of 8 numbers are between their least and most; "
            "TTFT mean (ms) is furthest off, +5.0% of the mean of the runs, which go from -10.0% "
            "to +10.0%",
        ),
        (
            [9.0, 11.0],
            12.0,
            "is NOT WITHIN the spread of the 2 runs: 0 of 8 numbers are between their least and "
            "most; TTFT mean (ms) is furthest off, +20.0% of the mean of the runs, which go from",
        ),
        ([10.0], 11.0, "what is simulated is at most 10.0% off (TTFT mean (ms)); one run has no"),
    ],
)
def test_the_verdict_begins_with_the_load(runs: list[float], predicted: float, told: str) -> None:
    lines = {
        name: layers.compared(name, [{name: v} for v in runs], {name: predicted})
        for name in OVERVIEW
    }
    found = {"load": [(0.5, 3.25)], "calibration": None, "runs": len(runs), "end_to_end": lines}
    words = verdict(found)
    assert words.startswith("load average of the machine, run by run: 0.5 to 3.2; what is simul")
    assert told in words


def noted(bias: float, simulated: float, calibrated: float, around_ms: float) -> list[str]:
    """Return what is said of costs with this bias, and of errors of a calibration that had
    `around_ms` around a micro-batch, where the runs had 2.5.
    """
    kinds = {"costs": {"kind": "affine"}, "workers": {"kind": "torch"}}
    line = {"error": simulated, "calibrated_error": calibrated}
    found = {
        "costs": [{"bias": 0.0}, {"bias": bias}],
        "provenance": {"config": kinds},
        "end_to_end": dict.fromkeys(OVERVIEW, line),
        "calibration": dict.fromkeys(AROUND_MS, around_ms / len(AROUND_MS)),
        "overheads": dict.fromkeys(AROUND_MS, 0.5),
    }
    return [*off_by_a_factor(found), *worse_when_calibrated(found)]


def test_costs_that_are_off_by_a_factor_and_a_calibration_that_is_worse_are_said_with_why() -> None:
    slow, why = noted(1.78, 0.42, 1.32, 2.5)
    assert slow == (
        "NOTE: costs: affine are 2.78 times too slow (stage 1), and every prediction rests on "
        "them; --profile FILE measures them, and takes that in their place"
    )
    assert why == (
        "NOTE: calibrated is further off (TTFT mean (ms): simulated +42.0%, calibrated +132.0%): "
        "costs that are 178% too slow already stood for the 2.50 ms around a micro-batch in the "
        "calibration run, which now come on top; right costs are better with it (--profile FILE)"
    )
    assert "4 times too fast" in noted(-0.75, 0.1, 0.05, 2.5)[0]
    (why,) = noted(0.01, -0.036, 0.316, 6.0)
    assert "there were 6.00 ms around a micro-batch in the calibration run, and 2.50 ms in" in why
    (why,) = noted(0.01, -0.036, 0.316, 2.5)
    assert "not for the costs (+1%)" in why
    assert noted(0.1, 0.1, 0.105, 2.5) == []


def test_errors_of_requests() -> None:
    result = simulate(WORLD)
    later = replace(
        result, completion_s=result.completion_s + 0.1 * (result.completion_s - result.arrival_s)
    )
    found = layers.request_errors(result, later)
    assert found["e2el"] == pytest.approx({"median": 0.1, "p95": 0.1, "most": 0.1})
    assert found["ttft"] == {"median": 0, "p95": 0, "most": 0}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    result = simulate(WORLD)
    predicted = simulate(replace(WORLD, link=Link(0, 0.001)))
    save(draw_validation(Validation({}, result, result, predicted), "t"), tmp_path / "validation")
    assert {path.name for path in tmp_path.iterdir()} == {"validation.png", "validation.svg"}
