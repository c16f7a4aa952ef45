"""`evenflow run`, `replay` and `validate`, in processes of their own where signals matter."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import evenflow as ef
from evenflow.experiments.validation import validate
from evenflow.report.folder import RECORDS
from evenflow.results.recorder import read_blocks
from evenflow.runtime import real
from evenflow.runtime.real import job_of
from tests.command_line import SOON, START_S, complaint, evenflow, gone, spawn
from tests.failing_workers import OneDies

VALIDATION_FILES = {
    "validation.json",
    "validation.md",
    "validation.png",
    "validation.svg",
    "manifest.json",
    "wall_clock.json",
}
END_LIMIT_S = 60.0  # a test that waits so long has found a hang
SLOW = "costs.base_s=0.1"
FILES = {
    "summary.json",
    "manifest.json",
    "wall_clock.json",
    "requests.csv",
    "batches.csv",
    "stages.csv",
    "bubbles.csv",
    "timeline.json.gz",
    "decisions.jsonl.gz",
    "report.html",
}


def start(run: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command that writes into `out`; return once it has served for a second."""
    process = spawn("run", run, "--out", run.parent / "out", *arguments)
    begins(run)
    return process


def begins(run: Path) -> None:
    """Wait until a run has recorded something."""
    limit_s = time.monotonic() + START_S
    while time.monotonic() < limit_s:
        files = run.parent.glob(f"out/.partial-*/{RECORDS}")
        if any(len(list(read_blocks(path)[1])) for path in files):
            return
        time.sleep(0.05)
    raise AssertionError("the run does not start")


def test_virtual_engines_have_a_journal_each(run: Path) -> None:
    out = run.parent / "out"
    engines = (*SOON, "--set", "virtual_engines=2", "--set", "runtime=vllm")
    status, _, errors = evenflow("run", str(run), *engines, "--out", str(out))
    assert status == 0, errors
    assert "note: runtime vllm is not charged" in errors
    assert json.loads((out / "summary.json").read_text())["completed"] > 0
    journals = [path.parent.name for path in sorted(out.glob("*/decisions.jsonl.gz"))]
    assert journals == ["engine-0", "engine-1"]
    assert evenflow("replay", str(out))[0] == 0
    eager = ("--set", "virtual_engines=2", "--set", "dispatch=eager")
    assert "dispatch: eager" in complaint("validate", run, *eager, "--out", out / "validation")


