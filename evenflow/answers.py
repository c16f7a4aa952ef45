"""No policy is waited for without an end: one that does not answer is told where it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ANSWER_LIMIT_S = 20.0


@contextmanager
def answers_in(limit_s: float = ANSWER_LIMIT_S) -> Iterator[None]:
    """While this lasts, a policy that takes `limit_s` s, at most twice that, gets a TimeoutError.

    It is raised where the policy is. The clock is the wall's. Only in a main thread that no one
    else wakes by SIGALRM, as pytest's time limits do; elsewhere nothing is watched.
    """
    free = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not free or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    asked: FrameType | None = None

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal asked
        while frame is not None and frame.f_code.co_name != "schedule":
            frame = frame.f_back
        before, asked = asked, frame
        if frame is not None and frame is before:
            raise TimeoutError(f"no answer in {limit_s:g} s")

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
