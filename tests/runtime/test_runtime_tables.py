"""Page tables and token ids: what the workers are told is what the Batcher holds; made-up prompts,
what each request draws with, what ends it early.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import ONE_TOKEN, Sequence
from evenflow.core.kv import KvCache
from evenflow.core.world import World
from evenflow.engines.loop import EngineLoop
from evenflow.engines.rules import EngineRules
from evenflow.errors import WorkerError
from evenflow.runtime import wire
from evenflow.runtime.page_tables import PageTable, StepWriter
from evenflow.runtime.tokens import RandomTexts, Text, TokenBook
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem
from evenflow.types import Chunk, MicroBatch, Prefix, Request
from tests.amounts import many
from tests.worlds import small_world, worlds


def token_at(request_id: int, position: int) -> int:
    return 1000 * request_id + position


def text_of(request: Request) -> Text:
    return Text([token_at(request.request_id, at) for at in range(request.prompt_tokens)])


class Told(Batcher):
    """A Batcher whose micro-batches are told to a worker's table and compared with it.

    The token that follows the first so many of a request is known beforehand.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.book = TokenBook(text_of)
        self.writer = StepWriter([self], self.book)
        self.table = PageTable(self.pool.page_tokens, self.pool.total_pages)
        self.sampled: dict[int, list[tuple[int, int]]] = {}
        self.shared: list[wire.Shared] = []

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self.writer.ended(self.given_up)
        if batch is not None:
            step = wire.decode(wire.encode(self.writer.step(batch, 0, [], [])))
            self.shared += step.shared
            rows = self.table.apply(step)
            assert rows == rows_of(batch)
            assert len(self.table) <= len(self.queues.live)
            spans = [(row.request_id, range(row.start, row.stop)) for row in rows]
            assert step.tokens == [token_at(number, at) for number, span in spans for at in span]
            ends = [(row.request_id, row.stop) for row in rows if row.last]
            self.sampled[batch.batch_id] = ends
        return batch

    def complete(
        self, batch: MicroBatch, now_s: float, stopped: Collection[int] = ()
    ) -> list[Sequence]:
        ends = self.sampled.pop(batch.batch_id)
        ids = [number for number, _ in ends]
        assert not self.book.sampled(ids, [token_at(*end) for end in ends])
        finished = super().complete(batch, now_s, stopped)
        self.writer.ended(finished)
        assert len(self.book) <= len(self.queues.live)
        return finished


def rows_of(batch: MicroBatch) -> list[wire.Piece]:
    rows = [
        wire.Piece(c.sequence.request.request_id, c.start, c.stop, c.last, c.sequence.pages)
        for c in batch.chunks
    ]
    if batch.decodes is not None:
        for row in batch.decodes.sequences():
            context = batch.decodes.context_of(row)
            rows.append(wire.Piece(row.request.request_id, context, context + 1, True, row.pages))
    return rows


@settings(max_examples=many(150), deadline=None)
@given(worlds())
def test_workers_hold_what_the_batcher_holds(world: World) -> None:
    rules = EngineRules.of(world.make_scheduler())  # what no real run takes is left out
    assume(not rules.cuts and not rules.ahead)
    plain = replace(world, decoding=ONE_TOKEN, kv=KvCache)
    SimDriver(plain, Tandem, batcher=Told).run()


def test_a_page_that_a_row_has_already_may_be_replaced_by_that_of_another() -> None:
    """Each of two begins with what the other has published; both fill the next page in pieces."""
    requests = [Request(i, 0.0, 100, 3, prefix=Prefix((7,), 100, 100)) for i in range(3)]
    sizes = {"depth": 3, "total_pages": 40, "prefix_cache": True}
    world = small_world(requests, "sarathi", {"token_budget": 20}, **sizes)
    driver = SimDriver(world, Tandem, batcher=Told)
    driver.run()
    assert isinstance(driver.engines[0], Told)
    assert any(pages.start for pages in driver.engines[0].shared)


def test_a_page_left_for_that_of_another_is_free_before_its_row_is_served_again() -> None:
    """SGLang publishes request 0's first page as request 1's, and serves request 2 before 0."""
    requests = [Request(i, 0.0, 145, 2, prefix=Prefix((0,), 16, 16)) for i in range(2)]
    requests += [Request(2, 0.0, 150, 1), Request(3, 0.0, 1, 1)]
    sizes = {"depth": 2, "total_pages": 32, "prefix_cache": True, "loop": EngineLoop}
    world = small_world(requests, "sglang", {}, **sizes)
    SimDriver(world, Tandem, batcher=Told).run()


def step(**parts: Any) -> wire.Step:
    plain = wire.Step(0, [], [], [], [], 0, [], [], [], [], [])
    return plain._replace(**parts)


