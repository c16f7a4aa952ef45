"""The simulated world as a SimPy model: what runs, and that both pipelines give the same bytes."""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import simpy
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import evenflow as ef
from evenflow.config.parts import ProcessConfig
from evenflow.config.processes import processes_of
from evenflow.core.replay import RecordingBatcher, replay
from evenflow.engines.recovery import Lives
from evenflow.errors import UsageError, UserProcessError
from evenflow.experiments.validation import validate
from evenflow.experiments.validation.faults import MortalDriver
from evenflow.results.bubbles import attribute
from evenflow.results.run import merged
from evenflow.runtime.journal import _entry, _line
from evenflow.runtime.real import job_of
from evenflow.sim import Link, World, simulate, simulate_replicas
from evenflow.sim.arrivals import ArrivalSource
from evenflow.sim.autoscaler import autoscaler, desired
from evenflow.sim.clock import CheckedEnvironment, SimClock
from evenflow.sim.faults import contended_link, outage, straggler
from evenflow.sim.processes import Processes, UserProcess
from evenflow.sim.replica import Replica
from evenflow.types import Request
from tests.amounts import ALL
from tests.command_line import complaint, done, evenflow, write_inputs
from tests.places import ROOT
from tests.properties.test_invariants import check_requests_and_tokens, check_stages, check_times
from tests.virtual_run import VirtualPipeline
from tests.worlds import assert_same, running_ahead, small_world, worlds

SYSTEMS = sorted((ROOT / "examples" / "systems").glob("*.yaml"))
FEW = {} if ALL else {"workload.requests": 10}


@pytest.mark.parametrize("file", SYSTEMS if ALL else SYSTEMS[::6], ids=lambda file: file.stem)
def test_a_system_is_the_same_bytes_as_a_recurrence_and_as_processes(file: Path) -> None:
    formula, processes = (
        ef.simulate(file, set=FEW, pipeline=pipeline).result
        for pipeline in ("recurrence", "processes")
    )
    assert formula.provenance["pipeline"] == "recurrence"
    assert processes.provenance["pipeline"] == "processes"
    assert_same(replace(formula, provenance={}), replace(processes, provenance={}))


def test_a_run_is_steps_of_a_simpy_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = []
    step = CheckedEnvironment.step

    def counted(env: CheckedEnvironment) -> None:
        step(env)
        stepped.append(env.now)

    monkeypatch.setattr(CheckedEnvironment, "step", counted)
    result = simulate(small_world([Request(0, 1.5, 8, 3), Request(1, 1.5, 8, 3)]))
    assert result.returned_s.tolist() == [2.5, 3.5, 4.5]
    started, arrived = 0.0, 1.5
    assert stepped == [started, arrived, 2.5, 3.5, 4.5]


def test_only_an_instant_writes_into_simpys_queue() -> None:
    for file in (ROOT / "sim").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = used & {"_queue", "_eid", "_now", "_ok", "_value", "_defused", "_active_proc"}
        assert not private or file.name == "clock.py", private
    clock = ast.parse((ROOT / "sim" / "clock.py").read_text(encoding="utf-8"))
    instant = next(n for n in clock.body if isinstance(n, ast.ClassDef) and n.name == "Instant")
    assert instant.end_lineno is not None
    assert instant.end_lineno - instant.lineno < 30


def test_a_shared_link_needs_processes() -> None:
    shared = small_world([Request(0, 0.0, 8, 2)], depth=3, link=Link(0.1, 0.0, shared=True))
    assert simulate(shared).completion_s.tolist() == [pytest.approx(7.8)]
    with pytest.raises(UsageError, match=r"pipeline: recurrence: hops share a link"):
        simulate(shared, pipeline="recurrence")


# -- processes of the user's ----------------------------------------------------------------------

THREE = small_world([Request(0, 0.0, 8, 3)], depth=3)  # a second a stage: tokens at 3, 6 and 9 s


def at(time_s: float, act: Callable[[Any], object], *later: Any) -> UserProcess:
    """Return a process that acts at one time, and at later ones."""

    def process(world: Any) -> Iterator[Any]:
        moments = iter((time_s, act, *later))
        for moment_s, acts in zip(moments, moments, strict=True):
            yield world.env.timeout(moment_s - world.env.now)
            acts(world)

    return process


def nothing(world: Any) -> Iterator[Any]:
    yield world.env.timeout(1.0)


