"""What makes tests quick: studies start no process, others are forked, pictures are a sketch."""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.util
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine


class Inline(Executor):
    """Runs what is submitted at once in this process, where the limits of time end it, too."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future


def fork_processes() -> None:
    """Let processes be forks of one that has imported what they need: no start takes a second."""
    forks = multiprocessing.get_context("forkserver")
    rooms = ("study.compare", "runtime.emulated", "runtime.torch.worker")
    forks.set_forkserver_preload([f"evenflow.{room}" for room in rooms])
    multiprocessing.util.get_temp_dir()  # before a test sets another
    multiprocessing.context._concrete_contexts["spawn"] = forks  # type: ignore[attr-defined]


def start_no_processes(patch: pytest.MonkeyPatch) -> None:
    """Let studies simulate in this process: another one takes seconds to start."""
    for module in ("points", "compare"):
        patch.setattr(f"evenflow.study.{module}.processes", lambda *_: Inline())


def sketch_pictures(patch: pytest.MonkeyPatch) -> None:
    """Draw pictures as SVG alone, without a layout, which takes most of the time."""
    drawn = Figure.savefig

    def savefig(figure: Figure, file: Any, *, format: str = "", **how: Any) -> None:
        if format == "svg":
            drawn(figure, file, format=format, **how)
        else:
            Path(file).write_bytes(b"a sketch")

    patch.setattr(Figure, "savefig", savefig)
    patch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
