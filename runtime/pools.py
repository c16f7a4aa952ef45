"""Pools of workers in real time: `evenflow.pools` by the clock of this machine.

A pool is a driver with a pipeline of its own; one thread turns all of them. Emulated, KV crosses
for as long as the link's cost says. Where workers compute, its pages are read in the processes of
one pool and written in those of the other, and it has crossed when the last of them says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from evenflow import decodes
from evenflow.batcher import Batcher
from evenflow.errors import UsageError, WorkerError
from evenflow.pools import PooledWorld, Pools, Transfer
from evenflow.replay import RecordingBatcher
from evenflow.world import World
from runtime.driver import Driver, take_turns
from runtime.front import TraceReplay
from runtime.pipeline import Pipeline
from runtime.serve import REQUESTS, BlocksOf, Journals, Served, Workers, driven, served_by
from runtime.tokens import TokenBook
from runtime.wire import Arrived, Message, Move

_Call = tuple[float, int, Callable[[float], None]]


class Timers:
    """Calls that are due at times of the run."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._late: list[_Call] = []
        self._number = count()

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called with the time, once it is that late."""
        heappush(self._calls, (time_s, next(self._number), call))

    def late(self, time_s: float, call: Callable[[float], None]) -> None:
        """Have `call` called after all that is due when it is."""
        heappush(self._late, (time_s, next(self._number), call))

    @property
    def next_s(self) -> float:
        return min(_due_s(self._calls), _due_s(self._late))

    def run_due(self, now_s: float) -> None:
        """Make the calls that are due."""
        while self.next_s <= now_s:
            first = self._calls if _due_s(self._calls) <= now_s else self._late
            heappop(first)[-1](now_s)


def _due_s(calls: list[_Call]) -> float:
    return calls[0][0] if calls else float("inf")


class Pool(Driver):
    """The driver of one pool, which the system turns: what it has computed may go on elsewhere."""

    def __init__(self, system: PooledDriver, part: Part, batcher: Batcher, **options: Any) -> None:
        super().__init__(part.world, [batcher], part.pipeline, **options)
        self.engine = batcher
        self.holders = part.holders
        self._system = system

    def record(self, seq: decodes.Sequence) -> None:
        """Count a request among those that this pool served."""
        self._recorder.finish([seq])

    def adopt(self, request_id: int, now_s: float) -> None:
        """Go on with a request whose KV is here, and tell the workers of its pages."""
        self.engine.adopt(request_id)
        self._writer.adopt(self.engine.queues.live[request_id])

    def changed(self, now_s: float) -> None:
        """Something happened: there may be room, and then it is asked."""
        self._system.transfers.poke(now_s)
        super().changed(now_s)

    def decide(self, now_s: float) -> None:
        """Ask the policy; what waited here, and went first, may be in now."""
        super().decide(now_s)
        self._system.poke(now_s)

    def note_admitted(self, now_s: float) -> None:
        """An arrival was seen."""
        self._noted["admitted_s"].append(now_s)

    def finished(self, sequences: list[decodes.Sequence], now_s: float) -> None:
        """Tell the workers, and the system, what has ended here."""
        self._writer.dropped(sequences)
        self._system.finished(self, sequences, now_s)

    def _hand_out(self, request_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Give everyone the token that came, but for those that compute it again."""
        queues = self.engine.queues
        lost = {i for i in request_ids if i in queues.live and queues.is_lost(queues.live[i])}
        kept = [pair for pair in zip(request_ids, tokens, strict=True) if pair[0] not in lost]
        return super()._hand_out(*zip(*kept, strict=True)) if kept else []

    def _apply(self, message: Message, now_s: float) -> None:
        if isinstance(message, Arrived):
            self._system.part_arrived(now_s)
        else:
            super()._apply(message, now_s)


class Holder(NamedTuple):
    """A worker that holds the KV of layers [start, stop), and where it hears."""

    worker: int
    rank: int
    start: int
    stop: int
    address: str


class Part(NamedTuple):
    """A pool that is started: `holders` of its KV, none where it is made up."""

    world: World
    pipeline: Pipeline
    holders: Sequence[Holder]


