"""The HTTP server: OpenAI's completions and chats, /health and /metrics, by Starlette and uvicorn.

A separate process, connected to the driver by a channel; it does not outlive the driver. Knows
HTTP; no pages and no policy. Tokens and text come from `evenflow.runtime.http.answers`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evenflow.runtime.http import FAILED_S, Serving
from evenflow.runtime.http.answers import Answers, Reply
from evenflow.runtime.http.protocol import (
    ChatRequest,
    CompletionBody,
    CompletionRequest,
    Delta,
    ServiceError,
    first_of,
)
from evenflow.web import body_of, configured, failure_of, own_hosts

T = TypeVar("T")


def make_app(answers: Answers) -> Starlette:
    serving, created = answers.serving, int(time.time())

    def answering(kind: type[CompletionBody]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            form = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
            if form != "application/json":  # of which browsers ask first, for another site's page
                raise HTTPException(415, f"content-type is {form}; application/json is right")
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
        if answers.failure is not None:
            raise ServiceError(answers.failure, 503)
        return Response()

    async def metrics(_: Request) -> Response:
        counted = generate_latest(answers.counted.registry)
        return Response(counted, media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/v1/completions", answering(CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", answering(ChatRequest), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    there = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes)

    async def refused(request: Request, error: Exception) -> Response:
        why = _service_error(request, error, there)
        return Response(json.dumps(why.body), why.status, media_type="application/json")

    kinds = (ServiceError, ValidationError, HTTPException, Exception)
    return Starlette(
        routes=routes,
        middleware=[own_hosts(serving.allowed_hosts)],
        exception_handlers=dict.fromkeys(kinds, refused),
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

    def _counts(self, tokens: int) -> dict[str, Any]:
        prompt = self.prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens}
        return {"usage": counts | {"total_tokens": prompt + tokens}}

    async def _whole(self) -> dict[str, Any]:
        tokens, texts = 0, [Delta(index, "", None) for index in range(len(self.reply.request_ids))]
        async for index, text, reason in self.reply.pieces():
            texts[index] = Delta(index, texts[index].text + text, reason)
            tokens += 1
        return self.body.answer(self._head, texts, whole=True) | self._counts(tokens)

    async def _events(self, first: Delta, later: AsyncIterator[Delta]) -> AsyncIterator[str]:
        """Yield a chunk a token, then the counts if asked for; an error ends the stream."""
        body, head, tokens, options = self.body, self._head, 0, self.body.stream_options
        counts: dict[str, Any] = {"usage": None} if options.include_usage else {}
        try:
            if (opening := body.opening(head)) is not None:
                yield _event(opening | counts)
            piece: Delta | None = first
            while piece is not None:
                tokens += 1
                if options.include_usage and options.continuous_usage_stats:
                    counts = self._counts(tokens)
                yield _event(body.answer(head, [piece], whole=False) | counts)
                piece = await anext(later, None)
            if options.include_usage:
                yield _event(body.answer(head, [], whole=False) | self._counts(tokens))
            yield "data: [DONE]\n\n"
        except ServiceError as error:
            yield _event(error.body)
        finally:
            self.answers.withdraw(self.reply)


async def _unless_left(request: Request, answer: Awaitable[T]) -> T:
    """Await an answer; ServiceError once the client has left."""
    work = asyncio.ensure_future(answer)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ServiceError("the client left", 499)
        return work.result()
    finally:
        work.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


class HttpServer(uvicorn.Server):
    """The server; a message of the driver's names a method of the answers, or of this class."""

    def __init__(self, serving: Serving, channel: Connection) -> None:
        self._channel = channel
        self._answers = answers = Answers(serving, self._tell)
        given = (answers.token, answers.refused, answers.given_up, answers.counted.gauges)
        words: tuple[Callable[..., None], ...] = (*given, answers.close, answers.fail, self.exit)
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
