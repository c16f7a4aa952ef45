"""Five hundred clients stream at once: what the HTTP front end, a process of its own, adds to the
times between tokens that the driver records, and what CPU time it and the driver take.

Run it from the repository: `python -m benchmarks.http_streams` takes half a minute. Of its times,
only those of a machine with nothing else to do count. Clients are coroutines of this process, on
sockets of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.02, per_token_s: 0.0}
kv: {pages: 40000}
max_model_len: 1000
workers: emulated
scheduler:
  {name: vllm_balanced, max_num_seqs: 2000, max_num_batched_tokens: 4000, async_scheduling: false}
"""
METRICS = ("p50_itl_ms", "p90_itl_ms", "p99_itl_ms", "mean_ttft_ms", "mean_e2el_ms")


def front_end_of(driver: int) -> int | None:
    """Return the process of the HTTP front end; None: it is the driver's."""
    children = Path(f"/proc/{driver}/task/{driver}/children").read_text(encoding="ascii").split()
    names = {Path(f"/proc/{each}/comm").read_text(encoding="utf-8"): each for each in children}
    found = names.get("evenflow-http\n")
    return None if found is None else int(found)


def cpu_s(process: int) -> float:
    """Return the CPU seconds that a process has used, without its children."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def stream(port: int, tokens: int) -> list[float]:
    """Ask for a stream; return when it was asked for, and when each token came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": [1] * 8, "max_tokens": tokens, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    at_s = [time.monotonic()]
    writer.write(f"{head}content-type: application/json\r\n\r\n{body}".encode())
    while b"[DONE]" not in (line := await reader.readline()):
        if line.startswith(b"data: "):
            at_s.append(time.monotonic())
        elif not line:
            raise SystemExit("the server closed a stream")
    writer.close()
    return at_s


async def streams(port: int, clients: int, tokens: int) -> dict[str, float]:
    """Let all clients in at once; return METRICS as they see them."""
    times = await asyncio.gather(*(stream(port, tokens) for _ in range(clients)))
    if {len(each) for each in times} != {tokens + 1}:
        raise SystemExit("a stream has another number of tokens than was asked for")
    at_ms = 1e3 * np.array(times)
    gaps_ms = np.diff(at_ms[:, 1:]).ravel()
    percentiles = np.percentile(gaps_ms, [50, 90, 99])
    waits_ms = at_ms[:, [1, -1]] - at_ms[:, :1]
    return dict(zip(METRICS, map(float, (*percentiles, *waits_ms.mean(0))), strict=True))


def main() -> None:
    """Serve, let the clients in, and print their times beside the driver's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        (Path(name) / "RUN.yaml").write_text(RUN, encoding="utf-8")
        command = [sys.executable, "-m", "evenflow", "serve", f"{name}/RUN.yaml"]
        server = subprocess.Popen(
            [*command, "--port", "0", "--out", str(out)], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        print(f"load average {os.getloadavg()[0]:.1f}, {options.clients} streams", flush=True)
        parts = {"driver": server.pid, "front end": front_end_of(server.pid)}
        before_s = {name: cpu_s(each) for name, each in parts.items() if each is not None}
        try:
            seen = asyncio.run(streams(port, options.clients, options.tokens))
            used_s = {name: cpu_s(parts[name] or 0) - at_s for name, at_s in before_s.items()}
        finally:
            server.terminate()
            server.communicate(timeout=60)
        recorded = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    for name, seconds in used_s.items():
        each_ms = 1e3 * seconds / (options.clients * options.tokens)
        print(f"CPU time of the {name}: {seconds:.1f} s, {each_ms:.3f} ms a token")
    for metric in METRICS:
        own, theirs = recorded[metric], seen[metric]
        print(f"{metric}: driver {own:.1f}, clients {theirs:.1f} ({theirs - own:+.1f})")


if __name__ == "__main__":
    main()