def test_a_slow_stage_takes_a_factor_longer_from_then_on() -> None:
    half_done = at(1.5, lambda w: w.stages[1].slow(3), 4.5, lambda w: w.stages[1].slow(1))
    result = simulate(THREE, processes=[half_done])
    assert result.returned_s.tolist() == [4.0, 7.0, 10.0]
    assert result.disturbed is not None
    assert result.disturbed.slowed_s[:, 1].tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_a_stopped_stage_goes_on_where_it_was() -> None:
    stop = at(1.25, lambda w: w.stages[1].stop(), 11.25, lambda w: w.stages[1].start())
    result = simulate(THREE, processes=[stop])
    assert result.returned_s.tolist() == [13.0, 16.0, 19.0]
    device = at(1.25, lambda w: w.stages[1].stop(finish=True), 11.25, lambda w: w.stages[1].start())
    finished = simulate(THREE, processes=[device])
    assert finished.returned_s.tolist() == [12.25, 15.25, 18.25]
    assert finished.disturbed.stopped_s[0].tolist() == [0.0, 9.25, 0.0]
    idle = attribute(result)
    assert idle.totals()["outage"] == 20.0  # ten seconds of two stages
    assert idle.idle_s + (result.end_s - result.start_s).sum() == 3 * 19.0
    assert [mark.kind for mark in result.marks or ()] == ["stop", "start"]


def test_a_pipeline_that_dies_computes_its_requests_again() -> None:
    dies = at(4.5, lambda w: w.replicas[0].fail(7.0))
    result = simulate(THREE, processes=[dies])
    assert result.first_token_s.tolist() == [3.0]
    assert result.returned_s.tolist() == [
        3.0,
        14.5,
        17.5,
    ]  # prompt and a token again, then the last
    assert result.preemptions.tolist() == [1]
    assert attribute(result).totals()["outage"] == 3 * (11.5 - 3.0)  # since what was lost was sent
    ends = at(4.5, lambda w: w.replicas[0].fail(7.0, reject=True))
    assert simulate(THREE, processes=[ends]).status == ["aborted"]


def test_a_link_is_slowed_and_stopped() -> None:
    world = replace(THREE, link=Link(per_token_s=0.125, latency_s=0.0))
    assert simulate(world, processes=[nothing]).returned_s[0] == 5.0
    slow = at(0.5, lambda w: w.links[0].slow(2))
    assert simulate(world, processes=[slow]).returned_s[0] == 6.0
    held = at(1.5, lambda w: w.links[0].stop(), 3.0, lambda w: w.links[0].start())
    assert simulate(world, processes=[held]).returned_s[0] == 6.5


def test_replicas_are_added_drained_and_removed() -> None:
    asked = [Request(number, float(number), 8, 3) for number in range(6)]
    world = small_world(asked, replicas=2)  # tokens a second apart, one pipeline each turn
    seen: list[Any] = []

    def process(world: Any) -> Iterator[Any]:
        yield world.env.timeout(2.5)
        world.replicas.add()
        world.replicas.remove(0)
        seen.append((world.replicas.open, world.queue))
        yield world.env.timeout(1.0)
        world.replicas.drain(1)
        with pytest.raises(ValueError, match="the only one that takes requests"):
            world.replicas.drain(2)

    results = simulate_replicas(world, processes=[process])
    assert seen == [([1, 2], (2, 1))]
    assert [result.request_id.tolist() for result in results] == [[], [1, 2, 3], [0, 4, 5]]
    assert merged(results).status == ["completed"] * 6


def test_idle_time_that_a_stop_causes_elsewhere_is_an_outage_and_no_more() -> None:
    asked = [Request(number, 0.0, 8, 20) for number in range(12)]
    world = small_world(asked, "token_throttling", depth=4, times_s=(0.5, 0.1))
    calm = attribute(simulate(world, processes=[nothing]))
    stop = at(7.0, lambda w: w.stages[2].stop(), 27.0, lambda w: w.stages[2].start())
    held = attribute(simulate(world, processes=[stop]))
    longer_s = held.idle_s - calm.idle_s
    assert held.totals()["outage"] == pytest.approx(longer_s, rel=0.1)
    assert longer_s > 50


# -- what holds whatever they do ------------------------------------------------------------------

ACTS = st.tuples(
    st.sampled_from(["slow", "stop", "start", "link", "fail", "reject", "draw"]),
    st.sampled_from([0.0, 0.003, 0.02, 0.3]),
    st.integers(0, 3),
)


