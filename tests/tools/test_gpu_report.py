"""The report of a GPU machine, run on this CPU with tiny settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from evenflow.costs.profile.file import read_profile
from tests.profiler.test_profile_measure import CONFIG, spare_processes
from tests.torch_pipeline import threads_for_processes
from tools import gpu_report
from tools.gpu_report import main, profile_path

POLICIES = ("token_throttling", "vllm")


@pytest.mark.long
def test_the_report_measures_checks_and_compares_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_for_processes(monkeypatch)
    spare_processes(monkeypatch)
    monkeypatch.setattr(gpu_report, "POLICIES", POLICIES)
    monkeypatch.setattr(gpu_report, "MODES", ("one_process",))  # the one that threads can do
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--minutes", "0.001", "--batches", "4", "--max-tokens", "16"]
    models = ["--models", str(tmp_path / "tiny.json")]
    served = ["--requests", "6", "--context", "64", "--layers", "2", "--runs", "1"]
    stages = ["--stages", "1", "2"]
    out = ["--max-rows", "2", "--out", str(tmp_path / "out")]
    assert main([*options, *models, *served, *stages, *out]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    (model,) = found["models"].values()
    assert len(read_profile(tmp_path / "out" / model["profile"]).points) == model["points"]
    assert model["errors"][-1]["operator"] == "stage"
    assert model["silicon"]["left_out"].startswith("no tables of ")
    assert found["tokens_equal"]
    assert "stage " in capsys.readouterr().out
    check_served(found["runtime"])
    assert (tmp_path / "out" / "validation.md").read_text().count("## 2 stages") == len(POLICIES)


def check_served(found: dict[str, Any]) -> None:
    ways = [(1, "one_process"), (2, "one_process")]
    assert [(row["stages"], row["mode"]) for row in found["tokens"]] == ways
    assert all(row["equal"] for row in found["tokens"])
    *served, refused = found["modes"]
    assert [(row["stages"], row["mode"]) for row in served] == ways
    assert all(row["failure"] is None and row["requests_per_s"] > 0 for row in served)
    assert refused["refused"].endswith("nccl is for GPUs; gloo or one_process is right")
    assert [row["scheduler"] for row in found["validation"]] == [*POLICIES, *POLICIES]
    assert all(row["requests"] == 6 for row in found["validation"])


def test_what_serving_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "NEEDED", {"zmq": "pyzmq", "not_there": "some-package"})
    found = gpu_report._serve(tmp_path, "Llama-3.1-8B", "no.csv", gpu_report.Scale("cpu"))
    assert found["left_out"].startswith("needs some-package: bring them as wheels")
    assert "serving and validation are left out" in capsys.readouterr().out


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*options, "--models", "Qwen2.5-14X"]) == 2
    assert 'unknown model "Qwen2.5-14X"' in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def modules_after(statement: str) -> set[str]:
    command = [sys.executable, "-c", f"{statement}; print(*sys.modules)"]
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}


@pytest.mark.long
def test_a_bare_machine_has_what_the_report_imports() -> None:
    statement = "import tools.gpu_report, evenflow.runtime.profiled, sys"
    not_there = {"pydantic", "simpy", "typer", "rich", "yaml", "matplotlib"}
    assert not not_there & modules_after(statement)


@pytest.mark.long
def test_what_serving_imports_is_asked_for_before_anything_is_measured() -> None:
    statement = "import evenflow.runtime.real, evenflow.experiments.validation.write, sys"
    ours = {"matplotlib", "pandas", "pydantic", "rich", "simpy", "typer", "yaml", "zmq"}
    assert ours & modules_after(statement) <= set(gpu_report.NEEDED)


def test_profiles_of_names_with_dots_have_files_of_their_own(tmp_path: Path) -> None:
    assert [profile_path(tmp_path, name).name for name in ("Qwen2.5-14B", "Qwen2.5-32B")] == [
        "Qwen2.5-14B.csv.gz",
        "Qwen2.5-32B.csv.gz",
    ]
