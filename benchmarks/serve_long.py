"""Serve two clients for long, kill the driver with -9, and recover: memory and descriptors while it
serves, and whether all that was answered up to the last second comes out.

Run it from the repository: `python -m benchmarks.serve_long --requests 50000`, as fast as the
answers come (nine minutes), or spread over `--seconds 3600`. One client keeps its connection, the
other makes a new one for each request and leaves every tenth early.
Exit status 1 where something grows or is lost.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.0005, per_token_s: 1.0e-6}
kv: {pages: 400}
max_model_len: 1000
workers: emulated
scheduler: {name: sarathi, token_budget: 128}
"""
MARKS = 10
GROWTH_MB = 8.0
"""What the driver may gain from the second mark to the last; 0.8 KB a request would be 36 MB."""

LOST_S = 1.5
"""A flush each second, and what a busy machine makes of that."""


class Client(threading.Thread):
    """Asks for one short answer after the other, none before its turn in `seconds`; `done_s` says
    when each was there."""

    def __init__(self, port: int, count: int, seconds: float, *, keeps: bool) -> None:
        super().__init__(daemon=True)
        self.done_s: dict[int, float] = {}
        self.sent = 0
        self._port, self._count, self._keeps = port, count, keeps
        self._turns_s = time.monotonic() + seconds / count * np.arange(count)

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        for number, turn_s in enumerate(self._turns_s):
            time.sleep(max(turn_s - time.monotonic(), 0.0))
            leaves = not self._keeps and number % 10 == 9
            body = json.dumps({"prompt": [1] * 8, "max_tokens": 500 if leaves else 4})
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            self.sent += 1
            if not leaves:
                answer = json.loads(connection.getresponse().read())
                self.done_s[int(answer["id"].removeprefix("cmpl-"))] = time.monotonic()
            if not self._keeps:
                connection.close()


def sizes_of(process: int) -> tuple[list[float], list[int]]:
    """Return the resident MB and the open descriptors of a process, then of its children."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    family = [str(process), *children]
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family]
    files = [len(list(Path(f"/proc/{each}/fd").iterdir())) for each in family]
    return [count * 4096 / 1e6 for count in pages], files


def watched(server: subprocess.Popen[str], clients: list[Client], total: int) -> list[list[float]]:
    """Print sizes at each mark; return the driver's memory and descriptors at each."""
    seen: list[list[float]] = []
    started_s = time.monotonic()
    while any(client.is_alive() for client in clients):
        sent = sum(client.sent for client in clients)
        if sent >= total * (len(seen) + 1) // MARKS:
            memory, files = sizes_of(server.pid)
            seen.append([memory[0], files[0]])
            shown = " ".join(f"{size:.1f}" for size in memory)
            print(
                f"{sent} requests, {time.monotonic() - started_s:.0f} s: {shown} MB, {files} files"
            )
        time.sleep(0.05)
    return seen


def main() -> int:
    """Serve, kill, recover; print what is seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=0.0, help="spread them over this long")
    options = parser.parse_args()
    total = options.requests
    evenflow = [sys.executable, "-m", "evenflow"]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        (Path(name) / "RUN.yaml").write_text(RUN)
        command = [*evenflow, "serve", f"{name}/RUN.yaml", "--port", "0", "--out", str(out)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        clients = [
            Client(port, total // 2, options.seconds, keeps=keeps) for keeps in (True, False)
        ]
        for client in clients:
            client.start()
        seen = watched(server, clients, total)
        workers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        server.kill()
        killed_s = time.monotonic()
        server.wait()
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            time.sleep(0.05)
        print(f"killed; its children are gone after {time.monotonic() - killed_s:.1f} s")
        recovered_s = time.monotonic()
        subprocess.run([*evenflow, "recover", str(out)], check=True, stdout=subprocess.DEVNULL)
        took_s = time.monotonic() - recovered_s
        with open(next(out.glob("recovered-*/requests.csv")), newline="") as file:
            rows = {int(row["request_id"]) for row in csv.DictReader(file)}
    done_s = {number: at_s for client in clients for number, at_s in client.done_s.items()}
    early = {number for number, at_s in done_s.items() if at_s < killed_s - LOST_S}
    lost = early - rows
    print(
        f"recovered {len(rows)} requests in {took_s:.1f} s; {len(done_s)} were answered, "
        f"{len(early)} of them {LOST_S} s before the kill, of which {len(lost)} are lost"
    )
    growth_mb, files = seen[-1][0] - seen[1][0], seen[-1][1] - seen[1][1]
    print(
        f"from {100 // MARKS * 2} % on, the driver gained {growth_mb:.1f} MB and {files:.0f} files"
    )
    return int(bool(lost) or growth_mb > GROWTH_MB or files > 4)


if __name__ == "__main__":
    sys.exit(main())
