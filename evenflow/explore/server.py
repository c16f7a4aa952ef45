"""The server of a page on loopback: with the token, what the command line named is simulated.

A page's request lasts as long as its answer, a line of JSON a message. When the page leaves it, for
the next one or for good, the simulation stops. Nothing else is kept of a page.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evenflow.errors import UsageError
from evenflow.explore.document import MOST_SIDES, Given, question_of
from evenflow.explore.page import live_page
from evenflow.explore.workers import Task, WorkerPool, line
from evenflow.web import body_of, configured, failure_of, listening, own_hosts

MOST_VALUES = 25
"""Values of a slider's sweep."""

Tells = Callable[[Task], AsyncGenerator[bytes]]

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_app(given: Given, token: str, tells: Tells) -> Starlette:
    """Return the application; `tells` yields the messages of a task."""

    def check(said: str | None) -> None:
        if said is None or not secrets.compare_digest(said.encode(), token.encode()):
            raise HTTPException(403, "the token is missing or wrong; open the printed address")

    async def page(request: Request) -> Response:
        check(request.query_params.get("token"))
        return HTMLResponse(live_page(given), headers=HEADERS)

    async def simulate(request: Request) -> Response:
        check(request.headers.get("x-token"))
        return _Streamed(_simulated(tells, await _json(request)))

    async def sweep(request: Request) -> Response:
        check(request.headers.get("x-token"))
        return _Streamed(_swept(tells, await _json(request)))

    routes = [
        Route("/", page),
        Route("/simulate", simulate, methods=["POST"]),
        Route("/sweep", sweep, methods=["POST"]),
    ]
    refusals = dict.fromkeys((HTTPException, Exception), _refused)
    return Starlette(routes=routes, middleware=[own_hosts()], exception_handlers=refusals)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return PlainTextResponse(f"{error.detail}\n", error.status_code)
    return PlainTextResponse(f"{failure_of(request, error)}\n", 500)


async def _json(request: Request) -> Any:
    try:
        data = json.loads(await body_of(request))
        question_of(data["question"])
        return data
    except (ValueError, KeyError, TypeError, RecursionError, UsageError):
        raise HTTPException(400, "no question of this page; reload it") from None


class _Streamed(StreamingResponse):
    """A stream that ends with its client."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        super().__init__(lines, media_type="application/x-ndjson", headers=HEADERS)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            await super().__call__(scope, receive, send)


async def _simulated(tells: Tells, data: Any) -> AsyncGenerator[bytes]:
    """Yield the document with the new values in it, then all sides as they are simulated."""
    document: Any = None
    async with aclosing(tells(("look", data["question"], ()))) as told:
        async for each in told:
            document = json.loads(each).get("document")
            yield each
    if document is not None:
        question = {"text": document["text"], "others": document["others"]}
        sides = range(1 + len(document["others"]))
        several = _merged(tells, [("simulate", question, (side,)) for side in sides])
        async with aclosing(several) as told:
            async for each in told:
                yield each


async def _swept(tells: Tells, data: Any) -> AsyncGenerator[bytes]:
    """Yield what each value of a key comes to, as it comes."""
    key, values = data.get("key"), data.get("values")
    if not isinstance(key, str) or not isinstance(values, list) or len(values) > MOST_VALUES:
        yield line({"error": f"a key and at most {MOST_VALUES} values are right"})
        return
    each_value: list[Task] = [("try_value", data["question"], (key, value)) for value in values]
    async with aclosing(_merged(tells, each_value)) as told:
        async for each in told:
            yield each


async def _merged(tells: Tells, several: Iterable[Task]) -> AsyncGenerator[bytes]:
    """Yield what several tasks tell, side by side; all stop where this is left."""
    told: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2 * MOST_SIDES)

    async def tell(task: Task) -> None:
        async with aclosing(tells(task)) as lines:
            async for each in lines:
                await told.put(each)
        await told.put(None)

    running = [asyncio.create_task(tell(task)) for task in several]
    left = len(running)
    try:
        while left:
            each = await told.get()
            if each is None:
                left -= 1
            else:
                yield each
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def serve(given: Given, port: int, opened: Callable[[str], None]) -> None:
    """Serve a page on loopback until Ctrl-C; `opened` is called with its address."""
    token = secrets.token_urlsafe(16)
    processes = WorkerPool(given)
    with listening("127.0.0.1", port) as bound, suppress(KeyboardInterrupt):
        config = configured(make_app(given, token, processes.lines))
        processes.start()
        opened(f"http://127.0.0.1:{bound.getsockname()[1]}/?token={token}")
        try:
            uvicorn.Server(config).run(sockets=[bound])
        finally:
            processes.end()
