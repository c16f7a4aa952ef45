"""Bridge between the driver, which has tokens, and the server's event loop, for text.

Knows neither HTTP nor the Batcher. An answer is to one request; a reply gathers the answers to all
prompts of one client's call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.results.run import GIVEN_UP
from evenflow.runtime.http.exposition import Counted
from evenflow.runtime.http.text import Codec, StopStrings


class ServiceError(Exception):
    """A request cannot be served, and the HTTP status and OpenAI error code that say so.

    `param` is the parameter that is wrong, if one is.
    """

    def __init__(
        self, message: str, status: int, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Serving:
    """The served model: its name, and what reads and writes for its clients.

    `workers` says what computes: torch, or emulated. At most `max_queue` requests wait for their
    first token (None: no limit). `allowed_hosts` are what clients may call the server, beside
    localhost. `by_priority`: the policy looks at priorities, so that clients may give one. Arrivals
    are in seconds since `origin_s` of the monotonic clock.
    """

    model: str
    codec: Codec
    workers: str
    max_queue: int | None = None
    allowed_hosts: Sequence[str] = ()
    max_model_len: int = 0
    by_priority: bool = False
    origin_s: float = 0.0


@dataclass(frozen=True)
class Generation:
    """What a client wants for one prompt; `max_tokens` is the limit, `stop` strings end it before.

    With `ignore_eos`, end-of-sequence tokens do not. Tokens are drawn greedily at a temperature of
    0.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    priority: int = 0


class Delta(NamedTuple):
    """A token's addition to the answer number `choice`; `finish_reason` with the last one."""

    choice: int
    text: str
    finish_reason: str | None


class Reply:
    """The answers to one call, for the event loop: pieces, or why there are none."""

    def __init__(self, first_id: int, count: int) -> None:
        self.request_ids = range(first_id, first_id + count)
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


class _Answer:
    """One output as its tokens come."""

    def __init__(self, reply: Reply, index: int, generation: Generation, codec: Codec) -> None:
        self.reply = reply
        self.generation = generation
        self._index = index
        self._end_ids = frozenset[int]() if generation.ignore_eos else codec.end_ids
        self._stream = codec.stream()
        self._stop = StopStrings(generation.stop)
        self._tokens = 0
        self._arrival_s = time.monotonic()
        self._first_s = self._last_s = 0.0

    @property
    def waits(self) -> bool:
        """Whether it has no token yet."""
        return not self._tokens

    def count(self, counted: Counted, reason: str | None) -> None:
        """Note when a token came and, with the last one, what the request came to."""
        now_s = time.monotonic() - self._arrival_s
        first = self._tokens == 1
        counted.token(now_s, None if first else now_s - self._last_s)
        self._first_s, self._last_s = now_s if first else self._first_s, now_s
        if reason is not None:
            prompt_tokens = len(self.generation.prompt_ids)
            counted.end(reason, self._first_s, now_s, prompt_tokens, self._tokens)

    def push(self, token: int) -> Delta:
        """Return the piece that a token adds."""
        self._tokens += 1
        if token in self._end_ids:
            return self._last("", "stop")
        text, stopped = self._stop.push(self._stream.push(token))
        if stopped:
            return Delta(self._index, text, "stop")
        if self._tokens == self.generation.max_tokens:
            return self._last(text, "length")
        return Delta(self._index, text, None)

    def _last(self, text: str, reason: str) -> Delta:
        """Return a last piece with all that was held back; a stop string may end just there."""
        more, stopped = self._stop.push(self._stream.rest())
        text += more if stopped else more + self._stop.rest()
        return Delta(self._index, text, "stop" if stopped else reason)


class Answers:
    """All client requests that are being answered.

    `tell` sends the driver a word: "submit", "withdraw", or "stop" where a stop string ends an
    answer. `failure`: why serving has stopped, None while it goes on.
    """

    def __init__(self, serving: Serving, tell: Callable[..., None]) -> None:
        self.serving = serving
        self.counted = Counted(serving.model)
        self.failure: str | None = None
        self._tell = tell
        self._answers: dict[int, _Answer] = {}
        self._next_id = 0

    # -- for clients ----------------------------------------------------------------------------

    def submit(self, generations: Sequence[Generation]) -> Reply:
        """Queue a request for each; ServiceError when serving has stopped, or too many wait."""
        if self.failure is not None:
            raise ServiceError(self.failure, 503)
        if (most := self.serving.max_queue) is not None:
            waiting = self.num_waiting
            if waiting + len(generations) > most:
                words = f"{waiting} requests wait for their first token"
                raise ServiceError(f"the queue is full: {words}, and {most} may", 503)
        if any(each.priority for each in generations) and not self.serving.by_priority:
            right = "only 0 is right, as the policy that serves has no scheduling_policy: priority"
            raise ServiceError(f"priority: {right}", 400, param="priority")
        reply = Reply(self._next_id, len(generations))
        self._next_id += len(generations)
        for index, generation in enumerate(generations):
            request_id = reply.request_ids[index]
            self._answers[request_id] = _Answer(reply, index, generation, self.serving.codec)
            arrival_s = time.monotonic() - self.serving.origin_s
            self._tell("submit", request_id, arrival_s, vars(generation))
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
        return sum(answer.waits for answer in self._answers.values())

    # -- what the driver says -------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Refuse new requests from now on."""
        self.failure = self.failure or why

    def fail(self, why: str) -> None:
        """Refuse new requests from now on, and fail the open ones."""
        self.failure = why
        for answer in self._answers.values():
            answer.reply.add(ServiceError(why, 503))
        self._answers.clear()

    def added(self, request_id: int, refusal: str | None) -> None:
        """Note that a request is admitted, or why it never can be."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        if refusal is None:
            self.counted.admit(len(answer.generation.prompt_ids))
            return
        del self._answers[request_id]
        message = f"prompt and max_tokens: {refusal}"
        answer.reply.add(ServiceError(message, 400, "context_length_exceeded", "max_tokens"))

    def given_up(self, request_id: int) -> None:
        """Note that the policy ended a request early."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self.counted.finished["abort"].inc()
            answer.reply.add(ServiceError(GIVEN_UP, 503))

    def token(self, request_id: int, token: int) -> None:
        """Hand out a token, unless its client has left."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        piece = answer.push(token)
        answer.count(self.counted, piece.finish_reason)
        if piece.finish_reason is not None:
            del self._answers[request_id]
            if piece.finish_reason == "stop":
                self._tell("stop", request_id)
        answer.reply.add(piece)
