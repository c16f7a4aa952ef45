"""A server of the real runtime: HTTP in a separate process, driver and clients in this one.

Messages between both processes are JSON arrays, a name first; many at a time go to the HTTP server.
Knows the order in which they start and end, requests and their tokens; no text, no HTTP and no
configuration.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from evenflow.core.batcher import Batcher
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError, require_package
from evenflow.runtime.driver import Driver
from evenflow.runtime.front import LiveFront
from evenflow.runtime.http.answers import Generation, Serving
from evenflow.runtime.pipeline import WorkerPipeline, ended_error
from evenflow.runtime.tokens import Text
from evenflow.runtime.wire import Draw
from evenflow.types import Prefix, Request

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Word = tuple[Any, ...]

START_LIMIT_S = 60.0
FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""

END_LIMIT_S = 6.0
"""How long the HTTP server may take to end: its clients may have things to read."""

STOPPING = "the server is stopping"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; UsageError if it cannot be had."""
    for module in ("fastapi", "prometheus_client", "uvicorn"):
        require_package(module, "a server", "fastapi prometheus-client uvicorn")
    try:
        kind, how = socket.SOCK_STREAM, socket.AI_PASSIVE
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=how)[0]
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}") from None
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise UsageError(f"--port {port} on {host}: {os.strerror(error.errno or 0)}") from None


@dataclass(slots=True)
class _Asked:
    """What the driver knows of a request while it is served."""

    text: Text
    left: int
    end_ids: frozenset[int]
    stopped: bool = False


class Clients:
    """Takes requests from a front end at the other end of `channel`, and gives it their tokens.

    `end_ids` end an answer. `knows_prefixes`: a request says what its prompt begins with, for a
    prefix cache. `gauges` are for /metrics. `lost` is called, by another thread, when the front end
    is gone, with why if it could say so.
    """

    def __init__(
        self,
        channel: Connection,
        end_ids: frozenset[int],
        gauges: Callable[[], Mapping[str, float]],
        lost: Callable[[str | None], None],
        *,
        knows_prefixes: bool,
    ) -> None:
        self.front = LiveFront()
        self._channel = channel
        self._end_ids = end_ids
        self._gauges = gauges
        self._lost = lost
        self._knows_prefixes = knows_prefixes
        self._asked: dict[int, _Asked] = {}
        self._news: SimpleQueue[Word | None] = SimpleQueue()

    def start(self) -> None:
        """Start the threads that receive and send messages."""
        for work in (self._hear, self._send):
            Thread(target=work, name=f"clients{work.__name__}", daemon=True).start()

    def tell(self, *word: Any) -> None:
        """Send the front end a message, in order; any thread may call it."""
        self._news.put(word)

    def stop_telling(self) -> None:
        """Stop sending messages."""
        self._news.put(None)

    # -- the driver's thread --------------------------------------------------------------------

    def added(self, request_id: int, refusal: str | None) -> None:
        """Note that a request is admitted, or why it never can be."""
        if refusal is not None:
            self._asked.pop(request_id, None)
        self.tell("added", request_id, refusal)

    def given_up(self, request_id: int) -> None:
        """Note that the policy ended a request early."""
        if self._asked.pop(request_id, None) is not None:
            self.tell("given_up", request_id)

    def token(self, request_id: int, token: int) -> bool:
        """Hand out a token; say whether the request ends here, though more might be allowed.

        A stop string is found by the front end: the request ends with the next token after that.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return False
        asked.left -= 1
        ends = asked.stopped or token in asked.end_ids
        if ends or not asked.left:
            self._asked.pop(request_id, None)
        if not asked.stopped:
            self.tell("token", request_id, token)
        return ends

    def text_of(self, request: Request) -> Text:
        """Return a request's text for workers: the prompt, and how its tokens are drawn."""
        asked = self._asked.get(request.request_id)
        if asked is None:  # its client has left, and the driver is about to hear of it
            return Text([0] * request.prompt_tokens)
        return asked.text

    # -- threads of their own -------------------------------------------------------------------

    def _send(self) -> None:
        """Send queued messages, all at a time, until sending stops."""
        words: list[Word | None] = []
        while not words or words[-1] is not None:
            words.append(self._news.get())
            if words[-1] is None or self._news.empty():
                told = [word for word in words if word is not None]
                try:
                    self._channel.send_bytes(json.dumps(told, separators=(",", ":")).encode())
                except OSError:  # it is gone, and the receiving thread says so
                    return
                del words[: len(told)]

    def _hear(self) -> None:
        """Apply the front end's messages until it is gone."""
        heard: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "withdraw": self._withdraw,
            "stop": self._stop,
            "gauges": lambda: self.tell("gauges", self._gauges()),
        }
        try:
            while True:
                name, *values = json.loads(self._channel.recv_bytes())
                if name == "broken":
                    return self._lost(*values)
                heard[name](*values)
        except (EOFError, OSError):
            self._lost(None)

    def _submit(self, request_id: int, arrival_s: float, told: Mapping[str, Any]) -> None:
        asked = Generation(**told)
        ids, most = asked.prompt_ids, asked.max_tokens
        how = asked.temperature, asked.top_k, asked.top_p, asked.seed
        draw = Draw(request_id, *how) if asked.temperature else None
        end_ids = frozenset[int]() if asked.ignore_eos else self._end_ids
        self._asked[request_id] = _Asked(Text(ids, draw), most, end_ids)
        prefix = Prefix(tuple(ids), 1, len(ids)) if self._knows_prefixes else None
        priority = asked.priority
        self.front.submit(
            Request(request_id, arrival_s, len(ids), most, prefix=prefix, priority=priority)
        )

    def _withdraw(self, request_id: int) -> None:
        self._asked.pop(request_id, None)
        self.front.withdraw(request_id)

    def _stop(self, request_id: int) -> None:
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.stopped = True


