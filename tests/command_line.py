"""Run the command in this process on a small configuration, for the tests of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from typer.testing import CliRunner

from experiments.cli import app

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.005, per_token_s: 2e-5}
kv: {pages: 200}
scheduler: {name: sarathi, token_budget: 64}
workload: {trace: trace.csv, arrivals: replay}
"""


def write_inputs(folder: Path) -> None:
    """Write RUN.yaml and its trace: 20 requests, a tenth of a second apart."""
    rows = [f"{0.1 * i:.1f},{20 + 7 * i % 50},{1 + i % 5}" for i in range(20)]
    head = "arrived_at,num_prefill_tokens,num_decode_tokens"
    (folder / "trace.csv").write_text("\n".join([head, *rows, ""]), encoding="utf-8")
    (folder / "RUN.yaml").write_text(RUN, encoding="utf-8")


def evenflow(*arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of one command."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def _running(folder: Path) -> Iterator[int]:
    """Yield the processes that work in a folder."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").resolve(strict=True) == folder:
                yield int(entry.name)
        except OSError:
            continue


def killed(folder: Path, *arguments: str, when: Callable[[set[int]], bool]) -> None:
    """Start a command in a folder, kill it `when` its processes allow, and see them all end."""
    started = subprocess.Popen(
        [sys.executable, "-m", "experiments.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    mine = {os.getpid()}
    while not when(set(_running(folder)) - mine - {started.pid}) and started.poll() is None:
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    others = set(_running(folder)) - mine
    deadline = time.monotonic() + 20
    while others & set(_running(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not others & set(_running(folder))
