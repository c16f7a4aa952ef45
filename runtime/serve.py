"""Serve the requests of a world, or those of clients, in real time; simulated by
`evenflow.sim.simulate`.

Knows a world and its workers; no configuration and no command line. Torch and ZeroMQ are imported
once something is served.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.answers import answers_in
from evenflow.core.batcher import Batcher
from evenflow.core.replay import Entry, RecordingBatcher
from evenflow.core.world import World
from evenflow.engines.handover import PoolBatcher, RecordingPoolBatcher
from evenflow.engines.pools import PooledWorld, Pools
from evenflow.errors import UsageError, WorkerError
from evenflow.results.recorder import Blocks
from evenflow.results.run import Floats, RunResult, merged

if TYPE_CHECKING:
    from evenflow.runtime.driver import Driver, Heard, System
    from evenflow.runtime.http.live import LiveServer
    from evenflow.runtime.tokens import TextOf
    from evenflow.runtime.worker import WorkerSettings

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
    SIGNALS += (signal.SIGHUP,)

REQUESTS = "requests"
"""The name of the part of a system of pools that no pool has: the front of the clients."""

LAST = "decode"
"""The pool from which no KV goes on."""

Journals = Callable[[str | None], Callable[[Entry], None]]
"""Gives the writer of an engine's journal by the engine's name; None: the only one."""

BlocksOf = Callable[[str], Blocks | None]
"""Gives the writer of the blocks of a part by its name; None: the driver's own memory."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a run: what each rank of each stage is made from, all in one process if
    `together`.

    `text_of` gives the requests their token ids, where workers compute with them. The run fails
    when no message of a micro-batch comes for `patience_s` seconds longer than all those in flight
    take. `facts` go into the provenance. `coupled` stages receive a micro-batch with its
    activations.
    """

    settings: Sequence[WorkerSettings]
    together: bool = False
    text_of: TextOf | None = None
    patience_s: float = 30.0
    start_limit_s: float = 60.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    coupled: bool = False

    def seen(self, world: World) -> World:
        """Return the world as far as the times of its stages are known."""
        return world

    def start(self, world: World, name: str = "") -> AbstractContextManager[Any]:
        """Return the pipeline of workers for a world, to be entered; of several, it has a name."""
        from evenflow.runtime.pipeline import WorkerPipeline

        return WorkerPipeline(
            self.settings,
            world.page_tokens,
            world.total_pages,
            ranks=len(self.settings) // world.depth,
            name=name,
            together=self.together,
            coupled=self.coupled,
            start_limit_s=self.start_limit_s,
        )

    def driver(self) -> Callable[..., Driver]:
        from evenflow.runtime.driver import Driver

        return Driver


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The outcome of a real run, and the wall seconds it took.

    `failure`: why it ended early, None if it did not; `interrupted`: because the user asked for it.
    `unfinished` requests have no result. `heard`: when the driver received messages. `free_pages`
    were free at the end. `pipelines`: what each replica, or pool, came to.
    """

    result: RunResult
    wall_s: float
    failure: str | None
    interrupted: bool
    unfinished: int
    free_pages: int
    heard: Heard
    pipelines: Sequence[ServedRun] = ()

    def facts(self) -> dict[str, Any]:
        """Return the facts in summary.json on the run itself."""
        ends = self.failure, self.unfinished, self.free_pages
        return facts_of(self.result, *ends, self.heard.driver_s)