def acting(acts: list[tuple[str, float, int]]) -> UserProcess:
    """Return a process that does things one after the other, and lets all stages go on."""

    def process(world: Any) -> Iterator[Any]:
        for kind, wait_s, number in acts:
            yield world.env.timeout(wait_s)
            stage = world.stages[number % len(world.stages)]
            if kind == "slow":
                stage.slow([0.5, 1.0, 2.0, 7.0][number])
            elif kind == "link":
                for link in world.links:
                    link.slow(number + 1)
            elif kind == "draw":
                yield world.env.timeout(world.rng.exponential(0.01))
            elif kind in ("fail", "reject"):
                world.replicas[0].fail(0.05 * number, reject=kind == "reject")
            else:
                getattr(stage, kind)()
        for stage in world.stages:
            stage.start()

    return process


# -- ready made, against closed forms --------------------------------------------------------------


def queue_of_one(arrivals_s: list[float]) -> World:
    """Return a stage that takes a second a request, one after the other."""
    asked = [Request(number, float(at_s), 1, 1) for number, at_s in enumerate(arrivals_s)]
    return small_world(asked, "vllm", {"max_num_seqs": 1}, max_in_flight=1)


def test_a_straggler_makes_the_pipeline_as_slow_as_it_is() -> None:
    """The bottleneck law: each of many micro-batches takes the longest stage's time."""
    asked = [Request(number, 0.0, 16, 1) for number in range(40)]
    world = small_world(asked, "sarathi", {"token_budget": 16}, depth=4, times_s=(0.5, 0.0))
    result = simulate(world, processes=[partial(straggler, stage=2, factor=1.6)])
    assert np.diff(result.returned_s) == pytest.approx(1.6 * 0.5)
    assert attribute(result).shares()["slow_stage"] == pytest.approx(3 / 4 * 0.6 / 1.6, abs=0.03)


def test_a_contended_link_has_the_bandwidth_that_is_left_over() -> None:
    """16 tokens of 0.1 s, of which a quarter of the bandwidth is left, take 6.4 s: the bottleneck.

    Of a link at work u alone and v in spells, (u + v (1 - share)) / (u + v) is left.
    """
    asked = [Request(number, 0.0, 16, 1) for number in range(40)]
    facts: dict[str, Any] = {"depth": 2, "times_s": (0.5, 0.0), "link": Link(0.1, 0.0)}
    world = small_world(asked, "sarathi", {"token_budget": 16}, **facts)
    result = simulate(world, processes=[partial(contended_link, hop=0, share=0.75)])
    assert np.diff(result.returned_s) == pytest.approx(6.4)
    many = replace(world, requests=[Request(number, 0.0, 16, 1) for number in range(2000)])
    spells = partial(contended_link, hop=0, share=0.75, every_s=30.0, lasts_s=10.0)
    took_s = simulate(many, processes=[spells], seed=1).returned_s[-1]
    assert 2000 * 1.6 / took_s == pytest.approx((30 + 10 / 4) / 40, rel=0.05)


def test_spells_of_a_straggler_cost_their_share_of_the_time() -> None:
    """Of a stage at work u at full speed and v in spells, (u + v / f) / (u + v) is left."""
    world = queue_of_one([0.0] * 3000)
    spells = partial(straggler, stage=0, factor=4.0, every_s=30.0, lasts_s=10.0)
    took_s = simulate(world, processes=[spells], seed=1).returned_s[-1]
    assert 3000 / took_s == pytest.approx((30 + 10 / 4) / 40, rel=0.05)


def test_the_wait_at_a_server_that_breaks_down_is_that_of_avi_itzhak_and_naor() -> None:
    """M/D/1, resumed after repairs, down at rate x while up (Operations Research 11, 1963):

    E[T] = C + (l s^2 (1 + x r)^2 / 2 + x E[R^2] / (2 (1 + x r))) / (1 - l C), C = s (1 + x r).
    """
    rate, fails, repair_s, count = 0.5, 1 / 40, 10.0, 20_000 if ALL else 4_000
    times_s = np.cumsum(np.random.default_rng(3).exponential(1 / rate, count))
    rng = np.random.default_rng(4)

    def breaks_down(world: Any) -> Iterator[Any]:
        while True:
            yield world.env.timeout(rng.exponential(1 / fails))
            world.stages[0].stop()
            yield world.env.timeout(repair_s)
            world.stages[0].start()

    result = simulate(queue_of_one(times_s.tolist()), processes=[breaks_down])
    measured_s = (result.completion_s - result.arrival_s).mean()
    longer = 1 + fails * repair_s
    late_s = rate * longer**2 / 2 + fails * repair_s**2 / (2 * longer)
    assert measured_s == pytest.approx(
        longer + late_s / (1 - rate * longer), rel=0.06 if ALL else 0.2
    )


