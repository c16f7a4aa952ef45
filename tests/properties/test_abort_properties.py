"""Clients that leave at any moment: nothing is lost, nothing stays behind, and replay holds."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.costs import AffineCost, estimates
from evenflow.kv import PagePool
from evenflow.prefix_cache import PrefixCache
from evenflow.replay import Aborted, RecordingBatcher, replay
from evenflow.schedulers import create
from evenflow.speculation import Speculation
from evenflow.types import MicroBatch, Request
from tests.worlds import MAX_MODEL_LEN, POLICIES, prefixes

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
def batchers(draw: st.DrawFn) -> tuple[RecordingBatcher, RecordingBatcher]:
    """Two fresh Batchers of one kind: of every policy, with pools that force preemption."""
    name, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 3))
    cap = draw(st.sampled_from([depth, depth, None]))
    pages = draw(st.sampled_from([16, 20, 60]))
    pool = draw(st.sampled_from([PagePool, PagePool, PrefixCache]))
    options = {
        "pipelined_chunks": draw(st.sampled_from([None, True, False])),
        "speculation": draw(st.sampled_from([None, None, Speculation(3, 0.7)])),
        "swap": draw(st.booleans()),
    }
    costs = AffineCost(0.005, 0.0001, depth)

    def make() -> RecordingBatcher:
        policy = create(name, params, max_model_len=MAX_MODEL_LEN, **estimates(costs))
        shape = {"depth": depth, "max_in_flight": cap, "max_model_len": MAX_MODEL_LEN}
        return RecordingBatcher(policy, pool(pages), **shape, **options)

    return make(), make()


class Play:
    """Plays actions on a Batcher, micro-batches returning in order, and looks after each."""

    def __init__(self, owner: RecordingBatcher) -> None:
        self.owner = owner
        self.in_flight: deque[MicroBatch] = deque()
        self.now_s = 0.0
        self.added = self.refused = self.aborted = self.finished = 0

    def add(self, prompt: int, output: int, draw: st.DataObject) -> None:
        prefix = None
        if isinstance(self.owner.pool, PrefixCache):
            prefix = draw.draw(prefixes(prompt + output, 16))
        request = Request(self.added, self.now_s, prompt, output, None, prefix)
        self.added += 1
        self.refused += self.owner.add(request) is not None

    def next(self) -> None:
        batch = self.owner.next(self.now_s)
        if batch is not None:
            self.in_flight.append(batch)

    def complete(self, stopped: tuple[int, ...] = ()) -> None:
        if self.in_flight:
            rows = self.owner.complete(self.in_flight.popleft(), self.now_s, stopped)
            assert not any(row.aborted for row in rows)
            self.finished += len(rows)

    def abort(self, choice: int) -> None:
        served = [number for number, row in self.owner.live.items() if not row.aborted]
        if served:
            row = self.owner.abort(served[choice % len(served)])
            assert row.aborted
            self.aborted += 1

    def play(self, action: str, one: int, other: int, draw: st.DataObject) -> None:
        self.now_s += 0.01
        if action == "add":
            self.add(one, other, draw)
        elif action == "abort":
            self.abort(one)
        elif action == "stop":
            self.complete((one, one + 1, one + 2))
        else:
            getattr(self, action)()
        self.check()

    def drain(self) -> None:
        """Serve what is left, without clients that leave."""
        while self.owner.live:
            self.now_s += 0.01
            self.next()
            if not self.owner.can_send or self.owner.wake_at_s is None:
                self.complete()
            self.check()

    def check(self) -> None:
        owner, rows = self.owner, list(self.owner.live.values())
        owner.pool.check_integrity([page for row in rows for page in row.pages])
        waits = [row for row in rows if not (row.aborted or row.decoding)]
        assert owner.waiting_tokens == sum(row.remaining for row in waits)
        assert owner.running == len(rows) - len(owner.waiting)
        assert owner.running_decodes == sum(row.decoding for row in rows)
        sent = [batch.decodes for batch in owner.in_flight.values() if batch.decodes is not None]
        decoding = [*owner.ready.groups, *sent]
        assert owner.running_decodes == sum(map(len, decoding))
        if owner.speculation is None:
            prefilling = (row.computed for row in rows if row.pages and not row.decoding)
            contexts = (group.context for group in decoding)
            assert owner.kv_tokens == sum(prefilling) + sum(contexts) + sum(map(len, sent))
        assert not any(row.aborted for row in [*owner.waiting, *owner.partials, *owner.ready])


@settings(max_examples=300, deadline=None)
@given(batchers(), ACTIONS, st.data())
def test_clients_may_leave_at_any_moment(
    pair: tuple[RecordingBatcher, RecordingBatcher],
    actions: list[tuple[str, int, int]],
    data: st.DataObject,
) -> None:
    owner, fresh = pair
    play = Play(owner)
    for action in actions:
        play.play(*action, data)
    play.drain()
    assert play.added == play.refused + play.aborted + play.finished
    assert sum(isinstance(entry, Aborted) for entry in owner.journal) == play.aborted
    assert (owner.running, owner.running_decodes, owner.waiting_tokens) == (0, 0, 0)
    assert (owner.kv_tokens, owner.ready.rows, len(owner.in_flight)) == (0, 0, 0)
    owner.pool.check_integrity([])
    assert replay(owner.journal, fresh) is None
