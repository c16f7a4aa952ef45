"""Run the command in this process on a small configuration, for the tests of the command line."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from evenflow.cli import terminal
from evenflow.cli.app import app
from evenflow.errors import UsageError
from tests.places import ROOT

terminal.FIRST_LINE_S = terminal.LINE_EVERY_S  # what is told is not how fast the machine is
typer.testing._get_command = functools.cache(typer.testing._get_command)  # 40 ms a command

RUN = """\
stages: 2
costs: {kind: affine, base_s: 0.005, per_token_s: 2e-5}
kv: {pages: 200}
scheduler: {name: sarathi, token_budget: 64}
workload: {trace: trace.csv, arrivals: replay}
"""


SOON = ("--set", "workload.arrivals.scale=20")
"""Has the requests of `write_inputs` come within a tenth of a second, where time is real."""

START_S = 180.0
"""A run that has not started by then hangs; vLLM takes a minute on a busy machine."""

HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def write_trace(path: Path, *rows: str) -> Path:
    """Write a trace of these rows: when a request comes, its prompt and output tokens."""
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def write_inputs(folder: Path) -> None:
    """Write RUN.yaml and its trace: 20 requests, a tenth of a second apart."""
    rows = [f"{0.1 * i:.1f},{20 + 7 * i % 50},{1 + i % 5}" for i in range(20)]
    write_trace(folder / "trace.csv", *rows)
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


def complaint(*arguments: object, prints: str = "") -> str:
    """Return the error line of a command that must be refused."""
    status, output, errors = evenflow(*map(str, arguments))
    assert (status, output) == (2, prints), errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors.removeprefix("error: ").rstrip()


def refusal(*arguments: str, leaves: Iterable[str] = ()) -> str:
    """Return the error line of a command that must be refused, having written nothing.

    It may leave what lies in folders of these names.
    """
    before = set(Path().rglob("*"))
    line = complaint(*arguments)
    kept = set(map(Path, leaves))
    above = {folder for path in kept for folder in path.parents}
    for path in set(Path().rglob("*")) - before - kept - above:
        assert "__pycache__" in str(path) or kept & set(path.parents), path
    return line


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


def fits_a_screen(result: Any) -> Any:
    """Return a result whose text is a line and whose HTML is at most a screen."""
    text, html = repr(result), result._repr_html_()
    assert text.startswith(f"<{type(result).__name__}")
    assert len(text) <= 170
    assert html.count("<tr>") + html.count("<p>") <= 45
    assert len(html) < 8000
    return result


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


def tokens_of(folder: str | Path) -> dict[int, list[int]]:
    """Return the tokens that a run wrote into a folder, of each request."""
    lines = gzip.decompress(Path(folder, "tokens.jsonl.gz").read_bytes()).splitlines()
    return {line["request_id"]: line["tokens"] for line in map(json.loads, lines)}


def spawn(*arguments: object, folder: Path | None = None) -> subprocess.Popen[str]:
    """Start a command as a terminal does, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "evenflow", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def group(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of a command that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == process.pid and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def gone(process: subprocess.Popen[str], patience_s: float = 20) -> bool:
    limit_s = time.monotonic() + patience_s
    while group(process) and time.monotonic() < limit_s:
        time.sleep(0.05)
    return not group(process)


def killed(
    folder: Path,
    *arguments: str,
    when: Callable[[set[int]], bool],
    by: signal.Signals = signal.SIGKILL,
) -> int:
    """Start a command in a folder, kill it `when` its other processes allow; see them all end.

    Return its exit status.
    """
    with spawn(*arguments, folder=folder) as started:
        while not when(set(group(started)) - {started.pid}) and started.poll() is None:
            time.sleep(0.01)
        started.send_signal(by)
        started.wait(timeout=60)
        assert gone(started)
    return started.returncode