def test_a_pipeline_is_up_as_often_as_the_rates_of_its_stages_say() -> None:
    """k stages that fail every m seconds, back after r: up m / (m + k r) of the time."""
    asked = [Request(number, 40.0 * number, 1, 1) for number in range(2000)]
    world = small_world(asked, depth=4, times_s=(0.01, 0.0))
    result = simulate(world, processes=[partial(outage, mtbf_s=400.0, restart_s=50.0)], seed=2)
    assert result.disturbed is not None
    down_s = 50.0 * len(result.disturbed.outages)
    assert 1 - down_s / result.returned_s[-1] == pytest.approx(400 / (400 + 4 * 50), abs=0.02)


def test_work_that_is_lost_is_done_again() -> None:
    """With failures at rate x a second of work that starts anew takes (e^x - 1) (1 / x + r)."""
    count = 3000 if ALL else 800
    world = replace(queue_of_one([0.0] * count), concurrency=1)
    dies = partial(outage, mtbf_s=2.0, restart_s=3.0)
    took_s = simulate(world, processes=[dies], seed=7).returned_s[-1]
    expected_s = (math.exp(0.5) - 1) * (2.0 + 3.0)
    assert took_s / count == pytest.approx(expected_s, rel=0.05 if ALL else 0.1)


@pytest.mark.parametrize(
    ("current", "metric", "target", "replicas"),
    [
        (50, 90, 75, 60),  # the example of the Kubernetes blog on its tolerance
        (3, 200, 100, 6),  # and those of its documentation: twice as much, half as much
        (4, 50, 100, 2),
        (10, 109, 100, 10),  # within a tenth of the target
        (10, 91, 100, 10),
        (10, 111, 100, 12),
        (3, 0, 100, 0),
    ],
)
def test_the_autoscaler_asks_for_as_many_as_kubernetes(
    current: int, metric: float, target: float, replicas: int
) -> None:
    assert desired(current, metric, target) == replicas


def test_a_fleet_follows_its_requests_up_at_once_and_down_after_the_window() -> None:
    """64 requests, of which the first replica ends four every 100 s; 8 a replica are wanted.

    At 200 s 56 are left, which is more than a tenth below 8 x 8: the last wish of 8 is of 195 s.
    """
    asked = [Request(number, 0.0, 8, 100) for number in range(64)]
    world = small_world(asked, "vllm", {"max_num_seqs": 4})
    scales = partial(autoscaler, target=8.0, max_replicas=8, start_s=20.0)
    (mark, *_), *_ = [result.marks for result in simulate_replicas(world, processes=[scales])]
    assert mark == (15.0, "scale", "64 requests ask for 5 replicas of 1; 0.00 replica-hours so far")
    marks = simulate_replicas(world, processes=[scales])[0].marks or ()
    changes = [(mark.kind, mark.time_s) for mark in marks if mark.kind != "scale"]
    assert changes[:8] == [("add", 35.0)] * 4 + [("add", 50.0)] * 3 + [("drain", 495.0)]


def test_of_a_fleet_that_shrinks_those_that_are_starting_go_first() -> None:
    """8 requests ask for 4 replicas at 1 s, and are done before those serve, at 21 s."""
    asked = [Request(number, 0.0, 8, 2) for number in range(8)] + [Request(8, 30.0, 8, 2)]
    world = small_world(asked, "vllm")
    fleet = partial(autoscaler, target=2.0, max_replicas=4, start_s=20.0, sync_s=1.0)
    result, *others = simulate_replicas(world, processes=[partial(fleet, stabilization_s=0.0)])
    assert (result.status, others) == (["completed"] * 9, [])
    assert [mark.kind for mark in result.marks or ()] == ["scale", "scale"]


def test_a_pipeline_that_is_added_dies_too() -> None:
    """One is added at 5 s to one that dies every second on average, down for none."""

    def grows(world: Any) -> Iterator[Any]:
        yield world.env.timeout(5.0)
        world.replicas.add()

    asked = [Request(number, 0.5 * number, 1, 1) for number in range(60)]
    world = small_world(asked, times_s=(0.01, 0.0))
    dies = partial(outage, mtbf_s=1.0, restart_s=0.0)
    marks = simulate_replicas(world, processes=[grows, dies])[0].marks or ()
    deaths = [mark for mark in marks if mark.text.startswith("replica 1 dies")]
    assert 15 < len(deaths) < 40
    assert deaths[0].time_s > 5.0


