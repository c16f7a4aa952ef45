"""Real processes: tokens, decisions and conservation; what dies, hangs or is interrupted."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import zmq

from evenflow.core.batcher import Batcher
from evenflow.core.replay import Entry, RecordingBatcher, replay
from evenflow.costs import AffineCost
from evenflow.engines.loop import EngineLoop
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError, WorkerError
from evenflow.results.bubbles import attribute
from evenflow.runtime.driver import Driver
from evenflow.runtime.emulated import EmulatedSettings, emulated_token, wait_until
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.serve import ServeOptions, Workers, serve
from evenflow.runtime.wire import Failed, driver_address, encode, open_socket
from evenflow.runtime.worker import WorkerSettings
from evenflow.sim import World
from evenflow.types import Request
from tests.failing_workers import PREPARE_S, Failing, OneDies, Slow, SlowToPrepare
from tests.worlds import check_integrity, small_world

PAGES, DEPTH = 24, 4
COSTS = AffineCost(0.002, 1e-6, DEPTH)
REQUESTS = [Request(i, 0.01 * (i // 2), 20 + 23 * i % 90, 1 + 5 * i % 17) for i in range(16)]
"""More than the pages hold at once, so some are preempted."""


@pytest.fixture(autouse=True)
def _nothing_stays_behind(sockets: Path) -> None: ...


def world_of(name: str = "sarathi", requests: Sequence[Request] = REQUESTS) -> World:
    sizes = {"depth": DEPTH, "total_pages": PAGES, "max_model_len": PAGES * 16}
    world = small_world(requests, name, costs=COSTS, **sizes)
    rules = EngineRules.of(world.make_scheduler())
    if not rules.in_turns:
        return world
    return replace(world, loop=EngineLoop, max_in_flight=rules.cap(DEPTH))


def driver_of(
    workers: WorkerPipeline, world: World | None = None, owner: Batcher | None = None, **more: Any
) -> Driver:
    world = world or world_of()
    return Driver(world, [owner or world.batcher()], workers, **more)


def pipeline(*others: tuple[int, WorkerSettings], **more: float) -> WorkerPipeline:
    settings: list[WorkerSettings] = [EmulatedSettings()] * DEPTH
    for stage, other in others:
        settings[stage] = other
    return WorkerPipeline(settings, 16, PAGES, **more)


def made_up(requests: Iterable[Request]) -> dict[int, list[int]]:
    """Return the tokens that emulated workers give."""
    return {
        each.request_id: [
            emulated_token(each.request_id, position)
            for position in range(each.prompt_tokens, each.prompt_tokens + each.output_tokens)
        ]
        for each in requests
    }


def test_a_pipeline_serves_one_policy_after_the_other_and_their_decisions_replay() -> None:
    """Plain, named decodes, those ahead of their tokens, and in slots; all are in virtual time."""
    with pipeline() as workers:
        for name in ("sarathi", "tests.worlds:NamesDecodes", "vllm_v1", "sglang"):
            serves_and_replays(name, workers)


def serves_and_replays(name: str, workers: WorkerPipeline) -> None:
    tokens: dict[int, list[int]] = defaultdict(list)
    world = world_of(name)
    owner = world.batcher(RecordingBatcher)
    driver = driver_of(workers, world, owner, on_token=lambda i, token: tokens[i].append(token))
    driver.run()
    result = driver.result()
    assert replay(owner.journal, world.batcher()) is None, name
    assert result.status == ["completed"] * len(REQUESTS)
    assert tokens == made_up(REQUESTS)
    check_integrity(owner.pool, [])
    assert result.sampled_rows.sum() == result.output_tokens.sum()
    assert result.gap_count.sum() == (result.output_tokens - 1).sum()
    check_causes(result)
    bubbles = attribute(result)
    assert bubbles.idle_s == pytest.approx(sum(bubbles.totals().values()))


@pytest.mark.parametrize("metadata", ["ahead", "with_activations"])
def test_a_stage_prepares_ahead_or_once_the_activations_are_there(metadata: str) -> None:
    """One request decodes alone: stage 1 has the time that stage 0 computes, or none."""
    costs = AffineCost(2 * PREPARE_S, 0.0, 2)
    world = replace(world_of(), requests=[Request(0, 0.0, 4, 6)], costs=costs, depth=2)
    owner = world.batcher(RecordingBatcher)
    tokens: dict[int, list[int]] = defaultdict(list)
    coupled = metadata == "with_activations"
    with WorkerPipeline(
        [EmulatedSettings(), SlowToPrepare()], 16, PAGES, coupled=coupled
    ) as workers:
        driver = driver_of(workers, world, owner, on_token=lambda i, token: tokens[i].append(token))
        driver.run()
    assert replay(owner.journal, world.batcher()) is None
    assert tokens == made_up(world.requests)
    result = driver.result()
    waits_s = result.start_s[:, 1] - result.end_s[:, 0]
    assert len(waits_s) == 6
    assert (waits_s.min() >= PREPARE_S) == coupled


def test_the_front_door_serves_a_world_by_its_workers() -> None:
    done: list[int] = []
    journal: list[Entry] = []
    world = world_of(requests=REQUESTS[:4])
    served = serve(
        world,
        Workers([EmulatedSettings()] * DEPTH),
        done.append,
        ServeOptions(record=lambda _: journal.append),
    )
    assert (served.failure, served.interrupted, served.unfinished) == (None, False, 0)
    assert served.result.status == ["completed"] * 4
    assert done[-1] == 4
    assert replay(journal, world.batcher()) is None
    assert served.facts()["free_pages"] == served.facts()["total_pages"] == PAGES
    with pytest.raises(UsageError, match="the workers do not start: stage 3 failed: ValueError"):
        serve(world, Workers([*[EmulatedSettings()] * 3, Failing("make")]))


def check_causes(result: object) -> None:
    columns = ("scheduled_s", "available_s", "start_s", "end_s", "first_token_s", "arrival_s")
    scheduled, available, start, end, first, arrival = (getattr(result, name) for name in columns)
    assert (first > arrival).all()
    assert (available[:, 0] >= scheduled).all()
    assert (start >= available).all()
    assert (end - start >= 0.999 * COSTS.base_s).all()
    assert (available[:, 1:] >= end[:, :-1]).all()
    assert (start[1:] >= end[:-1]).all(), "a stage served two at once"


def run_and_fail(
    workers: WorkerPipeline, during: Callable[[WorkerPipeline], None] | None = None
) -> Driver:
    def when_one_is_done(count: int) -> None:
        if during is not None and count == 1:
            during(workers)

    with workers:
        driver = driver_of(workers, on_done=when_one_is_done)
        started_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            driver.run()
        assert time.monotonic() - started_s < 10
    assert caught.match(r"stage 1 |stage 2 ")
    return driver


def test_a_worker_that_dies_leaves_what_is_finished() -> None:
    driver = run_and_fail(pipeline((1, OneDies())))
    result = driver.result()
    assert 0 < len(result.status) == driver.num_done < len(REQUESTS)
    assert 15 <= len(result.scheduled_s) <= 20
    attribute(result)


def test_a_worker_that_is_killed_is_an_error() -> None:
    run_and_fail(pipeline(), lambda some: os.kill(some.process_ids[1], signal.SIGKILL))


def test_a_worker_that_is_stopped_is_named_and_one_that_computes_for_as_long_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within seconds, whatever the patience, as its beats end."""
    with pipeline((2, Slow(2.0))) as workers:
        monkeypatch.setattr("evenflow.runtime.pipeline.SILENT_LIMIT_S", 1.7)
        driver = driver_of(workers, world_of(requests=[Request(0, 0.0, 20, 1)]))
        driver.run()
        assert driver.result().status == ["completed"]
        os.kill(workers.process_ids[1], signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"stage 1 .* says nothing for \d+\.\d s"):
            driver_of(workers, patience_s=3600.0).run()
        assert time.monotonic() - stopped_s < 15


