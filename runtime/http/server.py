"""The HTTP server: OpenAI's completions and chats, /health and /metrics, by Starlette and uvicorn.

A separate process, connected to the driver by a channel; it does not outlive the driver. Knows
HTTP; no pages and no policy. Tokens and text come from `evenflow.runtime.http.answers`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evenflow.runtime.http import FAILED_S, Serving
from evenflow.runtime.http.answers import Answers, Reply
from evenflow.runtime.http.limits import body_of, configured, failure_of, own_hosts
from evenflow.runtime.http.protocol import (
    ChatRequest,
    CompletionBody,
    CompletionRequest,
    Delta,
    ServiceError,
    StreamOptions,
    error_body,
    first_of,
    usage,
)

T = TypeVar("T")

NO_CLIENT = 499
"""The status of an answer to a client that has left."""

NAME = "evenflow-http"
"""What the system calls the process."""


def make_app(answers: Answers) -> Starlette:
    serving, created = answers.serving, int(time.time())

    def answering(kind: type[CompletionBody]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body = kind.model_validate_json(await body_of(request))
            if body.model not in (None, serving.model):
                message = f"model: no {body.model}; the model here is {serving.model}"
                raise ServiceError(message, 404, "model_not_found", "model")
            # A template takes its time, and its library to load.
            prompts = await asyncio.to_thread(body.prompt_ids, serving.codec)
            call = _Call(answers, body, sum(map(len, prompts)), answers.submit(body, prompts))
            return await call.respond(request)

        return endpoint

    async def models(_: Request) -> Response:
        entry = {
            "id": serving.model,
            "object": "model",
            "created": created,
            "owned_by": f"evenflow ({serving.workers})",
            "root": serving.model,  # as vLLM has it; its benchmark asks for it
            "max_model_len": serving.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        return Response() if answers.failure is None else _error(ServiceError(answers.failure, 503))

    async def metrics(_: Request) -> Response:
        return Response(answers.counted.exposition(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/v1/completions", answering(CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", answering(ChatRequest), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    there = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes)

    async def told(request: Request, error: Exception) -> Response:
        return _error(_service_error(request, error, there))

    kinds = (ServiceError, ValidationError, HTTPException, Exception)
    return Starlette(
        routes=routes,
        middleware=[own_hosts(serving.allowed_hosts)],
        exception_handlers=dict.fromkeys(kinds, told),
    )


def _service_error(request: Request, error: Exception, there: str) -> ServiceError:
    """Return any error in the form that OpenAI's clients read; `there` are the routes."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ValidationError):
        return first_of(error)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code in (404, 405):
            message += f"; there are {there}"
        return ServiceError(message, error.status_code)
    return ServiceError(ascii(failure_of(request, error)), 500)


def _error(error: ServiceError) -> Response:
    return Response(json.dumps(error_body(error)), error.status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Call:
    """One client's call and the answers to it."""

    answers: Answers
    body: CompletionBody
    prompt_tokens: int
    reply: Reply

    async def respond(self, request: Request) -> Response:
        """Answer in one piece or as a stream; a client that leaves takes its requests along."""
        try:
            if not self.body.stream:
                return JSONResponse(await _unless_left(request, self._whole()))
            pieces = self.reply.pieces()
            first = await _unless_left(request, anext(pieces))  # or what refuses it, as a status
            return StreamingResponse(self._events(first, pieces), media_type="text/event-stream")
        except BaseException:
            self.answers.withdraw(self.reply)
            raise

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": f"{self.body.prefix}-{self.reply.request_ids[0]}",
            "created": int(time.time()),
            "model": self.answers.serving.model,
        }

    async def _whole(self) -> dict[str, Any]:
        texts = [""] * len(self.reply.request_ids)
        reasons: list[str | None] = [None] * len(texts)
        tokens = 0
        async for piece in self.reply.pieces():
            texts[piece.choice] += piece.text
            reasons[piece.choice] = piece.finish_reason
            tokens += 1
        pieces = [Delta(*answer) for answer in zip(range(len(texts)), texts, reasons, strict=True)]
        answer = self.body.answer(self._head, pieces, whole=True)
        return answer | {"usage": usage(self.prompt_tokens, tokens)}

    async def _events(self, first: Delta, later: AsyncIterator[Delta]) -> AsyncIterator[str]:
        """A chunk a token; at the end, if asked for, the counts; then the end mark.

        A stream that breaks ends with the error.
        """
        options = self.body.stream_options or StreamOptions()
        head, tokens, body = self._head, 0, self.body
        counts: dict[str, Any] = {"usage": None} if options.include_usage else {}
        try:
            if (opening := body.opening(head)) is not None:
                yield _event(opening | counts)
            piece: Delta | None = first
            while piece is not None:
                tokens += 1
                if options.include_usage and options.continuous_usage_stats:
                    counts = {"usage": usage(self.prompt_tokens, tokens)}
                yield _event(body.answer(head, [piece], whole=False) | counts)
                piece = await anext(later, None)
            if options.include_usage:
                counts = {"usage": usage(self.prompt_tokens, tokens)}
                yield _event(body.answer(head, [], whole=False) | counts)
            yield "data: [DONE]\n\n"
        except ServiceError as error:
            yield _event(error_body(error))
        finally:
            self.answers.withdraw(self.reply)


async def _unless_left(request: Request, answer: Awaitable[T]) -> T:
    """Await an answer; ServiceError once the client has left."""
    work = asyncio.ensure_future(answer)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ServiceError("the client left", NO_CLIENT)
        return work.result()
    finally:
        work.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def serve_clients(serving: Serving, bound: socket.socket, channel: Connection) -> None:
    """Run a server's process on a bound socket until the driver says "exit", or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver's
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    asyncio.run(HttpServer(serving, channel).serve([bound]))


class HttpServer(uvicorn.Server):
    """The server; what a word of the driver's means is a method of the answers, or here."""

    def __init__(self, serving: Serving, channel: Connection) -> None:
        self._channel = channel
        self._answers = answers = Answers(serving, self._tell)
        told = (answers.token, answers.refused, answers.given_up, answers.counted.gauges)
        words: tuple[Callable[..., None], ...] = (*told, answers.close, answers.fail, self.exit)
        self._words = {word.__name__: word for word in words}
        super().__init__(configured(make_app(answers)))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals ignored: the driver says when to end."""
        yield

    def exit(self) -> None:
        """End, once the open connections have."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._hear)
        await super().startup(sockets)
        self._tell("started")

    def _hear(self) -> None:
        """Apply the driver's messages; once the driver is gone, fail open answers and exit."""
        try:
            while self._channel.poll():
                for name, *values in self._channel.recv():
                    self._words[name](*values)
        except (EOFError, OSError):
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            self._answers.fail("the server's driver is gone")
            loop.call_later(FAILED_S, self.exit)

    def _tell(self, *word: Any) -> None:
        with suppress(OSError):  # the driver is gone, as `_hear` is about to hear
            self._channel.send(word)