def test_a_fleet_of_no_size_is_refused() -> None:
    fleet = partial(autoscaler, target=2.0, min_replicas=3, max_replicas=2, start_s=1.0)
    with pytest.raises(UsageError, match="min_replicas 3 is more than max_replicas 2"):
        simulate_replicas(small_world([Request(0, 0.0, 8, 2)]), processes=[fleet])


def test_a_fleet_never_leaves_its_bounds() -> None:
    asked = [Request(number, 0.7 * number, 8, 30) for number in range(200)]
    world = small_world(asked, "vllm", {"max_num_seqs": 4}, replicas=2)
    seen: list[int] = []

    def watch(world: Any) -> Iterator[Any]:
        while True:
            yield world.env.timeout(5.0)
            seen.append(len(world.replicas.open))

    scales = partial(autoscaler, target=3.0, min_replicas=2, max_replicas=5, start_s=7.0)
    results = simulate_replicas(world, processes=[scales, watch])
    assert merged(results).status == ["completed"] * 200
    assert (min(seen), max(seen)) == (2, 5)


def with_requests(world: World) -> World:
    """Return the world with requests that overlap, so that a death meets many."""
    asked = [Request(number, 0.002 * number, 5 + 7 * number, 23) for number in range(6)]
    return replace(world, requests=asked)


@settings(max_examples=250 if ALL else 12, deadline=None)
@given(worlds() | running_ahead().map(with_requests), st.lists(ACTS, max_size=12))
def test_all_is_conserved_and_the_same_again_whatever_processes_do(
    world: World, acts: list[tuple[str, float, int]]
) -> None:
    result = simulate(world, processes=[acting(acts)], seed=3)
    assert_same(result, simulate(world, processes=[acting(acts)], seed=3))
    check_requests_and_tokens(result, world.requests)
    check_times(result)
    check_stages(result)
    bubbles = attribute(result)
    busy_s = (result.end_s - result.start_s).sum()
    whole_s = result.depth * (bubbles.window[1] - bubbles.window[0])
    assert bubbles.idle_s + busy_s == pytest.approx(whole_s, abs=1e-6)
    assert (bubbles.end_s >= bubbles.start_s).all()


@settings(max_examples=150 if ALL else 12, deadline=None)
@given(worlds())
def test_a_process_that_does_nothing_moves_no_byte(world: World) -> None:
    watched = simulate(world, processes=[nothing])
    assert_same(simulate(world), replace(watched, marks=None, disturbed=None))


def test_a_disturbed_run_replays_the_same_decisions() -> None:
    asked = [Request(number, 0.3 * number, 40, 9) for number in range(8)]
    world = small_world(asked, "sarathi", {"token_budget": 48}, depth=3, times_s=(0.1, 0.01))
    clock = SimClock()
    replica = Replica(world, clock, batcher=RecordingBatcher)
    source = ArrivalSource(clock, world, [replica], world.overheads, world.router)
    slow = at(0.5, lambda w: w.stages[1].slow(4), 2.0, lambda w: w.stages[0].stop(), 3.0, start)
    Processes(clock.env, source, [replica], lambda: replica, made=[slow], seed=0).run()
    (engine,) = replica.engines
    assert isinstance(engine, RecordingBatcher)
    assert replay(engine.journal, world.batcher(RecordingBatcher)) is None


class Restarting(VirtualPipeline):
    """Stages on a virtual clock whose workers may all be killed, and are there again at once."""

    def restart(self) -> None:
        self.coming.clear()
        self.free_s = [0.0] * len(self.free_s)