def facts_of(
    result: RunResult,
    failure: str | None,
    unfinished: int,
    free_pages: int | None,
    driver_s: Floats,
) -> dict[str, Any]:
    """Return the facts in summary.json on a real run itself; None: unknown."""
    work_ms = 1e3 * (driver_s if len(driver_s) else np.zeros(1))
    return {
        "failure": failure,
        "unfinished": unfinished,
        "aborted": result.status.count("aborted"),
        "free_pages": free_pages,
        "total_pages": result.total_pages * result.replicas,
        "mean_driver_ms": float(work_ms.mean()),
        "p99_driver_ms": float(np.percentile(work_ms, 99)),
    }


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Records that a real run keeps, and where its requests and its driver come from."""

    record: Journals | None = None
    on_token: Callable[[int, int], None] | None = None
    """Called with a request's number and a token of its output."""
    blocks: BlocksOf = lambda _: None
    """The parts are the pipelines ("" is the only one), and REQUESTS, the clients of pools."""
    live: LiveServer | None = None
    """The server whose clients have the requests; None: the world has them."""
    saves: bool = False
    """Whether Ctrl-C and SIGTERM are ignored from the end on, until `saving` ends."""
    mortal: Callable[..., Driver] | None = None
    """Makes the driver of the only pipeline, on which processes act."""


ALONE = ServeOptions()
"""Nothing is kept beside the result."""


def serve(
    world: World | PooledWorld,
    workers: Workers | Mapping[str, Workers],
    on_done: Callable[[int], None] | None = None,
    options: ServeOptions = ALONE,
) -> ServedRun:
    """Serve the requests of a world, or of clients, by its workers in real time.

    Of several pipelines, replicas or pools, `workers` has an entry by name. `on_done` is called
    with the number of requests done. A worker that dies by itself ends the run, and so does Ctrl-C.
    A server ends at the second, as the first sends new clients away. What is finished is returned.
    UsageError where the workers do not start.
    """
    from evenflow.runtime.pools import PoolDriver

    live, blocks = options.live, options.blocks
    own = workers if isinstance(workers, Mapping) else {"": workers}
    pooled = isinstance(world, PooledWorld)
    drives: dict[str, Callable[..., Driver]] = {}
    system: System
    try:
        with ExitStack() as stack:
            for name, each in own.items():
                part = _part(world, name)
                keeps = name != LAST if pooled else None
                engines = engines_of(part, options.record, name, keeps_pages=keeps)
                started = each.start(part, f"{name} pool" if pooled else name)
                pipeline = stack.enter_context(started)
                drives[name] = partial(
                    options.mortal or (PoolDriver if pooled else each.driver()),
                    each.seen(part),
                    engines,
                    pipeline,
                    text_of=each.text_of,
                    patience_s=each.patience_s,
                    on_token=options.on_token,
                    blocks=blocks(name),
                )
            started_s = time.perf_counter()
            if live is None:
                system = _system(world, each, drives, on_done, blocks)
                steps, most = (system.stop, system.quit), 0
                failure, taken = driven(system.run, *steps, saves=options.saves)
            else:  # there is one pipeline
                speaks = each.text_of is not None
                driver = live.open(drives[name], engines, pipeline, speaks=speaks)
                steps, most = (live.drain, driver.quit), 1
                failure, taken = driven(driver.run, *steps, saves=options.saves)
                system = driver
            interrupted = taken > most
            failure = failure or ("interrupted" if interrupted else None)
            if live is not None:
                failure = live.ended(failure)
            ends = time.perf_counter() - started_s, failure, interrupted
    except WorkerError as error:  # before anything was served
        raise UsageError(f"the workers do not start: {error}") from None
    unfinished = len(world.requests) - system.num_done if live is None else 0
    return _ended(system, ends, unfinished, alone=len(own) == 1)


def parts_of(world: World | PooledWorld, workers: Mapping[str, Workers]) -> dict[str, World]:
    """Return the world of each pipeline, as far as the times of its stages are known."""
    return {name: each.seen(_part(world, name)) for name, each in workers.items()}


def _part(world: World | PooledWorld, name: str) -> World:
    part: World = world if isinstance(world, World) else getattr(world, name)
    return part


def _ended(
    system: System, ends: tuple[float, str | None, bool], unfinished: int, *, alone: bool
) -> ServedRun:
    """Return what a system served, and what its pipelines did where there are several."""
    if isinstance(system, Pools):
        whole = system.result()
        results = [*whole.pools.values()]
    else:
        results = [driver.result() for driver in system.drivers]
        whole = merged(results)
    served = _served(system.drivers, whole, ends, unfinished)
    if alone:
        return served
    each_alone = zip(system.drivers, results, strict=True)
    return replace(served, pipelines=[_served([one], part, ends, 0) for one, part in each_alone])