@pytest.mark.long
def test_nobody_is_silent_while_the_driver_itself_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pipeline() as workers:
        monkeypatch.setattr("evenflow.runtime.pipeline.SILENT_LIMIT_S", 1.5)
        workers.receive(0)
        time.sleep(2.0)
        assert workers.receive(0) == []


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        pytest.param(
            Failing("prepare"), "stage 1 failed: ValueError: cannot prepare", marks=pytest.mark.long
        ),
        (Failing("execute"), "stage 1 failed: ValueError: cannot execute"),
        (Failing("leave"), r"stage 1 .* ended with status 0"),
    ],
)
def test_a_worker_that_fails_or_leaves_is_an_error(worker: WorkerSettings, message: str) -> None:
    with pytest.raises(WorkerError, match=message), pipeline((1, worker)) as workers:
        driver_of(workers).run()


def test_what_a_worker_said_may_come_after_its_end() -> None:
    with pipeline((1, Failing("leave"))) as workers, zmq.Context() as context:
        ended = next(child for child in active_children() if child.name == "stage 1").sentinel
        late = threading.Thread(target=say_late, args=(context, ended))
        late.start()
        with pytest.raises(WorkerError, match="stage 1 failed: it had a reason"):
            driver_of(workers).run()
        late.join()


def say_late(context: zmq.Context[zmq.Socket[bytes]], ended: int) -> None:
    """Be stage 1's last words, on their way for longer than its process lives."""
    folder = next(Path(tempfile.gettempdir()).iterdir())
    socket = open_socket(context, zmq.PUSH, driver_address(str(folder)))
    wait([ended], 60)
    time.sleep(0.3)
    socket.send(encode(Failed(1, "it had a reason")))
    socket.close(linger=1000)


