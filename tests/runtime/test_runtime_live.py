"""Clients that come, leave and end early while the driver runs, on a pipeline of virtual time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evenflow.runtime.driver
from evenflow.core.batcher import Batcher
from evenflow.core.replay import Call, RecordingBatcher, replay
from evenflow.runtime.driver import Driver
from evenflow.runtime.front import Front
from evenflow.runtime.page_tables import PageTable
from evenflow.runtime.wire import Step
from evenflow.sim import World
from evenflow.types import Request
from tests.amounts import many
from tests.runtime.test_runtime_driver import TICK_S
from tests.virtual_run import VirtualPipeline
from tests.worlds import MAX_MODEL_LEN, POLICIES, require_idle, small_world

PAGES = 20


class Checked(VirtualPipeline):
    """A pipeline with a worker's page table, which notices what cannot follow on what it knows."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.table = PageTable(16, PAGES)

    def send(self, step: Step) -> None:
        self.table.apply(step)
        super().send(step)


class Script(Front):
    """A front with a script: at which time who comes, or whose client leaves."""

    def __init__(self, events: list[tuple[float, Request | int]]) -> None:
        self.events = deque(events)

    def __bool__(self) -> bool:
        return bool(self.events)

    @property
    def next_s(self) -> float | None:
        return self.events[0][0] if self.events else None

    def _pop(self, now_s: float, kind: type) -> Any:
        if self.events and self.events[0][0] <= now_s and isinstance(self.events[0][1], kind):
            return self.events.popleft()[1]
        return None

    def due(self, now_s: float) -> Request | None:
        self.now_s = now_s
        found: Request | None = self._pop(now_s, Request)
        return found

    def withdrawn(self) -> Iterator[int]:
        while (request_id := self._pop(self.now_s, int)) is not None:
            yield request_id


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[float, Request | int]]:
    """Clients, some of whom leave after a while, some before the driver has looked."""
    lengths = st.tuples(st.integers(1, 150), st.sampled_from([1, 2, 5, 60]))
    events: list[tuple[float, int, Request | int]] = []
    for number, pair in enumerate(draw(st.lists(lengths, min_size=1, max_size=12))):
        arrival_s = draw(st.integers(0, 60)) * TICK_S
        events.append((arrival_s, 0, Request(number, arrival_s, *pair)))
        patience = draw(st.sampled_from([None, 0, 1, 5, 17, 60]))
        if patience is not None:
            events.append((arrival_s + patience * TICK_S, 1, number))
    events.sort(key=lambda event: event[:2])
    return [(at_s, event) for at_s, _, event in events]


def world_of(policy: tuple[str, dict[str, object]], depth: int) -> World:
    sizes = {"depth": depth, "total_pages": PAGES, "max_model_len": MAX_MODEL_LEN}
    return small_world([], *policy, times_s=(4 * TICK_S, TICK_S / 16), **sizes)


def live_driver(
    events: list[tuple[float, Request | int]],
    world: World,
    owner: Batcher,
    on_token: Callable[[int, int], bool | None],
) -> Driver:
    pipeline: Any = Checked(world.depth)
    front: Any = Script(events)
    front.token = on_token
    return Driver(world, [owner], pipeline, front=front, clock=pipeline.clock)


@settings(max_examples=many(200), deadline=None)
@given(st.sampled_from(POLICIES), st.integers(1, 3), scripts(), st.sampled_from([3, 99]))
def test_every_client_ends_and_every_page_is_free(
    policy: tuple[str, dict[str, object]],
    depth: int,
    events: list[tuple[float, Request | int]],
    ends_after: int,
) -> None:
    world = world_of(policy, depth)
    owner: Any = world.batcher(RecordingBatcher)
    got: Counter[int] = Counter()

    def on_token(request_id: int, token: int) -> bool:
        got[request_id] += 1
        return got[request_id] == ends_after  # the request ends with this one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evenflow.runtime.driver, "LOOK_S", 64 * TICK_S)
        driver = live_driver(events, world, owner, on_token)
        driver.run()
    result = driver.result()
    requests = [event for _, event in events if isinstance(event, Request)]
    limits = np.array([request.output_tokens for request in sorted(requests, key=by_id)])
    done = np.array([status == "completed" for status in result.status])
    assert len(result.status) == len(requests) == driver.num_done
    assert (result.output_tokens[done] == np.minimum(limits, ends_after)[done]).all()
    assert result.status.count("aborted") == sum(isinstance(e, Call) for e in owner.journal)
    served = np.array([status != "rejected" for status in result.status])
    assert result.sampled_rows.sum() == result.output_tokens[served].sum()
    gaps = np.maximum(result.output_tokens[served] - 1, 0)
    assert result.gap_count.sum() == gaps.sum()
    require_idle(owner)
    assert replay(owner.journal, world.batcher()) is None


def by_id(request: Request) -> int:
    return request.request_id


def test_what_is_served_when_a_driver_quits_is_recorded_as_aborted() -> None:
    world = world_of(("sarathi", {}), 2)
    events: list[tuple[float, Request | int]] = [
        (0.0, Request(0, 0.0, 4, 2)),
        (0.0, Request(1, 0.0, 4, 60)),
    ]
    tokens = 0

    def on_token(request_id: int, token: int) -> bool:
        nonlocal tokens
        tokens += request_id
        if tokens == 5:
            driver.quit()
        return False

    driver = live_driver(events, world, world.batcher(), on_token)
    driver.run()
    driver.abandon("the server was stopped")
    result = driver.result()
    assert result.status == ["completed", "aborted"]
    assert result.reason == ["", "the server was stopped"]
    assert result.output_tokens.tolist() == [2, 5]
    driver.abandon("again")
    assert driver.num_done == 2
