"""Odd HTTP clients of `evenflow serve`, the class `http` of `tools.fuzz`."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.005, per_token_s: 2.0e-5}
kv: {pages: 200}
scheduler: sarathi
workload: {trace: t.csv, arrivals: replay}
"""
BODY = b'{"prompt": [1, 2], "max_tokens": 3}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def _asks(rng: random.Random) -> bytes:
    """Return a well-formed request of something odd."""
    texts: tuple[Any, ...] = ("x" * 1000, "\ud800", [], [[]], [[1], "a"], {})
    odd = rng.choice((None, -1, 0, 1e308, True, 2**70, *texts))
    body: dict[str, Any] = {"prompt": [1], "max_tokens": 2, "stream": rng.random() < 0.5}
    sampling = ("temperature", "top_p", "top_k", "seed", "stop")
    body[rng.choice(("prompt", "max_tokens", "stream", "model", *sampling))] = odd
    text = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(text) + text


def flipped(whole: bytes, rng: random.Random) -> bytes:
    """Return some bytes, a few of them changed."""
    changed = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(changed)


SENT: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: WHOLE,
    lambda rng: WHOLE[: rng.randrange(len(WHOLE))],
    lambda rng: flipped(WHOLE, rng),
    lambda rng: rng.randbytes(rng.randint(1, 3000)),
    lambda rng: HEAD + b"content-length: %d\r\n\r\n" % rng.choice((0, -1, 10**30, 5)) + BODY,
    lambda rng: HEAD + b"transfer-encoding: chunked\r\n\r\n" + rng.choice((b"zz\r\n", b"5\r\nab")),
    lambda rng: HEAD + b"x: " + b"a" * rng.choice((10, 10**5, 10**6)) + b"\r\n\r\n",
    lambda rng: (
        b"GET /" + rng.choice((b"metrics", b"..//..", b"%00", b"v1/models")) + b" HTTP/1.1\r\n\r\n"
    ),
    _asks,
)


def http(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield clients of one server; at the end, it must answer, be whole and have lost nobody."""
    (folder / "serve.yaml").write_text(RUN.replace("0.005", "0.001"))
    command = [sys.executable, "-m", "evenflow", "serve", str(folder / "serve.yaml")]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [*command, "--port", "0", "--out", str(folder / "served")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert server.stdout is not None
    url = server.stdout.readline().split(" on ")[1].split("/v1")[0]
    port = int(url.rsplit(":", 1)[1])
    for number in range(count):
        sent = rng.choice(SENT)(rng)
        answer = _answer(port, sent, rng)
        crashed = answer.split(b" ")[1:2] == [b"500"]
        yield f"client {number}: {sent[:100]!r}", answer[:200].decode("latin1") if crashed else None
    yield "the server afterwards", _wrong_server(server, url, folder)


def _answer(port: int, sent: bytes, rng: random.Random) -> bytes:
    """Send something, in pieces or at once; read, or leave."""
    answer = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
        middle = rng.randrange(len(sent) + 1)
        for part in (sent[:middle], sent[middle:]):
            client.sendall(part)
        while rng.random() < 0.8 and (more := client.recv(4096)):
            answer += more
    return answer


def _wrong_server(server: subprocess.Popen[str], url: str, folder: Path) -> str | None:
    try:
        limit_s = time.monotonic() + 60
        while not re.search(
            r"num_requests_running\S* 0\.0\n(.*\n)*.*pages_free\S* 200\.0\n",
            urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode(),
        ):
            if time.monotonic() > limit_s:
                return "requests or pages are still held after a minute"
            time.sleep(0.2)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    log = (folder / "log").read_text()
    if server.returncode or "Traceback" in log:
        return f"status {server.returncode}: {log[-300:]!r}"
    return None if (folder / "served" / "requests.csv").exists() else "no results"