@pytest.mark.parametrize("policy", ["sarathi", "vllm_v1", "token_throttling"])
def test_an_engine_that_dies_is_served_as_it_is_simulated_and_its_journal_replays(
    policy: str,
) -> None:
    asked = [Request(number, 0.3 * number, 40, 2 + 3 * number) for number in range(8)]
    params = {"async_scheduling": False} if policy == "vllm_v1" else {}
    world = small_world(asked, policy, params, depth=3, times_s=(0.1, 0.01), total_pages=30)
    again = 5.4321, lambda w: w.replicas[0].fail(0.5)
    ends = 18.3456, lambda w: w.replicas[0].fail(0.5, reject=True)
    dies = at(1.2345, lambda w: w.replicas[0].fail(2.0), *again, *ends)
    journal: list[Any] = []

    def engines() -> list[Any]:
        return [world.batcher(partial(RecordingBatcher, record=journal.append))]

    pipeline = Restarting(3)
    given = {"made": [dies], "seed": 0, "make_engines": engines, "clock": pipeline.clock}
    driver = MortalDriver(world, engines(), pipeline, **given)
    driver.run()
    served, simulated = driver.result(), simulate(world, processes=[dies])
    assert served.preemptions.sum() > 3
    assert served.status == simulated.status
    assert {"completed", "aborted"} == set(served.status)
    for name in ("request_id", "decode_tokens", "free_pages", "preemptions"):
        np.testing.assert_array_equal(getattr(served, name), getattr(simulated, name), name)
    for name in ("start_s", "end_s", "first_token_s", "completion_s"):
        np.testing.assert_allclose(getattr(served, name), getattr(simulated, name), err_msg=name)
    assert replay(journal, cast("Any", Lives(world.batcher))) is None
    written = [_entry(json.loads(json.dumps(_line(entry, False)))) for entry in journal]
    assert replay(written, cast("Any", Lives(world.batcher))) is None
    without = [entry for entry in journal if getattr(entry, "verb", "") != "restart"]
    assert replay(without, cast("Any", Lives(world.batcher))) is not None


def start(world: Any) -> None:
    world.stages[0].start()


def test_each_process_has_a_random_stream_of_its_own() -> None:
    drawn: dict[str, list[float]] = {"alone": [], "beside": []}

    def draws(name: str) -> UserProcess:
        def process(world: Any) -> Iterator[Any]:
            drawn[name].append(world.rng.random())
            yield world.env.timeout(0)

        return process

    simulate(THREE, processes=[draws("alone")], seed=5)
    simulate(THREE, processes=[draws("alone"), draws("beside")], seed=5)
    simulate(THREE, processes=[draws("alone")], seed=6)
    first, second, third = drawn["alone"]
    assert first == second != third
    assert drawn["beside"] != [first]


# -- processes that break their promise -----------------------------------------------------------


def raises(world: Any) -> Iterator[Any]:
    yield world.env.timeout(1)
    raise KeyError("no such stage")


def never_yields(world: Any) -> int:
    return len(world.stages)


def yields_a_number(world: Any) -> Iterator[Any]:
    yield 5


def sleeps_into_the_past(world: Any) -> Iterator[Any]:
    yield world.env.timeout(-1)


def sleeps_for_no_number(world: Any) -> Iterator[Any]:
    yield world.env.timeout(float("nan"))


def runs_the_environment(world: Any) -> Iterator[Any]:
    yield world.env.timeout(1)
    world.env.run()


def stops_for_ever(world: Any) -> Iterator[Any]:
    world.stages[1].stop()
    yield world.env.timeout(1)


def wakes_for_ever(world: Any) -> Iterator[Any]:
    world.stages[1].stop()
    while True:
        yield world.env.timeout(0)


def has_a_child_that_raises(world: Any) -> Iterator[Any]:
    yield world.env.process(raises(world))


def leaves_a_child_that_raises(world: Any) -> Iterator[Any]:
    world.env.process(raises(world))
    yield world.env.timeout(9)


def leaves_a_child_that_never_ends(world: Any) -> Iterator[Any]:
    def ticks() -> Iterator[Any]:
        while True:
            yield world.env.timeout(1)

    world.env.process(ticks())
    yield world.env.timeout(0)


def leaves_it_beside_a_stopped_stage(world: Any) -> Iterator[Any]:
    world.stages[1].stop()
    yield from leaves_a_child_that_never_ends(world)


def takes_no_world() -> Iterator[Any]:
    yield 1


async def is_async(world: Any) -> None: ...


class IsAClass:
    def __init__(self, world: Any) -> None: ...


def waits_for_another_clock(world: Any) -> Iterator[Any]:
    yield simpy.Environment().timeout(1)


def steps_the_environment(world: Any) -> Iterator[Any]:
    yield world.env.timeout(1)
    for _ in range(9):
        world.env.step()


