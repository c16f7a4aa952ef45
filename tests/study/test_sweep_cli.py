"""The command `sweep` as a user sees it: files, other executors, death and resumption."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from evenflow.study.points import HEADER
from tests.command_line import done, evenflow, killed, refusal, rows_of
from tests.sweeps import RUN, write

TABLES = ("points.csv", "summary.csv", "main_effects.svg", "sensitivity.png")

SLOW = """\
import time
from evenflow.schedulers.sarathi import Sarathi


class Slow(Sarathi):
    def __init__(self, *, token_budget: int = 128) -> None:
        time.sleep(0.05)
        super().__init__(token_budget=token_budget)
"""


def sweep(out: str, *more: str) -> tuple[str, str]:
    """Return the output and the errors of a sweep that works."""
    status, output, errors = evenflow("sweep", "SWEEP.yaml", "--workers", "1", "--out", out, *more)
    assert status == 0, output + errors
    return output, errors


def contents(out: str) -> dict[str, bytes]:
    return {name: (Path(out) / name).read_bytes() for name in TABLES}


def records(out: str) -> dict[Path, tuple[int, int]]:
    """Return when each record was written, and as which file."""
    paths = (path for path in Path(out, "store").rglob("*.json") if path.name != HEADER)
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


@pytest.mark.long
@pytest.mark.processes
def test_every_executor_writes_the_same_bytes(folder: Path) -> None:
    pytest.importorskip("distributed")
    write(folder)
    output, errors = sweep("process")
    assert errors == ""
    assert output.splitlines()[-1] == "process/report.html"
    sweep("dask", "--executor", "dask")
    assert contents("process") == contents("dask")
    assert (folder / "process/report.html").read_bytes() == (
        folder / "dask/report.html"
    ).read_bytes()
    assert Path("process/sweep.json").read_bytes() == Path("dask/sweep.json").read_bytes()
    clocks = [json.loads(Path(out, "wall_clock.json").read_text()) for out in ("process", "dask")]
    assert [clock["executor"] for clock in clocks] == ["process", "dask"]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_a_killed_sweep_goes_on_and_repeats_nothing(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    slow = {**RUN, "scheduler": "slow:Slow"}
    write(folder, run=slow)
    sweep("whole")
    arguments = ("sweep", "SWEEP.yaml", "--out", "killed", "--workers", "1")
    killed(folder, *arguments, when=lambda processes: len(records("killed")) >= 3)
    before = records("killed")
    assert 3 <= len(before) < len(records("whole"))
    sweep("killed")
    after = records("killed")
    assert len(after) == len(records("whole")) == 12
    assert {path: after[path] for path in before} == before
    assert contents("killed") == contents("whole")


@pytest.mark.long
def test_fresh_simulates_everything_again(folder: Path) -> None:
    write(folder, replications=1, parameters={"scheduler.token_budget": [64, 128]})
    sweep("out")
    before = records("out")
    Path("out/store/notes.txt").write_text("mine")
    sweep("out", "--fresh")
    assert Path("out/store/notes.txt").read_text() == "mine"
    assert set(records("out")) == set(before)
    assert not set(records("out").values()) & set(before.values())


def test_failed_points_are_told_and_counted(folder: Path) -> None:
    tight = {**RUN, "model": "Qwen2.5-32B", "gpu": "L20", "kv": {"pages": "auto"}}
    write(folder, run=tight, parameters={"stages": [1, 4]}, replications=1)
    _, errors = sweep("out")
    assert errors.startswith(
        "1 of 3 points failed, the first of them point 1: Qwen2.5-32B does not"
    )
    assert errors.count("\n") == 1
    assert "does not fit" in (folder / "out/points.csv").read_text()


def test_a_sweep_of_which_all_points_fail_is_written_and_ends_with_1(folder: Path) -> None:
    write(folder, run={**RUN, "model": "Qwen2.5-32B", "gpu": "L20", "kv": {"pages": "auto"}})
    status, output, _ = evenflow("sweep", "SWEEP.yaml", "--set", "run.stages=1", "--out", "out")
    assert status == 1
    assert "No point was completed within the limits" in output
    assert Path("out/report.html").exists()


@pytest.mark.long
def test_a_search_for_two_goals_draws_its_front(folder: Path) -> None:
    pytest.importorskip("optuna")
    write(
        folder,
        parameters={"scheduler.token_budget": {"low": 16, "high": 512, "integer": True}},
        method={"kind": "optuna", "trials": 6, "sampler": "nsga2", "batch": 3},
        objectives=[
            {"metric": "mean_ttft_ms"},
            {"metric": "output_throughput", "goal": "maximize"},
        ],
    )
    output, errors = sweep("out")
    assert errors == ""
    assert "on the Pareto front" in output
    assert {"pareto_front.png", "pareto_front.svg"} <= set(os.listdir("out"))
    assert json.loads((folder / "out/sweep.json").read_text())["pareto_front"]


def test_a_dry_run_counts_points_and_writes_nothing(folder: Path) -> None:
    tight = {**RUN, "model": "Qwen2.5-32B", "gpu": "L20", "kv": {"pages": "auto"}}
    write(folder, run=tight, parameters={"stages": [1, 4]}, replications=2)
    lines = done("sweep", "SWEEP.yaml", "--dry-run", "--out", "out").splitlines()
    assert lines[:2] == ["3 points, 2 replications each: 6 simulations", "2 of the 3 fit in memory"]
    assert lines[2].startswith("1 not, such as point 1 (PP=1): Qwen2.5-32B does not fit")
    assert not Path("out").exists()
    sweep("out")
    assert "6 simulations, of which 6 are done" in done(
        "sweep", "SWEEP.yaml", "--dry-run", "--out", "out"
    )


@pytest.mark.long
def test_what_a_gpu_gives_and_a_user_gets_may_decide(folder: Path) -> None:
    names = ("output_throughput_per_gpu", "output_speed_per_user")
    goals = [{"metric": name, "goal": "maximize"} for name in names]
    write(folder, parameters={"stages": [1, 2, 4]}, objectives=goals, replications=1)
    sweep("out")
    for row in rows_of("out/points.csv"):
        given, got = (float(row[name]) for name in names)
        assert given == pytest.approx(float(row["output_throughput"]) / int(row["stages"]))
        assert got == pytest.approx(1e3 / float(row["mean_tpot_ms"]))
    assert "output tokens/s per user" in done("metrics")


@pytest.mark.long
@pytest.mark.parametrize(
    ("budgets", "told"),
    [([8, 16, 256], "budget=256 is the most"), ([128, 256], ""), ([64, 4096, 8192], "")],
)
def test_a_best_point_on_the_edge_is_told(folder: Path, budgets: list[int], told: str) -> None:
    write(folder, parameters={"scheduler.token_budget": budgets}, replications=1)
    output, _ = sweep("out")
    assert ("on the edge of what was tried" in output) == bool(told)
    assert told in output


@pytest.mark.long
def test_tables_fit_into_80_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    both = [{"name": "sarathi", "token_budget": size} for size in (64, 256)]
    write(folder, parameters={"scheduler": both, "max_in_flight": [1, 2], "stages": [2, 4]})
    output, _ = sweep("out")
    table = [line for line in output.splitlines() if line[:1] in "│┃"]
    assert max(map(len, table)) == 80
    assert "…" not in "".join(table)
    assert "budget=256" in "".join(table)


@pytest.mark.long
def test_a_gain_is_checked_where_there_is_something_unseen(folder: Path) -> None:
    budgets = {"scheduler.token_budget": [64, 256]}
    write(folder, parameters=budgets, replications=1)
    output, _ = sweep("out", "--check")
    assert re.search(r"^fresh seeds: .* HOLD: |^fresh seeds: the gain holds: ", output, re.M)
    assert Path("out/check.csv").exists()
    told = "3 points, 1 replication each, which says nothing of chance: 3 simulations"
    assert done("sweep", "SWEEP.yaml", "--dry-run", "--check").splitlines()[0].startswith(told)
    front = [{"metric": "mean_ttft_ms"}, {"metric": "mean_tpot_ms"}]
    write(folder, parameters=budgets, objectives=front)
    assert refusal("sweep", "SWEEP.yaml", "--check").startswith("--check: one objective is right")
    write(folder, parameters=budgets, run="RUN.yaml")
    assert refusal("sweep", "SWEEP.yaml", "--check", "--set", "replications=1").startswith(
        "--check: nothing is left that the sweep does not see"
    )


def test_refused_requests_are_allowed_by_an_option(folder: Path) -> None:
    write(folder, run={**RUN, "kv": {"pages": 1}}, parameters={"kv.pages": [60]}, replications=1)
    output, _ = sweep("out")
    assert "No point serves nine tenths of its requests (2 points" in " ".join(output.split())
    output, _ = sweep("out", "--allow-refused")
    assert re.search(r"^NOT FAIR: \d of 6 requests .* were refused or given up", output, re.M)
    assert "1 of them no answer: all of the requests are refused" in " ".join(output.split())
    assert json.loads(Path("out/sweep.json").read_text())["allow_refused"] is True