@pytest.mark.parametrize(
    ("settings", "limit_s", "message"),
    [
        (Failing("make"), 60.0, "stage 3 failed: ValueError: no weights for stage 3"),
        (
            Failing("make for an hour"),
            1.0,
            r"stages \[(\d, )*3\] did not start within 1 s \(workers.start_limit_s\)",
        ),
        pytest.param(
            Failing("stop"),
            60.0,
            r"stage 3 \(process \d+\) says nothing for 2\.\d s: it was",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_worker_that_does_not_start_is_an_error(
    settings: WorkerSettings, limit_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.runtime.pipeline.SILENT_LIMIT_S", 2.0)
    with pytest.raises(WorkerError, match=message):
        pipeline((3, settings), start_limit_s=limit_s).__enter__()


def test_a_folder_with_too_long_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.gettempdir()) / ("long" * 30)
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(WorkerError, match=r"no socket at ipc:.*longlong"):
            pipeline().__enter__()
    assert not list(folder.iterdir())
    folder.rmdir()


def test_stop_lets_what_is_in_the_pipeline_come_back() -> None:
    world = world_of()
    owner = world.batcher()
    with pipeline() as workers:
        driver = driver_of(workers, world, owner, on_done=lambda _: driver.stop())
        driver.run()
    assert not owner.queues.in_flight
    assert 0 < driver.num_done < len(REQUESTS)


def test_slow_links_slow_only_themselves() -> None:
    with pipeline((1, EmulatedSettings(latency_s=0.03))) as workers:
        driver = driver_of(workers, world_of(requests=REQUESTS[:3]))
        driver.run()
    result = driver.result()
    hops_s = result.available_s[:, 1:] - result.end_s[:, :-1]
    assert (hops_s[:, 0] >= 0.0299).all()
    assert (hops_s[:, 1:].min(axis=0) < 0.0299).all()


def test_a_wait_never_ends_early() -> None:
    for wait_s in (0.0, 1e-5, 1e-3, 5e-3):
        deadline_s = time.monotonic() + wait_s
        wait_until(deadline_s)
        assert time.monotonic() >= deadline_s
