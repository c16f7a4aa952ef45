"""The command `sweep` as a user sees it: mistakes, files, other executors, death and resumption."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from pathlib import Path

import pandas as pd
import pytest
import yaml

from evenflow.study.points import HEADER
from evenflow.study.sweep_file import check, load_sweep
from tests import command_line
from tests.command_line import done, evenflow, killed
from tests.sweeps import RUN, write

pytestmark = pytest.mark.usefixtures("folder")

TABLES = ("points.csv", "summary.csv", "main_effects.svg", "sensitivity.png", "sweep.json")
SMALL = {"replications": 1, "parameters": {"scheduler.token_budget": [64, 256]}}
TOO_LARGE = {**RUN, "model": "Qwen2.5-32B", "gpu": "L20", "kv": {"pages": "auto"}}

FILE = """\
{paramters: {}} | unknown key "paramters"; did you mean "parameters"?
{grid: {}} | unknown key "grid"; did you mean "parameters"?
{parameters: {}} | a sweep needs the key "parameters", or search_space: true
{parameters: {scheduler.token_budget: []}} | token_budget: should be at least one value, each once
{parameters: {scheduler.token_budget: [64, 64]}} | should be at least one value, each once
{parameters: {scheduler.token_budget: 64}} | should be a list of values, or {low, high}, not 64
{parameters: {max_in_flight: {low: 1, hihg: 2}}} | unknown key "parameters.max_in_flight.hihg"
{parameters: {max_in_flight: {low: 9, high: 2}}} | a range whose low is below its high
{parameters: {max_in_flight: {low: 0, high: 2, log: true}}} | a range above 0 where log is true
{parameters: {max_in_flight: {low: 1, high: 2}}} | method: grid needs the key "parameters.
{parameters: {max_in_flight: {low: 1, high: 2, steps: 1000000000}}} | steps: should be at most
{method: gird} | method.kind: unknown "gird"; did you mean "grid"?
{method: {kind: random}} | the key "method.points" is missing
{method: {kind: random, points: 1000000000}} | method.points: should be at most 100000
{method: {kind: optuna, trials: 0}} | method.trials: should be at least 1, not 0
{objectives: []} | objectives: should be not empty, not []
{objectives: [{metric: x, goal: less}]} | goal: should be 'minimize' or 'maxim
{limits: {p99_itl_ms: {}}} | limits.p99_itl_ms: should be at_most or at_least
{replications: -1} | replications: should be at least 1, not -1
{run: {}} | run: should be a RUN.yaml, or its keys
{run: nowhere.yaml} | SWEEP.yaml:1: run: nowhere.yaml: no such file
{parameters: {schedular.x: [1]}} | SWEEP.yaml:20: unknown key "schedular"; did you
{parameters: {stages.x: [1]}} | SWEEP.yaml:20: "stages" has no keys of its own
{parameters: {max_in_flight: [2, 0]}} | SWEEP.yaml:20: max_in_flight: should be null
{parameters: {max_in_flight: {low: -1, high: 4, integer: true, steps: 2}}} | SWEEP.yaml:20: max_in
{parameters: {scheduler.token_budget: [128, 0]}} | SWEEP.yaml:20: scheduler.token_budget: scheduler
{parameters: {scheduler.token_budgte: [64]}} | has no parameter 'token_budgte'; did you
{parameters: {workload.trace: [missing.csv]}} | neither a file nor a bundled sample
{parameters: {scheduler: [sarathi, sarathy]}} | unknown scheduler 'sarathy'
{objectives: [{metric: mean_e2e_ms}]} | unknown metric "mean_e2e_ms"; did you mean "
{limits: {p98_itl_ms: {at_most: 1}}} | unknown metric "p98_itl_ms"; did you mean "p9
{run: {stagse: 2}} | unknown key "stagse"; did you mean "stages"?
{run: {workload: {trace: azure-conv-sample, requests: 0}}} | requests: should be at least 1, not 0
{parameters: {max_in_flight: {low: 1, high: 9, steps: 60000}, scheduler: [vllm, orca]}} | 120000
{method: one_at_a_time, run: {stages: null}} | has to say what every param
"""
"""What is laid over the keys of a sweep, and of its run, and the mistake told with its place."""


def refusal(*arguments: str) -> str:
    """Return the error line of a sweep that must be refused, having simulated nothing."""
    words = ("sweep", "SWEEP.yaml", "--out", "out", *arguments)
    return command_line.refusal(*words, leaves=[f"out/store/{HEADER}"])


@pytest.mark.parametrize(("changes", "told"), [row.split(" | ") for row in FILE.splitlines()])
def test_what_is_wrong_is_one_line_that_names_its_place(changes: str, told: str) -> None:
    keys = yaml.safe_load(changes)
    if keys.get("run") and isinstance(keys["run"], dict):
        keys["run"] = {**RUN, **keys["run"]}
    write(Path(), **keys)
    assert told in refusal()


def test_equal_gaps_are_swept() -> None:
    """A prompt crosses two stages of 0.1 s by itself: the one before has ended long ago."""
    arrivals = {"kind": "gamma", "rate": 0.001, "burstiness": math.inf}
    workload = {"trace": "azure-conv-sample", "requests": 3, "arrivals": arrivals}
    costs = {"kind": "affine", "base_s": 0.1, "per_token_s": 0.0}
    alone = {**RUN, "costs": costs, "scheduler": "orca", "workload": workload}
    varied = {"workload.arrivals.rate": [0.001, 0.002], "workload.arrivals.burstiness": [math.inf]}
    write(Path(), run=alone, parameters=varied, replications=1)
    done("sweep", "SWEEP.yaml", "--out", "out")
    kept = json.loads(Path("out/sweep.json").read_text())["sweep"]
    assert kept["parameters"]["workload.arrivals.burstiness"] == [".inf"]
    assert kept["run"]["workload"]["arrivals"]["burstiness"] == ".inf"
    write(Path(), **kept)
    done("sweep", "SWEEP.yaml", "--dry-run")
    assert pd.read_csv("out/points.csv").mean_ttft_ms.tolist() == pytest.approx([200.0, 200.0])


def test_replications_that_would_be_alike() -> None:
    command_line.write_trace(Path("trace.csv"), *(f"{i},10,5" for i in range(9)))
    write(Path(), run={**RUN, "workload": {"trace": "trace.csv"}})
    assert "which has 9: give workload.requests, at most 4, or replications: 1" in refusal()
    check(load_sweep(Path("SWEEP.yaml"), ["replications=1"]))
    write(Path(), run={**RUN, "workload": {"trace": "trace.csv"}}, replicate="seeds")
    assert "replications: all would be alike" in refusal()


OPTIONS = """\
--executor slurm | --executor slurm: should be process, dask or dask:ADDRESS
--executor process:4 | --executor process:4: should be process, dask or dask:ADDRESS
run.workload.requests=0 | --set run.workload.requests=0: workload.requests:
replications=0 | --set replications=0: replications: should be at least 1
"""


@pytest.mark.parametrize(("arguments", "told"), command_line.table(OPTIONS))
def test_what_is_wrong_with_the_options(arguments: list[str], told: str) -> None:
    write(Path())
    assert told in refusal(*arguments)


def test_what_is_wrong_with_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SWEEP.yaml: no such file" in refusal()
    Path("SWEEP.yaml").touch()
    assert "it should hold run, parameters" in refusal()
    write(Path())
    Path("out").write_text("a file is in the way", encoding="utf-8")
    assert "out: is a file; give a folder" in refusal()
    Path("out").unlink()
    pytest.importorskip("distributed")
    monkeypatch.setattr("evenflow.study.points.CONNECT_LIMIT_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no one listens there, and no one else can
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        told = refusal("--executor", f"dask:{address}")
    assert told.startswith(f"--executor dask:{address}: no Dask scheduler answers there")


def sweep(out: str, *more: str) -> tuple[str, str]:
    """Return the output and the errors of a sweep that works."""
    status, output, errors = evenflow("sweep", "SWEEP.yaml", "--workers", "1", "--out", out, *more)
    assert status == 0, output + errors
    return output, errors


def contents(out: str, *more: str) -> dict[str, bytes]:
    return {name: (Path(out) / name).read_bytes() for name in (*TABLES, *more)}


def records(out: str) -> dict[Path, tuple[int, int]]:
    """Return when each record was written, and as which file."""
    paths = (path for path in Path(out, "store").rglob("*.json") if path.name != HEADER)
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


@pytest.mark.long
@pytest.mark.processes
def test_every_executor_writes_the_same_bytes() -> None:
    pytest.importorskip("distributed")
    write(Path())
    output, errors = sweep("process")
    assert (errors, output.splitlines()[-1]) == ("", "process/report.html")
    sweep("dask", "--executor", "dask")
    assert contents("process", "report.html") == contents("dask", "report.html")
    clocks = [json.loads(Path(out, "wall_clock.json").read_text()) for out in ("process", "dask")]
    assert [clock["executor"] for clock in clocks] == ["process", "dask"]


SLOW = """\
import time
from evenflow.schedulers.sarathi import Sarathi


