"""Folders that commands write into: whole or not at all, and nobody else's files touched."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextvars import Context
from pathlib import Path

import pytest

from evenflow.errors import UsageError
from evenflow.report.folder import (
    MANIFEST,
    RECORDS,
    check_folder,
    reading,
    recovery,
    staged,
    unfinished_runs,
)
from evenflow.report.manifest import MARK
from tests.amounts import ALL
from tests.command_line import complaint, write_inputs


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder but the manifest, by name."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def put(folder: Path, files: dict[str, str], *, force: bool = False) -> None:
    """Write files as a run does, by name."""
    with staged(folder, force=force) as scratch:
        for name, text in files.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(text)


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


def remove_while_writing(folder: Path) -> None:
    with staged(folder) as scratch:
        (scratch / "lost.csv").touch()
        shutil.rmtree(folder)
        scratch.mkdir(parents=True)
        (scratch / "late.csv").touch()


def test_a_folder_that_is_removed_meanwhile_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="out: was removed while"):
        remove_while_writing(tmp_path / "out")
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


ODD_NAMES = (
    "../precious.txt",
    "{above}/precious.txt",
    "a/../../precious.txt",
    "./x",
    "",
    ".",
    "a//b",
    "..",
    "/",
    "manifest.json",
    "a\0b",
    "link/precious.txt",
    "linked.txt",
)


@pytest.mark.parametrize("part", ["files", "replaced"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_manifest_names_files_below_its_folder_only(tmp_path: Path, name: str, part: str) -> None:
    out = tmp_path / "out"
    write(out, summary_json="ours")
    (tmp_path / "precious.txt").write_text("mine")
    (out / "link").symlink_to(tmp_path)
    (out / "linked.txt").symlink_to(tmp_path / "precious.txt")
    known = hashlib.sha256(b"mine").hexdigest()
    begun = out / ".partial-00000000"
    begun.mkdir()
    for file in (MANIFEST, MARK):
        (begun / file).touch()
    odd = {part: {name.format(above=tmp_path): known}, "moving": begun.name}
    (out / MANIFEST).write_text(json.dumps({"written_by": "evenflow", "files": {}, **odd}))
    before = contents(tmp_path), (out / MANIFEST).read_text()
    with pytest.raises(UsageError, match=r"manifest that evenflow wrote: |: is a link; "):
        write(out, force=True, summary_json="new")
    assert (contents(tmp_path), (out / MANIFEST).read_text()) == before


ODD_ENTRIES = (
    {"files": {"a.txt": None}},
    {"files": {"a.txt": "00"}},
    {"files": {"a.txt": 3}},
    {"files": {}, "moving": "mine"},
    {"files": {}, "moving": ".partial-mine"},
    {"files": {}, "moving": "../.partial-00000000"},
    {"files": {}, "replaced": {"a.txt": None}},
    {"files": {}, "written_by": "me"},
    {"files": {}, "more": 1},
)


@pytest.mark.parametrize("entries", ODD_ENTRIES, ids=str)
def test_a_manifest_says_nothing_else(tmp_path: Path, entries: dict[str, object]) -> None:
    for name in ("a.txt", "mine/a.txt", ".partial-mine/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / MANIFEST).write_text(json.dumps({"written_by": "evenflow", **entries}))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="no manifest that evenflow wrote: "):
        write(tmp_path, force=True, summary_json="ours")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".partial-mine", ".partial-0123abcd", ".partial-0123abcd.txt"])
def test_a_folder_of_the_users_is_no_scratch_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("mine")
    with pytest.raises(UsageError, match=f"did not write .*{name}"):
        write(tmp_path, summary_json="ours")
    write(tmp_path, force=True, summary_json="ours")
    assert contents(tmp_path) == {f"{name}/a.txt": "mine", "summary.json": "ours"}


def test_results_go_through_no_link_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "out" / "sarathi").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="sarathi: is not evenflow's and stays"):
        put(tmp_path / "out", {"sarathi/summary.json": "ours"}, force=True)
    assert list((tmp_path / "mine").iterdir()) == []


CHANGES = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
TAKES_ROOM = {"open", "os.mkdir", "os.rename"}
OLD = {"summary.json": "old", "pool/batches.csv": "old", "report.html": "old"}
NEW = {"summary.json": "new", "requests.csv": "new", "other/batches.csv": "new"}
NEXT = {"summary.json": "next"}


def forked(change: Callable[[], None]) -> int:
    """Return the status of a command in a process of its own: 2 if it is refused."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        Context().run(change)
        status = 0
    except UsageError:
        status = 2
    finally:
        os._exit(status)


