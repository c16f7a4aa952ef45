"""A server's address and limits on its clients: uvicorn's and Starlette's, and two that they lack.

For the server of a real run and the page of `explore`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenflow.errors import UsageError
from evenflow.user_code import place_of, words_of

MOST_BODY_BYTES = 16 * 1024**2
"""Two million token ids, or sixteen million letters: more than any context."""

BODY_LIMIT_S = 30.0
"""How long a body may be on its way; a client that goes silent in one keeps no memory here."""

HEAD_LIMIT_S = 10.0
"""How long a client may be silent before a request's head is here; twice that where it began."""

OTHER_FILES = 64
"""What a server has open besides connections."""

DRAIN_LIMIT_S = 2
"""How long clients that have all their tokens may take to read them."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; UsageError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        words = str(error.strerror).partition(" (while")[0]
        raise UsageError(f"--port {port} on {host}: {words}") from None


class HttpConnection(H11Protocol):
    """A client's connection, ended where no head of a request comes; uvicorn waits for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later()

    def _look_later(self) -> None:
        self.loop.call_later(HEAD_LIMIT_S, self._look, self.cycle)

    def _look(self, before: object) -> None:
        """End the connection if no request came after `before`, and none is being answered."""
        answers = self.cycle is not None and not self.cycle.response_complete
        if self.cycle is before and not answers:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._look_later()


async def body_of(request: Request) -> bytes:
    """Return a request's body; HTTPException for one that is too long or takes too long."""
    body, too_long = bytearray(), f"the body has more than {MOST_BODY_BYTES} bytes"
    if int(request.headers.get("content-length", 0)) > MOST_BODY_BYTES:
        raise HTTPException(413, too_long)
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise HTTPException(413, too_long)
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_LIMIT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client left") from None
    return bytes(body)


def failure_of(request: Request, error: Exception) -> str:
    """Return what an unexpected error says; log it, and where it is, in a line."""
    words = words_of(error)
    where = f"{request.method} {request.url.path}"
    logging.getLogger("evenflow").error("%s: %s%s", where, words, place_of(error))
    return words


def own_hosts(hosts: Sequence[str] = ()) -> Middleware:
    """Return what answers only to loopback's names and `hosts`: 400 elsewhere.

    A foreign page with a name that leads to this address (DNS rebinding) still calls it by that
    name.
    """
    names = [f"[{name}]" if ":" in name else name for name in (*LOOPBACK, *hosts)]
    return Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)


def configured(app: Starlette) -> uvicorn.Config:
    """Return uvicorn's settings for an application, which prints its own failures.

    asyncio and uvicorn would write tracebacks of them, and of every client that leaves.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        app,
        http=HttpConnection,
        lifespan="off",
        log_level="critical",
        access_log=False,
        backlog=OTHER_FILES,  # asyncio accepts as many before it reads what they say
        limit_concurrency=files - OTHER_FILES if files > OTHER_FILES else None,
        timeout_graceful_shutdown=DRAIN_LIMIT_S,
    )
