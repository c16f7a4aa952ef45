"""Answers between driver and clients: who is told what, in which order, and who listens no more."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import select
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from evenflow.runtime.front import LiveFront
from evenflow.runtime.http.answers import Answers, Delta, Generation, Reply, ServiceError, Serving
from evenflow.runtime.http.live import Clients
from evenflow.runtime.http.text import Codec
from evenflow.runtime.wire import Draw
from evenflow.types import Prefix, Request


def asked(max_tokens: int = 3, *, stop: Sequence[str] = (), temperature: float = 0.0) -> Generation:
    return Generation([1, 2], max_tokens, temperature, 5, 0.9, 11, stop)


async def pieces_of(reply: Reply) -> list[Delta]:
    return [piece async for piece in reply.pieces()]


def test_requests_come_out_in_order_and_who_leaves_comes_after_who_came() -> None:
    front = LiveFront()
    first, second = Request(0, 0.1, 1, 1), Request(1, 0.2, 1, 1)
    assert (front.next_s, bool(front)) == (None, True)
    front.submit(first)
    front.withdraw(0)
    front.submit(second)
    assert select.select([front], [], [], 0)[0], "a driver that waits is woken"
    assert front.next_s == 0.0
    assert [front.due(1.0), front.due(1.0), list(front.withdrawn())] == [first, None, [0]]
    assert [front.due(1.0), front.due(1.0), list(front.withdrawn())] == [second, None, []]
    assert not select.select([front], [], [], 0)[0]
    front.close()
    assert not front
    front.release()


class Driver:
    """What a driver would hear: words, in order."""

    def __init__(self, **options: Any) -> None:
        self.heard: list[tuple[Any, ...]] = []
        serving = Serving("model", Codec(), "emulated", **options)
        self.answers = Answers(serving, lambda *word: self.heard.append(word))


def test_a_priority_reaches_a_policy_that_looks_at_it() -> None:
    async def main(*, by_priority: bool) -> Driver:
        driver = Driver(by_priority=by_priority)
        driver.answers.submit([replace(asked(), priority=-2)])
        return driver

    with pytest.raises(ServiceError, match="priority: only 0 is right"):
        asyncio.run(main(by_priority=False))
    word, _, _, told = asyncio.run(main(by_priority=True)).heard[0]
    assert (word, told["priority"]) == ("submit", -2)


def test_tokens_become_the_pieces_of_each_answer() -> None:
    async def main() -> Driver:
        driver = Driver()
        answers = driver.answers
        reply = answers.submit([asked(), asked(9, stop=["18"])])
        waiting = answers.num_waiting
        for number in (0, 1):
            answers.added(number, None)
        for token in (7, 8, 9):
            for number in (0, 1):
                answers.token(number, token + 10 * number)
        found = await pieces_of(reply)
        assert [piece for piece in found if piece.choice == 0] == [
            (0, "7 ", None),
            (0, "8 ", None),
            (0, "9 ", "length"),
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
    assert [word[:2] for word in driver.heard] == [("submit", 0), ("submit", 1), ("stop", 1)]


def test_a_stop_string_in_the_last_text_is_found() -> None:
    async def main() -> list[Delta]:
        answers = Driver().answers
        reply = answers.submit([asked(1, stop=["7 "])])
        answers.token(0, 7)
        return await pieces_of(reply)

    assert asyncio.run(main()) == [(0, "", "stop")]


def test_a_refusal_is_an_error_for_the_call_and_withdraws_the_rest() -> None:
    async def main() -> Driver:
        driver = Driver()
        answers = driver.answers
        reply = answers.submit([asked(), asked()])
        answers.added(0, None)
        answers.added(1, "too long")
        with pytest.raises(ServiceError, match="prompt and max_tokens: too long") as error:
            await pieces_of(reply)
        assert error.value.status == 400
        answers.withdraw(reply)
        answers.token(0, 1)
        found = answers.counted.exposition({"vllm:num_preemptions_total": 0})
        assert b'generation_tokens_total{engine="0",model_name="model"} 0.0' in found
        return driver

    assert asyncio.run(main()).heard[2:] == [("withdraw", 0)]


def test_a_queue_that_is_full_and_a_server_that_stops_refuse() -> None:
    async def main() -> None:
        answers = Driver(max_queue=2).answers
        first = answers.submit([asked(), asked()])
        with pytest.raises(ServiceError, match="the queue is full: 2 requests wait"):
            answers.submit([asked()])
        answers.token(0, 1)
        second = answers.submit([asked()])
        answers.close("stopping")
        with pytest.raises(ServiceError, match="stopping"):
            answers.submit([asked()])
        answers.added(0, None)
        answers.added(1, None)
        answers.fail("a worker died")
        for reply in (first, second):
            with pytest.raises(ServiceError, match="a worker died"):
                await pieces_of(reply)

    asyncio.run(main())


class Peer:
    """A front end at the other end of a channel, and the clients that a driver knows by it."""

    def __init__(self, *, end_ids: frozenset[int] = frozenset(), keeps: bool = False) -> None:
        ours, self.channel = multiprocessing.Pipe()
        self.lost = threading.Event()
        self.clients = Clients(
            ours, end_ids, lambda: {"pages": 3}, lambda why: self.lost.set(), knows_prefixes=keeps
        )
        self.clients.start()

    def say(self, *word: Any) -> None:
        self.channel.send_bytes(json.dumps(word).encode())

    def submit(self, request_id: int, generation: Generation) -> Request:
        self.say("submit", request_id, 0.0, vars(generation))
        assert select.select([self.clients.front], [], [], 10)[0]
        request = self.clients.front.due(1.0)
        assert request is not None
        return request

    def hears(self, count: int) -> list[list[Any]]:
        words: list[list[Any]] = []
        while len(words) < count and self.channel.poll(10):
            words += json.loads(self.channel.recv_bytes())
        return words

    def settle(self) -> None:
        """Wait until all that was said is heard."""
        self.say("gauges")
        assert self.hears(1) == [["gauges", {"pages": 3}]]


def test_what_workers_compute_with() -> None:
    peer = Peer(keeps=True)
    requests = [peer.submit(0, asked()), peer.submit(1, asked(temperature=0.5))]
    greedy, drawn = map(peer.clients.text_of, requests)
    assert (greedy.prompt_ids, greedy.draw) == ([1, 2], None)
    assert drawn.draw == Draw(1, 0.5, 5, 0.9, 11)
    assert requests[0].prefix == Prefix((1, 2), 1, 2)
    peer.say("withdraw", 0)
    peer.settle()
    assert list(peer.clients.front.withdrawn()) == [0]
    assert peer.clients.text_of(requests[0]).prompt_ids == [0, 0], "its client has left"
    peer.channel.close()
    assert peer.lost.wait(10)


def test_a_request_ends_at_an_end_token_at_its_limit_and_after_a_stop_string() -> None:
    peer = Peer(end_ids=frozenset([5]))
    for number, generation in enumerate([asked(), replace(asked(), ignore_eos=True), asked(9)]):
        peer.submit(number, generation)
    token = peer.clients.token
    assert [token(0, 4), token(0, 5), token(0, 6)] == [False, True, False]
    assert [token(1, 5), token(1, 5), token(1, 5), token(1, 5)] == [False] * 4
    assert not token(2, 7)
    assert len(peer.hears(6)) == 6, "none of those after the end"
    peer.say("stop", 2)
    peer.settle()
    assert token(2, 8), "the next one ends it"
    peer.clients.added(2, None)
    assert peer.hears(1) == [["added", 2, None]], "and is told to nobody"
