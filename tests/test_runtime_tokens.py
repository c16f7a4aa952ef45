"""Token ids: made-up prompts, what each request draws with, what ends it early."""

from __future__ import annotations

from evenflow.decodes import Sequence
from evenflow.types import Chunk, Request
from runtime.tokens import RandomTexts, Text, TokenBook
from runtime.wire import Draw

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
    assert draw == Draw(7, 0.7, 40, 0.9, draw.seed)
    assert draw == texts(REQUEST).draw
    assert draw != RandomTexts(97, 3, (0.7, 40, 0.9), sampling_seed=2)(REQUEST).draw


def test_how_it_draws_is_told_with_the_end_of_a_prompt() -> None:
    draw = Draw(7, 1.0, 0, 1.0, 5)
    book = TokenBook(lambda _: Text(range(50), draw))
    assert (book.inputs([chunk(0, 30)], []), book.draws([chunk(0, 30)])) == ([*range(30)], [])
    assert book.inputs([chunk(30, 50)], []) == [*range(30, 50)]
    assert book.draws([chunk(30, 50)]) == [draw]


def test_a_stop_token_ends_its_request_and_one_that_left_is_not_missed() -> None:
    book = TokenBook(lambda _: Text(range(50), stop_ids=frozenset({2})))
    book.inputs([chunk(0, 50)], [])
    assert book.sampled([7, 8], [1, 2]) == []
    assert book.inputs([], [7]) == [1]
    assert book.sampled([7], [2]) == [7]
    book.ended(7)
    book.ended(7)
    assert len(book) == 0
