"""What is wrong with a sweep is one line that names the place, before anything is simulated."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import yaml

from evenflow.study.points import HEADER
from evenflow.study.sweep_file import check, load_sweep
from tests import command_line
from tests.sweeps import RUN, write

pytestmark = pytest.mark.usefixtures("folder")

FILE = """\
{paramters: {}} | unknown key "paramters"; did you mean "parameters"?
{parameters: {}} | parameters: should be not empty, not {}
{parameters: {scheduler.token_budget: []}} |
    token_budget: should be at least one value, each once, not []
{parameters: {scheduler.token_budget: [64, 64]}} | should be at least one value, each once
{parameters: {scheduler.token_budget: 64}} | should be a list of values, or {low, high}, not 64
{parameters: {max_in_flight: {low: 1, hihg: 2}}} | unknown key "parameters.max_in_flight.hihg"
{parameters: {max_in_flight: {low: 9, high: 2}}} | a range whose low is below its high
{parameters: {max_in_flight: {low: 0, high: 2, log: true}}} | a range above 0 where log is true
{parameters: {max_in_flight: {low: 1, high: 2}}} | method: grid needs the key "parameters.
{method: gird} | method.kind: unknown "gird"; did you mean "grid"?
{method: {kind: random}} | the key "method.points" is missing
{method: {kind: random, points: 1000000000}} | method.points: should be at most 100000
{parameters: {max_in_flight: {low: 1, high: 2, steps: 1000000000}}} | steps: should be at most
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
{parameters: {max_in_flight: {low: -1, high: 4, integer: true, steps: 2}}} |
    SWEEP.yaml:20: max_in_flight: should be null
{parameters: {scheduler.token_budget: [128, 0]}} |
    SWEEP.yaml:20: scheduler.token_budget: scheduler sarathi:
"""
"""What is written over a sweep, and what is told of it, with its place in the file."""

RUNS = """\
{parameters: {scheduler.token_budgte: [64]}} | has no parameter 'token_budgte' (did you
{parameters: {workload.trace: [missing.csv]}} | neither a file nor a bundled sample
{parameters: {scheduler: [sarathi, sarathy]}} | unknown scheduler 'sarathy'
{objectives: [{metric: mean_e2e_ms}]} | unknown metric "mean_e2e_ms"; did you mean "
{limits: {p98_itl_ms: {at_most: 1}}} | unknown metric "p98_itl_ms"; did you mean "p9
{run: {stagse: 2}} | unknown key "stagse"; did you mean "stages"?
{run: {workload: {trace: azure-conv-sample, requests: 0}}} |
    workload.requests: should be at least 1, not 0
{parameters: {max_in_flight: {low: 1, high: 9, steps: 60000}, scheduler: [vllm, orca]}} |
    method: grid: 120000 combinations; at most 100000 are right
{method: one_at_a_time, run: {stages: null}} | has to say what every param
"""
"""The same of what no run accepts; the keys of `run` are laid over those of the sweep's."""


def refusal(*arguments: str) -> str:
    """Return the error line of a sweep that must be refused, having simulated nothing."""
    words = ("sweep", "SWEEP.yaml", "--out", "out", *arguments)
    return command_line.refusal(*words, leaves=[f"out/store/{HEADER}"])


def rows(text: str) -> list[list[str]]:
    """Return the two columns of a table; an indented line goes on."""
    return [row.split(" | ") for row in re.sub(r" \|\n\s+", " | ", text).splitlines()]


@pytest.mark.parametrize(("changes", "told"), rows(FILE))
def test_the_file_itself(folder: Path, changes: str, told: str) -> None:
    write(folder, **yaml.safe_load(changes))
    line = refusal()
    assert line.startswith("SWEEP.yaml:")
    assert told in line


@pytest.mark.parametrize(("changes", "told"), rows(RUNS))
def test_what_no_run_accepts(folder: Path, changes: str, told: str) -> None:
    keys = yaml.safe_load(changes)
    write(folder, **{**keys, "run": {**RUN, **keys.get("run", {})}})
    assert told in refusal()


def test_replications_that_would_be_alike(folder: Path) -> None:
    command_line.write_trace(folder / "trace.csv", *(f"{i},10,5" for i in range(9)))
    write(folder, run={**RUN, "workload": {"trace": "trace.csv"}})
    assert "which has 9: give workload.requests, at most 4, or replications: 1" in refusal()
    check(load_sweep(folder / "SWEEP.yaml", ["replications=1"]))
    write(folder, run={**RUN, "workload": {"trace": "trace.csv"}}, replicate="seeds")
    assert "replications: all would be alike" in refusal()


@pytest.mark.parametrize(
    ("text", "told"), [(None, "SWEEP.yaml: no such file"), ("", "it should hold run, parameters")]
)
def test_no_file_or_an_empty_one(folder: Path, text: str | None, told: str) -> None:
    if text is not None:
        (folder / "SWEEP.yaml").write_text(text, encoding="utf-8")
    assert told in refusal()


OPTIONS = """\
--executor slurm | --executor slurm: should be process, dask or dask:ADDRESS
run.workload.requests=0 | --set run.workload.requests=0: workload.requests:
replications=0 | --set replications=0: replications: should be at least 1
"""


@pytest.mark.parametrize(("arguments", "told"), command_line.table(OPTIONS))
def test_the_options(folder: Path, arguments: list[str], told: str) -> None:
    write(folder)
    assert told in refusal(*arguments)


def test_a_dask_scheduler_that_does_not_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("evenflow.study.points.CONNECT_LIMIT_S", 0.3)
    write(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no one listens there, and no one else can
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        told = refusal("--executor", f"dask:{address}")
    assert told.startswith(f"--executor dask:{address}: no Dask scheduler answers there")


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    write(folder)
    (folder / "out").write_text("a file is in the way", encoding="utf-8")
    assert "out: is a file; give a folder" in refusal()
