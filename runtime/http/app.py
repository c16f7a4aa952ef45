"""The HTTP server: OpenAI's completions and chats, /health and /metrics, by FastAPI.

Knows HTTP; tokens, text and their order come from `runtime.http.answers`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.http.answers import Answers, Generation, Piece, Reply, ServiceError
from runtime.http.exposition import exposition
from runtime.http.protocol import (
    Asked,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    error_body,
    usage,
)

T = TypeVar("T")

NO_CLIENT = 499
"""The status of an answer that nobody waits for any more."""

MOST_BODY_BYTES = 16 * 1024**2
"""Two million token ids, or sixteen million letters: more than any context."""

BODY_LIMIT_S = 30.0
"""How long a body may be on its way; a client that goes silent in one keeps no memory here."""


LOOK_S = 0.25
"""How often it is looked whether a body that is not here yet is still wanted."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the application serves: the name of the model, its answers, its state.

    `workers` says what computes: torch, or emulated. `failure` says why nothing can be served any
    more, None while it can; `gauges` are written to /metrics as they are.
    """

    model: str
    workers: str
    max_model_len: int
    answers: Answers
    failure: Callable[[], str | None]
    gauges: Callable[[], Awaitable[Mapping[str, float]]]


def make_app(service: Service) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="Evenflow", docs_url=None, redoc_url=None)
    rng = np.random.default_rng()
    started_s = int(time.time())

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        _check_model(service, body)
        return await respond(body, body.prompt_ids(service.answers.codec), request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(service, body)
        codec = service.answers.codec  # a template takes its time, and its library to load
        return await respond(body, await asyncio.to_thread(body.prompt_ids, codec), request)

    async def respond(body: Asked, prompts: list[list[int]], request: Request) -> Response:
        generations = body.generations(prompts, rng, service.max_model_len)
        call = _Call(service, body, generations, service.answers.submit(generations))
        return await call.respond(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {
            "id": service.model,
            "object": "model",
            "created": started_s,
            "owned_by": f"evenflow ({service.workers})",
            "root": service.model,  # as vLLM has it; its benchmark asks for it
            "max_model_len": service.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    @app.get("/health")
    async def health() -> Response:
        failure = service.failure()
        if failure is not None:
            return _error(ServiceError(failure, 503))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(_exposition(service, await service.gauges()))

    _add_errors(app)
    app.add_middleware(BodyLimits, failure=service.failure)
    return app


def _check_model(service: Service, body: Asked) -> None:
    if body.model not in (None, service.model):
        message = f"model: no {body.model}; the model here is {service.model}"
        raise ServiceError(message, 404, "model_not_found", "model")


def _add_errors(app: FastAPI) -> None:
    """Have every error answered as OpenAI's clients read it."""

    @app.exception_handler(ServiceError)
    async def service_error(_: Request, error: ServiceError) -> Response:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _error(_first_of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code in (404, 405):
            there = ", ".join(_routes(app))
            message += f"; there are {there}"
        return _error(ServiceError(message, error.status_code))


def _routes(app: FastAPI) -> list[str]:
    """Return what there is to call: POST /v1/completions, and so on."""
    ours = [route for route in app.routes if isinstance(route, APIRoute)]
    return [f"{way} {route.path}" for route in ours for way in sorted(route.methods or ())]


@dataclass(frozen=True, slots=True)
class _Call:
    """One client's call and the answers to it."""

    service: Service
    body: Asked
    generations: list[Generation]
    reply: Reply

    async def respond(self, request: Request) -> Response:
        """Answer in one piece or as a stream; a client that leaves takes its requests along."""
        try:
            await _unless_left(request, self.reply.admitted())
            if self.body.stream:
                return StreamingResponse(self._events(), media_type="text/event-stream")
            return await _unless_left(request, self._whole())
        except BaseException:
            self.service.answers.withdraw(self.reply)
            raise

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "id": f"{self.body.form.prefix}-{self.reply.request_ids[0]}",
            "created": int(time.time()),
            "model": self.service.model,
        }

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(generation.prompt_ids) for generation in self.generations)

    async def _whole(self) -> Response:
        texts = [""] * len(self.generations)
        reasons: list[str | None] = [None] * len(self.generations)
        tokens = 0
        async for piece in self.reply.pieces():
            texts[piece.choice] += piece.text
            reasons[piece.choice] = piece.finish_reason
            tokens += 1
        pieces = [Piece(*answer) for answer in zip(range(len(texts)), texts, reasons, strict=True)]
        counts = {"usage": usage(self._prompt_tokens, tokens)}
        return JSONResponse(self.body.form.answer(self._head, pieces) | counts)

    async def _events(self) -> AsyncIterator[str]:
        """A chunk a token; at the end, if asked for, the counts; then the word that it is over.

        A stream that breaks ends with the error.
        """
        options = self.body.stream_options or StreamOptions()
        head, tokens, form = self._head, 0, self.body.form
        unopened = set(range(len(self.generations)))
        counts: dict[str, Any] = {"usage": None} if options.include_usage else {}
        try:
            async for piece in self.reply.pieces():
                if piece.choice in unopened and (opening := form.first(head, piece.choice)):
                    yield _event(opening | counts)
                unopened.discard(piece.choice)
                tokens += 1
                if options.include_usage and options.continuous_usage_stats:
                    counts = {"usage": usage(self._prompt_tokens, tokens)}
                yield _event(form.chunk(head, [piece]) | counts)
            if options.include_usage:
                counts = {"usage": usage(self._prompt_tokens, tokens)}
                yield _event(form.chunk(head, []) | counts)
            yield "data: [DONE]\n\n"
        except ServiceError as error:
            yield _event(error_body(error))
        finally:
            self.service.answers.withdraw(self.reply)


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


