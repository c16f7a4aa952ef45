"""How a command ends that is told to, and what is left where one could not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.command_line import done, killed, spawn

MANY = ("--set", "workload={trace: azure-conv-sample, requests: 60000, arrivals: offline}")
COMPARE = ("compare", "RUN.yaml", "--schedulers", "sarathi,vllm")
COMMANDS = [("simulate", "RUN.yaml"), pytest.param(COMPARE, marks=pytest.mark.long)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_time_limit_ends_a_command_as_ctrl_c_does(folder: Path, command: tuple[str, ...]) -> None:
    before = set(folder.rglob("*"))
    words = (*command, *MANY, "--out", "results")
    status = killed(
        folder, *words, when=lambda _: bool(list(folder.rglob(".partial-*"))), by=signal.SIGTERM
    )
    assert status == 130
    assert set(folder.rglob("*")) == before


def test_what_a_killed_run_left_goes_with_the_next(folder: Path) -> None:
    words = ("simulate", "RUN.yaml", "--save", "summary", "--out", "results")
    killed(folder, *words, *MANY, when=lambda _: bool(list(folder.rglob(".partial-*"))))
    assert list(folder.rglob(".partial-*"))
    done(*words)
    assert not list(folder.rglob(".partial-*"))


SWALLOWS = """\
import os, signal

try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    pass


class P:
    def schedule(self, view):
        import time

        time.sleep(0.1)
        return None
"""


def test_an_import_that_swallows_what_ends_a_command_puts_it_off_only(folder: Path) -> None:
    (folder / "swallows.py").write_text(SWALLOWS)
    command = ("simulate", "RUN.yaml", "--set", "scheduler=swallows:P")
    with spawn(*command, folder=folder) as started:
        assert started.wait(timeout=30) == 130
