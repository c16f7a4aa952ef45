"""What lies beside a RUN.yaml is not run unless it names a policy there; our packages stay ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import write_inputs

ROOT = Path(__file__).parent.parent
INSTALLED = f"import sys; sys.path.append({str(ROOT)!r}); from experiments.cli import main; main()"
"""The command as it is installed: the folder where one works is not on the path."""

POLICY = """\
open("imported", "w")
from evenflow.types import Plan, Prefill

class First:
    def schedule(self, view):
        prompt = next(view.prompts, None)
        prefills = [Prefill(prompt.request_id, prompt.remaining)] if prompt else []
        return Plan(prefills, decodes=view.ready_decodes)
"""


def run(folder: Path, *arguments: str, start: tuple[str, ...] = ("-P", "-c", INSTALLED)) -> str:
    """Return what a command prints; its exit status in front."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{done.returncode}: {done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("compare", "RUN.yaml", "--schedulers", "sarathi,vllm"),
        ("sweep", "SWEEP.yaml"),
    ],
)
def test_packages_where_one_works_do_not_hide_ours(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "SWEEP.yaml").write_text("run: RUN.yaml\nparameters: {kv.pages: [100, 200]}\n")
    for name in ("traces", "experiments", "evenflow"):
        (tmp_path / name).mkdir()
    (tmp_path / "sim.py").write_text("raise SystemExit('the wrong sim')")
    assert run(tmp_path, *command, "--out", "out").startswith("0:")


def test_a_package_that_hides_ours_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "sim.py").touch()
    (tmp_path / "traces").mkdir()
    start = f"import sys; sys.path.append({str(ROOT)!r}); import experiments"
    assert "ImportError: sim: Python finds" in run(tmp_path, start=("-c", start))
    (tmp_path / "sim.py").unlink()
    assert run(tmp_path, start=("-c", start)) == "0: "


def test_a_run_file_that_names_no_policy_runs_no_code_beside_it(tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    write_inputs(downloads)
    for name in ("optuna", "rich", "simpy", "sim", "mine"):
        (downloads / f"{name}.py").write_text("open('imported', 'w')")
    assert run(tmp_path, "simulate", "downloads/RUN.yaml").startswith("0:")
    assert not (tmp_path / "imported").exists()


def test_a_policy_beside_the_run_file_is_found_but_hides_nothing(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    write_inputs(beside)
    (beside / "mine.py").write_text(POLICY)
    (beside / "json.py").write_text("raise SystemExit('the wrong json')")
    (beside / "sim.py").write_text("raise SystemExit('the wrong sim')")
    arguments = ("compare", "beside/RUN.yaml", "--schedulers", "mine:First,sarathi")
    assert run(tmp_path, *arguments).startswith("0:")
    assert (tmp_path / "imported").exists()
