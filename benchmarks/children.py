"""What a command takes: seconds of the clock, of the CPU with its processes, and memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Taken(NamedTuple):
    """Seconds of a command, and the MB of the largest of its processes."""

    wall_s: float
    cpu_s: float
    megabytes: float


def taken(command: Sequence[str], folder: Path) -> Taken:
    """Run a command in a folder; return what it took. SystemExit with its errors if it fails."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}: {said.read().decode()}")
    return Taken(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)