class PooledDriver(Pools):
    """Serves a pooled world in real time by the parts of its name; `options` are the drivers'."""

    def __init__(
        self,
        world: PooledWorld,
        batchers: Mapping[str, Batcher],
        parts: Mapping[str, Part],
        *,
        book: TokenBook | None = None,
        on_done: Callable[[int], None] | None = None,
        blocks: BlocksOf = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._front = TraceReplay(world.requests, world.concurrency)
        self._timers = Timers()
        self._book = book
        self._clock = clock
        self.origin_s = clock()
        self.stops = False
        self._awaited = 0  # messages until what travels is there
        self.drivers: dict[str, Pool] = {}

        def pool_of(name: str) -> Pool:
            given = options | {"book": book, "clock": clock, "blocks": blocks(name)}
            pool = Pool(self, parts[name], batchers[name], **given)
            pool.origin_s = self.origin_s
            self.drivers[name] = pool
            return pool

        moves = all(part.holders for part in parts.values())
        move = self._move if moves else None
        super().__init__(world, self._timers, pool_of, on_done, move, blocks=blocks(REQUESTS))
        self.when_done(self._front.left)

    def run(self) -> None:
        """Serve until every request is done, or, after `stop`, until the pipelines are empty."""
        take_turns(self, list(self.drivers.values()))

    def stop(self) -> None:
        """Send nothing more; what is in the pipelines still comes back."""
        self.stops = True

    @property
    def goes_on(self) -> bool:
        """Whether there is more to do."""
        if self.stops:
            return any(pool.busy for pool in self.drivers.values())
        return bool(self._front or self.outstanding)

    @property
    def now_s(self) -> float:
        return self._clock() - self.origin_s

    @property
    def next_s(self) -> float:
        """When a request or a transfer is due, as far as is known."""
        due_s = self._front.next_s
        return min(self._timers.next_s, float("inf") if due_s is None else due_s)

    def let_in(self, now_s: float) -> None:
        """Let in who is due, and make the calls that are."""
        entered = False
        while (request := self._front.due(now_s)) is not None:
            entered = True
            next(iter(self.drivers.values())).note_admitted(now_s)
            if not self.admit(request):
                self._front.left(1)
        if entered:
            self.changed(now_s)
        self._timers.run_due(now_s)

    def poke(self, now_s: float) -> None:
        """A pool has decided: KV may set out at this same instant."""
        self.transfers.poke(now_s)
        self._timers.run_due(now_s)

    def flush(self, now_s: float | None = None) -> None:
        """Put what is recorded where it is kept."""
        for pool in self.drivers.values():
            pool.flush()
        super().flush(self.now_s if now_s is None else now_s)

    def _end(self, pool: Any, seq: decodes.Sequence) -> None:
        super()._end(pool, seq)
        if self._book is not None:
            self._book.ended(seq.request.request_id)

    def _move(self, transfer: Transfer) -> None:
        """Have the workers of one pool send the pages of a request to those of another."""
        request_id = transfer.handover.request.request_id
        pools = list(self.drivers.values())
        source, target = pools[transfer.source], pools[transfer.destination]
        pages = target.engine.queues.moving[request_id].pages
        given = source.engine.queues.moving[request_id].pages[: len(pages)]
        for sender in source.holders:
            for taker in target.holders:
                start, stop = max(sender.start, taker.start), min(sender.stop, taker.stop)
                if start < stop and sender.rank == taker.rank:
                    layers = start - sender.start, stop - sender.start, start - taker.start
                    message = Move(*layers, given, pages, taker.address)
                    source.pipeline.tell(sender.worker, message)
                    self._awaited += 1

    def part_arrived(self, now_s: float) -> None:
        """A worker has written what it was sent; the last one's word ends the transfer."""
        self._awaited -= 1
        if not self._awaited:
            self.transfers.arrive(now_s)


def holders_of(workers: Workers, depth: int, pipeline: Pipeline) -> list[Holder]:
    """Return which worker has the KV of which layers; none where nothing computes."""
    ranks = len(workers.settings) // depth
    return [
        Holder(number, number % ranks, stage.start, stage.stop, pipeline.address(number))
        for number, stage in enumerate(workers.settings)
        if hasattr(stage, "start") and hasattr(stage, "stop")
    ]


def serve_pools(
    world: PooledWorld,
    workers: Mapping[str, Workers],
    on_done: Callable[[int], None] | None = None,
    *,
    record: Journals | None = None,
    on_token: Callable[[int, int], None] | None = None,
    blocks: BlocksOf = lambda _: None,
) -> Served:
    """Serve a system of pools as `runtime.serve` does one; `record` gives each pool's journal.

    `blocks` gives what takes what happens in a pool, and those of the clients for REQUESTS.
    """
    worlds = {name: getattr(world, name) for name in workers}
    batchers = {name: _batcher(name, part, record) for name, part in worlds.items()}
    some = next(iter(workers.values()))
    book = None if some.text_of is None else TokenBook(some.text_of)
    options: dict[str, Any] = {"on_token": on_token, "patience_s": some.patience_s}
    try:
        with ExitStack() as stack:
            parts = {name: _started(stack, name, workers[name], worlds[name]) for name in workers}
            driver = PooledDriver(
                world, batchers, parts, book=book, on_done=on_done, blocks=blocks, **options
            )
            started_s = time.perf_counter()
            ends = driven(driver.run, driver.stop)
            wall_s = time.perf_counter() - started_s
    except WorkerError as error:  # before anything was served
        raise UsageError(f"the workers do not start: {error}") from None
    result = driver.result()
    pipelines = [
        served_by([pool], result.pools[name], wall_s, ends, 0)
        for name, pool in driver.drivers.items()
    ]
    unfinished = len(world.requests) - driver.num_done
    return served_by(
        [*driver.drivers.values()], result, wall_s, ends, unfinished, pipelines=pipelines
    )


def _batcher(name: str, world: World, record: Journals | None) -> Batcher:
    kind: Any = Batcher if record is None else partial(RecordingBatcher, record=record(name))
    return world.batcher(partial(kind, keeps_pages=name != "decode"))


def _started(stack: ExitStack, name: str, workers: Workers, world: World) -> Part:
    pipeline = stack.enter_context(replace(workers, name=f"{name} pool").start(world))
    return Part(world, pipeline, holders_of(workers, world.depth, pipeline))
