"""The driver of a real run against a pipeline of virtual time: it decides as the simulated one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenflow.runtime.driver
from evenflow.core.replay import RecordingBatcher
from evenflow.core.scheduling import View
from evenflow.engines.loop import EngineLoop
from evenflow.errors import PolicyError, StallError, WorkerError
from evenflow.runtime.front import TraceReplay
from evenflow.runtime.wire import Free, Message, Step
from evenflow.schedulers import create
from evenflow.sim import World, driver
from evenflow.sim.tandem import Tandem
from evenflow.types import Plan, Request, Scheduler
from tests.amounts import many
from tests.virtual_run import VirtualPipeline, drive
from tests.worlds import MAX_MODEL_LEN, served_worlds, small_world

TICK_S = 2.0**-9
"""All times are multiples of it or of a power of two below, so that sums are exact."""


exact_worlds = served_worlds(
    st.integers(0, 60).map(lambda ticks: ticks * TICK_S), 4 * TICK_S, TICK_S / 16
)
"""Worlds of every policy, in whose times there is no rounding."""


@settings(max_examples=many(150), deadline=None)
@given(exact_worlds)
def test_both_drivers_do_the_same_at_the_same_time(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evenflow.runtime.driver, "LOOK_S", 64 * TICK_S)
        patch.setattr(evenflow.runtime.driver, "FLUSH_S", 40 * TICK_S)
        real, batcher = drive(world)
    simulated = driver.SimDriver(world, Tandem, batcher=RecordingBatcher)
    expected, result = simulated.run(), real.result()
    assert result.status == expected.status
    for name in ("request_id", "first_token_s", "completion_s", "preemptions"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), name)
    for name in ("scheduled_s", "start_s", "end_s", "prefill_tokens", "decode_tokens"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), name)
    for name in ("wait_s", "wait_reason"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), name)
    gaps_s = [np.sort(np.repeat(run.gap_s, run.gap_count)) for run in (result, expected)]
    np.testing.assert_array_equal(*gaps_s)
    journal = simulated.engines[0].journal
    assert sent(batcher.journal) == sent(journal)


class Behind(VirtualPipeline):
    """Stage 0's word that it is free comes later than the micro-batch, over another connection."""

    def send(self, step: Step) -> None:
        assert self.free_s[0] <= self.now_s, "stage 0 computes another one"
        super().send(step)

    def tell(self, at_s: float, message: Message) -> None:
        super().tell(at_s + 92 * TICK_S * isinstance(message, Free), message)


def test_a_late_word_of_stage_0_is_of_the_micro_batch_it_names() -> None:
    requests = [Request(i, 5 * i * TICK_S, 8, 30) for i in range(40)]
    world = small_world(requests, "vllm", depth=2, times_s=(8 * TICK_S, 0.0), max_in_flight=None)
    real, _ = drive(world, Behind(world.depth))
    assert real.num_done == 40


def sent(journal: list[Any]) -> list[Any]:
    return [entry for entry in journal if getattr(entry, "decision", None) is not None]


def test_an_eager_policy_is_asked_as_often_as_in_the_simulation() -> None:
    """An adaptive reserve changes with every question: stage 0 that is free again is none."""
    lengths = [(15, 4), (79, 19), (86, 12), (93, 13), (81, 2), (32, 1)]
    params = {"max_prefill": 64, "use_ut": False, "reserve": "adaptive"}
    sizes = {"depth": 3, "total_pages": 16, "max_model_len": MAX_MODEL_LEN}
    times_s = 4 * TICK_S, TICK_S / 16
    requests = [Request(i, 0.0, *pair) for i, pair in enumerate(lengths)]
    kind = "token_throttling"
    world = small_world(requests, kind, params, times_s=times_s, dispatch="eager", **sizes)
    real, _ = drive(world)
    expected = driver.SimDriver(world, Tandem).run()
    np.testing.assert_array_equal(real.result().completion_s, expected.completion_s)


