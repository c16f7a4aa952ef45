"""How a server ends: a port in use, a worker or HTTP that dies, Ctrl-C; and clients gone silent."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.command_line import complaint, evenflow, gone, group
from tests.serving import RUN, httpx, openai, serving

uvicorn = pytest.importorskip("uvicorn")
http_app = pytest.importorskip("evenflow.runtime.http.server")

HEAD_LIMIT_S = 10.0
MAIN_LOOP = f"""
__file__ = {uvicorn.__file__!r}
__path__ = {list(uvicorn.__path__)!r}
exec(open(__file__).read())
async def dies(self):
    raise OSError("no more")
Server.main_loop = dies
"""


def test_a_port_in_use_is_one_line_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        out = tmp_path / "out"
        line = complaint("serve", tmp_path / "RUN.yaml", "--port", port, "--out", out)
    assert line == f"--port {port} on 127.0.0.1: Address already in use"
    assert not out.exists()


def test_a_worker_that_dies_is_told_to_clients_within_seconds() -> None:
    why = "was killed by signal 9"
    with serving() as server, ExitStack() as stack:
        client = server.client()
        answer = client.completions.create(
            model="evenflow", prompt=[1, 2], max_tokens=900, stream=True
        )
        assert next(answer).choices[0].text
        body = {"prompt": [1], "max_tokens": 900, "stream": True}
        lines = stack.enter_context(
            server.http.stream("POST", "/v1/completions", json=body)
        ).iter_lines()
        assert '"text"' in next(lines)
        worker = max(set(group(server.process)) - {server.front})
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=why):
            for _ in answer:
                pass
        events = [line for line in lines if line]
        assert why in events[-1], "nothing follows the error"
        health = server.http.get("/health")
        assert health.status_code == 503
        assert why in health.json()["error"]["message"]
        assert server.complete(prompt=[1]).status_code == 503
        client.close()
        status, errors = server.ends()
        assert status == 1
        assert f"stage 1 (process {worker}) {why}" in errors
        assert "; 0 of 2 requests are done" in errors
        assert "Traceback" not in errors
        assert server.statuses() == ["aborted"] * 2


def within_limits(app: Any, messages: Iterable[dict[str, Any]]) -> None:
    """Run an application whose client sends so much, and then is silent."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None: ...

    asyncio.run(http_app.BodyLimits(app, lambda: None)({"type": "http"}, receive, send))


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_LIMIT_S", 0.2)
    monkeypatch.setattr(http_app, "LOOK_S", 0.05)
    read = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not read or read[-1].get("more_body"):
            read.append(await receive())

    with pytest.raises(http_app.HTTPException) as refused:
        within_limits(app, [{"type": "http.request", "body": b"{", "more_body": True}])
    assert (refused.value.status_code, len(read)) == (408, 1)


def test_who_is_answered_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_LIMIT_S", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.2)
        assert (await receive())["type"] == "http.disconnect"

    body = {"type": "http.request", "body": b"{}", "more_body": False}
    within_limits(app, [body, {"type": "http.disconnect"}])


