"""The command `evenflow`: how its process starts and ends; the commands are in `app`.

The process's settings are made here, before any module that would set them otherwise is imported.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from types import FrameType

ON_HARDWARE = {"profile", "recover", "run", "serve", "validate"}
"""Commands that serve or measure with this machine as it is."""

LIGHT = {"OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
"""For all others: no pool of threads for products of matrices, which are small, no plugins."""


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit as on Ctrl-C; during an import, which may swallow that, once the import is done.

    Modules compiled by Cython, like NumPy's, clear what is raised while they are imported.
    """
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def main() -> None:
    """Run the command; SIGTERM, as of a time limit, ends it as Ctrl-C does.

    Making a command takes a millisecond, so of thirty only the named one is made. Nearly all that a
    command makes lives until it ends, or one simulation does. So garbage is seldom collected, and
    not at exit.
    """
    signal.signal(signal.SIGTERM, _stop)
    command = sys.argv[1:2]
    gc.set_threshold(10**6 if "simulate" in command else 10**5)
    if not ON_HARDWARE.intersection(command):
        for name, value in LIGHT.items():
            os.environ.setdefault(name, value)
    from evenflow.cli.app import app

    named = [each for each in app.registered_commands if each.name in command]
    if named:
        app.registered_commands, app.registered_groups = named, []
    try:
        app()
    finally:
        gc.freeze()
