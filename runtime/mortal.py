"""A pipeline that is acted on while it serves: workers stop, go on, or die and start again.

What acts joins the driver's turns, and knows no sockets. Nothing notices a death but what made it:
a worker that dies by itself ends the run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evenflow.core import decodes
from evenflow.core.batcher import Batcher
from evenflow.core.world import World
from evenflow.engines.recovery import restarted, take_again
from evenflow.errors import WorkerError
from evenflow.runtime.driver import Driver
from evenflow.runtime.page_tables import StepWriter
from evenflow.runtime.wire import Returned


class Actor(Protocol):
    """Actor on a run: `next_s` is when it is due (infinity: never), `run_due` lets it act."""

    @property
    def next_s(self) -> float: ...
    def run_due(self, now_s: float) -> None: ...


Joins = Callable[["MortalDriver"], Actor]
"""Makes what acts on a pipeline."""


class MortalDriver(Driver):
    """A driver that what it `joins` may act on; `make_engines` makes its engines anew."""

    def __init__(
        self,
        world: World,
        engines: Sequence[Batcher],
        pipeline: Any,
        *,
        joins: Joins,
        make_engines: Callable[[], list[Batcher]],
        **options: Any,
    ) -> None:
        super().__init__(world, engines, pipeline, **options)
        self._world = world
        self._make_engines = make_engines
        self._down_until_s = 0.0
        self.num_sent = 0
        """Micro-batches that came back."""
        self._joined = joins(self)

    @property
    def engines(self) -> Sequence[Batcher]:
        return self._engines

    @property
    def next_s(self) -> float:
        back_s = self._down_until_s if self._is_down(self.now_s) else float("inf")
        return min(super().next_s, self._joined.next_s, back_s)

    def _is_down(self, now_s: float) -> bool:
        return now_s < self._down_until_s

    def let_in(self, now_s: float) -> None:
        self._joined.run_due(now_s)
        super().let_in(now_s)

    def is_due(self, now_s: float) -> bool:
        """Say whether the policy is due; a dead engine's is once it is back."""
        return super().is_due(now_s) and not self._is_down(now_s)

    def _take_back(self, message: Returned, now_s: float) -> None:
        self.num_sent += 1
        super()._take_back(message, now_s)

    def signal(self, stage: int, number: signal.Signals) -> None:
        os.kill(self.pipeline.process_ids[stage], number)

    def fail(self, restart_s: float) -> list[decodes.Sequence]:
        """Kill the workers, lose what is in flight and all KV, and serve again after `restart_s`.

        Return what the engines had. WorkerError where new workers, which start at once, take longer
        to be there.
        """
        died_s = self.now_s
        self._engines, lost = restarted(self._engines, self._loop, self._make_engines)
        self._writer = StepWriter(self._engines, self._book)
        self._steps.lose(self._writer)
        self._loop = self._world.start(self._engines, self._steps, self, self._recorder)
        self.pipeline.restart()
        if (took_s := self.now_s - died_s) > restart_s:
            raise WorkerError(f"its workers were back after {took_s:.1f} s, not {restart_s:g} s")
        self._down_until_s = max(self._down_until_s, died_s + restart_s)
        self._changed = True
        return lost

    def give_up(self, lost: Sequence[decodes.Sequence], reason: str) -> None:
        for seq in lost:
            self._recorder.abort(seq, reason)
        self._left(len(lost))

    def take(self, lost: decodes.Sequence) -> None:
        take_again(self._engines, lost)
