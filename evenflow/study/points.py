"""Points: configurations to simulate, each at most once, and the executors that simulate them.

Sweeps, searches and figures are made of them. A point's result depends only on what its key is the
hash of: a result on disk stands for a run. An executor is made of processes of this machine that
end with it, or of a Dask cluster. Knows no command line, no plots, no search.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what is loaded later may need it, even at the end
import hashlib
import inspect
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

import evenflow
from evenflow.children import end_with_parent
from evenflow.config.build import Workload, reads_text
from evenflow.config.costs import MEASURED_COSTS
from evenflow.config.files import files_of
from evenflow.config.provenance import code_version
from evenflow.config.run import RunConfig
from evenflow.config.workload import WorkloadConfig
from evenflow.errors import LostProcessError, UsageError, require_counts, require_package
from evenflow.files import is_begun, write_whole
from evenflow.report.manifest import inside
from evenflow.results.outcome import Outcome
from evenflow.study.early import MISSED, Allowed, EarlyEnd, MissedError
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import service_levels
from evenflow.user_code import reason_of

CODE = (
    *("*.py", "core/*", "engines/*", "schedulers/*", "costs/**/*", "specs/*", "results/*"),
    *("config/*", "sim/*", "traces/**/*", "study/runs.py"),
)
"""The code that results follow from, as patterns in the package's folder."""

HEADER = "results.json"
HEX = "[0-9a-f]"
STALE_S = 3600.0
CONNECT_LIMIT_S = 10.0
ENDS = (signal.SIGINT, signal.SIGTERM)
"""What ends a command, by Ctrl-C or a time limit."""


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the summary of a run: the measure of a point that asks for no other."""
    return outcome.summary


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration, the folder its relative paths start from, and what to keep of its run.

    `measure` makes plain data of an outcome. It has to be a function of a module, so that another
    process finds it. `more` are its arguments by name, as plain data. A run ends early once
    more requests than `allowed` are beyond a limit; its record has nothing but MISSED.
    """

    config: RunConfig
    beside: Path
    measure: Callable[..., dict[str, Any]] = summary
    more: tuple[tuple[str, Any], ...] = ()
    allowed: tuple[Allowed, ...] = ()

    @property
    def workload(self) -> Workload:
        """Its requests, as `loaded`."""
        return loaded(self.config, self.beside)

    @property
    def key(self) -> str:
        """The SHA-256 of all that the result depends on but the code, as hexadecimal digits."""
        resolved = self.config.resolved()
        parts = [
            resolved,
            sorted(_digest_of(path) for path in files_of(resolved, self.beside)),
            _silicon_version() if self.config.costs.kind in MEASURED_COSTS else None,
            [self.measure.__module__, self.measure.__qualname__, self.more],
            _digest_of(Path(inspect.getfile(self.measure))),
            *self.allowed,
        ]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a point: its measure as plain data, or the `error` it ended with.

    `cost_source` is what the run's provenance says of its costs. `why` is the reason of the first
    request that was not completed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    values: Mapping[str, Any]
    error: str | None = None
    cost_source: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


RECORD = TypeAdapter(Record)

OF_REQUESTS = (summary, service_levels)
"""Measures that need the requests of a run, and no micro-batches."""


def simulate_point(point: Point) -> Record:
    """Simulate one point; a point that fails gives a record that says why, and raises nothing."""
    try:
        watch = EarlyEnd(point.allowed) if point.allowed else None
        job = Job(point.config, point.workload, point.beside)
        outcome = run_job(job, whole=point.measure not in OF_REQUESTS, watch=watch)
        values = point.measure(outcome, **dict(point.more))
        source = outcome.result.provenance.get("cost_source", {})
        values, source = json.loads(json.dumps([values, source]))  # as they will be read again
        return Record(point.key, values, cost_source=source, why=outcome.served.why)
    except MissedError as error:
        return Record(point.key, {MISSED: error.metric, "done": error.done})
    except Exception as error:  # whatever it is, the other points go on
        return Record(point.key, {}, reason_of(error))


