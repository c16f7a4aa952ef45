"""A real run whose output does not fit the disk: what fits is saved, and the rest is named."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evenflow.runtime import journal as journal_file
from tests.command_line import SOON, evenflow


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let every write beyond so many bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def serve(run: Path, *how: str) -> tuple[int, str, set[str]]:
    out = run.parent / "out"
    status, _, errors = evenflow("run", str(run), *how, "--out", str(out))
    return status, errors, {path.name for path in out.iterdir()} if out.exists() else set()


def test_what_does_not_fit_is_left_out_and_named(run: Path) -> None:
    with files_of_at_most(20_000):
        status, errors, files = serve(run, *SOON)
    assert status == 1
    assert errors == "report.html and the like are left out: cannot write: File too large\n"
    assert files >= {"summary.json", "requests.csv", "stages.csv", "decisions.jsonl.gz"}
    assert len((run.parent / "out" / "requests.csv").read_text().splitlines()) == 21
    assert evenflow("replay", str(run.parent / "out"))[0] == 0


def test_no_room_for_the_results_says_so(run: Path) -> None:
    with files_of_at_most(500):
        status, errors, files = serve(run, *SOON)
    assert status == 2
    message = "cannot write: File too large; the results of 20 finished requests are lost\n"
    assert errors == f"error: RUN.yaml: {message}"
    assert not files


def test_a_journal_that_cannot_be_written_on_stops_no_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A file on a disk that fills up with the second flush."""

        def __init__(self, path: Path, *_: Any, **__: Any) -> None:
            path.touch()
            self.flushes = 0

        def write(self, data: bytes) -> int:
            self.flushes += 1
            if self.flushes > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(data)

        def close(self) -> None:
            assert self.flushes == 2, "it goes on writing"

    with monkeypatch.context() as patch:
        patch.setattr(journal_file, "open", Full, raising=False)
        status, errors, files = serve(run, *SOON)
    assert status == 1
    reason = "cannot write: No space left on device"
    assert errors == f"decisions.jsonl.gz is left out: {reason}\n"
    assert "decisions.jsonl.gz" not in files
    assert files >= {"summary.json", "requests.csv", "report.html"}
