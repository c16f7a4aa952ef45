"""Serve the requests of a world, or those of clients, in real time: what `sim.simulate` simulates.

Knows a world and its workers; no configuration and no command line. torch and ZeroMQ are imported
once something is served.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.answers import answers_in
from evenflow.batcher import Batcher
from evenflow.errors import UsageError, WorkerError
from evenflow.replay import Entry, RecordingBatcher
from evenflow.results.recorder import Blocks
from evenflow.results.run import Floats, RunResult
from evenflow.world import World

if TYPE_CHECKING:
    from runtime.driver import Driver, Heard
    from runtime.hosts import Guest, Hosts
    from runtime.http.live import LiveServer
    from runtime.tokens import TextOf
    from runtime.worker import Settings

Journals = Callable[[str | None], Callable[[Entry], None]]
"""Gives what takes the entries of the engine of a name, for None those of the only one."""

REQUESTS = "requests"
"""What the part of a system of pools is called that is none: what the clients have."""

BlocksOf = Callable[[str], Blocks | None]
"""Gives what takes what happens in the part of a name; None: the driver's own memory does."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a run: what each rank of each stage is made from, all in one process if
    `together`.

    `text_of` gives the requests their token ids, where workers compute with them. The run fails
    when nothing is heard of a micro-batch for `patience_s` seconds longer than all those in flight
    take. `facts` go into the provenance. `name` is that of their pipeline, of several. `coupled`
    stages hear of a micro-batch with its activations.
    `hosts` says where those of other hosts come.
    """

    settings: Sequence[Settings]
    together: bool = False
    text_of: TextOf | None = None
    patience_s: float = 30.0
    start_limit_s: float = 60.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    hosts: Hosts | None = None
    coupled: bool = False

    def seen(self, world: World) -> World:
        """Return the world as far as the times of its stages are known."""
        return world

    def start(self, world: World) -> AbstractContextManager[Any]:
        """Return the pipeline of workers for a world, to be entered."""
        from runtime.pipeline import Pipeline

        return Pipeline(
            self.settings,
            world.page_tokens,
            world.total_pages,
            ranks=len(self.settings) // world.depth,
            name=self.name,
            hosts=self.hosts,
            together=self.together,
            coupled=self.coupled,
            start_limit_s=self.start_limit_s,
        )

    def driver(self) -> Callable[..., Driver]:
        """Return the driver that goes with that pipeline."""
        from runtime.driver import Driver

        return Driver


@dataclass(frozen=True, slots=True)
class Served:
    """What a real run came to, and the wall seconds it took.

    `failure`: why it ended early, None if it did not; `interrupted`: because the user asked for it.
    `unfinished` requests have no result. `driver_s`: the driver's own seconds on each micro-batch;
    `heard`: when it heard of what it answered. `free_pages` were free at the end. `guests`: the
    workers on other hosts; `pipelines`: what each replica, or pool, came to.
    """

    result: RunResult
    wall_s: float
    failure: str | None
    interrupted: bool
    unfinished: int
    driver_s: Floats
    free_pages: int
    heard: Heard
    guests: Sequence[Guest] = ()
    pipelines: Sequence[Served] = ()

    def facts(self) -> dict[str, Any]:
        """Return what summary.json says of the run itself."""
        ends = self.failure, self.unfinished, self.free_pages
        guests = [guest._asdict() for guest in self.guests]
        return facts_of(self.result, *ends, self.driver_s) | ({"hosts": guests} if guests else {})


def facts_of(
    result: RunResult,
    failure: str | None,
    unfinished: int,
    free_pages: int | None,
    driver_s: Floats,
) -> dict[str, Any]:
    """Return what summary.json says of a real run itself; None: it is not known."""
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


def serve(
    world: World,
    workers: Workers,
    on_done: Callable[[int], None] | None = None,
    *,
    record: Journals | None = None,
    on_token: Callable[[int, int], None] | None = None,
    live: LiveServer | None = None,
    blocks: Blocks | None = None,
) -> Served:
    """Serve the requests of a world by its workers in real time, or those of the clients of `live`.

    `on_done` is called with the number of requests done, `record` gives what takes the journal of
    an engine (of the only one for None), `on_token` takes the tokens, `blocks` each second what has
    happened. A worker that dies ends the run, and so does the
    first Ctrl-C (of a server the second: the first sends new clients away): what is finished is
    returned. UsageError where the workers do not start.
    """
    engines = engines_of(world, record)
    try:
        with workers.start(world) as pipeline:
            drive = partial(
                workers.driver(),
                workers.seen(world),
                engines,
                patience_s=workers.patience_s,
                blocks=blocks,
            )
            started_s = time.perf_counter()
            if live is None:
                driver = drive(
                    pipeline, text_of=workers.text_of, on_done=on_done, on_token=on_token
                )
                failure, interrupted = driven(driver.run, driver.stop)
            else:
                speaks = workers.text_of is not None
                driver = live.open(drive, engines, pipeline, on_token, speaks=speaks)
                failure, interrupted = driven(driver.run, live.drain, driver.quit)
                failure = live.ended(driver, failure)
            wall_s = time.perf_counter() - started_s
            guests = getattr(pipeline, "guests", ())
    except WorkerError as error:  # before anything was served
        raise UsageError(f"the workers do not start: {error}") from None
    unfinished = len(world.requests) - driver.num_done if live is None else 0
    ends = failure, interrupted
    return served_by([driver], driver.result(), wall_s, ends, unfinished, guests=guests)


def served_by(
    drivers: Sequence[Driver],
    result: RunResult,
    wall_s: float,
    ends: tuple[str | None, bool],
    unfinished: int,
    **more: Any,
) -> Served:
    """Return what drivers came to, whose `result` is of all of them; `ends` is that of `driven`."""
    from runtime.driver import Heard

    driver_s = np.concatenate([driver.driver_s for driver in drivers])
    free_pages = sum(driver.free_pages for driver in drivers)
    heard = Heard(*map(np.concatenate, zip(*(driver.heard for driver in drivers), strict=True)))
    return Served(result, wall_s, *ends, unfinished, driver_s, free_pages, heard, **more)


def engines_of(world: World, record: Journals | None, pipeline: str = "") -> list[Batcher]:
    """Return the engines of a pipeline, with the journals that `record` gives them, if it does."""
    kinds = (
        Batcher if record is None else partial(RecordingBatcher, record=record(name))
        for name in engine_names(world, pipeline)
    )
    return [world.batcher(kind) for kind in kinds]


def names_of(world: World) -> list[str]:
    """Return what the replicas of a world, and their folders, are called."""
    return [f"replica-{index}" for index in range(world.replicas)]


def engine_names(world: World, pipeline: str = "") -> list[str | None]:
    """Return the names of a pipeline's engines, in its own; that of the only one is the pipeline's.

    None: the only one of the only pipeline.
    """
    count = world.virtual_engines
    names = [f"engine-{number}" for number in range(count)] if count > 1 else []
    return [str(Path(pipeline, name)) for name in names] or [pipeline or None]


def driven(run: Callable[[], None], *steps: Callable[[], None]) -> tuple[str | None, bool]:
    """Run, taking one of `steps` at each Ctrl-C; return why it ended early, if it did.

    Beside it: whether that is because the last step was taken.
    """
    failure = None
    with _interrupts(*steps) as interrupted, answers_in():
        try:
            run()
        except WorkerError as error:
            failure = str(error)
    if interrupted.is_set():
        failure = failure or "interrupted"
    return failure, interrupted.is_set()


@contextmanager
def _interrupts(*steps: Callable[[], None]) -> Iterator[threading.Event]:
    """Take one of `steps` at each Ctrl-C, or SIGTERM; after the last, Ctrl-C interrupts as usual.

    Gives whether the last step was taken.
    """
    taken = threading.Event()
    left = deque(steps)

    def step(*_: object) -> None:
        left.popleft()()
        if not left:
            taken.set()
            for number in signals:
                signal.signal(number, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield taken
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, step) for number in signals]
    try:
        yield taken
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
