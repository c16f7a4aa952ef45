"""Answers between two threads: who is told what, in which order, and when nobody listens."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from evenflow.types import Request
from runtime.front import LiveFront
from runtime.http.answers import Answers, Generation, Piece, Reply, ServiceError
from runtime.http.text import Numbers
from runtime.wire import Draw


def asked(max_tokens: int = 3, *, stop: Sequence[str] = (), temperature: float = 0.0) -> Generation:
    return Generation([1, 2], max_tokens, temperature, 5, 0.9, 11, stop)


async def pieces_of(reply: Reply) -> list[Piece]:
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


def test_a_priority_reaches_a_policy_that_looks_at_it() -> None:
    front = LiveFront()
    answers = Answers(front, Numbers())

    async def main() -> None:
        with pytest.raises(ServiceError, match="priority: only 0 is right"):
            answers.submit([replace(asked(), priority=-2)])
        answers.by_priority = True
        answers.submit([replace(asked(), priority=-2)])

    asyncio.run(main())
    request = front.due(1.0)
    assert request is not None
    assert request.priority == -2


def test_tokens_of_another_thread_become_the_pieces_of_each_answer() -> None:
    front = LiveFront()
    answers = Answers(front, Numbers())

    def drive() -> None:
        for number in (0, 1):
            answers.added(number, None)
        for token in (7, 8, 9):
            ends = [answers.token(number, token + 10 * number) for number in (0, 1)]
            assert ends == [False, token == 8]
        assert not answers.token(1, 3), "it has ended"

    async def main() -> tuple[list[Piece], int]:
        reply = answers.submit([asked(), asked(9, stop=["18"])])
        waiting = answers.num_waiting
        driver = threading.Thread(target=drive)
        driver.start()
        await reply.admitted()
        found = await pieces_of(reply)
        driver.join()
        return found, waiting

    found, waiting = asyncio.run(main())
    assert [piece for piece in found if piece.choice == 0] == [
        (0, "7 ", None),
        (0, "8 ", None),
        (0, "9 ", "length"),
    ]
    assert [piece for piece in found if piece.choice == 1] == [(1, "17", None), (1, " ", "stop")]
    assert (waiting, answers.num_waiting) == (2, 0)
    assert answers.finished == {"stop": 1, "length": 1, "abort": 0}
    assert (answers.prompt_tokens, answers.output_tokens) == (4, 5)
    assert [front.due(0.0), front.due(0.0)] != [None, None]
    front.release()


def test_a_stop_string_in_the_last_text_is_found() -> None:
    async def main() -> list[Piece]:
        answers = Answers(LiveFront(), Numbers())
        reply = answers.submit([asked(1, stop=["7 "])])
        assert answers.token(0, 7)
        return await pieces_of(reply)

    assert asyncio.run(main()) == [(0, "", "stop")]


def test_a_refusal_is_an_error_for_the_call_and_withdraws_the_rest() -> None:
    front = LiveFront()

    async def main() -> None:
        answers = Answers(front, Numbers())
        reply = answers.submit([asked(), asked()])
        answers.added(0, None)
        answers.added(1, "too long")
        with pytest.raises(ServiceError, match="prompt and max_tokens: too long") as error:
            await reply.admitted()
        assert error.value.status == 400
        answers.withdraw(reply)
        assert not answers.token(0, 1)

    asyncio.run(main())
    assert [front.due(0.0) is None, front.due(0.0) is None, list(front.withdrawn())] == [
        False,
        False,
        [0],
    ]


def test_a_queue_that_is_full_and_a_server_that_stops_refuse() -> None:
    async def main() -> None:
        answers = Answers(LiveFront(), Numbers(), max_queue=2)
        first = answers.submit([asked(), asked()])
        with pytest.raises(ServiceError, match="the queue is full: 2 requests wait"):
            answers.submit([asked()])
        answers.token(0, 1)
        second = answers.submit([asked()])
        answers.close(ServiceError("stopping", 503))
        with pytest.raises(ServiceError, match="stopping"):
            answers.submit([asked()])
        answers.added(0, None)
        answers.added(1, None)
        answers.fail(ServiceError("a worker died", 503))
        await first.admitted()
        with pytest.raises(ServiceError, match="a worker died"):
            await pieces_of(first)
        with pytest.raises(ServiceError, match="a worker died"):
            await second.admitted()

    asyncio.run(main())


def test_what_workers_compute_with() -> None:
    async def main() -> None:
        answers = Answers(LiveFront(), Numbers())
        answers.submit([asked(), asked(temperature=0.5)])
        requests = [Request(number, 0.0, 2, 3) for number in range(3)]
        greedy, drawn, left = map(answers.text_of, requests)
        assert (greedy.prompt_ids, greedy.draw) == ([1, 2], None)
        assert drawn.draw == Draw(1, 0.5, 5, 0.9, 11)
        assert left.prompt_ids == [0, 0], "its client has left; nobody sees what comes out"

    asyncio.run(main())