def stopped(nth: int, change: Callable[[], None], *, full: bool) -> int:
    """Kill a change as it changes the disk for the nth time, or have no room from then on."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        reads = event == "open" and not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and not reads and next(count) >= nth:
            if not full:
                os._exit(9)
            if event in TAKES_ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    def watched() -> None:
        sys.addaudithook(hook)
        change()

    count = itertools.count(1)
    return forked(watched)


def seen(folder: Path) -> dict[str, str]:
    return {n: t for n, t in contents(folder).items() if not n.startswith(".partial-")}


def is_moving(folder: Path) -> bool:
    """Say whether a manifest says that files are moving; if not, it has to fit what is there."""
    said = json.loads((folder / MANIFEST).read_text()) if (folder / MANIFEST).exists() else {}
    there = {n: hashlib.sha256(t.encode()).hexdigest() for n, t in seen(folder).items()}
    assert "moving" in said or said.get("files", {}) == there
    return "moving" in said


@pytest.mark.parametrize("full", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("old", [{}, OLD], ids=["new", "over a run"])
def test_a_run_that_is_stopped_anywhere_is_whole_for_the_next_command(
    tmp_path: Path, old: dict[str, str], full: bool
) -> None:
    moving, new = [], NEW if old else NEW | {RECORDS: "of a real run"}
    for nth in itertools.count(1) if ALL else itertools.count(1 + bool(old) + full, 3):
        out = tmp_path / str(nth)
        put(out, old)
        if (status := stopped(nth, lambda to=out: put(to, new), full=full)) == 0:
            break
        assert status == (2 if full else 9)
        moving.append(is_moving(out))
        with reading(out):
            found = seen(out)
        assert found == NEW if moving[-1] else found in (old, NEW)
        assert not is_moving(out)
        kept = unfinished_runs(out)
        assert not (kept and found == NEW)
        put(out, NEXT)
        assert seen(out) == NEXT
        assert [*out.glob(".partial-*")] == kept
    assert seen(out) == NEW
    assert len(moving) > (15 if ALL else 4)
    assert {*moving} == {True, False}


def test_what_is_changed_while_a_move_is_interrupted_stays(tmp_path: Path) -> None:
    put(tmp_path, OLD)
    for nth in itertools.count(1):
        stopped(nth, lambda: put(tmp_path, NEW), full=False)
        if is_moving(tmp_path):
            break
    (tmp_path / "summary.json").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"summary\.json: was changed while results moved"):
        put(tmp_path, NEXT, force=True)
    assert contents(tmp_path) == before
    (tmp_path / "summary.json").unlink()
    with reading(tmp_path):
        assert seen(tmp_path) == NEW


def test_a_manifest_moves_nothing_out_of_a_folder_of_the_users(tmp_path: Path) -> None:
    put(tmp_path / ".partial-0123abcd", {"a.txt": "mine"})
    known = {"a.txt": hashlib.sha256(b"mine").hexdigest()}
    said = {"written_by": "evenflow", "files": known, "moving": ".partial-0123abcd"}
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(UsageError, match="should have the rest of the results"):
        put(tmp_path, NEXT, force=True)
    assert (tmp_path / ".partial-0123abcd" / "a.txt").read_text() == "mine"


def test_a_recovery_that_is_killed_anywhere_is_whole_or_can_be_made_again(tmp_path: Path) -> None:
    def recover(scratch: Path) -> None:
        with recovery(scratch):
            (scratch / "summary.json").write_text("served")

    for nth in itertools.count(1):
        scratch = tmp_path / str(nth) / ".partial-0123abcd"
        scratch.mkdir(parents=True)
        (scratch / RECORDS).write_text("kept")
        if stopped(nth, lambda at=scratch: recover(at), full=False) == 0:
            break
        put(scratch.parent, NEXT)
        for run in unfinished_runs(scratch.parent):
            recover(run)
        recovered = scratch.with_name("recovered-0123abcd")
        assert (recovered / "summary.json").read_text() == "served"
        assert (recovered / MANIFEST).is_file()
    assert nth > 5


def test_a_link_to_itself_or_to_nothing_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="dead: is a link to nothing"), staged(tmp_path / "dead"):
        pass
    with pytest.raises(UsageError, match="loop: is a link to nothing"), staged(tmp_path / "loop"):
        pass


def test_of_two_commands_in_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    with staged(tmp_path) as scratch:
        (scratch / "summary.json").write_text("first")
        assert forked(lambda: put(tmp_path, NEW)) == 2
        with reading(tmp_path):
            assert seen(tmp_path) == {}
    assert contents(tmp_path) == {"summary.json": "first"}


def test_a_reader_tells_that_another_run_was_written_meanwhile(tmp_path: Path) -> None:
    put(tmp_path, OLD)
    meanwhile = pytest.raises(UsageError, match="another run was written there meanwhile")
    with meanwhile, reading(tmp_path / "pool"):
        put(tmp_path, NEW)


def test_four_processes_leave_the_whole_run_of_one(tmp_path: Path) -> None:
    def write_often(who: int) -> None:
        done = 0
        while done < 4:
            try:
                put(tmp_path / "out", {f"{name}.txt": f"{who}" for name in range(who + 1)})
                done += 1
            except UsageError as error:
                if "another command writes there" not in str(error):
                    raise

    children = []
    for who in range(4):
        if not (child := os.fork()):
            os._exit(forked(lambda who=who: write_often(who)))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert not is_moving(tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found == {f"{name}.txt": f"{len(found) - 1}" for name in range(len(found))}
    assert found


def test_folders_with_records_of_their_own_are_not_of_others(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "results.json").write_text("{}")
    (tmp_path / ".partial-x").mkdir()
    write(tmp_path / "sarathi", summary_json="ours")
    check_folder(tmp_path)
    write(tmp_path, validation_md="ours")
    assert contents(tmp_path / "sarathi") == {"summary.json": "ours"}


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
