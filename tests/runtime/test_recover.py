"""What a real run keeps while it is served: kill -9 of the driver loses its last second at most."""

from __future__ import annotations

import gzip
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from evenflow.errors import UsageError
from evenflow.report.folder import RECORDS, check_folder
from evenflow.results.recorder import BlockFile, read_blocks
from evenflow.runtime.journal import NAME, Entries
from evenflow.runtime.real import job_of, replay_folder, serve_into
from evenflow.runtime.records import recover
from tests.command_line import complaint, evenflow, gone, rows_of, summary_of, write_inputs
from tests.report.test_full_disk import files_of_at_most
from tests.runtime.test_runtime_cli import FILES, start
from tests.serving import Server, serving

LOST_S = 2.0
"""A flush each second, and what a busy machine makes of that."""

TABLES = ("requests.csv", "batches.csv", "stages.csv", "bubbles.csv", "timeline.json.gz")


SLOWLY = ("--set", "workload.arrivals={kind: poisson, rate: 2}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a run has in its scratch folder just before it is moved."""
    folder = tmp_path_factory.mktemp("served")
    write_inputs(folder)
    (folder / "kept").mkdir()
    serve_into(folder / "kept", job_of(folder / "RUN.yaml"), "RUN.yaml")
    return folder / "kept"


@pytest.fixture
def scratch(served: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(copytree(served, tmp_path / "out" / ".partial-1"))


def killed_server(serve: Callable[[Server], Any]) -> tuple[Any, Path]:
    """Kill a server's driver; return what `serve` had seen, and its folder, elsewhere."""
    with serving() as server:
        seen = serve(server)
        server.process.kill()
        server.process.communicate(timeout=60)
        assert gone(server.process, patience_s=5), "workers outlive their driver"
        kept = server.out.rename(Path(os.environ["KEPT"]) / "out")
    return seen, kept


def answers_for(seconds: float) -> Callable[[Server], dict[int, float]]:
    def serve(server: Server) -> dict[int, float]:
        """Ask for one short answer after the other; return when each was there."""
        done_s: dict[int, float] = {}
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            number = int(server.complete(prompt=[1], max_tokens=4).json()["id"][5:])
            done_s[number] = time.monotonic()
        return done_s

    return serve


@pytest.mark.long
def test_what_a_killed_server_had_answered_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", str(tmp_path))
    done_s, out = killed_server(answers_for(4.0))
    last_s = max(done_s.values())
    status, text, errors = evenflow("recover", str(out))
    assert status == 0, errors
    assert "the driver was killed; what it had recorded until " in errors
    (recovered,) = out.iterdir()
    assert text.endswith(f"{recovered}\n")
    assert {path.name for path in recovered.iterdir()} == FILES
    rows = rows_of(recovered / "requests.csv")
    early = {number for number, at_s in done_s.items() if at_s < last_s - LOST_S}
    assert len(early) > 20
    assert {int(row["request_id"]) for row in rows} >= early
    assert {(row["status"], row["output_tokens"]) for row in rows} == {("completed", "4")}
    summary = summary_of(recovered)
    assert summary["completed"] == len(rows)
    assert summary["real_run"]["recovered"]
    assert summary["real_run"]["failure"].startswith("the driver was killed; ")
    check_folder(recovered)  # all of it is evenflow's
    status, text, errors = evenflow("replay", str(recovered))
    assert (status, text) == (0, "identical: every decision is as recorded\n")
    assert errors.startswith("the journal is cut after ")
    assert evenflow("recover", str(out))[0] == 2


@pytest.mark.long
def test_a_killed_run_stays_until_it_is_recovered(run: Path) -> None:
    out = run.parent / "out"
    begun = start(run, *SLOWLY)
    (killed,) = out.glob(".partial-*")
    while not any(len(block["request_id"]) for block in read_blocks(killed / RECORDS)[1]):
        assert begun.poll() is None
        time.sleep(0.02)
    assert "its run is alive" in complaint("recover", out)
    begun.kill()
    begun.communicate(timeout=60)
    assert gone(begun, patience_s=5)
    _, _, errors = evenflow("replay", str(out))
    assert errors.endswith(f"has one; {killed} is of a run that was killed\n")
    status, _, errors = evenflow("run", str(run), "--out", str(out))
    assert (status, errors) == (
        0,
        f"{killed}: what a killed run had served; evenflow recover {out}\n",
    )
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert evenflow("recover", str(out))[0] == 0
    assert {path: path.read_bytes() for path in before} == before
    assert 0 < len(rows_of(next(out.glob("recovered-*/requests.csv")))) < 20
    assert evenflow("simulate", str(run), "--out", str(out / "other"))[0] == 0
    assert evenflow("run", str(run), "--out", str(out))[0] == 0


def test_records_of_a_whole_run_give_its_tables(scratch: Path) -> None:
    before = {name: (scratch / name).read_bytes() for name in TABLES}
    whole = summary_of(scratch)
    folder, outcome, facts, lost = recover(scratch)
    assert (lost, facts["unfinished"], len(outcome.requests)) == ([], 0, 20)
    assert {name: (folder / name).read_bytes() for name in TABLES} == before
    assert (folder / "report.html").is_file()
    again = summary_of(folder)
    real = whole.pop("real_run") | {"recovered": True, "free_pages": None}
    assert again.pop("real_run") | {"failure": None} == real
    assert again == whole


SEVERAL = ["scheduler={name: distserve, kv_bytes_per_token: 1000}", "replicas={count: 2}"]


def tables_in(folder: Path) -> dict[str, bytes]:
    files = [*folder.rglob("*.csv"), *folder.rglob("timeline.json.gz")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
@pytest.mark.parametrize("several", SEVERAL, ids=["pools", "replicas"])
def test_records_of_several_pipelines_give_the_tables_of_each(several: str, run: Path) -> None:
    folder = run.parent / "out" / ".partial-1"
    folder.mkdir(parents=True)
    serve_into(folder, job_of(run, [several]), run.name)
    before, whole = tables_in(folder), summary_of(folder)
    recovered, _, facts, lost = recover(folder)
    assert (lost, facts["unfinished"]) == ([], 0)
    assert tables_in(recovered) == before
    assert len(before) > 8
    again = summary_of(recovered)
    real = whole.pop("real_run") | {"recovered": True, "free_pages": None, "failure": None}
    assert again.pop("real_run") | {"failure": None} == real
    assert again == whole


def test_of_records_cut_anywhere_what_is_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "records"
    blocks = [
        {"a": np.arange(n), "b": np.array([0.5, np.nan]), "words": ["x", "é"]} for n in range(3)
    ]
    file = BlockFile(path, {"depth": 2})
    for block in blocks:
        file.append(block)
    file.append({"a": np.zeros(0), "words": []})
    file.close()
    whole, counts = path.read_bytes(), set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        head, found = read_blocks(path)
        read = list(found)
        counts.add((head is not None, len(read)))
        for block, wrote in zip(read, blocks, strict=False):
            np.testing.assert_equal(block, wrote)
    assert counts == {(False, 0), (True, 0), (True, 1), (True, 2), (True, 3)}
    objects = b'{"depth": 2}\n[{}, {"a": ["O", 1]}]\n12345678'
    for damaged in (b"\x00\xff\n", b'{"depth": 2}\n[1]\n', objects):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="records"):
            list(read_blocks(path)[1])


def test_blocks_that_a_disk_has_no_room_for_stay_in_memory(tmp_path: Path) -> None:
    column = np.arange(100.0)
    with files_of_at_most(700):
        file = BlockFile(tmp_path / "records", {})
        for start in (0, 50, 90):
            file.append({"a": column[start : start + 50]})
        file.append({"a": column[:1]})
    assert np.concatenate([block["a"] for block in file]).tolist() == [
        *range(50),
        *range(50, 100),
        *range(90, 100),
        0,
    ]
    assert len(list(read_blocks(tmp_path / "records")[1])) == 1
    file.close()


def _has_a_line(start: bytes) -> bool:
    return b"\n" in zlib.decompressobj(wbits=31).decompress(start)


def test_a_journal_with_keys_that_are_gone_replays(scratch: Path) -> None:
    path = scratch / NAME
    text = gzip.decompress(path.read_bytes()).decode()
    assert text.count('"metadata":') == 1
    path.write_bytes(
        gzip.compress(text.replace('"metadata":', '"faults":null,"metadata":').encode())
    )
    assert replay_folder(scratch) == (None, None)


def test_a_journal_cut_anywhere_replays_as_far_as_it_goes(scratch: Path) -> None:
    path = scratch / NAME
    assert replay_folder(scratch) == (None, None)
    whole = path.read_bytes()
    entries = list(Entries(path))
    first = next(size for size in range(len(whole)) if _has_a_line(whole[:size]))
    member = whole.index(b"\x1f\x8b\x08", first)
    for size in (member + 1, first, *range(len(whole) - 1, first, -max(1, len(whole) // 25))):
        path.write_bytes(whole[:size])
        read = Entries(path)
        assert list(read) == entries[: len(list(Entries(path)))]
        assert read.cut
        difference, missing = replay_folder(scratch)
        assert difference is None
        assert missing is not None
        assert "requests had not ended" in missing
    path.write_bytes(whole[:10])
    with pytest.raises(UsageError, match="cannot read it"):
        replay_folder(scratch)
    for place in (first, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:place] + b"\x55\xaa" + whole[place + 2 :])
        try:
            told, _ = replay_folder(scratch)
        except UsageError as error:
            told = str(error)
        assert told is not None, "a journal that was changed is told, by its file or its decisions"


def test_what_cannot_be_recovered_is_one_line(tmp_path: Path) -> None:
    odd = {
        "the run was killed before it served anything": b"",
        "no records of a run: maximum recursion": b"[" * 100_000 + b"\n",
        "damaged before byte": b'{"depth": 1}\n{}\n',
        "no records of a run: 'flushed_s'": b'{"depth": 1}\n[{}, {"a": ["<f8", 0]}]\n',
        "no records of a run: bad char in struct": b'{"depth": -9}\n',
        "no records of a run: total struct size": b'{"depth": 1000000000000000000}\n',
        "no records of a run: should be the name of a file below": (
            b'{"bytes_per_token": 1, "parts": {"../mine": {"depth": 1, "facts": {}}}}\n'
        ),
        "cannot fit 'int'": b'{"depth": 1}\n[{}, {"a": ["<f8", 99999999999999999999]}]\n',
    }
    for words in ("", "nowhere"):
        told = complaint("recover", tmp_path / words)
        assert "holds no records of a run that was killed" in told
    for number, (told, text) in enumerate(odd.items()):
        folder = tmp_path / f".partial-{number}"
        folder.mkdir()
        (folder / RECORDS).write_bytes(text)
        assert told in complaint("recover", folder)
    (folder / "summary.json").symlink_to(tmp_path / "mine.txt")
    (tmp_path / "mine.txt").write_text("mine")
    assert "summary.json: is a link" in complaint("recover", folder)
    assert (tmp_path / "mine.txt").read_text() == "mine"
