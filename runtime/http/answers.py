"""Between the driver, which has tokens, and the server's event loop, which wants text.

Knows neither HTTP nor the Batcher. An answer is to one request; a reply gathers the answers to all
prompts of one client's call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenflow.results.run import GIVEN_UP
from runtime.http.exposition import Observed
from runtime.http.text import Codec, StopStrings


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
class Generation:
    """What a client asks of one prompt; `max_tokens` is the limit, `stop` strings end it before.

    With `ignore_eos`, end-of-sequence tokens do not.
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

    @property
    def asked(self) -> dict[str, Any]:
        """What the driver has to know of it, by the names of here."""
        return {name: getattr(self, name) for name in TOLD}

    @property
    def how(self) -> tuple[float, int, float, int]:
        """How tokens are drawn; greedily at a temperature of 0."""
        return self.temperature, self.top_k, self.top_p, self.seed


TOLD = ("prompt_ids", "max_tokens", "ignore_eos", "priority")


class Piece(NamedTuple):
    """What one token adds to the answer number `choice`; `finish_reason` with the last one."""

    choice: int
    text: str
    finish_reason: str | None


class Reply:
    """The answers to one call, as the event loop hears of them."""

    def __init__(self, first_id: int, count: int) -> None:
        self.request_ids = range(first_id, first_id + count)
        self.open = set(self.request_ids)
        self._missing = count
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[Piece | ServiceError] = asyncio.Queue()

    async def admitted(self) -> None:
        """Wait until all requests are admitted; ServiceError if one is not."""
        await self._admitted

    async def pieces(self) -> AsyncIterator[Piece]:
        """Iterate over the pieces of all answers; ServiceError if there are no more."""
        missing = len(self.request_ids)
        while missing:
            piece = await self._pieces.get()
            if isinstance(piece, ServiceError):
                raise piece
            missing -= piece.finish_reason is not None
            yield piece

    def admit(self) -> None:
        self._missing -= 1
        if not self._missing and not self._admitted.done():
            self._admitted.set_result(None)

    def add(self, piece: Piece) -> None:
        if piece.finish_reason is not None:
            self.open.discard(self.request_ids[piece.choice])
        self._pieces.put_nowait(piece)

    def fail(self, error: ServiceError) -> None:
        if self._admitted.done():
            self._pieces.put_nowait(error)
        else:
            self._admitted.set_exception(error)
            self._admitted.exception()  # asyncio would log one that nobody asked for


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

    def observe(self, observed: Observed, piece: Piece) -> None:
        """Note when a token came and, with the last one, what the request came to."""
        now_s = time.monotonic() - self._arrival_s
        first = self._tokens == 1
        observed.token(now_s, None if first else now_s - self._last_s)
        self._first_s, self._last_s = now_s if first else self._first_s, now_s
        if piece.finish_reason is not None:
            prompt_tokens = len(self.generation.prompt_ids)
            observed.end(self._first_s, now_s, prompt_tokens, self._tokens)

    def push(self, token: int) -> Piece:
        """Return what a token adds."""
        self._tokens += 1
        if token in self._end_ids:
            return self._last("", "stop")
        text, stopped = self._stop.push(self._stream.push(token))
        if stopped:
            return Piece(self._index, text, "stop")
        if self._tokens == self.generation.max_tokens:
            return self._last(text, "length")
        return Piece(self._index, text, None)

    def _last(self, text: str, reason: str) -> Piece:
        """Return a last piece with all that was held back; a stop string may end just there."""
        more, stopped = self._stop.push(self._stream.rest())
        text += more if stopped else more + self._stop.rest()
        return Piece(self._index, text, "stop" if stopped else reason)


class Answers:
    """All requests of clients that are being answered.

    `tell` has the driver hear a word: "submit", "withdraw", or "stop" where a stop string ends an
    answer. At most `max_queue` requests wait for their first token (None: no limit). `by_priority`:
    the policy looks at priorities, so that clients may give one. Arrivals are in seconds since
    `origin_s` of the monotonic clock.
    """

    def __init__(
        self,
        tell: Callable[..., None],
        codec: Codec,
        max_queue: int | None = None,
        *,
        by_priority: bool = False,
        origin_s: float = 0.0,
    ) -> None:
        self.codec = codec
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self.prompt_tokens = self.output_tokens = 0
        self.observed = Observed()
        self._tell = tell
        self._max_queue = max_queue
        self._by_priority = by_priority
        self._origin_s = origin_s
        self._answers: dict[int, _Answer] = {}
        self._next_id = 0
        self._closed: ServiceError | None = None

    # -- for clients ----------------------------------------------------------------------------

    def submit(self, generations: Sequence[Generation]) -> Reply:
        """Queue a request for each; ServiceError when nobody is served, or too many wait."""
        if self._closed is not None:
            raise self._closed
        if self._max_queue is not None:
            waiting = self.num_waiting
            if waiting + len(generations) > self._max_queue:
                words = f"{waiting} requests wait for their first token"
                raise ServiceError(f"the queue is full: {words}, and {self._max_queue} may", 503)
        if any(each.priority for each in generations) and not self._by_priority:
            right = "only 0 is right, as the policy that serves has no scheduling_policy: priority"
            raise ServiceError(f"priority: {right}", 400, param="priority")
        reply = Reply(self._next_id, len(generations))
        self._next_id += len(generations)
        for index, generation in enumerate(generations):
            request_id = reply.request_ids[index]
            self._answers[request_id] = _Answer(reply, index, generation, self.codec)
            arrival_s = time.monotonic() - self._origin_s
            self._tell("submit", request_id, arrival_s, generation.asked, generation.how)
        return reply

    def withdraw(self, reply: Reply) -> None:
        """Abort what is still open of a call whose client has left."""
        for request_id in reply.open:  # one that was refused is known no more
            if self._answers.pop(request_id, None) is not None:
                self.finished["abort"] += 1
                self._tell("withdraw", request_id)
        reply.open.clear()

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(answer.waits for answer in self._answers.values())

    # -- what the driver says -------------------------------------------------------------------

    def close(self, error: ServiceError) -> None:
        """Refuse what is submitted from now on."""
        self._closed = self._closed or error

    def fail(self, error: ServiceError) -> None:
        """Refuse what is submitted from now on, and give up what is open."""
        self._closed = error
        for answer in self._answers.values():
            answer.reply.fail(error)
        self._answers.clear()

    def added(self, request_id: int, refusal: str | None) -> None:
        """Hear that a request is served, or why it never can be."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        if refusal is None:
            self.prompt_tokens += len(answer.generation.prompt_ids)
            answer.reply.admit()
            return
        del self._answers[request_id]
        message = f"prompt and max_tokens: {refusal}"
        answer.reply.fail(ServiceError(message, 400, "context_length_exceeded", "max_tokens"))

    def given_up(self, request_id: int) -> None:
        """Hear that the policy ended a request before its time."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self.finished["abort"] += 1
            answer.reply.fail(ServiceError(GIVEN_UP, 503))

    def token(self, request_id: int, token: int) -> None:
        """Hand out a token, unless its client has left."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        piece = answer.push(token)
        self.output_tokens += 1
        answer.observe(self.observed, piece)
        if piece.finish_reason is not None:
            del self._answers[request_id]
            self.finished[piece.finish_reason] += 1
            if piece.finish_reason == "stop":
                self._tell("stop", request_id)
        answer.reply.add(piece)
