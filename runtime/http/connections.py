"""The connections of the HTTP server: how many there are, and how long a request's head may take.

Knows no request; what a body may be is `runtime.http.app`'s.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_LIMIT_S = 10.0
"""How long a client may be silent before a request's head is here."""

OTHER_FILES = 64
"""What the server has open besides connections, and the most that are accepted in one go."""

FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(H11Protocol):
    """A client's connection: sent away where there are too many, or when no head comes in time."""

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
    """Return how many connections there may be: as many as files may be open, but for a reserve."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1_000_000 if files == resource.RLIM_INFINITY else files
    return max(most // 2, most - 2 * OTHER_FILES)


class SaidOnce(logging.Filter):
    """Lets asyncio say once that no connection could be accepted; it would at each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "socket.accept() out of system resource" not in record.getMessage():
            return True
        first, self._said = not self._said, True
        return first
