"""Bodies of requests that are too long, or that never end: refused before anybody reads them.

Knows ASGI's messages; nothing of what a body says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 16 * 1024**2
"""Two million token ids, or sixteen million letters: more than any context."""

LIMIT_S = 30.0
"""How long a body may be on its way; a client that goes silent in one keeps no memory here."""


LOOK_S = 0.25
"""How often it is looked whether a body that is not here yet is still wanted."""


class BodyLimits:
    """An ASGI application whose requests' bodies have limits: 413 above one, 408 above the other.

    `failure` says why nothing is served any more, None while it is: then nobody waits for a body.
    After its body, a request may last as long as its answer takes.
    """

    def __init__(self, app: ASGIApp, failure: Callable[[], str | None]) -> None:
        self._app = app
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        due_s = time.monotonic() + LIMIT_S
        left_bytes, ended = MOST_BYTES, False

        async def limited() -> Message:
            nonlocal left_bytes, ended
            message = await (receive() if ended else self._part(receive, due_s))
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes")
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
                raise HTTPException(408, f"the body took longer than {LIMIT_S:g} s")
