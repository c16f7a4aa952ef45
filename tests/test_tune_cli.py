"""The command `evenflow tune`: what it writes can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.command_line import evenflow, write_inputs

SLO = ("--slo", "p99_ttft_ms=500")
SMALL = ("--trials", "3", "--replications", "1", "--checks", "2", "--schedulers", "sarathi,vllm")
RANDOM = ("--set", "workload.requests=8", "--set", "workload.arrivals={kind: poisson, rate: 9}")
FILES = ("tune.json", "trials.csv", "checks.csv", "tuned.yaml", "tune.png", "tune.svg")


def test_the_winner_is_ready_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ("tune", "RUN.yaml", *SLO, *SMALL, *RANDOM)
    status, output, errors = evenflow(*arguments)
    assert (status, errors) == (0, "")
    folder = tmp_path / "out" / "RUN-tune"
    assert {path.name for path in folder.iterdir()} == {*FILES, "manifest.json", "store"}
    told = json.loads((folder / "tune.json").read_text())
    assert told["objective"] == "request_goodput"
    assert set(told["checks"]) == {"fresh seeds", "later parts"}
    assert f"best of {len((folder / 'trials.csv').read_text().splitlines()) - 1} tried" in output
    winner = yaml.safe_load((folder / "tuned.yaml").read_text())
    assert winner["workload"]["trace"] == "../../trace.csv"
    assert winner["workload"]["requests"] == 8
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert evenflow("simulate", str(folder / "tuned.yaml"), "--save", "summary")[0] == 0
    monkeypatch.chdir(tmp_path)
    before = [(folder / name).read_bytes() for name in FILES]
    assert evenflow(*arguments)[0] == 0
    assert [(folder / name).read_bytes() for name in FILES] == before
