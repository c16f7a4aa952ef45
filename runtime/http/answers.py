"""Bridge between the driver, which has tokens, and the server's event loop, for text.

Knows neither HTTP nor the Batcher. An answer is to one request; a reply gathers the answers to all
prompts of one client's call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from evenflow.results.run import GIVEN_UP
from evenflow.runtime.http import Serving
from evenflow.runtime.http.exposition import Counted, Timed
from evenflow.runtime.http.protocol import CompletionBody, Delta, ServiceError
from evenflow.runtime.http.text import Codec, StopStrings
from evenflow.runtime.tokens import Text
from evenflow.types import Request


class Reply:
    """The answers to one call, for the event loop: pieces, or why there are none."""

    def __init__(self, request_ids: range) -> None:
        self.request_ids = request_ids
        self._pieces: asyncio.Queue[Delta | ServiceError] = asyncio.Queue()
        self.add = self._pieces.put_nowait

    async def pieces(self) -> AsyncIterator[Delta]:
        """Iterate over the pieces of all answers; ServiceError if there are no more."""
        missing = len(self.request_ids)
        while missing:
            piece = await self._pieces.get()
            if isinstance(piece, ServiceError):
                raise piece
            missing -= piece.finish_reason is not None
            yield piece


class _Answer(Timed):
    def __init__(
        self, reply: Reply, index: int, prompt_tokens: int, stop: Sequence[str], codec: Codec
    ) -> None:
        super().__init__(prompt_tokens)
        self.reply = reply
        self._index = index
        self._stream = codec.stream()
        self._stop = StopStrings(stop)

    def push(self, token: int, reason: str | None) -> Delta:
        """Return the piece that a token adds; an end token (`reason` "stop") is no text."""
        text = "" if reason == "stop" else self._stream.push(token)
        if reason is not None:
            text += self._stream.rest()
        text, stopped = self._stop.push(text, ends=reason is not None)
        return Delta(self._index, text, "stop" if stopped else reason)


class Answers:
    """All client requests that are being answered; `failure`: why serving has stopped.

    `tell` sends the driver "submit", "withdraw", or "stop" where a stop string ends an answer.
    """

    def __init__(self, serving: Serving, tell: Callable[..., None]) -> None:
        self.serving = serving
        self.counted = Counted(serving.model)
        self.failure: str | None = None
        self._tell = tell
        self._answers: dict[int, _Answer] = {}
        self._next_id = 0

    def submit(self, how: CompletionBody, prompts: Sequence[Sequence[int]]) -> Reply:
        """Queue a request for each prompt; ServiceError if serving has stopped or too many wait."""
        if self.failure is not None:
            raise ServiceError(self.failure, 503)
        most, waiting = self.serving.max_queue, self.num_waiting
        if most is not None and waiting + len(prompts) > most:
            words = f"{waiting} requests wait for their first token"
            raise ServiceError(f"the queue is full: {words}, and {most} may", 503)
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        reply = Reply(range(first, self._next_id))
        codec = self.serving.codec
        stop_ids = frozenset[int]() if how.ignore_eos else codec.end_ids
        for index, ids in enumerate(prompts):
            number = first + index
            answer = self._answers[number] = _Answer(reply, index, len(ids), how.stop, codec)
            limit = how.most_tokens(self.serving.max_model_len - len(ids))
            request = Request(number, answer.arrival_s, len(ids), limit)
            self._tell("submit", request, Text(ids, how.draw(number), stop_ids))
        return reply

    def withdraw(self, reply: Reply) -> None:
        """Abort the open requests of a call after its client has left."""
        for request_id in reply.request_ids:  # one that has ended is known no more
            if self._answers.pop(request_id, None) is not None:
                self.counted.finished["abort"].inc()
                self._tell("withdraw", request_id)

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(not answer.tokens for answer in self._answers.values())

    def close(self, why: str) -> None:
        """Refuse new requests from now on."""
        self.failure = self.failure or why

    def fail(self, why: str) -> None:
        """Refuse new requests from now on, and fail the open ones."""
        self.failure = why
        for answer in self._answers.values():
            answer.reply.add(ServiceError(why, 503))
        self._answers.clear()

    def refused(self, request_id: int, why: str) -> None:
        if (answer := self._answers.pop(request_id, None)) is not None:
            message = f"prompt and max_tokens: {why}"
            answer.reply.add(ServiceError(message, 400, "context_length_exceeded", "max_tokens"))

    def given_up(self, request_id: int) -> None:
        if (answer := self._answers.pop(request_id, None)) is not None:
            self.counted.finished["abort"].inc()
            answer.reply.add(ServiceError(GIVEN_UP, 503))

    def token(self, request_id: int, token: int, reason: str | None) -> None:
        """Hand out a token, and why it is the last one, unless its client has left."""
        if (answer := self._answers.get(request_id)) is None:
            return
        piece = answer.push(token, reason)
        self.counted.token(answer, piece.finish_reason)
        if piece.finish_reason is not None:
            del self._answers[request_id]
            if reason is None:
                self._tell("stop", request_id)
        answer.reply.add(piece)
