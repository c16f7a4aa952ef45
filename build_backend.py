"""Hooks by which pip builds the package: those of setuptools, with a core compiled if that works.

EVENFLOW_COMPILE=1 compiles whatever is built, or fails; 0 compiles nothing. Without it, a wheel is
compiled where a C compiler and Python's headers are at hand, and plain where that fails or takes
longer than LIMIT_S. An editable install is plain.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

LIMIT_S = 120
NEEDED = ["mypy>=2,<3", "simpy"]
"""The compiler, and the package of which it reads types."""

SWITCH = "EVENFLOW_COMPILE"
WHEEL = "import json, sys; from setuptools.build_meta import build_wheel; \
print('', build_wheel(*json.loads(sys.argv[1])), sep='\\n')"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a wheel needs to be built."""
    compiles = can_compile() if SWITCH not in os.environ else os.environ[SWITCH] == "1"
    needed = NEEDED if compiles else []
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needed]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel, compiled if that works; return its name."""
    given = str(wheel_directory), config_settings, metadata_directory and str(metadata_directory)
    name = None
    if SWITCH not in os.environ and can_compile():
        name = printed([sys.executable, "-c", WHEEL, json.dumps(given)])
    return name or build_meta.build_wheel(*given)


def can_compile() -> bool:
    """Say whether a C compiler and Python's headers are at hand."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    header = f"-I{sysconfig.get_path('include')} -E -x c -include Python.h {os.devnull}"
    with suppress(OSError):
        words = [*shlex.split(compiler), *shlex.split(header)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    return False


def printed(command: list[str], limit_s: float = LIMIT_S) -> str | None:
    """Return the last line that a compiling command prints; None, and a note, where it fails."""
    why = "failed"
    with subprocess.Popen(
        command,
        env={**os.environ, SWITCH: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that its C compiler ends with it
    ) as child:
        try:
            lines = child.communicate(timeout=limit_s)[0].split()
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            why = f"took over {limit_s:g} s"
        else:
            if child.returncode == 0:
                return str(lines[-1])
    note = f"note: evenflow is plain Python, as compiling {why}; {SWITCH}=1 shows what it does"
    print(note, file=sys.stderr)
    return None
