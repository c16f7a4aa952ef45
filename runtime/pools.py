"""Pools of workers in real time: `evenflow.engines.pools` by the clock of this machine.

A pool is a driver with a pipeline; one thread turns all of them. Emulated, KV crosses for as long
as the link's cost says. Where workers compute, processes of one pool read its pages and those of
the other write them. It has crossed when the last of these reports so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from evenflow.core import decodes
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld, Pools, Transfer
from evenflow.results.recorder import Blocks
from evenflow.runtime.driver import Driver, System
from evenflow.runtime.front import TraceReplay
from evenflow.runtime.tokens import TextOf, TokenBook
from evenflow.runtime.wire import Arrived, Message, Move


class Timers:
    """Calls scheduled for times of the run."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, bool, int, Callable[[float], None]]] = []
        self._number = count()

    def late(self, time_s: float, call: Callable[[float], None]) -> None:
        """Schedule `call`, which gets the time, for `time_s`."""
        heappush(self._calls, (time_s, False, next(self._number), call))

    def last(self, time_s: float, call: Callable[[float], None]) -> None:
        """Schedule `call` for `time_s`, after all other calls then due."""
        heappush(self._calls, (time_s, True, next(self._number), call))

    @property
    def next_s(self) -> float:
        return self._calls[0][0] if self._calls else float("inf")

    def run_due(self, now_s: float) -> None:
        while self.next_s <= now_s:
            heappop(self._calls)[-1](now_s)


class PoolDriver(Driver):
    """The driver of one pool of a `system`: its requests may continue in another pool."""

    def __init__(self, *args: Any, system: PooledDriver, **options: Any) -> None:
        super().__init__(*args, **options)
        (engine,) = self.engines
        assert isinstance(engine, PoolBatcher)
        self.engine = engine
        self._system = system

    def record(self, seq: decodes.Sequence) -> None:
        """Count a request as served by this pool."""
        self._recorder.finish([seq])

    def adopt(self, request_id: int, now_s: float) -> None:
        """Continue a request after its KV has arrived, and tell the workers of its pages."""
        self.engine.adopt(request_id)
        self._writer.adopt(self.engine.queues.live[request_id])

    def changed(self, now_s: float) -> None:
        """Note a change: there may be room, and then the policy is asked."""
        self._system.transfers.poke(now_s)
        super().changed(now_s)

    def decide(self, now_s: float) -> None:
        """Ask the policy; transfers behind requests that are now admitted may start."""
        super().decide(now_s)
        self._system.poke(now_s)

    def note_admitted(self, now_s: float) -> None:
        self._noted["admitted_s"].append(now_s)

    def finished(self, sequences: list[decodes.Sequence], now_s: float) -> None:
        self._writer.dropped(sequences)
        self._system.finished(self, sequences, now_s)

    def _hand_out(self, request_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Give each request its token, except requests that compute it again."""
        pairs = zip(request_ids, tokens, strict=True)
        kept = [pair for pair in pairs if not self.engine.is_lost(pair[0])]
        return super()._hand_out(*zip(*kept, strict=True)) if kept else []

    def _apply(self, message: Message, now_s: float) -> None:
        if isinstance(message, Arrived):
            self._system.part_arrived(now_s)
        else:
            super()._apply(message, now_s)


class PooledDriver(Pools, System):
    """Serves a pooled world in real time.

    `drives` make the driver of the pool of each name, given this and the requests' tokens.
    `text_of` says the tokens where workers compute. `blocks` takes what the clients have.
    """

    def __init__(
        self,
        world: PooledWorld,
        drives: Mapping[str, Callable[..., Any]],
        *,
        text_of: TextOf | None = None,
        on_done: Callable[[int], None] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self._front = TraceReplay(world.requests, world.concurrency)
        self._timers = Timers()
        self._book = None if text_of is None else TokenBook(text_of)
        self._awaited = 0  # messages until what travels is there
        self.drivers: list[PoolDriver] = []

        def pool_of(name: str) -> PoolDriver:
            pool: PoolDriver = drives[name](system=self, text_of=None, book=self._book)
            self.drivers.append(pool)
            pool.origin_s = self.drivers[0].origin_s
            return pool

        move = None if text_of is None else self._move
        super().__init__(world, self._timers, pool_of, on_done, move, blocks=blocks)
        self.when_done(self._front.left)

    @property
    def goes_on(self) -> bool:
        if self.stops:
            return any(pool.busy for pool in self.drivers)
        return bool(self._front or self.outstanding)

    @property
    def next_s(self) -> float:
        due_s = self._front.next_s
        return min(self._timers.next_s, float("inf") if due_s is None else due_s)

    def let_in(self, now_s: float) -> None:
        if self._enter(now_s):
            self.changed(now_s)
        self._timers.run_due(now_s)

    def finished(self, pool: Any, sequences: list[decodes.Sequence], now_s: float) -> None:
        """Pass sequences on; in a closed loop, what ends lets others in before the pool goes on."""
        super().finished(pool, sequences, now_s)
        if self._world.concurrency is not None and not self.stops:
            self._enter(now_s)

    def _enter(self, now_s: float) -> bool:
        """Admit the requests that are due; say whether there were some."""
        entered = False
        while (request := self._front.due(now_s)) is not None:
            entered = True
            self.drivers[0].note_admitted(now_s)
            if not self.admit(request):
                self._front.left(1)
        return entered

    def poke(self, now_s: float) -> None:
        """Start transfers of KV that a pool's decision allows, at this same instant."""
        self.transfers.poke(now_s)
        self._timers.run_due(now_s)

    def flush(self, now_s: float | None = None) -> None:
        for pool in self.drivers:
            pool.flush()
        super().flush(self.now_s if now_s is None else now_s)

    def _end(self, pool: Any, seq: decodes.Sequence) -> None:
        super()._end(pool, seq)
        if self._book is not None:
            self._book.ended(seq.request.request_id)

    def _move(self, transfer: Transfer) -> None:
        """Make the workers of one pool send a request's pages to those of another."""
        request_id = transfer.handover.request.request_id
        source, target = self.drivers[transfer.source], self.drivers[transfer.destination]
        pages = target.engine.moving[request_id].pages
        given = source.engine.moving[request_id].pages[: len(pages)]
        for sender in source.pipeline.kv_layers:
            for taker in target.pipeline.kv_layers:
                start, stop = max(sender.start, taker.start), min(sender.stop, taker.stop)
                if start < stop and sender.rank == taker.rank:
                    layers = start - sender.start, stop - sender.start, start - taker.start
                    message = Move(*layers, given, pages, taker.address)
                    source.pipeline.tell(sender.worker, message)
                    self._awaited += 1

    def part_arrived(self, now_s: float) -> None:
        """Note that a worker has written its part; the last part ends the transfer."""
        self._awaited -= 1
        if not self._awaited:
            self.transfers.arrive(now_s)
