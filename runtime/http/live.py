"""A server of the real runtime: HTTP in a process of its own, the driver in this one.

Knows the order in which they start and end; no configuration.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from evenflow.batcher import Batcher
from evenflow.errors import UsageError
from runtime.driver import Driver
from runtime.http.clients import Clients, Serving
from runtime.http.text import Codec
from runtime.pipeline import Pipeline, ended_error

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

START_LIMIT_S = 60.0
FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""

END_LIMIT_S = 6.0
"""How long the HTTP server may take to end: its clients may have things to read."""

STOPPING = "the server is stopping"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; UsageError if it cannot be had."""
    for module in ("fastapi", "uvicorn"):
        if find_spec(module) is None:
            raise UsageError(f"a server needs {module}: pip install 'evenflow[server]'")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        raise UsageError(f"--port {port} on {host}: {error.strerror}") from None
    return bound


class LiveServer:
    """Serves a model, by its name, on a bound socket; `codec` reads and writes for its clients.

    `workers` says what computes: torch, or emulated. At most `max_queue` requests wait for their
    first token (None: no limit). `open`, `drain` (at Ctrl-C), `ended` and `close` are called in
    this order.
    """

    def __init__(
        self,
        model: str,
        codec: Codec,
        bound: socket.socket,
        max_queue: int | None = None,
        workers: str = "emulated",
    ) -> None:
        self.model = model
        self.workers = workers
        self.on_open: Callable[[], None] = lambda: None
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._codec = codec
        self._bound = bound
        self._max_queue = max_queue
        self._failure: str | None = None
        self._broken: str | None = None
        self._failed_s = 0.0
        self._clients: Clients | None = None
        self._process: BaseProcess | None = None

    def open(
        self,
        drive: Callable[..., Driver],
        engines: Sequence[Batcher],
        pipeline: Pipeline,
        on_token: Callable[[int, int], None] | None,
        *,
        speaks: bool,
    ) -> Driver:
        """Let clients in; return the driver that serves them once it runs, made by `drive`.

        `on_token` hears of their tokens too. `speaks`: the workers compute with tokens.
        """
        spawn = multiprocessing.get_context("spawn")
        channel, theirs = spawn.Pipe()
        clients = self._clients = Clients(
            channel,
            self._codec.end_ids,
            gauges=partial(_gauges, engines),
            lost=lambda why: self._lost(driver, why),
            knows_prefixes=engines[0].kv.keeps,
        )

        def heard(request_id: int, token: int) -> bool:
            if on_token is not None:
                on_token(request_id, token)
            return clients.token(request_id, token)

        driver = drive(
            pipeline,
            text_of=clients.text_of if speaks else None,
            front=clients.front,
            on_added=clients.added,
            on_given_up=clients.given_up,
            on_token=heard,
        )
        pipeline.watch(clients.front.fileno())
        serving = Serving(
            self.model,
            self._codec,
            self._max_queue,
            self.workers,
            engines[0].max_model_len,
            engines[0].queues.by_priority,
            driver.origin_s,
        )
        told = (serving, self._bound, theirs)
        self._process = spawn.Process(
            target=_serve_clients, args=told, name="the HTTP server", daemon=True
        )
        self._process.start()
        theirs.close()
        self._bound.close()
        if (why := self._does_not_start(channel)) is not None:
            raise UsageError(f"the HTTP server does not start: {why}")
        clients.start()
        self.on_open()
        return driver

    def drain(self) -> None:
        """Send new clients away; those that are here are served."""
        assert self._clients is not None
        self._clients.tell("close", STOPPING)
        self._clients.front.close()

    def ended(self, driver: Driver, failure: str | None) -> str | None:
        """Tell clients that are still here that nothing more comes, and why.

        Return `failure`, or why there are no clients any more.
        """
        failure = failure or self._broken
        self._failure, self._failed_s = failure or STOPPING, time.monotonic()
        driver.abandon(self._failure)
        assert self._clients is not None
        self._clients.tell("fail", self._failure)
        if failure is None:
            self._failed_s -= FAILED_S
        return failure

    def close(self) -> None:
        """End the HTTP server; after an error, its clients have not heard of the end yet."""
        clients, process = self._clients, self._process
        if clients is None:
            return
        clients.tell("fail", self._failure or STOPPING)
        if process is not None:
            if self._broken is None:
                time.sleep(max(0.0, self._failed_s + FAILED_S - time.monotonic()))
            clients.tell("exit")
            clients.stop_telling()
            process.join(END_LIMIT_S)
            process.kill()
            process.join()
        clients.front.release()

    def _does_not_start(self, channel: Connection) -> str | None:
        """Wait for the word that it has started; return why there is none."""
        if not channel.poll(START_LIMIT_S):
            return f"nothing heard of it for {START_LIMIT_S:g} s"
        try:
            _, *why = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return self._how_it_ended()
        return why[0] if why else None

    def _lost(self, driver: Driver, why: str | None) -> None:
        """Hear that the HTTP server is gone; unasked, nobody can be answered any more."""
        if self._failure is None:
            self._broken = self._how_it_ended() if why is None else f"the HTTP server ended: {why}"
            driver.quit()

    def _how_it_ended(self) -> str:
        assert self._process is not None
        return str(ended_error(self._process))


def _gauges(engines: Sequence[Batcher]) -> Mapping[str, float]:
    """Return the sums of the engines' counters; read from another thread, each is right at a moment
    of its own."""
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
    """Be the HTTP server's process: it alone needs FastAPI."""
    try:
        from runtime.http.front_end import serve_clients

        serve_clients(serving, bound, channel)
    except Exception as error:
        channel.send_bytes(json.dumps(["broken", f"{type(error).__name__}: {error}"]).encode())
        raise SystemExit(1) from None
