"""The HTTP server: OpenAI's completions and chats, /health and /metrics, by FastAPI.

A separate process, connected to the driver by a channel; it does not outlive the driver. Knows
HTTP, how many connections there may be and how long a request may be on its way. Knows no pages and
no policy: tokens and text come from `evenflow.runtime.http.answers`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenflow.runtime.http.answers import Answers, Delta, Generation, Reply, ServiceError, Serving
from evenflow.runtime.http.protocol import (
    ChatRequest,
    CompletionBody,
    CompletionRequest,
    StreamOptions,
    error_body,
    usage,
)
from evenflow.user_code import place_of, words_of

T = TypeVar("T")

NO_CLIENT = 499
"""The status of an answer to a client that has left."""

MOST_BODY_BYTES = 16 * 1024**2
"""Two million token ids, or sixteen million letters: more than any context."""

BODY_LIMIT_S = 30.0
"""How long a body may be on its way; a client that goes silent in one keeps no memory here."""

LOOK_S = 0.25
"""How often it is looked whether a body that is not here yet is still wanted."""

HEAD_LIMIT_S = 10.0
"""How long a client may be silent before a request's head is here."""

OTHER_FILES = 64
"""What the server has open besides connections, and the most that are accepted in one go."""

FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

NAME = "evenflow-http"
"""What the system calls the process."""

DRAIN_LIMIT_S = 5.0
"""How long clients that have all their tokens may take to read them."""

FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""

ANSWER_LIMIT_S = 5.0
"""How long the driver may take to say how it is."""


