"""A server of the real runtime: HTTP in a thread of its own, the driver in the main thread.

Knows the order in which it starts and ends; no configuration.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from evenflow.batcher import Batcher
from evenflow.errors import UsageError
from runtime.driver import Driver
from runtime.front import LiveFront
from runtime.http.answers import Answers, ServiceError
from runtime.http.text import Codec
from runtime.pipeline import Pipeline

if TYPE_CHECKING:
    import uvicorn

    from runtime.http.app import Service

START_LIMIT_S = 10.0
DRAIN_LIMIT_S = 5.0
"""How long clients that have all their tokens may take to read them."""

FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""

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
        self.front = LiveFront()
        self.answers = Answers(self.front, codec, max_queue)
        self.model = model
        self.workers = workers
        self.on_open: Callable[[], None] = lambda: None
        self._bound = bound
        self._failure: str | None = None
        self._broken: str | None = None
        self._failed_s = 0.0
        self._driver: Driver | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._bound.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

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
        from runtime.http.app import Service

        answers = self.answers

        def heard(request_id: int, token: int) -> bool:
            if on_token is not None:
                on_token(request_id, token)
            return answers.token(request_id, token)

        driver = drive(
            pipeline,
            text_of=answers.text_of if speaks else None,
            front=self.front,
            on_added=answers.added,
            on_given_up=answers.given_up,
            on_token=heard,
        )
        self._driver = driver
        answers.origin_s = driver.origin_s
        answers.knows_prefixes = engines[0].kv.keeps
        answers.by_priority = engines[0].queues.by_priority
        pipeline.watch(self.front.fileno())
        self._start(
            Service(
                self.model,
                self.workers,
                engines[0].max_model_len,
                answers,
                failure=lambda: self._failure,
                gauges=lambda: _gauges(engines),
            )
        )
        self.on_open()
        return driver

    def _start(self, service: Service) -> None:
        import uvicorn

        from runtime.http.app import make_app
        from runtime.http.connections import OTHER_FILES, Connection, SaidOnce

        logging.getLogger("asyncio").addFilter(SaidOnce())
        options = uvicorn.Config(
            make_app(service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=Connection,
            backlog=OTHER_FILES,
            timeout_graceful_shutdown=int(DRAIN_LIMIT_S),
        )
        server = self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        self._thread.start()
        limit_s = time.monotonic() + START_LIMIT_S
        while not server.started:
            if time.monotonic() > limit_s or not self._thread.is_alive():
                raise UsageError("the HTTP server does not start")
            time.sleep(0.01)

    def drain(self) -> None:
        """Send new clients away; those that are here are served."""
        self._failure = STOPPING
        self.answers.close(ServiceError(STOPPING, 503))
        self.front.close()

    def ended(self, driver: Driver, failure: str | None) -> str | None:
        """Tell clients that are still here that nothing more comes, and why.

        Return `failure`, or why there are no clients any more.
        """
        failure = failure or self._broken
        self._failure, self._failed_s = failure or STOPPING, time.monotonic()
        driver.abandon(self._failure)
        self.answers.fail(ServiceError(self._failure, 503))
        if failure is None:
            self._failed_s -= FAILED_S
        return failure

    def close(self) -> None:
        """End the HTTP server; after an error, its clients have not heard of the end yet."""
        self.answers.fail(ServiceError(self._failure or STOPPING, 503))
        if self._thread is not None and self._server is not None:
            time.sleep(max(0.0, self._failed_s + FAILED_S - time.monotonic()))
            self._server.should_exit = True
            self._thread.join(DRAIN_LIMIT_S + 1)
        self.front.release()

    def _serve(self, server: uvicorn.Server) -> None:
        """Be the HTTP server; if it ends unasked, nobody can be answered any more."""
        why = ""
        try:
            server.run(sockets=[self._bound])
        except Exception as error:
            why = f": {type(error).__name__}: {error}"
        if server.started and not server.should_exit and self._driver is not None:
            self._broken = f"the HTTP server ended{why}"
            self._driver.quit()
        self.front.close()


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
