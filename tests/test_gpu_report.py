"""The report of a GPU machine, run on this CPU with tiny settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")

from evenflow.costs.profile_file import read_profile
from experiments.gpu_report import main
from tests.test_profile_measure import CONFIG


def test_the_report_measures_checks_and_compares_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--minutes", "0.001", "--batches", "4", "--max-tokens", "16"]
    models = ["--models", str(tmp_path / "tiny.json")]
    assert main([*options, *models, "--max-rows", "2", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    (model,) = found["models"].values()
    assert len(read_profile(tmp_path / "out" / model["profile"]).points) == model["points"]
    assert model["errors"][-1]["operator"] == "stage"
    assert found["tokens_equal"]
    assert "stage " in capsys.readouterr().out


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*options, "--models", "Qwen2.5-14X"]) == 2
    assert 'unknown model "Qwen2.5-14X"' in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_a_bare_machine_has_what_the_report_imports() -> None:
    statement = "import experiments.gpu_report, runtime.timed, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True
    )
    not_there = {"pydantic", "simpy", "typer", "rich", "yaml", "plotly", "matplotlib"}
    assert not not_there & set(done.stdout.split())