def make_app(answers: Answers, gauges: Callable[[], Awaitable[Mapping[str, float]]]) -> FastAPI:
    """Return the application; `gauges` of the driver are written to /metrics as they are."""
    app, serving = FastAPI(title="Evenflow", docs_url=None, redoc_url=None), answers.serving
    rng = np.random.default_rng()
    started_s = int(time.time())

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        check_model(body)
        return await respond(body, body.prompt_ids(serving.codec), request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        check_model(body)  # a template takes its time, and its library to load
        return await respond(body, await asyncio.to_thread(body.prompt_ids, serving.codec), request)

    def check_model(body: CompletionBody) -> None:
        if body.model not in (None, serving.model):
            message = f"model: no {body.model}; the model here is {serving.model}"
            raise ServiceError(message, 404, "model_not_found", "model")

    async def respond(body: CompletionBody, prompts: list[list[int]], request: Request) -> Response:
        generations = body.generations(prompts, rng, serving.max_model_len)
        return await _Call(answers, body, generations, answers.submit(generations)).respond(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {
            "id": serving.model,
            "object": "model",
            "created": started_s,
            "owned_by": f"evenflow ({serving.workers})",
            "root": serving.model,  # as vLLM has it; its benchmark asks for it
            "max_model_len": serving.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    @app.get("/health")
    async def health() -> Response:
        return Response() if answers.failure is None else _error(ServiceError(answers.failure, 503))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(answers.counted.exposition(await gauges()), media_type=CONTENT_TYPE_LATEST)

    _add_errors(app)
    app.add_middleware(BodyLimits, failure=lambda: answers.failure)
    app.add_middleware(AllowedHosts, hosts=serving.allowed_hosts)
    return app


def _add_errors(app: FastAPI) -> None:
    """Answer every error in the form that OpenAI's clients read."""

    @app.exception_handler(ServiceError)
    async def service_error(_: Request, error: ServiceError) -> Response:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _error(_first_of(error))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return _error(ServiceError(f"{type(error).__name__}: {str(error)!a}", 500))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code in (404, 405):
            there = ", ".join(_routes(app))
            message += f"; there are {there}"
        return _error(ServiceError(message, error.status_code))


def _routes(app: FastAPI) -> list[str]:
    """Return the routes: POST /v1/completions, and so on."""
    ours = [route for route in app.routes if isinstance(route, APIRoute)]
    return [f"{way} {route.path}" for route in ours for way in sorted(route.methods or ())]


@dataclass(frozen=True, slots=True)
class _Call:
    """One client's call and the answers to it."""

    answers: Answers
    body: CompletionBody
    generations: list[Generation]
    reply: Reply

    async def respond(self, request: Request) -> Response:
        """Answer in one piece or as a stream; a client that leaves takes its requests along."""
        try:
            if not self.body.stream:
                return await _unless_left(request, self._whole())
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
        pieces = [Delta(*answer) for answer in zip(range(len(texts)), texts, reasons, strict=True)]
        counts = {"usage": usage(self._prompt_tokens, tokens)}
        return JSONResponse(self.body.answer(self._head, pieces, whole=True) | counts)

    async def _events(self, first: Delta, later: AsyncIterator[Delta]) -> AsyncIterator[str]:
        """A chunk a token; at the end, if asked for, the counts; then the end mark.

        A stream that breaks ends with the error.
        """
        options = self.body.stream_options or StreamOptions()
        head, tokens, body = self._head, 0, self.body
        unopened = set(range(len(self.generations)))
        counts: dict[str, Any] = {"usage": None} if options.include_usage else {}
        try:
            piece: Delta | None = first
            while piece is not None:
                if piece.choice in unopened and (opening := body.first(head, piece.choice)):
                    yield _event(opening | counts)
                unopened.discard(piece.choice)
                tokens += 1
                if options.include_usage and options.continuous_usage_stats:
                    counts = {"usage": usage(self._prompt_tokens, tokens)}
                yield _event(body.answer(head, [piece], whole=False) | counts)
                piece = await anext(later, None)
            if options.include_usage:
                counts = {"usage": usage(self._prompt_tokens, tokens)}
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


def _error(error: ServiceError) -> Response:
    return Response(json.dumps(error_body(error)), error.status, media_type="application/json")


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


class BodyLimits:
    """An ASGI application with limits on requests' bodies: 413 above one, 408 above the other.

    `failure` says why serving has stopped, None while it goes on: once stopped, no body is awaited.
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


class AllowedHosts:
    """An ASGI application that answers only to its own host names: 400 elsewhere.

    A foreign page with a name that leads to this address (DNS rebinding) still calls it by that
    name. Addresses of loopback are ours, and all where the server listens on all (`hosts` has
    0.0.0.0 or ::). Starlette's own knows no IPv6 in its older versions, and answers in plain text.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and self._has(hosts[0]):
            await self._app(scope, receive, send)
            return
        called = ascii(", ".join(hosts))
        right = "localhost is right, or a name given to the server with --allowed-host"
        error = ServiceError(
            f"host: {called} is no name of this server; {right}", 400, param="host"
        )
        await _error(error)(scope, receive, send)

    def _has(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._names:
                return True
            return ip_address(name).is_loopback or bool(self._names & {"0.0.0.0", "::"})
        except ValueError:
            return False


class HttpConnection(H11Protocol):
    """A client's connection: sent away where there are too many, or when no head comes in time.

    uvicorn's own limit counts requests: clients that are silent would take all descriptors.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(FULL)
            transport.close()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _await_head(self) -> None:
        """Let the time run from the first byte of a head, or the start, until the head is here."""
        if self._answers:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_LIMIT_S, self._end)

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if not self._answers:
            self.transport.abort()


def most_connections() -> int:
    """Return the limit on connections: that on open files, less a reserve."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1_000_000 if files == resource.RLIM_INFINITY else files
    return max(most // 2, most - 2 * OTHER_FILES)


class FewerWords(logging.Filter):
    """Logs a failure in a line, where asyncio and uvicorn would write a traceback.

    Once that no connection could be accepted, which asyncio would at each attempt; never that a
    write reached no client, as when one leaves with tokens on their way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "socket.send() raised" in message:
            return False
        if record.exc_info and (error := record.exc_info[1]) is not None:
            record.msg, record.args = f"{message.strip()}: {words_of(error)}{place_of(error)}", ()
            record.exc_info = record.exc_text = None
        if "socket.accept() out of system resource" not in message:
            return True
        first, self._said = not self._said, True
        return first


def serve_clients(serving: Serving, bound: socket.socket, channel: Connection) -> None:
    """Run a server's process on a bound socket until the driver says "exit", or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the driver's to hear
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    words = FewerWords()
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(words)
    asyncio.run(HttpServer(serving, channel).serve([bound]))


class HttpServer(uvicorn.Server):
    """The server; what the driver's words mean here is a method of this name, or of the answers'.

    It leaves signals to the driver, and says when it is there.
    """

    def __init__(self, serving: Serving, channel: Connection) -> None:
        self._channel = channel
        self._asked: deque[asyncio.Future[Mapping[str, float]]] = deque()
        self._answers = answers = Answers(serving, self._tell)
        self._words: dict[str, Callable[..., None]] = {
            "added": answers.added,
            "given_up": answers.given_up,
            "token": answers.token,
            "gauges": self._gauged,
            "close": answers.close,
            "fail": answers.fail,
            "exit": self._exit,
        }
        config = uvicorn.Config(
            make_app(answers, self._gauges),
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=HttpConnection,
            backlog=OTHER_FILES,
            timeout_graceful_shutdown=int(DRAIN_LIMIT_S),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._hear)
        await super().startup(sockets)
        self._channel.send_bytes(b'["started"]')

    def _hear(self) -> None:
        """Apply the driver's messages; once the driver is gone, fail open answers and exit."""
        try:
            while self._channel.poll():
                for name, *values in json.loads(self._channel.recv_bytes()):
                    self._words[name](*values)
        except (EOFError, OSError):
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            self._answers.fail("the server's driver is gone")
            loop.call_later(FAILED_S, self._exit)

    def _tell(self, *word: Any) -> None:
        with suppress(OSError):  # the driver is gone, as `_hear` is about to hear
            self._channel.send_bytes(json.dumps(word, separators=(",", ":")).encode())

    async def _gauges(self) -> Mapping[str, float]:
        asked: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)  # answered in this order
        self._tell("gauges")
        try:
            return await asyncio.wait_for(asked, ANSWER_LIMIT_S)
        except TimeoutError:
            raise ServiceError("the server's driver does not answer", 503) from None

    def _gauged(self, gauges: Mapping[str, float]) -> None:
        if not (asked := self._asked.popleft()).done():
            asked.set_result(gauges)

    def _exit(self) -> None:
        self.should_exit = True
