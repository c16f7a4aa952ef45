"""The import direction: evenflow <- traces, profiler <- sim, runtime <- experiments; no circles."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "evenflow": {"evenflow"},
    "traces": {"evenflow", "traces"},
    "profiler": {"evenflow", "profiler"},
    "sim": {"evenflow", "traces", "profiler", "sim"},
    "runtime": {"evenflow", "traces", "profiler", "runtime"},
    "experiments": {"evenflow", "traces", "profiler", "sim", "runtime", "experiments"},
}
ENGINES = {"simpy": {"sim"}, "torch": {"runtime", "profiler"}}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def breaches(package: str, source: str) -> list[tuple[int, str]]:
    return [
        (line, name)
        for line, name in imported(ast.parse(source))
        if (name in LAYERS and name not in LAYERS[package])
        or (name in ENGINES and package not in ENGINES[name])
    ]


@pytest.mark.parametrize("package", LAYERS)
def test_no_module_imports_against_the_direction(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for line, name in breaches(package, path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("evenflow", "import simpy"),
        ("evenflow", "def late():\n    from torch import nn"),
        ("evenflow", "import traces.trace"),
        ("sim", "from runtime import worker"),
        ("runtime", "import sim"),
        ("sim", "from experiments.cli import main"),
    ],
)
def test_a_breach_is_found(package: str, source: str) -> None:
    assert breaches(package, source)


def needed(node: ast.AST) -> Iterator[str]:
    """Modules, and names in modules, that are imported anywhere, for their types alone too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from needed(child)


def require_no_circle(sources: dict[str, str]) -> None:
    """Raise CycleError where modules, by name, import each other, in functions too."""

    def modules(names: Iterable[str]) -> set[str]:
        found = {name if name in sources else name.rpartition(".")[0] for name in names}
        return found & sources.keys()

    graph = {name: modules(needed(ast.parse(text))) - {name} for name, text in sources.items()}
    TopologicalSorter(graph).prepare()


def test_no_modules_import_each_other() -> None:
    paths = [path for package in LAYERS for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    require_no_circle(
        {name.removesuffix(".__init__"): text for name, text in zip(names, texts, strict=True)}
    )


def test_a_circle_is_found() -> None:
    for place in ("def late()", "if TYPE_CHECKING"):
        with pytest.raises(CycleError):
            require_no_circle({"a": "import b.c", "b.c": f"{place}:\n    from a import x"})
    require_no_circle({"a": "import b.c", "b.c": "import d"})


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
    assert not heavy & loaded_by("import experiments.cli.app")


def test_a_simulation_needs_no_pandas(tmp_path: Path) -> None:
    command = "from pathlib import Path\nfrom experiments.cli.app import simulate\nsimulate"
    run, out = Path("examples/quickstart.yaml"), tmp_path / "out"
    given = f"Path({str(run)!r}), ['workload.requests=1'], out=Path({str(out)!r})"
    loaded = loaded_by(f"{command}({given})")
    assert "sim.tandem" in loaded
    assert not {"pandas", "matplotlib", "scipy", "torch"} & loaded


def test_every_package_is_installed() -> None:
    """The tests find packages in the checkout; a user has only those that setuptools is told of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {f"{path.parent.name}*" for path in ROOT.glob("*/__init__.py")} == set(patterns)


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
from sim import World, simulate
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
