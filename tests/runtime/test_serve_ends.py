"""How a server ends: a port in use, a worker or HTTP that dies, Ctrl-C; and clients gone silent."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tests.command_line import complaint, evenflow, gone, rows_of, summary_of
from tests.serving import RUN, httpx, openai, serving

limits = pytest.importorskip("evenflow.web")


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


def served_while(act: Callable[[str, int], None], worker: str, folder: Path) -> tuple[int, str]:
    """Serve in this process, with `act` as client, given a process; return status and errors."""
    (folder / "RUN.yaml").write_text(RUN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def client() -> None:
        url, limit_s = f"http://127.0.0.1:{port}", time.monotonic() + 60
        try:
            while health_of(url) != 200:
                assert time.monotonic() < limit_s
            process = next(each for each in active_children() if each.name == worker)
            act(url, process.pid or 0)
        except BaseException:
            for _ in range(2):  # so that the server ends
                os.kill(os.getpid(), signal.SIGINT)
            raise

    with ThreadPoolExecutor() as pool:
        acted = pool.submit(client)
        out = ("--port", str(port), "--out", str(folder / "out"))
        status, _, errors = evenflow("serve", str(folder / "RUN.yaml"), *out)
        acted.result(30)
    return status, errors


def health_of(url: str) -> int:
    with suppress(httpx.TransportError):
        return int(httpx.get(f"{url}/health", timeout=2).status_code)
    return 0


def begun(url: str, stack: ExitStack) -> Iterator[str]:
    """Return the lines of a long stream that has begun."""
    body = {"prompt": [1], "max_tokens": 900, "stream": True}
    stream = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)
    lines = stack.enter_context(stream).iter_lines()
    assert '"text"' in next(lines)
    return lines


def test_a_worker_that_dies_is_told_to_clients_within_seconds(
    tmp_path: Path, sockets: Path
) -> None:
    why = "was killed by signal 9"

    def client(url: str, worker: int) -> None:
        with ExitStack() as stack:
            lines = begun(url, stack)
            os.kill(worker, signal.SIGKILL)
            events = [line for line in lines if line]
            assert why in events[-1], "nothing follows the error"
            health = httpx.get(f"{url}/health")
            assert (health.status_code, why in health.text) == (503, True)
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [1]}).status_code == 503

    status, errors = served_while(client, "stage 1", tmp_path)
    assert re.fullmatch(
        rf"ended early: stage 1 \(process \d+\) {why}; 0 of 1 requests are done\n", errors
    )
    assert (status, rows_of(tmp_path / "out/requests.csv")[0]["status"]) == (1, "aborted")


def test_an_http_server_that_is_killed_ends_the_run_within_seconds(
    tmp_path: Path, sockets: Path
) -> None:
    def client(url: str, front: int) -> None:
        short = {"prompt": [1], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=short).status_code == 200
        with ExitStack() as stack:
            lines = begun(url, stack)
            os.kill(front, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)

    status, errors = served_while(client, "the HTTP server", tmp_path)
    assert re.fullmatch(
        r"ended early: the HTTP server \(process \d+\) was killed by signal 9; "
        r"1 of 2 requests are done\n",
        errors,
    )
    rows = rows_of(tmp_path / "out" / "requests.csv")
    assert (status, [row["status"] for row in rows]) == (1, ["completed", "aborted"])
    assert summary_of(tmp_path / "out")["real_run"]["failure"]


def body_read(*messages: dict[str, Any]) -> bytes:
    """Read the body of a client that sends these messages, and then is silent."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    return asyncio.run(limits.body_of(Request({"type": "http", "headers": []}, receive)))


def test_a_body_that_never_ends_or_is_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_LIMIT_S", 0.1)
    monkeypatch.setattr(limits, "MOST_BODY_BYTES", 3)
    part = {"type": "http.request", "body": b"{}", "more_body": True}
    assert body_read(part, {"type": "http.request", "body": b""}) == b"{}"
    for parts, status in (([part], 408), ([part, part], 413), ([{"type": "http.disconnect"}], 400)):
        with pytest.raises(HTTPException) as refused:
            body_read(*parts)
        assert refused.value.status_code == status


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


def test_an_http_server_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN)
    (tmp_path / "path" / "uvicorn").mkdir(parents=True)
    (tmp_path / "path" / "uvicorn" / "__init__.py").write_text("raise OSError('no more')")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    run = ("serve", tmp_path / "RUN.yaml", "--port", 0, "--out", tmp_path / "out")
    status, _, errors = evenflow(*map(str, run))
    line = "ended early: the HTTP server ended: OSError: no more; 0 of 0 requests are done"
    assert (status, errors.splitlines()) == (1, [line])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_serves_who_is_there_the_second_ends_at_once(
    number: signal.Signals,
) -> None:
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
        os.killpg(server.process.pid, number)
        limit_s = time.monotonic() + 20
        while server.http.get("/health").status_code == 200 and time.monotonic() < limit_s:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            client.completions.create(model="evenflow", prompt=[1])
        assert sum(len(chunk.choices) for chunk in short) == 59
        os.killpg(server.process.pid, number)
        with pytest.raises(openai.APIError, match="interrupted"):
            for _ in long:
                pass
        client.close()
        status, errors = server.ends()
        assert status == 130, errors
        assert "ended early: interrupted; 1 of 2 requests are done" in errors
        assert server.statuses() == ["completed", "aborted"]


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
            limit_s = time.monotonic() + 2 * limits.HEAD_LIMIT_S + 10
            while (status := health_of(server.url)) != 200 and time.monotonic() < limit_s:
                time.sleep(0.5)
            assert status == 200
        _, errors = server.interrupted()
    assert errors.count("out of system resource") <= 1
    assert len(errors) < 5000


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