class Store:
    """A folder of records by key, one file for one record, which is written whole or not at all.

    Results of other versions of the code lie beside ours, each in a folder. Folders of
    several machines merge by copying them into one. UsageError for one that cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._code = folder, code_digest()[:12]
        ours = (folder / self._code).absolute()
        nearest = next(path for path in (ours, *ours.parents) if path.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            raise UsageError(f"{folder}: cannot write there; choose another folder")
        for path in folder.rglob(".*.partial"):  # killed processes had begun to write them
            if is_begun(path) and path.stat().st_mtime < time.time() - STALE_S:
                path.unlink(missing_ok=True)

    def get(self, key: str) -> Record | None:
        """Return the record of a key; None when there is none; UsageError for a truncated one."""
        path = self._path(key)
        if not path.exists():
            return None
        with suppress(OSError, ValidationError):
            if (record := RECORD.validate_json(path.read_bytes())).key == key:
                return record
        raise UsageError(f"{path}: is no record of a point; remove it")

    def put(self, record: Record) -> None:
        path, header = self._path(record.key), self.folder / HEADER
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.folder}: cannot write there: {error.strerror}") from None
        if not header.exists():
            write_whole(header, json.dumps(code_version(), indent=1))
        write_whole(path, json.dumps(asdict(record), indent=1))

    def clear(self) -> None:
        """Remove the records of this code; UsageError where one lies behind a link."""
        for path in self.folder.glob(f"{self._code}/{HEX * 2}/{HEX * 64}.json"):
            self._path(path.stem).unlink()

    def _path(self, key: str) -> Path:
        return inside(self.folder, f"{self._code}/{key[:2]}/{key}.json")


def simulated(
    points: Iterable[Point], executor: Executor, writes: Sequence[str] = ()
) -> Iterator[Record]:
    """Yield the record of each point once it is there; LostProcessError when a worker dies.

    `writes`: modules that only what is written needs, loaded once all points are asked for.
    """
    futures: list[Future[Record]] = []
    death: Exception | None = None
    try:
        for point in points:
            futures.append(executor.submit(simulate_point, point))
    except BrokenExecutor as error:
        death = error
    if not sys.modules.keys() >= set(writes):
        threading.Thread(target=lambda: [*map(import_module, writes)]).start()
    try:
        for future in as_completed(futures):
            try:
                record = future.result()
            except Exception as error:  # a simulation raises nothing: its worker died
                death = error
            else:
                yield record
    except GeneratorExit:  # enough is known; where all ends, the pool's thread still needs them
        for future in futures:
            future.cancel()
        raise
    if death is not None:
        lost = isinstance(death, CancelledError)
        what = "the cluster went away" if lost else "a worker died, perhaps for want of memory"
        raise LostProcessError(
            f"{what} ({type(death).__name__}); what is done is kept, and the same command goes on "
            "from there" + ("" if lost else ": try fewer workers, or fewer requests")
        )


def code_digest() -> str:
    """Return the SHA-256 of the code that results follow from, as hexadecimal digits."""
    root = Path(evenflow.__file__).parent
    total = hashlib.sha256()
    for pattern in CODE:
        paths = (path for path in root.glob(pattern) if path.suffix in (".py", ".yaml", ".csv"))
        for path in sorted(paths):
            total.update(f"{path.relative_to(root)} {_digest_of(path)}\n".encode())
    return total.hexdigest()


def _silicon_version() -> str | None:
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return None


def _digest_of(path: Path) -> str:
    status = path.stat()
    return _digest_at(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _digest_at(path: Path, modified_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def loaded(config: RunConfig, beside: Path) -> Workload:
    """Load a run's requests, once for all runs that have the same, while its files are as they are.

    Forked workers have what was loaded before.
    """
    keys = config.workload.model_dump_json()
    files = tuple(map(_digest_of, files_of(config.resolved(), beside)))
    return _loaded(keys, beside, files, keep_text=reads_text(config))


@lru_cache(maxsize=4)
def _loaded(keys: str, beside: Path, files: tuple[str, ...], *, keep_text: bool) -> Workload:
    return WorkloadConfig.model_validate_json(keys).load(beside, keep_text=keep_text)


@contextmanager
def executor_of(name: str = "process", workers: int | None = None) -> Iterator[Executor]:
    """Yield an executor: `process`, `dask` (a cluster inside this process) or `dask:ADDRESS`.

    `workers` defaults to the number of cores; a cluster at an address has its own. UsageError for
    another name, and without the extra `cluster`. So it is for a cluster that does not answer, has
    no workers or runs other code. Leaves no process behind, however this one ends.
    """
    if workers is not None:
        require_counts("executor", workers=workers)
    kind, _, address = name.partition(":")
    if kind == "process" and not address:
        with processes(workers or os.cpu_count() or 1) as pool:
            yield pool
    elif kind == "dask":
        with _dask_client(address, workers or os.cpu_count() or 1) as client:
            yield client.get_executor(pure=False)
    else:
        raise UsageError(f"--executor {name}: should be process, dask or dask:ADDRESS")


@contextmanager
def processes(
    workers: int, start: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[Executor]:
    """Give a pool of processes of this machine, none of which outlives this one or the block.

    Each calls `start` with the arguments first; they may be shared memory, as a task's may not.
    Forked ones, which have what this process has read, are there from the start. LostProcessError
    when one dies.
    """
    forks = _may_fork()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (start, arguments))
    try:
        with _without_main():
            if forks:
                with _put_off():
                    pool.submit(int).result()
            yield pool
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            message = "a worker died, perhaps for want of memory: try fewer requests"
            raise LostProcessError(message) from None
        raise
    finally:
        pool.shutdown()


@contextmanager
def _put_off() -> Iterator[None]:
    """Put off what ends a command: Python ignores an interrupt in a module's hooks at a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _may_fork() -> bool:
    """Say whether this process may fork: a copy would lack no thread."""
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    return sys.platform == "linux" and alone


