"""Run the command in this process on a small configuration, for the tests of the command line."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evenflow.errors import UsageError
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


def done(*arguments: str) -> str:
    """Return the output of a command that works and has nothing to complain of."""
    status, output, errors = evenflow(*arguments)
    assert (status, errors) == (0, "")
    return output


def refusal(*arguments: str, leaves: Iterable[str] = ()) -> str:
    """Return the error line of a command that must be refused, having written nothing.

    It may leave what lies in folders of these names.
    """
    before = set(Path().rglob("*"))
    status, output, errors = evenflow(*arguments)
    assert (status, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    kept = set(map(Path, leaves))
    above = {folder for path in kept for folder in path.parents}
    for path in set(Path().rglob("*")) - before - kept - above:
        assert "__pycache__" in str(path) or kept & set(path.parents), path
    return errors.removeprefix("error: ").rstrip()


def refused(message: str) -> Any:
    """Expect a mistake in a `with` block, told in these words."""
    return pytest.raises(UsageError, match=re.escape(message))


def mistake(call: Callable[[], object]) -> str:
    """Return the line in which a call tells of a mistake."""
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message.strip()
    return message


def table(text: str) -> list[tuple[list[str], str]]:
    """Return the rows of a table of `what is typed | what is told`.

    A line `## words` begins all commands below it, or `## words; words` those of either. KEY=VALUE
    is a --set, an indented line goes on.
    """
    rows, starts = [], [""]
    for line in re.sub(r" \|\n\s+", " | ", text).splitlines():
        if line.startswith("##"):
            starts = line.removeprefix("##").split(";")
            continue
        typed, _, told = line.partition("| ")
        rows += [(_words(f"{start} {typed}"), told) for start in starts]
    return rows


def _words(typed: str) -> list[str]:
    pairs = pairwise(["", *shlex.split(typed)])
    sets = ("=" in word and not before.startswith("--") for before, word in pairs)
    words = zip(sets, shlex.split(typed), strict=True)
    return [part for is_set, word in words for part in (["--set", word] if is_set else [word])]


def rows_of(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary_of(folder: str | Path) -> dict[str, Any]:
    """Return the summary that a run wrote into a folder."""
    return dict(json.loads(Path(folder, "summary.json").read_text(encoding="utf-8")))


def _running(folder: Path) -> Iterator[int]:
    """Yield the processes that work in a folder."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").resolve(strict=True) == folder:
                yield int(entry.name)
        except OSError:
            continue


def killed(
    folder: Path,
    *arguments: str,
    when: Callable[[set[int]], bool],
    by: signal.Signals = signal.SIGKILL,
) -> int:
    """Start a command in a folder, kill it `when` its processes allow, and see them all end.

    Return its exit status.
    """
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
    started.send_signal(by)
    status = started.wait()
    others = set(_running(folder)) - mine
    deadline = time.monotonic() + 20
    while others & set(_running(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not others & set(_running(folder))
    return status
