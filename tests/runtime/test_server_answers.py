"""Answers between driver and clients: who is told what, in which order, and who listens no more."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import pytest
from prometheus_client import generate_latest

from evenflow.runtime.http import Serving
from evenflow.runtime.http.answers import Answers, Reply
from evenflow.runtime.http.live import Clients
from evenflow.runtime.http.protocol import CompletionRequest, Delta, ServiceError
from evenflow.runtime.http.text import Codec
from evenflow.runtime.tokens import Text
from evenflow.runtime.wire import Draw
from evenflow.types import Prefix, Request

ONE = [[1, 2]]


def asked(max_tokens: int = 3, **more: Any) -> CompletionRequest:
    how = {"prompt": [1, 2], "temperature": 0, "top_k": 5, "top_p": 0.9, "seed": 11}
    return CompletionRequest.model_validate({**how, "max_tokens": max_tokens, **more})


async def pieces_of(reply: Reply) -> list[Delta]:
    return [piece async for piece in reply.pieces()]


class Driver:
    """What a driver would hear: words, in order."""

    def __init__(self, **options: Any) -> None:
        self.heard: list[tuple[Any, ...]] = []
        serving = Serving("model", Codec(), "emulated", **options)
        self.answers = Answers(serving, lambda *word: self.heard.append(word))


def test_tokens_become_the_pieces_of_each_answer() -> None:
    async def main() -> Driver:
        driver = Driver()
        answers = driver.answers
        reply = answers.submit(asked(9, stop=["18"]), 2 * ONE)
        waiting = answers.num_waiting
        for token, reason in ((7, None), (8, None), (9, "length")):
            for number in (0, 1):
                answers.token(number, token + 10 * number, reason)
        found = await pieces_of(reply)
        assert [piece for piece in found if piece.choice == 0] == [
            (0, "7", None),
            (0, " 8", None),
            (0, " 9 ", "length"),
        ]
        assert [each for each in found if each.choice == 1] == [(1, "17", None), (1, " ", "stop")]
        assert (waiting, answers.num_waiting) == (2, 0)
        return driver

    driver = asyncio.run(main())
    answers = driver.answers
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
    )
    labels = {"model_name": "model", "engine": "0"}
    count = answers.counted.registry.get_sample_value
    assert [count(name, labels) for name in names[:2]] == [4, 5]
    ends = [count(names[2], {**labels, "finished_reason": each}) for each in ("stop", "length")]
    assert ends == [1, 1]
    assert [word[0] for word in driver.heard] == ["submit", "submit", "stop"]


def test_a_stop_string_in_the_last_text_is_found() -> None:
    async def main() -> list[Delta]:
        answers = Driver().answers
        reply = answers.submit(asked(1, stop=["7 "]), ONE)
        answers.token(0, 7, "length")
        return await pieces_of(reply)

    assert asyncio.run(main()) == [(0, "", "stop")]


def test_a_refusal_is_an_error_for_the_call_and_withdraws_the_rest() -> None:
    async def main() -> Driver:
        driver = Driver()
        answers = driver.answers
        reply = answers.submit(asked(), 2 * ONE)
        answers.refused(1, "too long")
        with pytest.raises(ServiceError, match="prompt and max_tokens: too long") as error:
            await pieces_of(reply)
        assert error.value.status == 400
        answers.withdraw(reply)
        answers.token(0, 1, None)
        found = generate_latest(answers.counted.registry)
        assert b'generation_tokens_total{engine="0",model_name="model"} 0.0' in found
        return driver

    assert asyncio.run(main()).heard[2:] == [("withdraw", 0)]


def test_a_queue_that_is_full_and_a_server_that_stops_refuse() -> None:
    async def main() -> None:
        answers = Driver(max_queue=2).answers
        first = answers.submit(asked(), 2 * ONE)
        with pytest.raises(ServiceError, match="the queue is full: 2 requests wait"):
            answers.submit(asked(), ONE)
        answers.token(0, 1, None)
        second = answers.submit(asked(), ONE)
        answers.close("stopping")
        with pytest.raises(ServiceError, match="stopping"):
            answers.submit(asked(), ONE)
        answers.fail("a worker died")
        for reply in (first, second):
            with pytest.raises(ServiceError, match="a worker died"):
                await pieces_of(reply)

    asyncio.run(main())


class Peer:
    """An HTTP server at the other end of a channel, and the clients that a driver knows by it."""

    def __init__(self) -> None:
        ours, self.channel = multiprocessing.Pipe()
        self.is_lost = False
        self.clients = Clients(ours, lambda: {"pages": 3}, self._lose, knows_prefixes=True)

    def _lose(self) -> None:
        self.is_lost = True

    def submit(self, number: int, most: int = 3, draw: Draw | None = None, *ends: int) -> Request:
        text = Text([1, 2], draw, frozenset(ends))
        self.channel.send(("submit", Request(number, 0.5, 2, most), text))
        request = self.clients.due(1.0)
        assert request is not None
        return request

    def hears(self, count: int) -> list[Any]:
        assert self.clients.due(1.0) is None
        words: list[Any] = []
        while len(words) < count:
            assert self.channel.poll(10)
            words += [word for word in self.channel.recv() if word[0] != "gauges"]
        return words


def test_what_workers_compute_with() -> None:
    peer, draw = Peer(), Draw(1, 0.5, 5, 0.9, 11)
    peer.clients.origin_s = 0.25
    requests = [peer.submit(0), peer.submit(1, 3, draw)]
    assert [peer.clients.text_of(each).draw for each in requests] == [None, draw]
    assert (requests[0].prefix, requests[0].arrival_s) == (Prefix((1, 2), 1, 2), 0.25)
    peer.channel.send(("withdraw", 0))
    assert peer.clients.due(1.0) is None
    assert list(peer.clients.withdrawn()) == [0]
    assert not peer.clients.token(0, 4), "its client has left"
    peer.channel.close()
    assert peer.clients.due(1.0) is None
    assert peer.is_lost


def test_a_request_ends_at_an_end_token_at_its_limit_and_after_a_stop_string() -> None:
    peer = Peer()
    peer.submit(0, 3, None, 5)
    peer.submit(1, 3)
    peer.submit(2, 9)
    token = peer.clients.token
    assert [token(0, 4), token(0, 5), token(0, 6)] == [False, True, False]
    assert [token(1, 5), token(1, 5), token(1, 5), token(1, 5)] == [False] * 4
    assert not token(2, 7)
    told = [("token", 0, 4, None), ("token", 0, 5, "stop")]
    told += [("token", 1, 5, None)] * 2 + [("token", 1, 5, "length"), ("token", 2, 7, None)]
    assert peer.hears(6) == told
    peer.channel.send(("stop", 2))
    assert peer.clients.due(1.0) is None
    assert token(2, 8), "the next one ends it"
    peer.submit(3)
    peer.clients.refused(3, "too long")
    assert peer.hears(1) == [("refused", 3, "too long")], (
        "and nothing of the one that is told nobody"
    )
