"""Folders that commands write into: whole or not at all, and nobody else's files touched."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from evenflow.errors import UsageError
from evenflow.report.folder import MANIFEST, check_folder, staged
from tests.command_line import complaint, write_inputs


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder but the manifest, by name."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def write(folder: Path, *, force: bool = False, adds: bool = False, **files: str) -> None:
    """Write files as a run does; `_` in a name stands for the dot of its suffix."""
    with staged(folder, force=force, adds=adds) as scratch:
        for name, text in files.items():
            (scratch / name.replace("_", ".")).write_text(text)


def test_files_appear_together_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with staged(folder) as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "summary.json").write_text("{}")
        (scratch / "summary.json").write_text("{}")
        assert [path for path in folder.iterdir() if path != scratch] == []
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert found == ["manifest.json", "sub", "sub/summary.json", "summary.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with staged(tmp_path / "new" / "run") as scratch:
            (scratch / "summary.json").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_run_that_is_stopped_as_its_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(file: int, how: int) -> None:
        if any(tmp_path.glob("new/run/.partial-*")):
            raise KeyboardInterrupt
        real(file, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", stop)
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "new" / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_never_holds_parts_of_two_runs(tmp_path: Path) -> None:
    with staged(tmp_path) as scratch:
        (scratch / "prefill").mkdir()
        (scratch / "prefill" / "stages.csv").write_text("1")
        (scratch / "report.html").write_text("earlier")
    write(tmp_path, summary_json="later")
    assert contents(tmp_path) == {"summary.json": "later"}
    assert not (tmp_path / "prefill").exists()
    write(tmp_path, adds=True, claims_csv="more")
    assert contents(tmp_path) == {"summary.json": "later", "claims.csv": "more"}
    write(tmp_path, summary_json="last")
    assert contents(tmp_path) == {"summary.json": "last"}


def test_a_folder_with_files_of_others_is_refused_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "requests.csv").write_text("mine too")
    with pytest.raises(UsageError, match=r"deep and 1 more.*--force"):
        write(tmp_path, summary_json="ours")
    write(tmp_path, force=True, summary_json="ours")
    write(tmp_path, force=True, report_html="again")
    assert contents(tmp_path) == {
        "notes.txt": "mine",
        "deep/requests.csv": "mine too",
        "report.html": "again",
    }


def test_a_file_of_others_is_never_replaced_and_the_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("mine")
    with pytest.raises(UsageError, match=r"summary\.json: is not evenflow's and stays; .* are in"):
        write(tmp_path, force=True, summary_json="ours", report_html="ours")
    found = contents(tmp_path)
    assert found.pop("summary.json") == "mine"
    assert sorted(name.partition("/")[2] for name in found) == ["report.html", "summary.json"]


def test_what_was_changed_since_is_the_users(tmp_path: Path) -> None:
    write(tmp_path, summary_json="ours")
    (tmp_path / "summary.json").write_text("edited")
    with pytest.raises(UsageError, match="what was changed since"):
        write(tmp_path, report_html="ours")
    assert contents(tmp_path) == {"summary.json": "edited"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}'])
def test_a_manifest_of_others_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UsageError, match="no manifest that evenflow wrote"):
        check_folder(tmp_path, force=True)


def test_folders_with_records_of_their_own_are_not_of_others(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "results.json").write_text("{}")
    (tmp_path / ".partial-x").mkdir()
    write(tmp_path / "sarathi", summary_json="ours")
    check_folder(tmp_path)
    write(tmp_path, validation_md="ours")
    assert contents(tmp_path / "sarathi") == {"summary.json": "ours"}


def test_the_clock_is_named_without_its_hash(tmp_path: Path) -> None:
    with staged(tmp_path) as scratch:
        (scratch / "wall_clock.json").write_text("1")
    assert json.loads((tmp_path / MANIFEST).read_text())["files"] == {"wall_clock.json": None}


COMMANDS = {
    "simulate": (),
    "compare": ("--schedulers", "sarathi,vllm"),
    "sweep": (),
    "capacity": ("--slo", "p99_ttft_ms=5"),
    "run": (),
    "validate": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_touches_the_files_where_one_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    names = ("requests.csv", "summary.csv", "points.csv", "report.html", "checks.csv", "rates.csv")
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "SWEEP.yaml").write_text("run: RUN.yaml\nparameters: {kv.pages: [100, 200]}\n")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    file = "SWEEP.yaml" if command == "sweep" else "RUN.yaml"
    line = complaint(command, file, *COMMANDS[command], "--out", ".")
    assert "evenflow did not write" in line
    assert contents(tmp_path) == before


def test_what_a_run_reads_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = (tmp_path / "RUN.yaml").read_text()
    write(tmp_path / "out", tuned_yaml=run.replace("trace.csv", "../trace.csv"))
    line = complaint("simulate", "out/tuned.yaml", "--out", "out")
    assert "out/tuned.yaml: is read by this run" in line
    assert (tmp_path / "out" / "tuned.yaml").exists()
