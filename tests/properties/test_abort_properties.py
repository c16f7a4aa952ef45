"""Clients that leave at any moment: nothing is lost, nothing stays behind, and replay holds."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.decodes import ONE_TOKEN
from evenflow.core.kv import KvCache, PrefixCache
from evenflow.core.replay import Call, RecordingBatcher, replay
from evenflow.core.world import World
from evenflow.engines.queues import EngineQueues
from evenflow.engines.swap import SwapCache
from evenflow.types import MicroBatch, Request
from tests import worlds
from tests.amounts import many

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 150), st.sampled_from([1, 2, 3, 5, 60])),
        st.tuples(st.sampled_from(["next"] * 3 + ["complete"] * 2), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 20), st.just(0)),
    ),
    min_size=20,
    max_size=100,
)


@st.composite
def deployments(draw: st.DrawFn) -> World:
    """Worlds of every policy without requests, with pools that force preemption."""
    if draw(st.integers(0, 5)) == 0:
        return draw(worlds.running_ahead())
    return worlds.drawn_world(
        draw,
        [16, 20, 60],
        most_stages=3,
        pipelined_chunks=draw(st.sampled_from([None, True, False])),
        decoding=draw(worlds.SPECULATIONS),
        prefix_cache=draw(st.sampled_from([False, False, True])),
        kv=draw(st.sampled_from([KvCache, SwapCache])),
    )


class Play:
    """Plays actions on a Batcher, micro-batches returning in order, and looks after each."""

    def __init__(self, owner: RecordingBatcher) -> None:
        self.owner = owner
        self.in_flight: deque[MicroBatch] = deque()
        self.now_s = 0.0
        queues = owner.queues  # where decodes run ahead, only lengths end a request
        self.runs_ahead = isinstance(queues, EngineQueues) and queues.ahead > 0
        self.added = self.refused = self.aborted = self.finished = 0

    def add(self, prompt: int, output: int, draw: st.DataObject) -> None:
        prefix = None
        if isinstance(self.owner.pool, PrefixCache):
            prefix = draw.draw(worlds.prefixes(prompt + output, 16))
        request = Request(self.added, self.now_s, prompt, output, None, prefix)
        self.added += 1
        self.refused += self.owner.add(request) is not None

    def next(self) -> None:
        batch = self.owner.next(self.now_s)
        if batch is not None:
            self.in_flight.append(batch)

    def complete(self, stopped: tuple[int, ...] = ()) -> None:
        if self.in_flight:
            ended = self.owner.complete(self.in_flight.popleft(), self.now_s, stopped)
            assert not any(seq.aborted for seq in ended)
            self.finished += len(ended)

    def abort(self, choice: int) -> None:
        live = self.owner.queues.live.items()
        served = [number for number, seq in live if not seq.aborted]
        if served:
            assert self.owner.abort(served[choice % len(served)]).aborted
            self.aborted += 1

    def play(self, action: str, one: int, other: int, draw: st.DataObject) -> None:
        self.now_s += 0.01
        if action == "add":
            self.add(one, other, draw)
        elif action == "abort":
            self.abort(one)
        elif action == "stop":
            self.complete(() if self.runs_ahead else (one, one + 1, one + 2))
        else:
            getattr(self, action)()
        self.check()

    def drain(self) -> None:
        """Serve what is left, without clients that leave."""
        while self.owner.queues.live or self.in_flight:
            self.now_s += 0.01
            self.next()
            if not self.owner.can_send() or self.owner.wake_at_s is None:
                self.complete()
            self.check()

    def check(self) -> None:
        queues = self.owner.queues
        live = list(queues.live.values())
        worlds.check_integrity(self.owner.pool, [page for seq in live for page in seq.pages])
        waits = [seq for seq in live if not (seq.aborted or seq.decoding)]
        assert queues.waiting_tokens == sum(seq.remaining for seq in waits)
        assert len(queues.admitted) == len(live) - len(queues.waiting)
        assert queues.running_decodes == sum(seq.decoding for seq in live)
        ready = [seq for group in queues.ready.groups for seq in group.members.values()]
        assert not any(seq.aborted for seq in [*queues.waiting, *queues.partials, *ready])
        if self.runs_ahead:
            return
        sent = [batch.decodes for batch in queues.in_flight.values() if batch.decodes is not None]
        decoding = [*queues.ready.groups, *sent]
        assert queues.running_decodes == sum(map(len, decoding))
        if queues.decoding is ONE_TOKEN:
            prefilling = (seq.computed for seq in live if seq.pages and not seq.decoding)
            contexts = (group.context for group in decoding)
            assert self.owner.kv.tokens == sum(prefilling) + sum(contexts) + sum(map(len, sent))


@settings(max_examples=many(150), deadline=None)
@given(deployments(), ACTIONS, st.data())
def test_clients_may_leave_at_any_moment(
    world: World, actions: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    owner = world.batcher(RecordingBatcher)
    play = Play(owner)
    for action in actions:
        play.play(*action, data)
    play.drain()
    assert play.added == play.refused + play.aborted + play.finished
    assert sum(isinstance(entry, Call) for entry in owner.journal) == play.aborted
    worlds.require_idle(owner)
    assert replay(owner.journal, world.batcher()) is None
