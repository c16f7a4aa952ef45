"""Stages that compute beside the measured one: they compute, they end, and their death is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from evenflow.errors import UsageError
from profiler.machine import most_beside, neighbours, places_beside, require_threads
from profiler.shapes import Shape
from profiler.timed_runs import Mark


class Writer:
    """A subject whose runs are seen from outside: it writes its process and how often it ran."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs = 0

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[Mark], None]:
        self._runs += 1
        self._path.write_text(f"{os.getpid()} {self._runs}\n")
        return lambda mark: None


def seen(path: Path, runs: int, limit_s: float = 30.0) -> int:
    """Return the process of a writer once it has run so often."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        words = path.read_text().split() if path.exists() else []
        if len(words) == 2 and int(words[1]) >= runs:
            return int(words[0])
        time.sleep(0.01)
    raise AssertionError("it does not compute")


def here() -> list[list[int]]:
    return [sorted(os.sched_getaffinity(0))[:1]]


def test_a_neighbour_computes_meanwhile_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    with neighbours(partial(Writer, path), [Shape(((4, 0),))], here()):
        process = seen(path, 3)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_measurement_whose_neighbour_died_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    beside = neighbours(partial(Writer, path), [Shape(((4, 0),))], here())
    beside.__enter__()
    os.kill(seen(path, 1), signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(UsageError, match="computed beside ended with -9"):
        beside.__exit__(None, None, None)


def test_stages_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.machine._cores", lambda: list(range(7)))
    assert places_beside(2, 2) == [[3, 4], [1, 2]]
    assert (most_beside("cpu", 2), most_beside("cpu", 7), most_beside("cuda", 1)) == (2, 0, 0)
    require_threads(2, 3)
    with pytest.raises(UsageError, match=r"--beside 3: .* at most 2 is right"):
        require_threads(2, 4)