def lets_an_event_fail(world: Any) -> Iterator[Any]:
    world.env.event().fail(ValueError("too late"))
    yield world.env.timeout(1)


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (raises, "process raises raised KeyError: 'no such stage' (test_processes.py:LINE: raise"),
        (never_yields, "process never_yields never yields (test_processes.py:LINE); yield world."),
        (yields_a_number, "yields 5, which is no event (test_processes.py:LINE); yield world.env"),
        (sleeps_into_the_past, "raised ValueError: Negative delay -1 (test_processes.py:LINE: y"),
        (sleeps_for_no_number, "raised ValueError: a delay of nan s; 0 or more is right (test_pr"),
        (runs_the_environment, "RuntimeError: a process waits by yielding an event; the run goes"),
        (stops_for_ever, "the run cannot end: no process goes on (test_processes.py:LINE); 1 req"),
        (wakes_for_ever, "woke 101 times while nothing came or returned (test_processes.py:LINE)"),
        (has_a_child_that_raises, "raised KeyError: 'no such stage' (test_processes.py:LINE: "),
        (leaves_a_child_that_raises, "a process of a process raised KeyError: 'no such stage' ("),
        (takes_no_world, "process takes_no_world does not take a world alone (test_processes.py:"),
        (is_async, "process is_async never yields (test_processes.py:LINE); yield world.env.time"),
        (IsAClass, "process IsAClass never yields (test_processes.py:LINE); yield world.env.time"),
        (waits_for_another_clock, "yields an event of another clock (test_processes.py:LINE); y"),
        (steps_the_environment, "moved the clock before it waits (test_processes.py:LINE); yield"),
        (leaves_it_beside_a_stopped_stage, "the run cannot end: 100 events while nothing came or"),
        (lets_an_event_fail, "raised ValueError: too late (test_processes.py:LINE)"),
    ],
)
def test_a_bad_process_is_one_line(
    process: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.sim.processes.MOST_IDLE_WAKES", 100)
    with pytest.raises(UserProcessError) as caught:
        simulate(THREE, processes=[process])
    line = str(caught.value)
    assert "\n" not in line
    assert words in re.sub(r"\.py:\d+", ".py:LINE", line)
    assert caught.value.status == 1


def test_a_run_ends_when_its_requests_have_ended_whatever_a_process_left() -> None:
    left = simulate(THREE, processes=[leaves_a_child_that_never_ends])
    assert left.completion_s.tolist() == [9.0]


EXAMPLES = sorted((ROOT / "examples" / "processes").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_does_what_its_marks_say(file: Path) -> None:
    asked = [Request(number, 0.5 * number, 16, 30) for number in range(100)]
    world = small_world(asked, depth=2, link=Link(0.01, 0.0), times_s=(0.5, 0.05))
    example = processes_of([ProcessConfig(name=f"{file}:{file.stem}")], ROOT)
    results = simulate_replicas(world, processes=example, seed=1)
    assert merged(results).status == ["completed"] * 100
    assert {mark.kind for mark in results[0].marks or ()} == {"slow"}


# -- in a run -------------------------------------------------------------------------------------

MINE = """
def straggler(world, stage: int = 1, factor: float = 2.0):
    yield world.env.timeout(1)
    world.stages[stage].slow(factor)
    world.log("note", "a <b>straggler</b>")

def breaks(world):
    yield world.env.timeout(1)
    world.stages[9].stop()
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "my_faults.py").write_text(MINE, encoding="utf-8")
    write_inputs(tmp_path)
    run = yaml.safe_load((tmp_path / "RUN.yaml").read_text(encoding="utf-8"))
    run["processes"] = ["my_faults.py:straggler"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return tmp_path


def test_a_run_names_a_process_beside_it(mine: Path) -> None:
    out = mine / "out"
    done("simulate", str(mine / "run.yaml"), "--out", str(out))
    marks = (out / "marks.csv").read_text(encoding="utf-8").splitlines()
    assert marks[:2] == ["time_s,kind,text", "1.0,slow,stage 1 takes 2 times as long"]
    assert "a &lt;b&gt;straggler&lt;/b&gt;" in (out / "report.html").read_text(encoding="utf-8")
    with gzip.open(out / "timeline.json.gz", "rt") as file:
        instants = [event for event in json.load(file)["traceEvents"] if event["ph"] == "i"]
    assert [event["name"] for event in instants] == [
        "slow: stage 1 takes 2 times as long",
        "note: a <b>straggler</b>",
    ]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["provenance"]["pipeline"] == "processes"


def test_a_process_in_a_run_has_parameters(mine: Path) -> None:
    known = {"name": "my_faults.py:straggler", "factor": 3.0}
    run = ef.simulate(mine / "run.yaml", set={"processes": [known]})
    assert run.marks["text"][0] == "stage 1 takes 3 times as long"
    assert run.result.provenance["config"]["processes"][0]["params"] == {"factor": 3.0}


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ("stragler", "unknown process 'stragler'; did you mean \"straggler\"? known: autosc"),
        ("my_faults.py:nope", "my_faults.py has no function 'nope' of a world"),
        ("nowhere.py:nope", "process nowhere.py: no such file"),
        ({"name": "my_faults.py:straggler", "stge": 1}, "no parameter 'stge'; did you mean"),
        ({"name": "my_faults.py:straggler", "stage": "x"}, "stage should be a whole number, not"),
        ({"name": "straggler", "stage": 2}, "replica 0, stage 2: there are 1 replicas of 2 stages"),
        ({"name": "straggler", "stage": 0, "every_s": 1.0}, "give both or none"),
        ({"name": "straggler"}, "process straggler needs a value of 'stage', a whole number"),
        ({"name": "contended_link", "hop": 0, "share": 0.5}, "hop 0: there are 1 replicas of 0 h"),
        ({"name": "contended_link", "hop": 0, "share": 1.0}, "share should be less than 1"),
        ({"name": "outage", "mtbf_s": 0, "restart_s": 1}, "mtbf_s should be greater than 0"),
    ],
)
def test_a_process_that_is_none_is_refused(mine: Path, process: Any, words: str) -> None:
    setting = f"processes=[{json.dumps(process)}]"
    line = complaint("simulate", str(mine / "run.yaml"), "--set", setting)
    assert words in line


def test_a_process_that_breaks_ends_the_command_with_a_line_and_status_1(mine: Path) -> None:
    where = "--set", "processes=[my_faults.py:breaks]", "--out", str(mine / "out")
    status, _, line = evenflow("simulate", str(mine / "run.yaml"), *where)
    assert (status, line.count("\n")) == (1, 1)
    assert "process breaks raised IndexError: list index out of range (my_faults.py:9: " in line
    assert not (mine / "out").exists()


def test_a_sweep_whose_points_all_break_says_the_first_of_them(mine: Path) -> None:
    points = "run: RUN.yaml\nparameters: {processes: [['my_faults.py:breaks']]}\n"
    (mine / "sweep.yaml").write_text(points, encoding="utf-8")
    status, _, line = evenflow("sweep", str(mine / "sweep.yaml"), "--out", str(mine / "out"))
    assert (status, line.count("\n")) == (0, 1)
    assert line.startswith("1 of 2 points failed, the first of them point 1: process breaks raised")


def test_only_a_simulation_has_processes(mine: Path) -> None:
    line = complaint("run", str(mine / "run.yaml"), "--out", str(mine / "out"))
    assert "processes" in line
    assert "can only be simulated" in line


def test_processes_join_no_recurrence_and_no_pools(mine: Path) -> None:
    with pytest.raises(UsageError, match="pipeline: recurrence: processes join in"):
        ef.simulate(mine / "run.yaml", pipeline="recurrence")
    with pytest.raises(UsageError, match="processes: not with a system of pools"):
        ef.simulate(ROOT / "examples/systems/distserve.yaml", set=FEW, processes=[nothing])


def acted_on(mine: Path, process: str) -> dict[str, Any]:
    """Return what a validation of one run on two emulated workers found."""
    (mine / "my_faults.py").write_text(MORE, encoding="utf-8")
    changes = [f"processes=[my_faults.py:{process}]", "workers=emulated"]
    return validate(job_of(mine / "run.yaml", changes, joined=True), 1).found


def test_a_process_of_the_run_stops_a_real_worker(mine: Path) -> None:
    found = acted_on(mine, "stops")
    assert found["decisions"][0] > 20
    assert found["end_to_end"]["duration"]["measured"] > 0.4 + 0.4


@pytest.mark.long
def test_a_process_of_the_run_kills_real_workers_which_go_on_anew(mine: Path) -> None:
    found = acted_on(mine, "dies")
    assert found["decisions"][0] > 20
    assert found["end_to_end"]["duration"]["measured"] > 0.4 + 30.0
    with pytest.raises(
        UserProcessError, match=r"its workers were back after .* s, not 0 s \(my_fa"
    ):
        acted_on(mine, "is_back_too_soon")


MORE = """
def stops(world):
    yield world.env.timeout(0.4)
    world.stages[1].stop(finish=True)
    yield world.env.timeout(0.4)
    world.stages[1].start()

def dies(world, restart_s=30.0):
    yield world.env.timeout(0.4)
    world.replicas[0].fail(restart_s)

def is_back_too_soon(world):
    yield from dies(world, 0.0)
"""