def test_an_http_server_that_is_killed_ends_the_run_within_seconds() -> None:
    with serving() as server:
        done = server.complete(prompt=[1, 2], max_tokens=3)
        assert done.status_code == 200
        body = {"prompt": [1], "max_tokens": 900, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert '"text"' in next(lines)
            front = server.front
            os.kill(front, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        status, errors = server.ends(15)
        assert status == 1
        words = f"ended early: the HTTP server (process {front}) was killed by signal 9"
        assert f"{words}; 1 of 2 requests are done\n" in errors
        assert "Traceback" not in errors
        assert server.statuses() == ["completed", "aborted"]
        assert server.summary()["real_run"]["failure"]


@pytest.mark.long
def test_the_http_server_does_not_outlive_a_driver_that_is_killed() -> None:
    with serving(tidy=False) as server:
        body = {"prompt": [1], "max_tokens": 900, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert '"text"' in next(lines)
            os.kill(server.process.pid, signal.SIGKILL)
            events = [line for line in lines if line]
            assert "the server's driver is gone" in events[-1]
        server.process.communicate(timeout=15)
        assert gone(server.process, 15)


@pytest.mark.parametrize(
    ("fails", "status", "line"),
    [
        ("raise OSError('no more')", 2, "error: the HTTP server does not start: OSError: no more"),
        (MAIN_LOOP, 1, "ended early: the HTTP server ended: OSError: no more; 0 of 0 requests"),
    ],
)
def test_an_http_server_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, status: int, line: str
) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN)
    (tmp_path / "path" / "uvicorn").mkdir(parents=True)
    (tmp_path / "path" / "uvicorn" / "__init__.py").write_text(fails)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    run = ("serve", tmp_path / "RUN.yaml", "--port", 0, "--out", tmp_path / "out")
    found, _, errors = evenflow(*map(str, run))
    assert (found, errors.splitlines()[-1][: len(line)]) == (status, line)


@pytest.mark.long
def test_ctrl_c_once_serves_who_is_there_twice_ends_at_once() -> None:
    slower = RUN.replace("base_s: 0.002", "base_s: 0.01")  # the long one is still there at the end
    with serving("--max-queue", "2", run=slower) as server:
        client = server.client()

        def begin(max_tokens: int) -> Any:
            answer = client.completions.create(
                model="evenflow", prompt=[1], max_tokens=max_tokens, stream=True
            )
            return next(answer), answer

        _, short = begin(60)
        _, long = begin(900)
        with pytest.raises(openai.InternalServerError, match="the queue is full: 0 requests"):
            client.completions.create(model="evenflow", prompt=[[1]] * 3, max_tokens=1)
        os.killpg(server.process.pid, signal.SIGINT)
        limit_s = time.monotonic() + 20
        while server.http.get("/health").status_code == 200 and time.monotonic() < limit_s:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            client.completions.create(model="evenflow", prompt=[1])
        assert sum(len(chunk.choices) for chunk in short) == 59
        os.killpg(server.process.pid, signal.SIGINT)
        with pytest.raises(openai.APIError, match="interrupted"):
            for _ in long:
                pass
        client.close()
        status, errors = server.ends()
        assert status == 130, errors
        assert "ended early: interrupted; 1 of 2 requests are done" in errors
        assert server.statuses() == ["completed", "aborted"]


def test_what_asyncio_says_of_each_attempt_is_said_once_or_not_at_all() -> None:
    full, gone, other = "socket.accept() out of system resource", "socket.send() raised", "other"
    heard = http_app.FewerWords()
    said = [
        words
        for words in (full, gone, other, full, gone, other)
        if heard.filter(logging.LogRecord("asyncio", 30, "", 0, words, None, None))
    ]
    assert said == [full, other, other], "of a client that has left, the counts tell"


@pytest.mark.long
def test_connections_that_send_half_a_head_are_ended_and_the_server_answers() -> None:
    with serving() as server:
        resource.prlimit(server.front, resource.RLIMIT_NOFILE, (100, 100))
        address = urlsplit(server.url)
        with ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection((address.hostname, address.port)))
                for _ in range(150)
            ]
            for one in idle:
                with suppress(OSError):
                    one.sendall(b"POST / HTTP/1.1\r\nX: ")
            limit_s = time.monotonic() + HEAD_LIMIT_S + 10
            while (status := _health(server)) != 200 and time.monotonic() < limit_s:
                time.sleep(0.5)
            assert status == 200
        _, errors = server.interrupted()
    assert errors.count("out of system resource") <= 1
    assert len(errors) < 5000


def _health(server: Any) -> int:
    with suppress(httpx.TransportError):
        return int(httpx.get(f"{server.url}/health", timeout=2).status_code)
    return 0


GIVES_UP = """\
stages: 2
costs: {kind: affine, base_s: 0.002, per_token_s: 2e-5}
kv: {pages: 20}
max_model_len: 300
scheduler: {name: sglang, chunked_prefill_size: 256}
dispatch: engine_loop
"""


@pytest.mark.long
def test_a_client_whose_request_the_policy_gives_up_hears_of_it() -> None:
    """Each is alone in its slot, and together they outgrow the pool."""
    with serving(run=GIVES_UP) as server, ThreadPoolExecutor() as pool:
        bodies = [{"prompt": [1] * 100, "max_tokens": 150}, {"prompt": [2] * 20, "max_tokens": 150}]
        asked = [pool.submit(server.complete, **body) for body in bodies]
        answers = sorted((each.result(20) for each in asked), key=lambda each: each.status_code)
        assert [each.status_code for each in answers] == [200, 503]
        assert "gave it up: its pages do not suffice" in answers[1].json()["error"]["message"]
        assert server.metrics()["vllm:request_success_totalabort"] == 1
        assert server.complete(prompt=[3], max_tokens=2).status_code == 200
        server.interrupted()
        assert sorted(server.statuses()) == ["aborted", "completed", "completed"]
