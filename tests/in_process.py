"""An executor that runs what is submitted at once, in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest


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