def test_prefixes_are_cached_for_real_and_stand_in_the_journal(run: Path) -> None:
    rows = [[block, 10 + number] for number, block in enumerate([1, 2, 1, 1, 2, 1])]
    lines = (
        {"timestamp": 40 * i, "input_length": 700, "output_length": 3, "hash_ids": ids}
        for i, ids in enumerate(rows)
    )
    (run.parent / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = ["workload={trace: t.jsonl, arrivals: replay}", "kv={pages: 400, prefix_cache: true}"]
    out, sets = run.parent / "out", [word for key in keys for word in ("--set", key)]
    status, _, errors = evenflow("run", str(run), *sets, "--out", str(out))
    assert status == 0, errors
    assert json.loads((out / "summary.json").read_text())["prefix_hit_rate"] > 0.3
    assert evenflow("replay", str(out))[:2] == (0, "identical: every decision is as recorded\n")
    found = validate(job_of(run, keys), runs=1).found
    assert found["structure"][0]["same_micro_batches"] == 1


def test_run_writes_what_simulate_writes_and_replays(run: Path) -> None:
    out = run.parent / "out"
    status, text, errors = evenflow("run", str(run), *SOON, "--out", str(out))
    assert status == 0, errors
    assert "sarathi, emulated" in text
    assert {file.name for file in out.iterdir()} == FILES
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 20
    assert summary["real_run"]["failure"] is None
    assert summary["provenance"]["config"]["workers"]["kind"] == "emulated"
    rows = list(csv.DictReader((out / "requests.csv").read_text().splitlines()))
    arrivals_s = [float(row["arrival_s"]) for row in rows]
    assert arrivals_s == pytest.approx([0.005 * i for i in range(20)])
    assert ef.diff(ef.simulate(run, set={"workload.arrivals.scale": 20}), out).paired
    assert evenflow("replay", str(out))[:2] == (0, "identical: every decision is as recorded\n")
    change_one_decision(out / "decisions.jsonl.gz")
    status, text, _ = evenflow("replay", str(out))
    assert status == 1
    assert re.match(r"different: entry \d+ \(Asked\): Decision\(chunks=\(\(0, 0, 20\),", text)
    line = complaint("simulate", run, "--out", out)
    assert "decisions.jsonl.gz)" in line, "it was changed since"
    assert {file.name for file in out.iterdir()} == FILES


def change_one_decision(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).decode()
    assert "[0,0,20]" in text
    path.write_bytes(gzip.compress(text.replace("[0,0,20]", "[0,0,19]", 1).encode()))


def test_ctrl_c_once_saves_what_is_done(run: Path) -> None:
    """Served in this process, which is interrupted once something is recorded."""
    out = run.parent / "out"

    def interrupt() -> None:
        begins(run)
        os.kill(os.getpid(), signal.SIGINT)

    acting = threading.Thread(target=interrupt)
    acting.start()
    status, _, errors = evenflow("run", str(run), "--set", SLOW, "--out", str(out))
    acting.join()
    assert status == 130
    assert errors.startswith("ended early: interrupted; ")
    assert {file.name for file in out.iterdir()} == FILES


def test_ctrl_c_twice_ends_at_once_and_saves_what_is_done(run: Path) -> None:
    out = run.parent / "out"
    stuck = "costs.base_s=200"
    process = start(run, "--set", stuck)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "it waits for what is in the pipeline"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 130
    assert errors == "ended early: interrupted; 0 of 20 requests are done and saved\n"
    assert gone(process)
    assert {file.name for file in out.iterdir()} == FILES


def test_nothing_is_lost_by_ctrl_c_while_results_are_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = signal.getsignal(signal.SIGINT), real.write_served

    def interrupted(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(*given)

    monkeypatch.setattr(real, "write_served", interrupted)
    out = run.parent / "out"
    status, _, errors = evenflow("run", str(run), *SOON, "--out", str(out))
    assert status == 0, errors
    assert {file.name for file in out.iterdir()} == FILES
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_workers_outlive_no_driver(number: signal.Signals, run: Path) -> None:
    """A terminal that is closed sends SIGHUP to all of them."""
    process = start(run, "--set", SLOW)
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    process.communicate(timeout=END_LIMIT_S)
    assert gone(process)


def test_a_worker_that_dies_is_one_line_and_status_1(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.runtime.emulated.EmulatedSettings", OneDies)
    out = run.parent / "out"
    settings = ("--set", "workload.arrivals={kind: closed, concurrency: 1}")
    status, _, errors = evenflow("run", str(run), "--out", str(out), *settings)
    assert status == 1
    assert errors.startswith("ended early: stage 1 (process ")
    assert errors.endswith("was killed by signal 9; 7 of 20 requests are done and saved\n")
    assert len((out / "requests.csv").read_text().splitlines()) == 8
    assert evenflow("replay", str(out))[0] == 0
    line = complaint("validate", run, "--runs", "1", "--calibrate", "0")
    assert line.startswith("run 1 of 1 did not finish: stage 1 (process ")


def test_validate_reports_three_layers(run: Path) -> None:
    out = run.parent / "out"
    arguments = ("--runs", "2", "--calibrate", "3", "--out", str(out))
    settings = ("workload.requests=5", "runtime={schedule_s: 0.0003}")
    changes = [word for setting in settings for word in ("--set", setting)]
    status, text, errors = evenflow("validate", str(run), *arguments, *changes)
    assert status == 0, errors
    assert "End to end, sarathi, 2 runs of 5 requests" in text
    assert "NOT FAIR: 5 requests are few" in text + errors
    assert "calibrated on 3 other requests (seed 1" in text
    assert "in a simulation: runtime: {schedule_s: 0.0" in text
    assert {path.name for path in out.iterdir()} == VALIDATION_FILES
    found = json.loads((out / "validation.json").read_text())
    line = found["end_to_end"]["mean_e2el_ms"]
    assert line["least"] <= line["measured"] <= line["most"]
    assert line["error"] == pytest.approx(line["simulated"] / line["measured"] - 1)
    assert line["simulated"] != line["calibrated"]
    for layer in found["structure"]:
        assert layer["same_micro_batches"] == 1
        assert abs(layer["metrics"]["mean_e2el_ms"]) < 0.01
    assert [set(stage) >= {"median", "p95", "p95_repeat"} for stage in found["costs"]] == [True] * 2
    assert found["overheads"]["schedule_ms"] > 0
    shares = found["bubbles"]["measured"]
    idle = found["end_to_end"]["bubble_share"]["measured"]
    assert sum(shares.values()) == pytest.approx(idle, abs=0.01)


@pytest.mark.long
def test_validate_takes_one_scheduler_after_the_other(run: Path) -> None:
    out = run.parent / "out"
    arguments = ("--schedulers", "vllm,sarathi", "--runs", "1", "--calibrate", "0")
    settings = ("--set", "workload.requests=3", "--out", str(out))
    status, text, errors = evenflow("validate", str(run), *arguments, *settings)
    assert status == 0, errors
    assert "not calibrated" in text
    assert {path.name for path in out.iterdir()} == {
        "manifest.json",
        "vllm",
        "sarathi",
        "validation.md",
    }
    assert {path.name for path in (out / "vllm").iterdir()} == VALIDATION_FILES - {"validation.md"}
    assert "calibrated" not in json.loads((out / "vllm" / "validation.json").read_text())["bubbles"]
    table = (out / "validation.md").read_text()
    assert table.index("| vllm, simulated |") < table.index("| sarathi, structure, worst run |")
    assert table.index("### vllm") < table.index("### sarathi")