class Slow(Sarathi):
    def __init__(self, *, token_budget: int = 128) -> None:
        time.sleep(0.05)
        super().__init__(token_budget=token_budget)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_a_killed_sweep_goes_on_and_repeats_nothing_unless_told_to(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    write(folder, run={**RUN, "scheduler": "slow:Slow"})
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
    Path("killed/store/notes.txt").write_text("mine")
    sweep("killed", "--fresh")
    assert Path("killed/store/notes.txt").read_text() == "mine"
    assert set(records("killed")) == set(after)
    assert not set(records("killed").values()) & set(after.values())


def test_points_that_do_not_fit_are_counted_before_and_told_after() -> None:
    write(Path(), run=TOO_LARGE, parameters={"stages": [1, 4]}, replications=2)
    dry = ("sweep", "SWEEP.yaml", "--dry-run", "--out", "out")
    lines = done(*dry).splitlines()
    assert lines[:2] == ["3 points, 2 replications each: 6 simulations", "2 of the 3 fit in memory"]
    assert lines[2].startswith("1 not, such as point 1 (PP=1): Qwen2.5-32B does not fit")
    assert not Path("out").exists()
    _, errors = sweep("out")
    first = "1 of 3 points failed, the first of them point 1: Qwen2.5-32B does not"
    assert errors.startswith(first)
    assert errors.count("\n") == 1
    assert "does not fit" in Path("out/points.csv").read_text()
    assert "6 simulations, of which 6 are done" in done(*dry)


def test_a_sweep_of_which_all_points_fail_is_written_and_ends_with_1() -> None:
    write(Path(), run=TOO_LARGE)
    status, output, _ = evenflow("sweep", "SWEEP.yaml", "--set", "run.stages=1", "--out", "out")
    assert status == 1
    assert "No point was completed within the limits" in output
    assert Path("out/report.html").exists()


@pytest.mark.long
def test_a_search_for_two_goals_draws_its_front() -> None:
    pytest.importorskip("optuna")
    goals = [{"metric": "mean_ttft_ms"}, {"metric": "output_throughput", "goal": "maximize"}]
    budgets = {"scheduler.token_budget": {"low": 16, "high": 512, "integer": True}}
    method = {"kind": "optuna", "trials": 6, "sampler": "nsga2", "batch": 3}
    write(Path(), parameters=budgets, method=method, objectives=goals)
    output, errors = sweep("out")
    assert errors == ""
    assert "Points on the Pareto front: " in output
    assert {"pareto_front.png", "pareto_front.svg"} <= set(os.listdir("out"))
    assert json.loads(Path("out/sweep.json").read_text())["pareto_front"]
    assert command_line.refusal("sweep", "SWEEP.yaml", "--check").startswith("--check: one obj")


@pytest.mark.long
def test_tables_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    both = [{"name": "sarathi", "token_budget": size} for size in (64, 256)]
    write(Path(), parameters={"scheduler": both, "max_in_flight": [1, 2], "stages": [2, 4]})
    output, _ = sweep("out")
    table = [line for line in output.splitlines() if line[:1] in "│┃"]
    assert max(map(len, table)) == 80
    assert "…" not in "".join(table)
    assert "budget=256" in "".join(table)


@pytest.mark.long
def test_a_gain_is_checked_where_there_is_something_unseen() -> None:
    write(Path(), **SMALL)
    output, _ = sweep("out", "--check")
    assert re.search(r"^fresh seeds: .* HOLD: |^fresh seeds: the gain holds: ", output, re.M)
    assert Path("out/check.csv").exists()
    told = "3 points, 1 replication each, which says nothing of chance: 3 simulations"
    assert done("sweep", "SWEEP.yaml", "--dry-run", "--check").splitlines()[0].startswith(told)
    write(Path(), **SMALL, run="RUN.yaml")
    nothing = command_line.refusal("sweep", "SWEEP.yaml", "--check")
    assert nothing.startswith("--check: nothing is left that the sweep does not see")


def test_refused_requests_are_allowed_by_an_option() -> None:
    write(Path(), run={**RUN, "kv": {"pages": 1}}, parameters={"kv.pages": [60]}, replications=1)
    output, _ = sweep("out")
    assert "No point serves nine tenths of its requests (2 points" in " ".join(output.split())
    output, _ = sweep("out", "--allow-refused")
    assert re.search(r"^NOT FAIR: \d of 6 requests .* were refused or given up", output, re.M)
    assert "1 of them no answer: all of the requests are refused" in " ".join(output.split())
    assert json.loads(Path("out/sweep.json").read_text())["allow_refused"] is True
