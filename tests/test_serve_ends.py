"""How a server ends: a port in use, a worker that dies, Ctrl-C once and twice."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import evenflow
from tests.serving import RUN, openai, serving
from tests.test_runtime_cli import group


def test_a_port_in_use_is_one_line_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(RUN)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        out = tmp_path / "out"
        status, text, errors = evenflow(
            "serve", str(tmp_path / "RUN.yaml"), "--port", port, "--out", str(out)
        )
    assert (status, text) == (2, "")
    assert errors == f"error: --port {port} on 127.0.0.1: Address already in use\n"
    assert not out.exists()


def test_a_worker_that_dies_is_told_to_clients_and_ends_the_server() -> None:
    with serving() as server:
        client = server.client()
        answer = client.completions.create(
            model="evenflow", prompt=[1, 2], max_tokens=900, stream=True
        )
        first = next(answer)
        worker = max(group(server.process))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was killed by signal 9"):
            for _ in answer:
                pass
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "was killed by signal 9" in health.json()["error"]["message"]
        assert server.complete(prompt=[1]).status_code == 503
        client.close()
        status, errors = server.ends()
        assert status == 1
        assert f"(process {worker}) was killed by signal 9; 0 of 1 requests are done" in errors
        assert "Traceback" not in errors
        assert server.statuses() == ["aborted"]
        assert first.choices[0].text


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
