"""A server of the real runtime: HTTP in a separate process, driver and clients in this one.

Messages are tuples, a name first. Knows requests and their tokens; no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from evenflow.core.batcher import Batcher
from evenflow.runtime.driver import Driver
from evenflow.runtime.front import Front
from evenflow.runtime.http import FAILED_S, Serving
from evenflow.runtime.pipeline import WorkerPipeline, ended_error
from evenflow.runtime.tokens import Text
from evenflow.types import Prefix, Request
from evenflow.user_code import words_of

Word = tuple[Any, ...]

START_LIMIT_S = 60.0
END_LIMIT_S = 6.0
"""How long the HTTP server may take to end: its clients may have things to read."""

STOPPING = "the server is stopping"


@dataclass(slots=True)
class _Asked:
    """State of a request in the driver while it is served."""

    text: Text
    left: int
    stopped: bool = False


class Clients(Front):
    """The front of a driver, by what the HTTP server at the other end of `channel` says.

    `knows_prefixes`: a request says what its prompt begins with, for a prefix cache. `gauges` are
    for /metrics. `lost` is called when the HTTP server is gone, with why if it could say so.
    """

    def __init__(
        self,
        channel: Connection,
        gauges: Callable[[], Mapping[str, float]],
        lost: Callable[..., None],
        *,
        knows_prefixes: bool,
    ) -> None:
        self.origin_s = 0.0
        self._channel = channel
        self._gauges = gauges
        self._measured: Mapping[str, float] = {}
        self._knows_prefixes = knows_prefixes
        self._open = True
        self._asked: dict[int, _Asked] = {}
        self._left: list[int] = []
        self._words: list[Word] = []
        self._news: SimpleQueue[list[Word]] = SimpleQueue()
        self._lost = lost
        Thread(target=self._send, name="clients", daemon=True).start()

    def __bool__(self) -> bool:
        return self._open

    def due(self, now_s: float) -> Request | None:
        """Send this instant's messages to the HTTP server; return a new request, if any."""
        if (gauges := self._gauges()) != self._measured or self._words:
            self._measured = gauges
            self.tell("gauges", gauges)
        try:
            while self._channel.poll():
                name, *values = self._channel.recv()
                if name == "submit":
                    return self._submit(*values)
                if name == "withdraw":
                    self._left += values
                elif name == "stop":
                    self._stop(*values)
                elif name == "broken":
                    self._lost(*values)
        except (EOFError, OSError):
            self._lost()
        return None

    def withdrawn(self) -> Iterator[int]:
        while self._left:
            request_id = self._left.pop(0)
            self._asked.pop(request_id, None)
            yield request_id

    def close(self, why: str) -> None:
        """Refuse new requests; a signal handler may call it."""
        self._open = False
        self._news.put([("close", why)])

    def tell(self, *word: Any) -> None:
        """Send the HTTP server all messages so far, and this one."""
        self._news.put([*self._words, word])
        self._words.clear()

    def _send(self) -> None:
        """Send messages, in a thread: the driver waits for no HTTP server that is busy."""
        with suppress(OSError):  # it is gone, as the driver is about to hear
            while True:
                self._channel.send(self._news.get())

    def refused(self, request_id: int, why: str) -> None:
        del self._asked[request_id]
        self._words.append(("refused", request_id, why))

    def given_up(self, request_id: int) -> None:
        if self._asked.pop(request_id, None) is not None:
            self._words.append(("given_up", request_id))

    def token(self, request_id: int, token: int) -> bool:
        """Hand out a token; say whether the request ends here, though more might be allowed.

        A stop string is found by the HTTP server: the request ends with the next token after that.
        """
        if (asked := self._asked.get(request_id)) is None:
            return False
        asked.left -= 1
        ends = token in asked.text.stop_ids
        reason = "stop" if ends else None if asked.left else "length"
        if reason or asked.stopped:
            del self._asked[request_id]
        if not asked.stopped:
            self._words.append(("token", request_id, token, reason))
        return ends or asked.stopped

    def text_of(self, request: Request) -> Text:
        return self._asked[request.request_id].text

    def _submit(self, request: Request, text: Text) -> Request:
        self._asked[request.request_id] = _Asked(text, request.output_tokens)
        ids, arrival_s = text.prompt_ids, request.arrival_s - self.origin_s
        prefix = Prefix(tuple(ids), 1, len(ids)) if self._knows_prefixes else None
        return replace(request, arrival_s=arrival_s, prefix=prefix)

    def _stop(self, request_id: int) -> None:
        if (asked := self._asked.get(request_id)) is not None:
            asked.stopped = True


