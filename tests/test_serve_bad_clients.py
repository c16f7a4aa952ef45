"""Clients that send nonsense, too much, or nothing more: they get an error, and nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import evenflow
from tests.serving import RUN, Server, openai, serving
from tests.test_runtime_cli import group

http_app = pytest.importorskip("runtime.http.app")
HEAD = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found
        status, errors = found.interrupted()
        assert status == 0
        assert errors.startswith("rejected 1 requests, the first of them request 0: 1000000001 tok")
        assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1], "n": 2}, "n"),
        ({"prompt": [1], "best_of": 2}, "best_of"),
        ({"prompt": [1], "logprobs": 1}, "logprobs"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": [1], "suffix": "x"}, "suffix"),
        ({"prompt": [1], "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": [1], "tools": []}, "tools"),
        ({"prompt": [1], "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": [1], "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": [1], "max_tokens": -1}, "max_tokens"),
        ({"prompt": [1], "top_k": 10**30}, "top_k"),
        ({"prompt": [1], "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": [1], "max_tokens": "9"}, "max_tokens"),
        ({"prompt": [1], "temperature": "hot"}, "temperature"),
        ({"prompt": [1], "seed": 2**70}, "seed"),
        ({"prompt": [1], "stop": list("abcde")}, "stop"),
        ({"prompt": [1], "stop": 5}, "stop"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1], "stream_options": {"include_usage": "yes"}, "stream": True}, "stream_opt"),
        ({"prompt": [1], "model": 5}, "model"),
    ],
)
def test_the_error_names_the_parameter(server: Server, body: dict[str, Any], param: str) -> None:
    answer = server.http.post("/v1/completions", content=json.dumps(body), headers=HEAD)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].startswith(param)
    assert error["message"].startswith(param) or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', 400),
        (b"\x00\x01", 400),
        (b"", 400),
        (b"[]", 400),
        (b'{"prompt": [1], "temperature": NaN}', 400),
        (b'{"prompt": [1], "temperature": 1e999}', 400),
        (b'{"a":' * 20_000, 400),
        (b'{"prompt": "' + b"a" * http_app.MOST_BODY_BYTES + b'"}', 413),
    ],
    ids=["not utf-8", "binary", "empty", "no object", "nan", "infinity", "deep", "too long"],
)
def test_a_body_that_is_none(server: Server, content: bytes, status: int) -> None:
    answer = server.http.post("/v1/completions", content=content, headers=HEAD)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_half_open_connections_keep_nobody_waiting() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    begun = (b"", b"POST /v1/com", head, head + b'content-length: 99\r\n\r\n{"prompt": [1')
    with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            for index in range(40):
                half = stack.enter_context(socket.create_connection((host, int(port))))
                half.sendall(begun[index % len(begun)])
            assert server.complete(prompt=[1], max_tokens=3).status_code == 200
            assert server.interrupted() == (0, "")


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_LIMIT_S", 0.2)
    monkeypatch.setattr(http_app, "LOOK_S", 0.05)
    read = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not read or read[-1].get("more_body"):
            read.append(await receive())

    async def receive() -> dict[str, Any]:
        if read:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Any) -> None: ...

    limited = http_app.BodyLimits(app, lambda: None)
    with pytest.raises(http_app.HTTPException) as refused:
        asyncio.run(limited({"type": "http"}, receive, send))
    assert (refused.value.status_code, len(read)) == (408, 1)


def test_who_is_answered_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_LIMIT_S", 0.1)
    messages = iter(
        [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.2)
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None: ...

    asyncio.run(http_app.BodyLimits(app, lambda: None)({"type": "http"}, receive, send))


def test_a_stopped_worker_is_an_error_for_all_clients_within_seconds() -> None:
    with serving() as server:
        client = server.client()
        answer = client.completions.create(
            model="evenflow", prompt=[1, 2], max_tokens=900, stream=True
        )
        next(answer)
        worker = max(group(server.process))
        os.kill(worker, signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(openai.APIError, match=r"stage 1 .* says nothing for"):
            for _ in answer:
                pass
        assert time.monotonic() - stopped_s < 15
        assert server.complete(prompt=[1]).status_code == 503
        client.close()
        status, errors = server.ends()
        assert status == 1
        assert f"stage 1 (process {worker}) says nothing for" in errors
        assert "Traceback" not in errors
        assert server.statuses() == ["aborted"]


def test_an_http_server_that_dies_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    (tmp_path / "RUN.yaml").write_text(RUN)

    async def dies(self: Any) -> None:
        raise RuntimeError("no more sockets")

    monkeypatch.setattr(uvicorn.Server, "main_loop", dies)
    out = tmp_path / "out"
    command = ("serve", str(tmp_path / "RUN.yaml"), "--port", "0", "--out", str(out))
    status, _, errors = evenflow(*command)
    assert status == 1
    why = "the HTTP server ended: RuntimeError: no more sockets; 0 of 0 requests are done"
    assert errors == f"ended early: {why}\n"
    assert json.loads((out / "summary.json").read_text())["real_run"]["failure"]
