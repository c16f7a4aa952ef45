"""What makes tests quick: studies start no process, and pictures are drawn once, as a sketch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


class Inline(Executor):
    """Runs what is submitted at once in this process, where the limits of time end it, too."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future


def start_no_processes(patch: pytest.MonkeyPatch) -> None:
    """Let studies simulate in this process: another one takes seconds to start."""
    for module in ("points", "compare"):
        patch.setattr(f"evenflow.study.{module}.processes", lambda *_: Inline())


def sketch_pictures(patch: pytest.MonkeyPatch) -> None:
    """Draw pictures as SVG alone, without a layout, which takes most of the time."""
    drawn = Figure.savefig

    def savefig(figure: Figure, file: Any, *, format: str = "", **how: Any) -> None:
        if format == "svg":
            figure.set_layout_engine("none")
            drawn(figure, file, format=format, **how)
        else:
            Path(file).write_bytes(b"a sketch")

    patch.setattr(Figure, "savefig", savefig)
