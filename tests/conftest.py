"""Shared test set-up: reproducible property tests in CI, and where the shared data lies."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import active_children, forkserver
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.amounts import many
from tests.places import SHARED

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=many(250))
settings.register_profile("local", deadline=None, max_examples=many(250))
settings.register_profile(  # nobody reads the example that a mutant fails on
    "mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
ci = "ci" if os.environ.get("CI") == "true" else "local"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", ci))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder with the shared traces and profiles; skip where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}: set EVENFLOW_SHARED")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def _forked() -> None:
    from tests.quick import fork_processes

    fork_processes()


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes and draw no pictures, unless a test is of `processes` or `pictures`."""
    from tests.quick import sketch_pictures, start_no_processes

    for mark, instead in (("processes", start_no_processes), ("pictures", sketch_pictures)):
        if request.node.get_closest_marker(mark) is None:
            instead(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a RUN.yaml that works; what is imported from it goes with the test."""
    from tests.command_line import write_inputs

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_inputs(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where workers put their sockets, whose names have to be short; nothing may stay."""
    forkserver.ensure_running()  # in the environment of all tests
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)
        assert not active_children()
        left = {path.name for path in Path(name).iterdir()}
        assert not {each for each in left if not each.startswith("torchinductor")}


@pytest.fixture
def run(tmp_path: Path, sockets: Path) -> Path:
    """Return a RUN.yaml that works, beside its trace, for commands that start workers."""
    from tests.command_line import write_inputs

    write_inputs(tmp_path)
    return tmp_path / "RUN.yaml"