@pytest.mark.parametrize(
    ("name", "params", "depth"),
    [
        ("sglang", {"chunked_prefill_size": 64}, 1),
        ("vllm_v1", {"max_num_batched_tokens": 64, "max_num_seqs": 9}, 2),
    ],
)
def test_decodes_run_ahead_as_in_the_simulation(
    name: str, params: dict[str, Any], depth: int
) -> None:
    requests = [Request(i, 0.011 * i, 15 + 13 * i % 60, 1 + 7 * i % 30) for i in range(30)]
    sizes = {"total_pages": 14, "max_model_len": 14 * 16, "loop": EngineLoop}
    rule = {"depth": depth, "max_in_flight": depth + 1, "times_s": (0.01, 1e-5)}
    world = small_world(requests, name, params, **sizes, **rule)
    real, batcher = drive(world)
    simulated = driver.SimDriver(world, Tandem, batcher=RecordingBatcher)
    expected = simulated.run()
    assert expected.preemptions.any() == (name == "vllm_v1")
    np.testing.assert_allclose(real.result().completion_s, expected.completion_s)
    decisions = [entry.decision for entry in sent(batcher.journal)]
    assert decisions == [entry.decision for entry in sent(simulated.engines[0].journal)]


def small(**more: Any) -> World:
    requests = more.pop("requests", [Request(i, 0.0, 10, 3) for i in range(4)])
    return small_world(requests, depth=2, times_s=(0.01, 0.0), **more)


def test_a_pipeline_that_falls_silent_is_an_error() -> None:
    class Silent(VirtualPipeline):
        def send(self, step: Step) -> None:
            pass

    with pytest.raises(WorkerError, match=r"nothing heard of micro-batch 0 for 5\.\d s"):
        drive(small(), Silent(2), patience_s=5.0)


def test_a_lost_word_that_stage_0_is_free_does_not_hang_the_run() -> None:
    class Mute(VirtualPipeline):
        def receive(self, timeout_s: float) -> list[Message]:
            return [m for m in super().receive(timeout_s) if not isinstance(m, Free)]

    real, _ = drive(small(), Mute(2))
    assert real.num_done == 4


def test_a_lost_result_is_an_error() -> None:
    class Forgetful(VirtualPipeline):
        def receive(self, timeout_s: float) -> list[Message]:
            return [m for m in super().receive(timeout_s) if m != self.first]

        def send(self, step: Step) -> None:
            super().send(step)
            if step.batch_id == 0:
                self.first = self.coming[-1][1]

    with pytest.raises(
        WorkerError, match="micro-batch 1 with 0 tokens returned, expected 0 with 1"
    ):
        drive(
            small(
                make_scheduler=lambda: create("sarathi", {"token_budget": 4}),
                requests=[Request(0, 0.0, 4, 2), Request(1, 0.0, 9, 2)],
            ),
            Forgetful(2),
        )


class Idle:
    """A policy that sends nothing, and asks to be woken after `later_s` if there is one."""

    def __init__(self, later_s: float | None) -> None:
        self.later_s = later_s

    def schedule(self, view: View) -> Plan:
        return Plan(wake_at_s=None if self.later_s is None else view.now_s + self.later_s)


class Patient:
    """A policy that sends each prompt a second after it came."""

    def __init__(self) -> None:
        self.inner: Scheduler = create("sarathi", {})

    def schedule(self, view: View) -> Plan:
        return self.inner.schedule(view) if view.now_s >= 1 else Plan(wake_at_s=1.0)


def test_a_policy_is_woken_when_it_asked_to_be() -> None:
    real, _ = drive(small(make_scheduler=Patient))
    assert real.result().scheduled_s[0] == pytest.approx(1.0)


@pytest.mark.parametrize(("later_s", "error"), [(None, StallError), (0.0, PolicyError)])
def test_a_policy_that_would_hang_the_run_is_an_error(
    later_s: float | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        drive(small(make_scheduler=lambda: Idle(later_s)))


def test_a_closed_loop_lets_in_one_for_each_that_leaves() -> None:
    front = TraceReplay([Request(i, 9.0, 1, 1) for i in range(4)], concurrency=2)
    entered = [front.due(1.0), front.due(1.0), front.due(1.0)]
    assert [r and (r.request_id, r.arrival_s) for r in entered] == [(0, 1.0), (1, 1.0), None]
    assert front.next_s is None
    front.left(1)
    after = front.due(2.5)
    assert (after.request_id, after.arrival_s, len(front)) == (2, 2.5, 1)


def test_who_comes_late_keeps_its_time() -> None:
    front = TraceReplay([Request(0, 0.5, 1, 1), Request(1, 3.0, 1, 1)])
    late = front.due(2.0)
    assert late.arrival_s == 0.5
    assert (front.due(2.0), front.next_s) == (None, 3.0)
