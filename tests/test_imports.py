"""What an import loads; who may import whom is a contract in pyproject.toml (`make lint`)."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import setuptools

from tests.places import ROOT


def loaded_by(statement: str, **env: str) -> set[str]:
    """Return the modules that a statement loads, and the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=env.get("PYTHONPATH", ROOT),
        env={**os.environ, **env},
    )
    return set(done.stdout.split())


def test_the_command_starts_without_heavy_modules() -> None:
    heavy = {"pandas", "matplotlib", "scipy", "torch", "simpy", "numpy"}
    assert not heavy & loaded_by("import evenflow.cli.app")


def test_a_simulation_needs_no_pandas(tmp_path: Path) -> None:
    given = f"set=['workload.requests=1'], out={str(tmp_path / 'out')!r}"
    run = "examples/quickstart.yaml"
    loaded = loaded_by(f"import evenflow as ef\nef.simulate({run!r}, {given})")
    assert "evenflow.sim.tandem" in loaded
    assert not {"pandas", "matplotlib", "scipy", "torch"} & loaded


def test_what_draws_is_loaded_only_when_processes_simulate() -> None:
    rooms = "study.plan", "study.sweep", "study.capacity", "experiments.figures.make"
    names = ", ".join(f"evenflow.{room}" for room in rooms)
    assert not {"pandas", "matplotlib"} & loaded_by(f"import {names}")


def test_a_source_distribution_has_the_same_bytes_from_every_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    command = runpy.run_path(str(ROOT / "setup.py"))["Sdist"](setuptools.Distribution())
    made = []
    for clone, mode, time in (("a", 0o600, 1), ("b", 0o664, 10**9)):
        (tmp_path / clone / "evenflow").mkdir(parents=True)
        for name in sorted(("x.py", "y.py"), reverse=clone == "b"):
            path = tmp_path / clone / "evenflow" / name
            path.write_text(name)
            path.chmod(mode)
            os.utime(path, (time, time))
        monkeypatch.chdir(tmp_path / clone)
        archive = command.make_archive("dist/evenflow", "gztar", base_dir="evenflow")
        made.append(Path(archive).read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "a" / "dist" / "evenflow.tar.gz") as tar:
        assert tar.getnames() == ["evenflow", "evenflow/x.py", "evenflow/y.py"]
        assert [member.mode for member in tar] == [0o755, 0o644, 0o644]


def test_what_is_said_to_install_is_in_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    known = {re.split(r"[^\w-]", each)[0] for needs in extras.values() for each in needs}
    product = ("evenflow", "profiler", "runtime", "traces")
    texts = [path.read_text() for folder in product for path in (ROOT / folder).rglob("*.py")]
    code = "".join(texts)
    told = re.findall(r"pip install ([a-z][^,\"{=]*)", code)
    told += re.findall(r"require_package\([^()]*?(?:, \"([a-z\- ]+)\")?\)", code)
    named = [name for words in told for name in words.split()]
    assert set(named) - known == set()
    assert {"aiconfigurator-core", "pyzmq", "safetensors", "starlette"} <= set(named)
    documents = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    installed = re.findall(r"pip install '\.\[([a-z,]+)\]'", documents)
    assert {name for names in installed for name in names.split(",")} <= set(extras)
    assert "evenflow[" not in documents + code


def test_the_drawing_of_the_floors_is_that_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.replace("evenflow.", "") for layer in contract["contracts"][0]["layers"]]
    drawn = (ROOT / "docs" / "tour.md").read_text().partition("## Floors")[2].split("```")[1]
    found = [re.match(r" (\w+(?: \| \w+)?) ", line) for line in drawn.splitlines() if line]
    assert [floor[1] for floor in found if floor] == layers


# -- the core, which knows no engine --------------------------------------------------------------

CORE = sorted((ROOT / "evenflow" / "core").glob("*.py"))
NAMES = re.compile(r"vllm|sglang|gllm|trt.?llm|tensorrt|orca|transformer|evenflow.engines", re.I)
SERVE = """
import sys
sys.modules["evenflow.engines"] = None  # nor that of another copy
import evenflow
from evenflow.costs import AffineCost
from evenflow.schedulers import create
from evenflow.types import Request
from evenflow.sim import World, simulate
for name in ("sarathi", "token_throttling"):
    asked = [Request(number, 0.1 * number, 40, 5) for number in range(9)]
    world = World(asked, lambda: create(name, {}), AffineCost(0.01, 1e-4, 2), 2, 12, 64)
    assert list(simulate(world).status) == ["completed"] * 9
print(evenflow.__file__)
"""


def test_the_core_serves_without_the_engines(tmp_path: Path) -> None:
    """Their room is deleted from a copy of the package; nothing else is touched."""
    shutil.copytree(ROOT / "evenflow", tmp_path / "evenflow")
    shutil.rmtree(tmp_path / "evenflow" / "engines")
    assert loaded_by(SERVE, PYTHONPATH=str(tmp_path)) >= {str(tmp_path / "evenflow/__init__.py")}


def test_the_core_names_no_engine() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in CORE}
    assert not {name: NAMES.findall(text) for name, text in texts.items() if NAMES.search(text)}


def branches(tree: ast.AST) -> int:
    """Count the places where control may go two ways."""
    forks = ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case
    nodes = list(ast.walk(tree))
    terms = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    loops = sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return sum(isinstance(node, forks) for node in nodes) + terms + loops


def test_the_core_is_read_in_an_afternoon() -> None:
    texts = [path.read_text(encoding="utf-8") for path in CORE]
    assert sum(len(text.splitlines()) for text in texts) <= 2400
    assert sum(branches(ast.parse(text)) for text in texts) <= 330


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["validate", "run.yaml"], "error: a real run needs zmq: pip install pyzmq"),
        (["reproduce", "--costs", "nope"], "error: --costs: no measured costs nope"),
    ],
)
def test_without_the_package_of_real_runs_a_line_says_so(words: list[str], said: str) -> None:
    code = f"import sys; sys.modules['zmq'] = None; sys.argv[1:] = {words!r}\n"
    code += "from evenflow.cli import main; main()"
    environment = {**os.environ, "EVENFLOW_SHARED": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