def _error(error: ServiceError) -> Response:
    return JSONResponse(error_body(error), error.status)


def _first_of(error: RequestValidationError) -> ServiceError:
    """Return the first thing that is wrong with a body, and where."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ServiceError(f"the body is no JSON: {first['ctx']['error']}", 400)
    where = ".".join(str(part) for part in first["loc"][1:])
    words = str(first["msg"])
    if first["type"] == "unsupported":
        where, _, words = words.partition(": ")
    elif first["type"] == "extra_forbidden":
        words = "is not supported"
    elif first["loc"][1:2] == ("prompt",) and first["type"] != "missing":
        where = "prompt"
        words = "a string, a list of token ids, or a list of such prompts is right"
    return ServiceError(f"{where}: {words}" if where else words, 400, param=where or None)


def _exposition(service: Service, gauges: Mapping[str, float]) -> str:
    """Return the counters in Prometheus' text format, under vLLM's names where it has one."""
    answers = service.answers
    values = {
        **gauges,
        "vllm:prompt_tokens_total": answers.prompt_tokens,
        "vllm:generation_tokens_total": answers.output_tokens,
    }
    return exposition(service.model, values, answers.finished, answers.observed)


class BodyLimits:
    """An ASGI application whose requests' bodies have limits: 413 above one, 408 above the other.

    `failure` says why nothing is served any more, None while it is: then nobody waits for a body.
    After its body, a request may last as long as its answer takes.
    """

    def __init__(self, app: ASGIApp, failure: Callable[[], str | None]) -> None:
        self._app = app
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        due_s = time.monotonic() + BODY_LIMIT_S
        left_bytes, ended = MOST_BODY_BYTES, False

        async def limited() -> Message:
            nonlocal left_bytes, ended
            message = await (receive() if ended else self._part(receive, due_s))
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
            ended = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    async def _part(self, receive: Receive, due_s: float) -> Message:
        """Return the next part of a body, while it is wanted."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    return await receive()
            if (failure := self._failure()) is not None:
                raise HTTPException(503, failure)
            if time.monotonic() > due_s:
                raise HTTPException(408, f"the body took longer than {BODY_LIMIT_S:g} s")
