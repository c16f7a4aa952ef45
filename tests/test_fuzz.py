"""A few cases of each class of attack; `make test-fuzz` has as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz import CLASSES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", CLASSES)
def test_what_nobody_sane_gives_it_is_told_in_a_line(name: str) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--cases", "60", "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"{name}: 0 of 60 cases are wrong\n", done.stdout + done.stderr
