"""Comparisons: who is asked for, and that no process outlives the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.errors import UsageError
from experiments.run_file.run import load_config
from experiments.study.compare import line_up, parse_schedulers, run_all
from tests.command_line import killed, write_inputs

SLOW = """\
import time
from evenflow.schedulers.sarathi import Sarathi


class Slow(Sarathi):
    def schedule(self, view):
        time.sleep(30)
        return super().schedule(view)
"""


def test_a_comparison_that_writes_nothing(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = load_config(tmp_path / "RUN.yaml")
    entries = parse_schedulers("sarathi,{name: sarathi, token_budget: 32},vllm")
    jobs = line_up(entries, config, tmp_path)
    assert (jobs[0].label, jobs[0].config) == ("sarathi", config)
    before = set(tmp_path.rglob("*"))
    comparison = run_all(jobs)
    assert set(tmp_path.rglob("*")) == before
    assert comparison.table.index.to_list() == ["sarathi", "sarathi(token_budget=32)", "vllm"]
    assert set(comparison.table["completed"]) == {20}
    assert set(comparison.runs) == set(comparison.summaries)


def killer(*_: object) -> None:
    raise SystemExit(9)


def test_a_process_that_dies_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.setattr("experiments.study.compare._count_in", killer)
    jobs = line_up(["sarathi"], load_config(tmp_path / "RUN.yaml"), tmp_path)
    with pytest.raises(UsageError, match="a scheduler's process died"):
        run_all(jobs)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_no_worker_outlives_a_comparison_that_is_killed(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    schedulers = "slow:Slow,{name: slow:Slow, token_budget: 32}"
    arguments = ("compare", "RUN.yaml", "--schedulers", schedulers, "--out", "out")
    killed(tmp_path, *arguments, when=lambda processes: len(processes) >= 3)  # tracker, workers
