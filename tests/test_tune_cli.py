"""The command `evenflow tune`: what it writes can be used, and every mistake is one line."""

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


BAD = [
    ([], "no limit is given"),
    (["--slo", "p99_tft_ms=500"], 'did you mean "p99_ttft_ms"'),
    ([*SLO, "--objective", "speed"], "--objective speed"),
    (["--slo", "p99_itl_ms=5", "--objective", "request_goodput"], "needs limits of requests"),
    ([*SLO, "--trials", "0"], "--trials 0"),
    ([*SLO, "--checks", "1"], "--checks 1"),
    ([*SLO, "--replications", "0"], "--replications 0"),
    ([*SLO, "--seed", "-1"], "--seed -1"),
    ([*SLO, "--gpus", "4"], "--gpus 4: the run's costs do not follow"),
    ([*SLO, "--schedulers", "sarahti"], "unknown scheduler 'sarahti'"),
    ([*SLO, "--schedulers", ","], "names no scheduler"),
    ([*SLO, "--schedulers", "vllm,vllm"], "there twice"),
    ([*SLO, "--executor", "cloud"], "--executor cloud"),
    ([*SLO, "--set", "workload.trace=empty.csv"], "empty.csv"),
    ([*SLO, "--set", "workload.requests=50"], "50 requests"),
    ([*SLO, "--set", "workload.skip=20"], "no request is left"),
    ([*SLO, "--set", "workload.skip=19"], "cannot be divided"),
    ([*SLO, "--set", "kv.pages=1"], "none of its requests can be served"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "empty.csv").touch()
    monkeypatch.chdir(tmp_path)
    status, output, errors = evenflow("tune", "RUN.yaml", *arguments, "--out", "out")
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert told in errors
    assert not Path("out").exists()


def test_no_such_file() -> None:
    status, output, errors = evenflow("tune", "none.yaml", *SLO)
    assert (status, output, errors) == (2, "", "error: none.yaml: no such file\n")