class LiveServer:
    """Serves a model on a bound socket; `serving` is what is known of it yet.

    `open`, `drain` (at Ctrl-C), `ended` and `close` are called in this order.
    """

    def __init__(self, serving: Serving, bound: socket.socket) -> None:
        self.serving = serving
        self.on_open: Callable[[], None] = lambda: None
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._bound = bound
        self._failure: str | None = None
        self._broken: str | None = None
        self._failed_s = 0.0
        self._clients: Clients | None = None
        self._process: BaseProcess | None = None

    def open(
        self,
        drive: Callable[..., Driver],
        engines: Sequence[Batcher],
        pipeline: WorkerPipeline,
        on_token: Callable[[int, int], None] | None,
        *,
        speaks: bool,
    ) -> Driver:
        """Let clients in; return the driver that serves them once it runs, made by `drive`.

        `on_token` gets their tokens too. `speaks`: the workers compute with tokens.
        """
        spawn = multiprocessing.get_context("spawn")
        channel, theirs = spawn.Pipe()
        clients = self._clients = Clients(
            channel,
            self.serving.codec.end_ids,
            gauges=partial(_gauges, engines),
            lost=lambda why: self._lost(driver, why),
            knows_prefixes=engines[0].kv.keeps,
        )

        def heard(request_id: int, token: int) -> bool:
            if on_token is not None:
                on_token(request_id, token)
            return clients.token(request_id, token)

        driver = drive(
            text_of=clients.text_of if speaks else None,
            front=clients.front,
            on_added=clients.added,
            on_given_up=clients.given_up,
            on_token=heard,
        )
        pipeline.watch(clients.front.fileno())
        self.serving = replace(
            self.serving,
            max_model_len=engines[0].max_model_len,
            by_priority=EngineRules.of(engines[0].scheduler).by_priority,
            origin_s=driver.origin_s,
        )
        told = (self.serving, self._bound, theirs)
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
        """Refuse new clients; the connected ones are served."""
        assert self._clients is not None
        self._clients.tell("close", STOPPING)
        self._clients.front.close()

    def ended(self, driver: Driver, failure: str | None) -> str | None:
        """Tell the remaining clients that nothing more comes, and why.

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
        """End the HTTP server; after an error, its clients do not know of the end yet."""
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
        """Wait until the HTTP server has started; return why it does not."""
        if not channel.poll(START_LIMIT_S):
            return f"nothing heard of it for {START_LIMIT_S:g} s"
        try:
            _, *why = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return self._how_it_ended()
        return why[0] if why else None

    def _lost(self, driver: Driver, why: str | None) -> None:
        """Note that the HTTP server is gone; if unasked, no client can be answered any more."""
        if self._failure is None:
            self._broken = self._how_it_ended() if why is None else f"the HTTP server ended: {why}"
            driver.quit()

    def _how_it_ended(self) -> str:
        assert self._process is not None
        return str(ended_error(self._process))


def _gauges(engines: Sequence[Batcher]) -> Mapping[str, float]:
    """Return the sums of the engines' counters. Another thread reads them, one after the other."""
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
    """Run the HTTP server's process: it alone needs FastAPI."""
    try:
        from evenflow.runtime.http.server import serve_clients

        serve_clients(serving, bound, channel)
    except Exception as error:
        channel.send_bytes(json.dumps(["broken", f"{type(error).__name__}: {error}"]).encode())
        raise SystemExit(1) from None
