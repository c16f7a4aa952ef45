"""Serve one configuration for real, and write its folder as a simulation's is written.

Knows how a configuration becomes workers; no command line.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError, UsageError
from evenflow.kv import PagePool
from evenflow.replay import Entry, RecordingBatcher, replay
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import POOLED
from evenflow.types import MicroBatch
from evenflow.world import World
from experiments.provenance import provenance
from experiments.real import journal as journal_file
from experiments.real.workers import Crew, crew_of
from experiments.run_file.build import Built, build
from experiments.run_file.run import RunConfig, RuntimeConfig
from experiments.runs import Job, Outcome

if TYPE_CHECKING:
    from experiments.real.live import LiveServer
    from runtime.driver import Driver, Heard
    from runtime.serving import Serving


@dataclass(frozen=True, slots=True)
class Served:
    """What a real run came to. `failure`: why it ended early, None if it did not.

    `interrupted`: because the user asked for it. `unfinished` requests have no result. `driver_s`:
    the driver's own seconds on each micro-batch; `heard`: when it heard of what it answered.
    `free_pages` were free at the end.
    """

    outcome: Outcome
    failure: str | None
    interrupted: bool
    unfinished: int
    driver_s: Sequence[float]
    free_pages: int
    heard: Heard

    def facts(self) -> dict[str, Any]:
        """Return what summary.json says of the run itself."""
        work_ms = np.array(self.driver_s or [0.0]) * 1e3
        return {
            "failure": self.failure,
            "unfinished": self.unfinished,
            "aborted": self.outcome.result.status.count("aborted"),
            "free_pages": self.free_pages,
            "total_pages": self.outcome.result.total_pages,
            "mean_driver_ms": float(work_ms.mean()),
            "p99_driver_ms": float(np.percentile(work_ms, 99)),
        }


def check_servable(config: RunConfig) -> None:
    """Raise UsageError for what only a simulation can do yet."""
    if find_spec("zmq") is None:
        raise UsageError("a real run needs pyzmq: pip install 'evenflow[runtime]'")
    refusals = (
        (config.scheduler.name in POOLED, f"scheduler {config.scheduler.name}", "one policy"),
        (config.replicas is not None, "replicas", "one pipeline"),
        (bool(config.virtual_engines), "virtual_engines", "false"),
        (config.speculative is not None, "speculative", "null"),
        (config.kv.prefix_cache, "kv.prefix_cache", "false"),
        (config.kv.swap, "kv.swap", "false"),
        (_prepares(config.runtime), "runtime", "ideal, or schedule_s alone,"),
        (_is_split(config), "tensor_parallel", "1"),
    )
    for refused, key, right in refusals:
        if refused:
            raise UsageError(f"{key}: can only be simulated; for a real run, {right} is right")


def _prepares(runtime: RuntimeConfig | str) -> bool:
    """Say whether a simulation charges for preparing inputs, which no emulated worker waits for.

    What it charges for scheduling stands for the messages and the driver that a real run has.
    """
    if isinstance(runtime, str):
        return runtime != "ideal"
    return runtime.prepare_s > 0 or runtime.prepare_share > 0


def _is_split(config: RunConfig) -> bool:
    return config.workers.kind == "torch" and config.tensor_parallel > 1


def serve(
    job: Job,
    on_done: Callable[[int], None] | None = None,
    record: Callable[[Entry], None] | None = None,
    on_token: Callable[[int, int], None] | None = None,
    live: LiveServer | None = None,
) -> Served:
    """Serve a job's requests in real time, or those of the clients of `live`.

    `record` takes the journal, `on_token` the tokens. A worker that dies ends the run, and so does
    the first Ctrl-C (of a server the second: the first sends new clients away): what is finished is
    returned. UsageError for a configuration that cannot be served.
    """
    check_servable(job.config)
    from evenflow.errors import WorkerError
    from runtime.driver import Driver
    from runtime.pipeline import Pipeline

    built = build(job.config, job.workload.requests, job.beside, job.workload.texts)
    world = servable(built)
    recording = partial(RecordingBatcher, record=record)
    batcher = batcher_of(world, Batcher if record is None else recording)
    try:
        crew = crew_of(job.config, built, job.beside)
        pages = world.page_tokens, world.total_pages
        with Pipeline(
            crew.settings, *pages, together=crew.together, start_limit_s=crew.start_limit_s
        ) as pipeline:
            started_s = time.perf_counter()
            serving = _serving(world, crew)
            if live is None:
                driver = Driver(serving, batcher, pipeline, on_done=on_done, on_token=on_token)
                failure, interrupted = _drive(driver, driver.stop)
            else:
                driver = live.open(serving, batcher, pipeline, on_token)
                failure, interrupted = _drive(driver, live.drain, driver.quit)
                failure = live.ended(driver, failure)
            seconds = time.perf_counter() - started_s
    except WorkerError as error:  # before anything was served
        raise UsageError(f"the workers do not start: {error}") from None
    outcome = _outcome(job, built, crew, driver.result(), seconds)
    unfinished = len(world.requests) - driver.num_done if live is None else 0
    ends = failure, interrupted, unfinished
    return Served(outcome, *ends, driver.work_s, batcher.pool.free_pages, driver.heard)


def _drive(driver: Driver, *steps: Callable[[], None]) -> tuple[str | None, bool]:
    """Run a driver, taking one of `steps` at each Ctrl-C; return why it ended early, if it did.

    Beside it: whether that is because the last step was taken.
    """
    from evenflow.errors import WorkerError

    failure = None
    with _interrupts(*steps) as interrupted:
        try:
            driver.run()
        except WorkerError as error:
            failure = str(error)
    if interrupted.is_set():
        failure = failure or "interrupted"
    return failure, interrupted.is_set()


def servable(built: Built) -> World:
    """Return the world of one pipeline with a link of its own for each hop; else UsageError."""
    world = built.world
    assert isinstance(world, World)  # pools are refused by name
    if world.shares_link:
        raise UsageError("link.shared: can only be simulated; for a real run, false is right")
    return world


def batcher_of(world: World, made_by: Callable[..., Batcher] = Batcher) -> Batcher:
    """Return the Batcher of a world, of the kind that `made_by` makes."""
    return made_by(
        world.make_scheduler(),
        PagePool(world.total_pages, world.page_tokens),
        depth=world.depth,
        max_in_flight=world.max_in_flight,
        max_model_len=world.max_model_len,
        pipelined_chunks=world.pipelined_chunks,
    )


def replay_folder(folder: Path) -> str | None:
    """Feed the inputs of a recorded run to a fresh Batcher; return the first difference, or None.

    UsageError when the folder holds no record, or one that cannot be read.
    """
    path = folder / journal_file.NAME
    if not path.is_file():
        raise UsageError(f"{path}: no such file; a folder that evenflow run wrote has one")
    config, beside = journal_file.read_head(path)
    world = servable(build(config, [], beside))
    try:
        return replay(journal_file.read_entries(path), batcher_of(world))
    except PolicyError as error:
        return str(error)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _serving(world: World, crew: Crew) -> Serving:
    from runtime.serving import Serving, StepCost

    per_token_s = [hop.per_token_s for hop in world.hops] or [0.0] * (world.depth - 1)

    def cost(batch: MicroBatch) -> StepCost:
        work = batch.charged or batch
        hops_s = [seconds * batch.num_tokens for seconds in per_token_s]
        return StepCost(world.costs.times(work), hops_s, int(world.costs.transfer_bytes(work)))

    return Serving(
        requests=world.requests,
        cost=cost,
        depth=world.depth,
        max_in_flight=world.max_in_flight,
        dispatch=world.dispatch,
        concurrency=world.concurrency,
        patience_s=crew.patience_s,
        text_of=crew.text_of,
    )


def _outcome(job: Job, built: Built, crew: Crew, result: RunResult, seconds: float) -> Outcome:
    source = {
        **provenance(job.config, job.workload.trace, built.cost_source),
        "deployment": built.deployment,
        **({"workers": dict(crew.facts)} if crew.facts else {}),
    }
    result = replace(result, provenance=source)
    return Outcome(result, summarize(result, job.config.goodput), seconds, (result,))


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