class LiveServer:
    """Serves a model on a bound socket: `open`, `drain` (at Ctrl-C), `ended`, `close`."""

    def __init__(self, serving: Serving, bound: socket.socket) -> None:
        self.serving = serving
        self.on_open: Callable[[], None] = lambda: None
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._bound = bound
        self._failure: str | None = None  # what clients are told, once no more comes
        self._broken: str | None = None  # why there are none, if the HTTP server ended by itself
        self._process: BaseProcess | None = None

    def open(
        self,
        drive: Callable[..., Driver],
        engines: Sequence[Batcher],
        pipeline: WorkerPipeline,
        *,
        speaks: bool,
    ) -> Driver:
        """Return the driver of clients, which may come now; `speaks`: workers need tokens."""
        spawn = multiprocessing.get_context("spawn")
        channel, theirs = spawn.Pipe()
        gauges, keeps = partial(_gauges, engines), engines[0].kv.keeps
        clients = self._clients = Clients(channel, gauges, self._lost, knows_prefixes=keeps)
        self._driver = drive(front=clients, text_of=clients.text_of if speaks else None)
        clients.origin_s = self._driver.origin_s
        pipeline.watch(channel.fileno())
        serving = replace(self.serving, max_model_len=engines[0].max_model_len)
        given = serving, self._bound, theirs
        self._process = spawn.Process(
            target=_serve_clients, args=given, name="the HTTP server", daemon=True
        )
        self._process.start()
        theirs.close()
        self._bound.close()
        channel.poll(START_LIMIT_S)  # until it has started, or says why it cannot
        self.on_open()
        return self._driver

    def drain(self) -> None:
        """Refuse new clients; the connected ones are served."""
        self._clients.close(STOPPING)

    def ended(self, failure: str | None) -> str | None:
        """End the answers to clients; return `failure`, or the failure of the HTTP server."""
        failure = failure or self._broken
        self._failure = failure or STOPPING
        self._driver.abandon(self._failure)
        self._clients.tell("fail", self._failure)
        return failure

    def close(self) -> None:
        """End the HTTP server, which says for a while why it has failed, if it has."""
        if self._process is None:
            return
        if self._failure is None:
            self._clients.tell("fail", STOPPING)
        elif self._failure not in (STOPPING, self._broken):
            time.sleep(FAILED_S)
        self._clients.tell("exit")
        self._process.join(END_LIMIT_S)
        self._process.kill()
        self._process.join()

    def _lost(self, why: str | None = None) -> None:
        """Note that the HTTP server is gone: no client can be answered any more."""
        assert self._process is not None
        ended = str(ended_error(self._process)) if why is None else f"the HTTP server ended: {why}"
        self._broken = self._broken or ended
        self._driver.quit()


def _gauges(engines: Sequence[Batcher]) -> Mapping[str, float]:
    """Return the sums of the engines' counters."""
    queues, pools = [each.queues for each in engines], [each.pool for each in engines]
    free, total = sum(pool.free_pages for pool in pools), sum(pool.total_pages for pool in pools)
    return {
        "vllm:num_requests_running": sum(len(each.admitted) for each in queues),
        "vllm:num_requests_waiting": sum(len(each.waiting) for each in queues),
        "vllm:kv_cache_usage_perc": 1 - free / total,
        "vllm:num_preemptions_total": sum(each.preemptions for each in queues),
        "evenflow:kv_pages_free": free,
        "evenflow:kv_pages_total": total,
    }


def _serve_clients(serving: Serving, bound: socket.socket, channel: Connection) -> None:
    """Serve on a bound socket, in a separate process, until the driver says "exit", or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the driver's
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("evenflow-http", encoding="ascii")
    try:
        from evenflow.runtime.http.server import HttpServer

        asyncio.run(HttpServer(serving, channel).serve([bound]))
    except Exception as error:
        channel.send(("broken", words_of(error)))
        raise SystemExit(1) from None