def _system(
    world: World | PooledWorld,
    workers: Workers,
    drives: Mapping[str, Callable[..., Driver]],
    on_done: Callable[[int], None] | None,
    blocks: BlocksOf,
) -> System:
    from evenflow.runtime.driver import Replicas
    from evenflow.runtime.pools import PooledDriver

    if isinstance(world, PooledWorld):
        return PooledDriver(
            world, drives, text_of=workers.text_of, on_done=on_done, blocks=blocks(REQUESTS)
        )
    if len(drives) > 1:
        return Replicas(world, drives.values(), on_done)
    (drive,) = drives.values()
    return drive(on_done=on_done)


def _served(
    drivers: Sequence[Driver],
    result: RunResult,
    ends: tuple[float, str | None, bool],
    unfinished: int,
) -> ServedRun:
    """Return the drivers' outcomes as one run; `result` is of all of them."""
    from evenflow.runtime.driver import Heard

    free_pages = sum(driver.free_pages for driver in drivers)
    heard = Heard(*map(np.concatenate, zip(*(driver.heard for driver in drivers), strict=True)))
    return ServedRun(result, *ends, unfinished, free_pages, heard)


def engines_of(
    world: World, record: Journals | None, pipeline: str = "", *, keeps_pages: bool | None = None
) -> list[Batcher]:
    """Return the engines of a pipeline, with the journals that `record` gives them, if it does.

    `keeps_pages` as of a PoolBatcher; None: it is no pool.
    """
    kinds: tuple[Callable[..., Batcher], ...] = (Batcher, RecordingBatcher)
    more: dict[str, Any] = {}
    if keeps_pages is not None:
        kinds, more = (PoolBatcher, RecordingPoolBatcher), {"keeps_pages": keeps_pages}
    plain, recording = (partial(kind, **more) for kind in kinds)
    return [
        world.batcher(plain if record is None else partial(recording, record=record(name)))
        for name in engine_names(world, pipeline)
    ]


def names_of(world: World) -> list[str]:
    """Return the names of a world's replicas, and of their folders; "": the only one."""
    count = world.replicas
    return [f"replica-{index}" for index in range(count)] if count > 1 else [""]


def engine_names(world: World, pipeline: str = "") -> list[str | None]:
    """Return the names of a pipeline's engines, in its own; that of the only one is the pipeline's.

    None: the only one of the only pipeline.
    """
    count = world.virtual_engines
    names = [f"engine-{number}" for number in range(count)] if count > 1 else []
    return [str(Path(pipeline, name)) for name in names] or [pipeline or None]


def driven(
    run: Callable[[], None], *steps: Callable[[], None], saves: bool = False
) -> tuple[str | None, int]:
    """Run, taking one of `steps` at each of SIGNALS; after the last, they end it as usual.

    Return why the run failed, if it did, and how many steps were taken. `saves` as in ServeOptions.
    """
    failure, left = None, deque(steps)

    def step(*_: object) -> None:
        left.popleft()()
        if not left:
            _handle(signal.default_int_handler)

    before = _handle(step)
    try:
        with answers_in():
            run()
    except WorkerError as error:
        failure = str(error)
    finally:
        _handle(*([signal.SIG_IGN] if saves else before))
    return failure, len(steps) - len(left)


@contextmanager
def saving() -> Iterator[None]:
    """Have a block serve and save; signals that were ignored meanwhile end a command again."""
    before = [signal.getsignal(each) for each in SIGNALS]
    try:
        yield
    finally:
        _handle(*before)


def _handle(*handlers: Any) -> list[Any]:
    """Set the handlers of SIGNALS, in a main thread alone; return the former ones."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [signal.signal(each, handler) for each, handler in zip(SIGNALS, cycle(handlers))]