@contextmanager
def _without_main() -> Iterator[None]:
    """Let workers start without running the user's script again, of which they need nothing."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    for number in ENDS:  # the parent tells the user; a worker just ends
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    end_with_parent()
    if start is not None:
        start(*arguments)


@contextmanager
def _dask_client(address: str, workers: int) -> Iterator[Any]:
    require_package("distributed", "--executor dask:", "dask distributed")
    from distributed import Client

    # A cluster that goes away is told in one line; the client would log its attempts to reconnect.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    own = {"n_workers": 1, "threads_per_worker": workers, "processes": False}
    where = {"address": address} if address else {**own, "dashboard_address": ":0"}
    try:
        client = Client(**where, timeout=CONNECT_LIMIT_S)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--executor dask:{address}: no Dask scheduler answers there "
            f"({type(error).__name__}); start one, or use --executor process"
        ) from None
    with client:
        if address:
            _check_workers(client, f"--executor dask:{address}")
        with _watched(client):
            yield client


@contextmanager
def _watched(client: Any) -> Iterator[None]:
    """Close a client whose cluster has had no worker for a while: its tasks would wait for ever."""
    ended = threading.Event()

    def watch() -> None:
        seen_s = time.monotonic()
        with suppress(Exception):  # a scheduler that went away is told by the tasks
            while not ended.wait(1.0) and time.monotonic() - seen_s <= CONNECT_LIMIT_S:
                if client.nthreads():
                    seen_s = time.monotonic()
            if not ended.is_set():
                client.close()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _check_workers(client: Any, name: str) -> None:
    """Raise UsageError unless there are workers, and all run the code that this process runs."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_LIMIT_S)
        digests = client.run(code_digest)
    except TimeoutError:
        raise UsageError(f"{name}: the scheduler has no workers; start some") from None
    except Exception as error:  # whatever a worker raises where evenflow is missing
        raise UsageError(f"{name}: its workers cannot import evenflow ({error})") from None
    others = sorted(worker for worker, digest in digests.items() if digest != code_digest())
    if others:
        raise UsageError(f"{name}: worker {others[0]} runs another version of evenflow")
