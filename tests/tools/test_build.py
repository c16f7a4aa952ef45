"""The hooks by which pip builds: a wheel is compiled if that works, and plain otherwise."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import build_backend

NOTE = "note: evenflow is plain Python, as compiling {}; EVENFLOW_COMPILE=1 shows what it does\n"


def test_a_compiling_command_that_prints_a_name_names_the_wheel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import os; print('noise', os.environ['EVENFLOW_COMPILE'], 'a.whl')"
    assert build_backend.printed([sys.executable, "-c", code]) == "a.whl"
    assert capsys.readouterr().err == ""


def test_a_compiling_command_that_fails_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert build_backend.printed([sys.executable, "-c", "print('a.whl'); 1 / 0"]) is None
    assert capfd.readouterr().err == NOTE.format("failed")


def test_a_compiling_command_that_takes_too_long_ends_with_its_compiler(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    late = tmp_path / "late"
    compiler = f"sleep 0.5; touch {late}"  # holds the pipe, as a C compiler does
    code = f"import subprocess; subprocess.run(['sh', '-c', {compiler!r}])"
    began = time.monotonic()
    assert build_backend.printed([sys.executable, "-c", code], limit_s=0.2) is None
    assert capfd.readouterr().err == NOTE.format("took over 0.2 s")
    time.sleep(max(began + 0.8 - time.monotonic(), 0.0))
    assert not late.exists()


@pytest.mark.parametrize(
    ("switch", "compiler", "needs", "built"),
    [
        (None, True, True, "compiled"),
        (None, False, False, "plain"),
        ("0", True, False, "plain"),
        ("1", False, True, "plain"),  # setup.py compiles, or fails
    ],
)
def test_what_a_wheel_needs_and_how_it_is_built(
    switch: str | None,
    compiler: bool,
    needs: bool,
    built: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EVENFLOW_COMPILE", raising=False)
    if switch is not None:
        monkeypatch.setenv("EVENFLOW_COMPILE", switch)
    monkeypatch.setattr(build_backend, "can_compile", lambda: compiler)
    monkeypatch.setattr(build_backend, "printed", lambda command: "compiled")
    setuptools = build_backend.build_meta
    monkeypatch.setattr(setuptools, "build_wheel", lambda *given: "plain")
    monkeypatch.setattr(setuptools, "get_requires_for_build_wheel", lambda settings: [])
    assert (build_backend.get_requires_for_build_wheel() == build_backend.NEEDED) is needs
    assert build_backend.build_wheel("dist") == built


def test_headers_that_are_not_there_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_backend.sysconfig, "get_path", lambda name: str(tmp_path))
    assert not build_backend.can_compile()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not build_backend.can_compile()