BEGUN = step(pieces=[wire.Piece(1, 0, 20, True, [0, 1])])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (step(decodes=[2]), "request 2 goes on and was never begun"),
        (step(pieces=[wire.Piece(1, 30, 40, True, [])]), "request 1 goes on at 30, not at 20"),
        (step(pieces=[wire.Piece(2, 0, 4, True, [1])]), "request 2 gets page 1, which is not free"),
        (step(grown=[wire.Growth(1, [4])]), "request 1 gets page 4, which is not free"),
        (step(pieces=[wire.Piece(2, 0, 40, True, [2])]), "request 2 has 1 pages for 40 tokens"),
        (step(dropped=[1], decodes=[1]), "request 1 goes on and was never begun"),
    ],
)
def test_a_lost_message_is_noticed(second: wire.Step, message: str) -> None:
    table = PageTable(page_tokens=16, total_pages=4)
    table.apply(BEGUN)
    with pytest.raises(WorkerError, match=message):
        table.apply(second._replace(batch_id=1))


def test_another_batcher_begins_with_no_rows() -> None:
    table = PageTable(page_tokens=16, total_pages=4)
    for _ in range(2):
        assert table.apply(BEGUN) == [wire.Piece(1, 0, 20, True, [0, 1])]


def test_dropped_pages_may_be_given_away_in_the_same_step() -> None:
    table = PageTable(page_tokens=16, total_pages=4)
    table.apply(BEGUN)
    rows = table.apply(step(batch_id=1, dropped=[1], pieces=[wire.Piece(2, 0, 5, False, [1])]))
    assert rows == [wire.Piece(2, 0, 5, False, [1])]
    assert len(table) == 1


# -- messages -------------------------------------------------------------------------------------

FULL = step(
    dropped=[1],
    pieces=[wire.Piece(2, 0, 20, True, [0, 1])],
    grown=[wire.Growth(3, [4])],
    draws=[wire.Draw(2, 1.0, 0, 0.9, 5)],
    adopted=[wire.Piece(4, 0, 9, False, [6])],
    shared=[wire.Shared(2, 0, [0], 16)],
)


def test_a_message_comes_out_as_it_went_in_and_what_is_none_is_refused() -> None:
    for message in (FULL, wire.Returned(1, [0.5, 1e-9], [2]), wire.Failed(1, "é"), wire.Stop()):
        assert wire.decode(wire.encode(message)) == message
    decodes = list(range(1000, 1256))
    assert len(wire.encode(step(decodes=decodes))) < 6 * len(decodes), (
        "one that goes on costs its id"
    )
    odd = [b"", b"[]", b"{}", b"[99]", b"[0, 1]", b'[2, "seven"]', b"[2, 1, 1]", b"\xff\xfe"]
    odd += [b"[0,1,[],[[1]],[],[],0,[],[],[],[],[]]", b"[0,1,[],[],[],[],0,[],[],[],[[1]],[]]"]
    for data in [*odd, pickle.dumps(wire.Stop())]:
        with pytest.raises(WorkerError, match="a message that is none"):
            wire.decode(data)


# -- token ids ------------------------------------------------------------------------------------

REQUEST = Request(7, 0.0, 50, 4)


def chunk(start: int, stop: int) -> Chunk:
    seq = Sequence(REQUEST, REQUEST.prompt_tokens)
    return Chunk(seq, start, stop, stop == REQUEST.prompt_tokens, 0)


def test_prompts_follow_from_the_seed_and_the_request() -> None:
    texts = RandomTexts(vocabulary=97, seed=3)
    ids = texts(REQUEST).prompt_ids
    assert ids == texts(REQUEST).prompt_ids
    assert (len(ids), min(ids) >= 0, max(ids) < 97) == (50, True, True)
    assert ids != RandomTexts(97, 4)(REQUEST).prompt_ids
    assert ids != texts(Request(8, 0.0, 50, 4)).prompt_ids
    assert texts(REQUEST).draw is None


def test_each_request_draws_with_a_seed_of_its_own() -> None:
    texts = RandomTexts(97, 3, (0.7, 40, 0.9), sampling_seed=1)
    seeds = {draw.seed for i in range(50) if (draw := texts(Request(i, 0.0, 1, 1)).draw)}
    assert len(seeds) == 50
    draw = texts(REQUEST).draw
    assert draw == wire.Draw(7, 0.7, 40, 0.9, draw.seed)
    assert draw == texts(REQUEST).draw
    assert draw != RandomTexts(97, 3, (0.7, 40, 0.9), sampling_seed=2)(REQUEST).draw


def test_a_book_knows_how_a_request_draws() -> None:
    draw = wire.Draw(7, 1.0, 0, 1.0, 5)
    book = TokenBook(lambda _: Text(range(50), draw))
    assert book.inputs([chunk(0, 30)], []) == [*range(30)]
    assert book.inputs([chunk(30, 50)], []) == [*range(30, 50)]
    assert book.draws([7]) == [draw]


def test_a_stop_token_ends_its_request_and_one_that_left_is_not_missed() -> None:
    book = TokenBook(lambda _: Text(range(50), stop_ids=frozenset({2})))
    book.inputs([chunk(0, 50)], [])
    assert book.sampled([7, 8], [1, 2]) == []
    assert book.inputs([], [7]) == [1]
    assert book.sampled([7], [2]) == [7]
    book.ended(7)
    book.ended(7)
    assert len(book) == 0
