"""The HTTP server as a process of its own, at one end of a channel whose other end has the driver.

Reads and writes text for clients; knows no pages and no policy. It does not outlive the driver. Of
its connections: how many there are, and how long a request's head may take.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.http.answers import Answers, ServiceError
from runtime.http.app import Service, make_app
from runtime.http.clients import Serving

HEAD_LIMIT_S = 10.0
"""How long a client may be silent before a request's head is here."""

OTHER_FILES = 64
"""What the server has open besides connections, and the most that are accepted in one go."""

FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpConnection(H11Protocol):
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


NAME = "evenflow-http"
"""What the system calls the process."""

DRAIN_LIMIT_S = 5.0
"""How long clients that have all their tokens may take to read them."""

FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""

ANSWER_LIMIT_S = 5.0
"""How long the driver may take to say how it is."""


def serve_clients(serving: Serving, bound: socket.socket, channel: Connection) -> None:
    """Be the process of a server on a bound socket until the driver says "exit", or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the driver's to hear
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME, encoding="ascii")
    logging.getLogger("asyncio").addFilter(SaidOnce())
    asyncio.run(FrontEnd(serving, channel).run(bound))


class _Server(uvicorn.Server):
    """A server that leaves signals to the driver, and says when it is there."""

    def __init__(self, config: uvicorn.Config, channel: Connection) -> None:
        super().__init__(config)
        self._channel = channel

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._channel.send_bytes(b'["started"]')


class FrontEnd:
    """What the driver's words mean here; each is a method of this name, or of the answers'."""

    def __init__(self, serving: Serving, channel: Connection) -> None:
        self._channel = channel
        self._failure: str | None = None
        self._asked: dict[int, asyncio.Future[Mapping[str, float]]] = {}
        self._tickets = count()
        self._answers = answers = Answers(
            self._tell,
            serving.codec,
            serving.max_queue,
            by_priority=serving.by_priority,
            origin_s=serving.origin_s,
        )
        service = Service(
            serving.model,
            serving.workers,
            serving.max_model_len,
            answers,
            failure=lambda: self._failure,
            gauges=self._gauges,
        )
        self._server = _Server(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                access_log=False,
                lifespan="off",
                http=HttpConnection,
                backlog=OTHER_FILES,
                timeout_graceful_shutdown=int(DRAIN_LIMIT_S),
            ),
            channel,
        )
        self._words: dict[str, Callable[..., None]] = {
            "added": answers.added,
            "given_up": answers.given_up,
            "token": answers.token,
            "gauges": self._gauged,
            "close": self._close,
            "fail": self._fail,
            "exit": self._exit,
        }

    async def run(self, bound: socket.socket) -> None:
        """Serve until `exit`."""
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._hear)
        await self._server.serve([bound])

    def _hear(self) -> None:
        """Apply what the driver says; when it is gone, so is this server, and says so."""
        try:
            while self._channel.poll():
                for name, *values in json.loads(self._channel.recv_bytes()):
                    self._words[name](*values)
        except (EOFError, OSError):
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            self._fail("the server's driver is gone")
            loop.call_later(FAILED_S, self._exit)

    def _tell(self, *word: Any) -> None:
        with suppress(OSError):  # the driver is gone, as `_hear` is about to hear
            self._channel.send_bytes(json.dumps(word, separators=(",", ":")).encode())

    async def _gauges(self) -> Mapping[str, float]:
        ticket = next(self._tickets)
        self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._tell("gauges", ticket)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await self._asked[ticket]
        except TimeoutError:
            raise ServiceError("the server's driver does not answer", 503) from None
        finally:
            del self._asked[ticket]

    def _gauged(self, ticket: int, gauges: Mapping[str, float]) -> None:
        if (asked := self._asked.get(ticket)) is not None and not asked.done():
            asked.set_result(gauges)

    def _close(self, why: str) -> None:
        self._failure = why
        self._answers.close(ServiceError(why, 503))

    def _fail(self, why: str) -> None:
        self._failure = why
        self._answers.fail(ServiceError(why, 503))

    def _exit(self) -> None:
        self._server.should_exit = True
