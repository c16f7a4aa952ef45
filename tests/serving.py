"""A server in a process of its own, for tests, and what it should answer."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs openai: pip install -e '.[test]'")
httpx = pytest.importorskip("httpx")

from evenflow.runtime.emulated import emulated_token  # noqa: E402
from tests.command_line import START_S, gone, group, rows_of, spawn, summary_of  # noqa: E402

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.002, per_token_s: 2e-5}
kv: {pages: 400}
max_model_len: 1000
scheduler: {name: sarathi, token_budget: 128}
"""


def named(process: int) -> str:
    """Return what the system calls a process."""
    return Path(f"/proc/{process}/comm").read_text().strip()


class Server:
    """A server process, and what it says."""

    def __init__(self, folder: Path, run: str, arguments: Sequence[str]) -> None:
        self.out = folder / "out"
        (folder / "RUN.yaml").write_text(run)
        more = ("--port", 0, "--out", self.out, *arguments)
        self.process = spawn("serve", folder / "RUN.yaml", *more)
        limit = threading.Timer(START_S, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        found = re.search(r"serving (\S+) on (http://127\.0\.0\.1:\d+)/v1", line)
        assert found, line or self.process.communicate(timeout=5)
        self.model, self.url = found[1], found[2]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def front(self) -> int:
        """The process of the HTTP server."""
        return next(each for each in group(self.process) if named(each) == "evenflow-http")

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, **body: Any) -> Any:
        return self.http.post("/v1/completions", json=body)

    def metrics(self) -> dict[str, float]:
        pattern = (
            r"^(\S+)\{engine=\"0\"(?:,finished_reason=\"(\w+)\")?,model_name=\"[^\"]*\"\} (\S+)$"
        )
        found = re.findall(pattern, self.http.get("/metrics").text, re.MULTILINE)
        return {name + reason: float(value) for name, reason, value in found}

    def ends(self, limit_s: float = 60.0) -> tuple[int, str]:
        """Wait for the end; return the exit status and what went to stderr."""
        self.http.close()
        _, errors = self.process.communicate(timeout=limit_s)
        assert gone(self.process)
        return self.process.returncode, errors

    def interrupted(self) -> tuple[int, str]:
        """Press Ctrl-C and wait for the end."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.ends()

    def summary(self) -> dict[str, Any]:
        return summary_of(self.out)

    def statuses(self) -> list[str]:
        return [row["status"] for row in rows_of(self.out / "requests.csv")]


@contextmanager
def serving(*arguments: str, run: str = RUN, tidy: bool = True) -> Iterator[Server]:
    """Start a server; it must leave no socket behind if it is `tidy`, and be gone if it should."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        sockets = Path(folder) / "s"
        sockets.mkdir()
        os.environ["TMPDIR"], before = str(sockets), os.environ.get("TMPDIR")
        try:
            server = Server(Path(folder), run, arguments)
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
        try:
            yield server
            assert not (tidy and list(sockets.iterdir())), "it leaves sockets"
        finally:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.communicate(timeout=5)
            server.http.close()


def expected_tokens(completion_id: str, prompt_tokens: int, count: int, choice: int = 0) -> str:
    request_id = int(completion_id.removeprefix("cmpl-")) + choice
    positions = range(prompt_tokens, prompt_tokens + count)
    return "".join(f"{emulated_token(request_id, position)} " for position in positions)
