"""What an import loads; who may import whom is a contract in pyproject.toml (`make lint`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def loaded_by(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


def test_the_command_starts_without_heavy_modules() -> None:
    heavy = {"pandas", "matplotlib", "scipy", "torch", "simpy", "numpy"}
    assert not heavy & loaded_by("import evenflow.cli.app")


def test_a_simulation_needs_no_pandas(tmp_path: Path) -> None:
    command = "from pathlib import Path\nfrom evenflow.cli.app import simulate\nsimulate"
    run, out = Path("examples/quickstart.yaml"), tmp_path / "out"
    given = f"Path({str(run)!r}), ['workload.requests=1'], out=Path({str(out)!r})"
    loaded = loaded_by(f"{command}({given})")
    assert "evenflow.sim.tandem" in loaded
    assert not {"pandas", "matplotlib", "scipy", "torch"} & loaded
