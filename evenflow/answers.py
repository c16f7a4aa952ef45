"""Limit the time that a policy or a process may take, with an error where its code is."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from evenflow.user_code import working_directory

ANSWER_LIMIT_S = 20.0

ASKS = ("schedule", "resume_process")
"""Functions that answer soon."""


@contextmanager
def answers_in(limit_s: float = ANSWER_LIMIT_S) -> Iterator[None]:
    """Raise TimeoutError in a policy that takes `limit_s` s, at most twice that, in this block.

    It is raised where the policy's code is. The clock is the wall's, and a thread of our own looks
    at it. Only in a main thread that nothing else interrupts by SIGALRM, as pytest's time limits
    do; elsewhere nothing is watched. At the end the working directory is what it was.
    """
    free = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    with working_directory():
        if not free or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
            yield
            return
        watch = _Watch(limit_s)
        signal.signal(signal.SIGALRM, watch.stop)
        watch.start()
        try:
            yield
        finally:
            watch.end()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


class _Watch(threading.Thread):
    """Check every `limit_s` where the creating thread is; interrupt it in an old one of ASKS."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(name="answers", daemon=True)
        self._limit_s = limit_s
        self._watched = threading.get_ident()
        self._ends = threading.Event()
        self._late = False

    def run(self) -> None:
        before: FrameType | None = None
        while not self._ends.wait(self._limit_s):
            asked = sys._current_frames().get(self._watched)
            while asked is not None and asked.f_code.co_name not in ASKS:
                asked = asked.f_back
            if asked is not None and asked is before:
                self._late = True
                signal.pthread_kill(self._watched, signal.SIGALRM)
            before = asked

    def stop(self, *_: object) -> None:
        """Handle the signal, in the policy; a signal from elsewhere changes nothing."""
        if self._late:
            self._late = False
            raise TimeoutError(f"no answer in {self._limit_s:g} s")

    def end(self) -> None:
        self._ends.set()
        self.join()
