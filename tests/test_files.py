"""Files are written whole, and over nothing of the user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evenflow import files
from evenflow.cli.lists import init_command
from evenflow.costs.profile.file import write_profile
from evenflow.errors import UsageError
from evenflow.traces import sample_trace
from evenflow.traces.describe import convert
from tests.profiles import profile

WRITERS: dict[str, Callable[[Path], object]] = {
    "init": init_command,
    "convert": lambda path: convert(sample_trace("arxiv-sample", 2), path),
    "profile": lambda path: write_profile(path, profile()),
}


def without_links(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=["links", "no links"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no links":
        monkeypatch.setattr(os, "link", without_links)


@pytest.mark.usefixtures("_file_system")
@pytest.mark.parametrize("command", WRITERS)
def test_a_file_that_appears_while_another_is_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Another process makes it after all checks, as the last byte is written beside it."""
    path, filled = tmp_path / "mine", files.Path.write_bytes

    def meanwhile(scratch: Path, data: bytes) -> int:
        path.write_text("precious")
        return filled(scratch, data)

    monkeypatch.setattr(files.Path, "write_bytes", meanwhile)
    with pytest.raises(UsageError, match="mine: is there already; name another file"):
        WRITERS[command](path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    assert path.read_text() == "precious"


@pytest.mark.usefixtures("_file_system")
@pytest.mark.parametrize("data", ["text", b"bytes"])
def test_a_new_file_is_all_that_is_left(tmp_path: Path, data: str | bytes) -> None:
    files.write_new(tmp_path / "new", data)
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new").read_text() == ("text" if data == "text" else "bytes")
    assert (tmp_path / "new").stat().st_nlink == 1


def test_nothing_is_left_where_a_new_file_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", without_links)
    monkeypatch.setattr(os, "replace", without_links)
    with pytest.raises(UsageError, match="new"):
        files.write_new(tmp_path / "new", "text")
    assert not list(tmp_path.iterdir())
